//! Whether a table of metrics tells what a page shows.

/// What a page has and a Markdown table does not, and the other way round; for tests.
///
/// A row of the table begins with the name in code and the type: `` | `name` | counter | ``. Only
/// names with one of the prefixes count; an expression with a blank in it is none.
pub fn differences(page: &str, docs: &str, prefixes: &[&str]) -> Vec<String> {
    let is_meant = |name: &str| {
        !name.contains([' ', '{', '(']) && prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    let shown: Vec<(&str, &str)> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect();
    let listed: Vec<(&str, &str)> = docs
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split('|');
            let name = cells.next()?.trim_end().strip_suffix('`')?;
            Some((name, cells.next()?.trim()))
        })
        .filter(|(name, _)| is_meant(name))
        .collect();
    let missing = shown.iter().filter(|metric| !listed.contains(metric));
    let unknown = listed.iter().filter(|metric| !shown.contains(metric));
    let missing = missing.map(|(name, kind)| format!("{name}, a {kind}, is not in the table"));
    let unknown = unknown.map(|(name, kind)| format!("{name}, a {kind}, is not on the page"));
    let strange = shown.iter().filter(|(name, _)| !is_meant(name));
    let strange = strange.map(|(name, _)| format!("{name} has none of the prefixes"));
    missing.chain(unknown).chain(strange).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_that_one_side_lacks_or_calls_otherwise_is_named() {
        let page = "# HELP a_x X.\n# TYPE a_x gauge\na_x 1\n# TYPE a_y_total counter\n";
        let table = "| name | type |\n| `a_x` | gauge | x |\n| `a_y_total` | counter | y |\n\
            | `a_x > 0` | because |\n";
        assert_eq!(differences(page, table, &["a_"]), [""; 0]);
        let table = "| `a_x` | counter | x |\n| `a_z` | gauge | z |\n| `b` | gauge | b |\n";
        let found = differences(page, table, &["a_"]);
        assert_eq!(
            found,
            [
                "a_x, a gauge, is not in the table",
                "a_y_total, a counter, is not in the table",
                "a_x, a counter, is not on the page",
                "a_z, a gauge, is not on the page",
            ]
        );
        assert_eq!(differences("# TYPE c gauge\n", "", &["a_"]).len(), 2);
    }
}
