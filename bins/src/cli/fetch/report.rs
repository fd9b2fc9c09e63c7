//! What a fetch did, for people; `--json` prints the same fields.

use expert_arena::ExpertArena;
use expert_tier::stats::RailStats;
use serde::Serialize;

use crate::cli::output::{self, grouped, human_bytes};

/// What one run did; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) backend: &'static str,
    pub(super) records: u64,
    pub(super) failed: u64,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) gb_per_s: f64,
    pub(super) record_p50_us: u64,
    pub(super) record_p99_us: u64,
    pub(super) batch_p50_us: u64,
    pub(super) batch_p99_us: u64,
    pub(super) cpu_seconds_per_gib: f64,
    pub(super) verify: &'static str,
    pub(super) verify_seconds: f64,
    pub(super) payload_digest: Option<String>,
    pub(super) content_id: Option<String>,
    pub(super) verified: bool,
    pub(super) verify_failures: u64,
    pub(super) fallbacks: u64,
    pub(super) takeovers: u64,
    pub(super) peers_refused: u64,
    pub(super) rails: Vec<RailStats>,
}

/// The report as text.
pub(super) fn text(report: &Report, arena: &ExpertArena) -> String {
    let none = || "none".to_owned();
    let mut lines = vec![
        ("backend", report.backend.to_owned()),
        (
            "records",
            match report.failed {
                0 => grouped(report.records),
                n => format!("{}, {} FAILED", grouped(report.records), grouped(n)),
            },
        ),
        ("bytes", human_bytes(report.bytes)),
        (
            "took",
            format!("{:.3} s, {:.2} GB/s", report.seconds, report.gb_per_s),
        ),
        (
            "record p50, p99",
            format!(
                "{} us, {} us",
                grouped(report.record_p50_us),
                grouped(report.record_p99_us)
            ),
        ),
        (
            "batch p50, p99",
            format!(
                "{} us, {} us",
                grouped(report.batch_p50_us),
                grouped(report.batch_p99_us)
            ),
        ),
        (
            "client CPU",
            format!("{:.3} s per GiB", report.cpu_seconds_per_gib),
        ),
        (
            "checksums",
            match (report.verify, &report.content_id, report.verify_failures) {
                ("off", ..) => "off, as asked".to_owned(),
                (_, None, _) => "NOT compared: the store has none".to_owned(),
                ("first", _, 0) => "compared at the first fetch of each record".to_owned(),
                (_, _, 0) => "every chunk compared".to_owned(),
                (_, _, n) => format!("compared, {n} chunks did not fit"),
            },
        ),
        ("arena", arena.report().to_string().replace('\n', "; ")),
        (
            "taken over",
            match report.takeovers {
                0 => "never".to_owned(),
                n => format!("{n} times by less preferred rails: no other worked"),
            },
        ),
        ("content id", report.content_id.clone().unwrap_or_else(none)),
    ];
    let reads_files = report.rails.iter().filter_map(|rail| rail.io);
    lines.extend(reads_files.map(|io| {
        let text = match io.fallbacks {
            0 => io.mode.name().to_owned(),
            n => format!(
                "{}; times that this machine refused more: {n}",
                io.mode.name()
            ),
        };
        ("reads of files", text)
    }));
    let mut out = output::pairs(&lines);
    if let Some(digest) = &report.payload_digest {
        // Not aligned: scripts look for this line.
        out.push_str(&format!("payload-digest: {digest}\n"));
    }
    let rows: Vec<Vec<String>> = report
        .rails
        .iter()
        .map(|rail| {
            vec![
                rail.name.clone(),
                rail.state.to_owned(),
                human_bytes(rail.bytes),
                grouped(rail.reads),
                rail.errors.to_string(),
                rail.state_changes.to_string(),
                format!("{} us", grouped(rail.latency_p50_us)),
                format!("{} us", grouped(rail.latency_p99_us)),
            ]
        })
        .collect();
    out.push('\n');
    out.push_str(&output::table(
        &[
            "rail", "state", "bytes", "reads", "errors", "changes", "p50", "p99",
        ],
        &rows,
    ));
    out
}
