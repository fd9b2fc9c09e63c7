//! What was measured: JSON as it is, and text for people.

use expert_arena::ExpertArena;
use expert_tier::stats::RailStats;
use serde::Serialize;

use super::Args;
use super::client::{Client, Outcome};
use crate::cli::measure::{per_gib, per_mille};
use crate::cli::output::{self, gb_per_s, grouped, human_bytes};

/// All clients together; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    backend: &'static str,
    clients: u32,
    batch: u32,
    depth: u32,
    seed: u64,
    /// Records there are to draw from.
    among: u64,
    records: u64,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    cpu_seconds: f64,
    cpu_seconds_per_gib: f64,
    request_us: Latency,
    record_us: Latency,
    slowest_client_gb_per_s: f64,
    fastest_client_gb_per_s: f64,
    verify: &'static str,
    /// Records whose checksums were not compared at this fetch.
    unverified: u64,
    verify_failures: u64,
    fallbacks: u64,
    takeovers: u64,
    content_id: Option<String>,
    /// Of the first client, with what warmed up.
    rails: Vec<RailStats>,
}

/// Microseconds.
#[derive(Debug, Serialize)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Latency {
    fn of(mut times_ns: Vec<u64>) -> Self {
        times_ns.sort_unstable();
        let at = |tenths| per_mille(&times_ns, tenths) as f64 / 1e3;
        Self {
            p50: at(500),
            p90: at(900),
            p99: at(990),
            p999: at(999),
            max: at(1000),
        }
    }

    fn cells(&self, name: &str) -> Vec<String> {
        let numbers = [self.p50, self.p90, self.p99, self.p999, self.max];
        [name.to_owned()]
            .into_iter()
            .chain(numbers.iter().map(|n| format!("{n:.1}")))
            .collect()
    }
}

impl Report {
    /// `took`: seconds on the clock, and of processors.
    pub(super) fn new(
        args: &Args,
        clients: &[Client],
        outcomes: Vec<Outcome>,
        took: (f64, f64),
    ) -> Self {
        let (seconds, cpu_seconds) = took;
        let bytes = outcomes.iter().map(|o| o.bytes).sum();
        let rates = outcomes.iter().map(|o| gb_per_s(o.bytes, o.seconds));
        let all = |times: fn(&Outcome) -> &Vec<u64>| {
            Latency::of(outcomes.iter().flat_map(times).copied().collect())
        };
        let stats: Vec<_> = clients.iter().map(Client::stats).collect();
        Self {
            backend: args.source.backend_name(),
            clients: args.clients,
            batch: args.batch,
            depth: args.depth,
            seed: args.seed,
            among: clients[0].among(),
            records: outcomes.iter().map(|o| o.records).sum(),
            bytes,
            seconds,
            gb_per_s: gb_per_s(bytes, seconds),
            cpu_seconds,
            cpu_seconds_per_gib: per_gib(cpu_seconds, bytes),
            request_us: all(|o| &o.request_ns),
            record_us: all(|o| &o.record_ns),
            slowest_client_gb_per_s: rates.clone().fold(f64::INFINITY, f64::min),
            fastest_client_gb_per_s: rates.fold(0.0, f64::max),
            verify: args.source.verify_name(),
            unverified: outcomes.iter().map(|o| o.unverified).sum(),
            verify_failures: stats.iter().map(|s| s.verify_failures).sum(),
            fallbacks: stats.iter().map(|s| s.fallbacks).sum(),
            takeovers: stats.iter().map(|s| s.takeovers).sum(),
            content_id: clients[0].content_id(),
            rails: stats
                .into_iter()
                .next()
                .map(|s| s.rails)
                .unwrap_or_default(),
        }
    }

    pub(super) fn text(&self, arena: &ExpertArena) -> String {
        let mut lines = vec![
            ("backend", self.backend.to_owned()),
            (
                "load",
                format!(
                    "{} client(s), {} record(s) a request, {} request(s) under way each",
                    self.clients, self.batch, self.depth
                ),
            ),
            (
                "records",
                format!(
                    "{} drawn from {} by seed {}",
                    grouped(self.records),
                    grouped(self.among),
                    self.seed
                ),
            ),
            ("bytes", human_bytes(self.bytes)),
            (
                "took",
                format!("{:.3} s, {:.3} GB/s", self.seconds, self.gb_per_s),
            ),
            (
                "client CPU",
                format!("{:.3} s per GiB", self.cpu_seconds_per_gib),
            ),
            (
                "checksums",
                match (self.verify, self.unverified) {
                    ("off", _) => "off, as asked".to_owned(),
                    (_, 0) => "every chunk compared".to_owned(),
                    (_, n) => format!("NOT compared for {} records", grouped(n)),
                },
            ),
            ("arena", arena.report().to_string().replace('\n', "; ")),
        ];
        if self.clients > 1 {
            lines.push((
                "a client",
                format!(
                    "{:.3} to {:.3} GB/s",
                    self.slowest_client_gb_per_s, self.fastest_client_gb_per_s
                ),
            ));
        }
        let troubles = [
            (self.verify_failures, "chunks did not fit"),
            (self.fallbacks, "fallbacks"),
            (self.takeovers, "takeovers"),
        ];
        let troubles: Vec<String> = troubles
            .iter()
            .filter(|(n, _)| *n > 0)
            .map(|(n, what)| format!("{n} {what}"))
            .collect();
        if !troubles.is_empty() {
            lines.push(("trouble", troubles.join(", ")));
        }
        let mut out = output::pairs(&lines);
        out.push('\n');
        out.push_str(&output::table(
            &["microseconds", "p50", "p90", "p99", "p99.9", "max"],
            &[
                self.request_us.cells("a request"),
                self.record_us.cells("a record of it"),
            ],
        ));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_microseconds_in_order() {
        let latency = Latency::of((1..=1000).rev().map(|n| n * 1000).collect());
        let got = latency.cells("x").join(" ");
        assert_eq!(got, "x 500.0 900.0 990.0 999.0 1000.0");
        assert_eq!(Latency::of(Vec::new()).cells("x")[1], "0.0");
    }
}
