//! A client's numbers as Prometheus text, for engines that show it beside their own.
//!
//! [`render`] gives a whole page of [`crate::ExpertTier::stats`] and
//! [`crate::ExpertStreamer::stats`]. Its names all begin with `atlas_expert_`, so that it can be
//! appended to another page; `docs/operations.md` lists them. Engines with a registry of their own
//! take the numbers from [`TierStats`] and [`StreamerStats`] themselves.

use expert_metrics::Page;

use crate::stats::{RailErrors, RailStats, TierStats};
use crate::streamer::StreamerStats;

/// The media type of what [`render`] gives.
pub use expert_metrics::CONTENT_TYPE;

/// The states of a rail.
const STATES: [&str; 4] = ["up", "suspect", "quarantined", "probing"];

/// Numbers of a tier, and of the streamer above it where there is one.
///
/// *Shapes and units*: text format 0.0.4; seconds, bytes, and counts since the tier was built. An
/// engine with several tiers shows each on a page of its own, as the names have no label for them.
pub fn render(tier: &TierStats, streamer: Option<&StreamerStats>) -> String {
    let mut page = Page::new();
    requests(&mut page, tier);
    rails(&mut page, &tier.rails);
    if let Some(streamer) = streamer {
        self::streamer(&mut page, streamer);
    }
    page.render()
}

fn requests(page: &mut Page, tier: &TierStats) {
    let mut counter = |name: &str, help: &str, value: u64| {
        page.counter(name, help).count(&[], value);
    };
    counter(
        "atlas_expert_tier_requests_total",
        "Requests that ended, well or not.",
        tier.requests,
    );
    counter(
        "atlas_expert_tier_records_total",
        "Records that arrived whole.",
        tier.records,
    );
    counter(
        "atlas_expert_tier_bytes_total",
        "Bytes of records that arrived whole.",
        tier.bytes,
    );
    counter(
        "atlas_expert_tier_records_failed_total",
        "Records that did not arrive.",
        tier.failed,
    );
    counter(
        "atlas_expert_tier_verify_failures_total",
        "Chunks that did not fit their checksum; they were read again.",
        tier.verify_failures,
    );
    counter(
        "atlas_expert_tier_records_unverified_total",
        "Records that were handed out without a comparison of checksums.",
        tier.unverified,
    );
    counter(
        "atlas_expert_tier_fallbacks_total",
        "READs that another rail finished than the one they were first posted on.",
        tier.fallbacks,
    );
    counter(
        "atlas_expert_tier_takeovers_total",
        "Times that rails of a lower preference took over because no preferred one worked.",
        tier.takeovers,
    );
    counter(
        "atlas_expert_tier_peers_refused_total",
        "Times that a peer was refused because of what it serves.",
        tier.peers_refused,
    );
    counter(
        "atlas_expert_tier_backpressure_total",
        "Requests refused because too much was under way.",
        tier.backpressure,
    );
    counter(
        "atlas_expert_tier_replanned_total",
        "Records fetched once more because their content changed under way.",
        tier.replanned,
    );
    let mut limits = page.counter(
        "atlas_expert_tier_requests_limited_total",
        "Requests by what limited them.",
    );
    for (limit, requests) in tier.limits.iter() {
        limits.count(&[("limit", limit)], requests);
    }
    for (name, help, times) in [
        (
            "atlas_expert_tier_request_queue_seconds",
            "From a request to its first READ posted.",
            &tier.times.queue,
        ),
        (
            "atlas_expert_tier_request_wire_seconds",
            "From a request's first READ posted to its end.",
            &tier.times.wire,
        ),
        (
            "atlas_expert_tier_request_verify_seconds",
            "Time in which checksums of a request were compared, over all threads.",
            &tier.times.verify,
        ),
        (
            "atlas_expert_tier_request_seconds",
            "From a request to its end.",
            &tier.times.total,
        ),
    ] {
        page.histogram(name, help).buckets(&[], &times.buckets());
    }
}

