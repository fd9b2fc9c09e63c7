//! A report for people.

use expert_doctor::{Finding, Report};

/// A line for each finding, and below it what it means and what mends it; how many there are at the end.
pub(super) fn report(report: &Report) -> String {
    let width = report
        .findings
        .iter()
        .map(|f| f.id.len())
        .max()
        .unwrap_or(0);
    let mut out: String = report.findings.iter().map(|f| finding(f, width)).collect();
    let count = |n: usize, word: &str| match n {
        1 => format!("1 {word}"),
        n => format!("{n} {word}s"),
    };
    out.push_str(&format!(
        "\n{} looked at: {}, {}\n",
        count(report.findings.len(), "thing"),
        count(report.failures, "failure"),
        count(report.warnings, "warning")
    ));
    out
}

fn finding(finding: &Finding, width: usize) -> String {
    let line = |text: &str| text.replace('\n', " ");
    let mut out = format!(
        "{:<8} {:<width$}  {}\n",
        finding.level,
        finding.id,
        line(&finding.what)
    );
    if !finding.means.is_empty() {
        out.push_str(&format!("         means: {}\n", line(&finding.means)));
    }
    if let Some(fix) = &finding.fix {
        out.push_str(&format!("         fix:   {}\n", line(fix)));
    }
    out
}

#[cfg(test)]
mod tests {
    use expert_doctor::{Check, Level};

    use super::*;

    #[test]
    fn report_has_a_line_for_each_finding_and_what_mends_it() {
        let findings = vec![
            Finding::ok(Check::VerbsLibrary, "libibverbs.so.1 can be loaded"),
            Finding::trouble(
                Level::Warning,
                Check::Mtu,
                "rxe0 port 1 sends packets of 1024 bytes",
                "the smaller of both ends counts",
                "ip link set dev eth0 mtu 9000",
            ),
            Finding::trouble(
                Level::Failure,
                Check::PortState,
                "rxe1 port 1 is down",
                "the port carries nothing\nat all",
                "ip link set dev eth1 up",
            ),
        ];
        let want = "\
ok       verbs-library  libibverbs.so.1 can be loaded
warning  mtu            rxe0 port 1 sends packets of 1024 bytes
         means: the smaller of both ends counts
         fix:   ip link set dev eth0 mtu 9000
failure  port-state     rxe1 port 1 is down
         means: the port carries nothing at all
         fix:   ip link set dev eth1 up

3 things looked at: 1 failure, 1 warning
";
        assert_eq!(report(&findings.into()), want);
    }
}