fn rails(page: &mut Page, rails: &[RailStats]) {
    // Two rails may have one name, e.g. two replicas behind one address; a sample must not.
    let numbers: Vec<String> = (0..rails.len()).map(|i| i.to_string()).collect();
    let labels = |i: usize| [("rail", numbers[i].as_str()), ("name", &rails[i].name)];
    let mut counter = |name: &str, help: &str, value: fn(&RailStats) -> f64| {
        let mut samples = page.counter(name, help);
        for (i, rail) in rails.iter().enumerate() {
            samples.add(&labels(i), value(rail));
        }
    };
    counter(
        "atlas_expert_tier_rail_bytes_total",
        "Bytes of READs that completed well.",
        |rail| rail.bytes as f64,
    );
    counter(
        "atlas_expert_tier_rail_reads_total",
        "READs that completed well.",
        |rail| rail.reads as f64,
    );
    counter(
        "atlas_expert_tier_rail_state_changes_total",
        "Changes of the rail's state.",
        |rail| rail.state_changes as f64,
    );
    counter(
        "atlas_expert_tier_rail_cpu_seconds_total",
        "Time that the rail's own threads ran or waited for a processor.",
        |rail| rail.cpu_us as f64 / 1e6,
    );
    let mut errors = page.counter(
        "atlas_expert_tier_rail_errors_total",
        "Errors of the rail by cause.",
    );
    for (i, rail) in rails.iter().enumerate() {
        for (cause, count) in causes(&rail.errors_by_cause) {
            let [index, name] = labels(i);
            errors.count(&[index, name, ("cause", cause)], count);
        }
    }
    let mut in_flight = page.gauge(
        "atlas_expert_tier_rail_in_flight_bytes",
        "Bytes posted on the rail and not completed.",
    );
    for (i, rail) in rails.iter().enumerate() {
        in_flight.count(&labels(i), rail.in_flight_bytes);
    }
    let mut states = page.gauge(
        "atlas_expert_tier_rail_state",
        "1 for the state that the rail is in, 0 for the others.",
    );
    for (i, rail) in rails.iter().enumerate() {
        for state in STATES {
            let [index, name] = labels(i);
            states.count(
                &[index, name, ("state", state)],
                (rail.state == state).into(),
            );
        }
    }
    let mut registered = page.gauge(
        "atlas_expert_tier_rail_registered_bytes",
        "Bytes of the arena that the rail's card may write to; 0 where it has none.",
    );
    for (i, rail) in rails.iter().enumerate() {
        registered.count(&labels(i), rail.registered_bytes);
    }
    let mut latency = page.histogram(
        "atlas_expert_tier_rail_read_seconds",
        "From a READ's post to its completion.",
    );
    for (i, rail) in rails.iter().enumerate() {
        latency.buckets(&labels(i), &rail.latency.buckets());
    }
}

fn causes(errors: &RailErrors) -> [(&'static str, u64); 6] {
    let RailErrors {
        flushed,
        checksum,
        refused,
        stalls,
        downs,
        probes_failed,
    } = *errors;
    [
        ("flushed", flushed),
        ("checksum", checksum),
        ("refused", refused),
        ("stall", stalls),
        ("down", downs),
        ("probe", probes_failed),
    ]
}

fn streamer(page: &mut Page, streamer: &StreamerStats) {
    let mut counter = |name: &str, help: &str, value: u64| {
        page.counter(name, help).count(&[], value);
    };
    counter(
        "atlas_expert_streamer_hits_total",
        "Records asked for that were in memory.",
        streamer.hits,
    );
    counter(
        "atlas_expert_streamer_misses_total",
        "Records asked for that were not.",
        streamer.misses,
    );
    counter(
        "atlas_expert_streamer_fetched_total",
        "Records fetched, guesses included.",
        streamer.fetched,
    );
    counter(
        "atlas_expert_streamer_fetched_bytes_total",
        "Their bytes.",
        streamer.fetched_bytes,
    );
    counter(
        "atlas_expert_streamer_failed_total",
        "Fetches that failed.",
        streamer.failed,
    );
    counter(
        "atlas_expert_streamer_evictions_total",
        "Records given up to make room.",
        streamer.evictions,
    );
    counter(
        "atlas_expert_streamer_guesses_total",
        "Records that prefetch asked for.",
        streamer.guesses,
    );
    counter(
        "atlas_expert_streamer_guesses_used_total",
        "Guesses that were needed later and found in memory.",
        streamer.guesses_used,
    );
    counter(
        "atlas_expert_streamer_guesses_late_total",
        "Guesses that were needed while they were under way.",
        streamer.guesses_late,
    );
    let mut gauge = |name: &str, help: &str, value: u64| {
        page.gauge(name, help).count(&[], value);
    };
    gauge(
        "atlas_expert_streamer_under_way",
        "Records wanted and not in memory now.",
        streamer.under_way,
    );
    gauge(
        "atlas_expert_streamer_slots_out",
        "Slots on their way back: a fence has not fired, or a rail may still write to them.",
        streamer.slots_out,
    );
    gauge(
        "atlas_expert_streamer_slots_stuck",
        "Slots whose fence has not fired for ten seconds.",
        streamer.slots_stuck,
    );
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::attribution::{Limit, LimitCounts};
    use crate::rail::RailKind;
    use crate::stats::{Histogram, Percentiles, RequestTimes};

    fn histogram(us: u64) -> Histogram {
        let mut histogram = Histogram::default();
        histogram.record(Duration::from_micros(us));
        histogram
    }

    fn tier() -> TierStats {
        let rail = RailStats {
            name: "tcp:10.0.0.2:9909".into(),
            kind: RailKind::Tcp,
            state: "quarantined",
            bytes: 4096,
            reads: 3,
            errors: 2,
            errors_by_cause: RailErrors {
                stalls: 2,
                ..RailErrors::default()
            },
            state_changes: 5,
            in_flight_bytes: 100,
            latency_p50_us: 0,
            latency_p99_us: 0,
            latency: histogram(1000),
            cpu_us: 1500,
            registered_bytes: 8192,
            io: None,
        };
        let mut limits = LimitCounts::default();
        limits.count(&Limit::Unknown);
        TierStats {
            rails: vec![rail.clone(), rail],
            requests: 11,
            records: 12,
            bytes: 13,
            failed: 14,
            verify_failures: 15,
            unverified: 16,
            fallbacks: 17,
            takeovers: 18,
            peers_refused: 19,
            backpressure: 20,
            replanned: 21,
            limits,
            queue: Percentiles::default(),
            wire: Percentiles::default(),
            verify: Percentiles::default(),
            total: Percentiles::default(),
            times: RequestTimes {
                total: histogram(40_000),
                ..RequestTimes::default()
            },
        }
    }

    #[test]
    fn every_metric_is_in_the_table_of_the_docs_and_no_other_is() {
        let page = render(&tier(), Some(&StreamerStats::default()));
        let docs = include_str!("../../../docs/operations.md");
        let prefixes = ["atlas_expert_tier_", "atlas_expert_streamer_"];
        let found = expert_metrics::differences(&page, docs, &prefixes);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn numbers_stand_under_their_names_and_rails_of_one_name_apart() {
        let streamer = StreamerStats {
            hits: 31,
            slots_stuck: 32,
            ..StreamerStats::default()
        };
        let page = render(&tier(), Some(&streamer));
        let rail = |n: u32| format!("rail=\"{n}\",name=\"tcp:10.0.0.2:9909\"");
        for line in [
            "atlas_expert_tier_requests_total 11".into(),
            "atlas_expert_tier_takeovers_total 18".into(),
            "atlas_expert_tier_requests_limited_total{limit=\"unknown\"} 1".into(),
            "atlas_expert_tier_request_seconds_sum 0.04".into(),
            "atlas_expert_tier_request_seconds_bucket{le=\"0.065536\"} 1".into(),
            "atlas_expert_tier_request_seconds_bucket{le=\"0.032768\"} 0".into(),
            format!("atlas_expert_tier_rail_bytes_total{{{}}} 4096", rail(0)),
            format!("atlas_expert_tier_rail_bytes_total{{{}}} 4096", rail(1)),
            format!(
                "atlas_expert_tier_rail_cpu_seconds_total{{{}}} 0.0015",
                rail(0)
            ),
            format!(
                "atlas_expert_tier_rail_registered_bytes{{{}}} 8192",
                rail(0)
            ),
            format!(
                "atlas_expert_tier_rail_errors_total{{{},cause=\"stall\"}} 2",
                rail(1)
            ),
            format!(
                "atlas_expert_tier_rail_state{{{},state=\"quarantined\"}} 1",
                rail(1)
            ),
            format!("atlas_expert_tier_rail_state{{{},state=\"up\"}} 0", rail(1)),
            format!("atlas_expert_tier_rail_read_seconds_count{{{}}} 1", rail(0)),
            "atlas_expert_streamer_hits_total 31".into(),
            "atlas_expert_streamer_slots_stuck 32".into(),
        ] {
            let line: String = line;
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
        assert!(!render(&tier(), None).contains("atlas_expert_streamer_"));
    }

    #[test]
    fn no_two_samples_of_a_page_are_the_same() {
        let page = render(&tier(), Some(&StreamerStats::default()));
        let mut names: Vec<&str> = page
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(name, _)| name)
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
