//! A peer's numbers as Prometheus text. `docs/operations.md` lists them.

use expert_metrics::Page;
use expert_wire::message::ErrorCode;

use crate::stats::CODES;
use crate::{PeerStats, Refusal};

/// What every page has, whether or not there is a peer yet.
pub(crate) fn head(is_ready: bool) -> Page {
    let mut page = Page::new();
    page.gauge(
        "atlas_expert_peer_build_info",
        "1, with the version of the program.",
    )
    .count(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.gauge(
        "atlas_expert_peer_ready",
        "1 while /readyz says so, else 0.",
    )
    .count(&[], is_ready.into());
    page
}

pub(crate) fn add(page: &mut Page, stats: &PeerStats) {
    let mut gauge = |name: &str, help: &str, value: u64| {
        page.gauge(name, help).count(&[], value);
    };
    gauge(
        "atlas_expert_peer_epoch",
        "Number of the store that is served: one more with each reload.",
        stats.epoch.into(),
    );
    gauge(
        "atlas_expert_peer_last_reload_ok",
        "0 while a store is served because the next one could not be taken up, else 1.",
        (!stats.last_reload_failed).into(),
    );
    gauge(
        "atlas_expert_peer_connections",
        "Connections now.",
        stats.connections_active,
    );
    gauge(
        "atlas_expert_peer_answers_in_flight",
        "Answers with record bytes that are being sent now.",
        stats.answers_active,
    );
    gauge(
        "atlas_expert_peer_store_files_refused",
        "Files whose records are refused because they changed under the peer.",
        stats.files_refused,
    );
    let mut counter = |name: &str, help: &str, value: u64| {
        page.counter(name, help).count(&[], value);
    };
    counter(
        "atlas_expert_peer_connections_accepted_total",
        "Connections that were let in.",
        stats.connections_accepted,
    );
    counter(
        "atlas_expert_peer_auth_refused_total",
        "Clients that did not prove that they know the token.",
        stats.auth_refused,
    );
    counter(
        "atlas_expert_peer_queue_pairs_refused_total",
        "Rails that were not opened because their client had too many queue pairs.",
        stats.qps_refused,
    );
    counter(
        "atlas_expert_peer_turns_waited_total",
        "Turns to send that had to be waited for.",
        stats.turns_waited,
    );
    counter(
        "atlas_expert_peer_connections_timed_out_total",
        "Connections that ended because a deadline passed.",
        stats.connections_timed_out,
    );
    counter(
        "atlas_expert_peer_requests_total",
        "Requests of all kinds, refused ones too.",
        stats.requests,
    );
    counter(
        "atlas_expert_peer_sent_bytes_total",
        "Record bytes of answers over TCP; one-sided READs are not seen by the peer.",
        stats.payload_bytes_sent,
    );
    counter(
        "atlas_expert_peer_answers_broken_off_total",
        "Answers that were broken off because a file changed, ended early or could not be read.",
        stats.replies_broken_off,
    );
    counter(
        "atlas_expert_peer_checksum_reports_total",
        "Reports of clients that bytes did not fit their checksum.",
        stats.checksum_reports,
    );
    counter(
        "atlas_expert_peer_store_changes_total",
        "Files of the store that were found changed.",
        stats.store_changes,
    );
    counter(
        "atlas_expert_peer_reloads_total",
        "Stores taken up after the first.",
        stats.reloads,
    );
    counter(
        "atlas_expert_peer_reloads_failed_total",
        "Reloads that failed; the store before goes on being served.",
        stats.reloads_failed,
    );
    let mut refused = page.counter(
        "atlas_expert_peer_connections_refused_total",
        "Connections that ended before they were served, by the reason.",
    );
    for why in Refusal::ALL {
        refused.count(&[("reason", why.name())], stats.refused(why));
    }
    let mut errors = page.counter(
        "atlas_expert_peer_errors_total",
        "Requests refused, by the code that the client was told.",
    );
    for code in (1..CODES as u16).map(ErrorCode::from_wire) {
        let count = stats.errors.iter().find(|(c, _)| *c == code);
        errors.count(&[("code", &snake_case(code))], count.map_or(0, |(_, n)| *n));
    }
    page.histogram(
        "atlas_expert_peer_answer_seconds",
        "From a request for record bytes to the last byte of its answer in the socket.",
    )
    .buckets(&[], &stats.answer_times);
    rails(page, stats);
}

fn rails(page: &mut Page, stats: &PeerStats) {
    let mut gauge = |name: &str, help: &str, value: fn(&crate::RailStats) -> u64| {
        let mut samples = page.gauge(name, help);
        for rail in &stats.rails {
            samples.count(&[("rail", &rail.name)], value(rail));
        }
    };
    gauge(
        "atlas_expert_peer_rail_registered_bytes",
        "Bytes of the store that can be read over the rail now.",
        |rail| rail.registered_bytes,
    );
    gauge(
        "atlas_expert_peer_rail_regions",
        "Regions that they are registered in.",
        |rail| rail.regions,
    );
    gauge(
        "atlas_expert_peer_rail_queue_pairs",
        "Queue pairs of clients now.",
        |rail| rail.qps_open,
    );
    let mut opens = page.counter(
        "atlas_expert_peer_rail_opens_total",
        "Clients that opened the rail.",
    );
    for rail in &stats.rails {
        opens.count(&[("rail", &rail.name)], rail.opens);
    }
}

/// `BadFrame` as `bad_frame`.
fn snake_case(code: ErrorCode) -> String {
    let mut name = String::new();
    for c in format!("{code:?}").chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_lowercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RailStats;

    #[test]
    fn every_metric_is_in_the_table_of_the_docs_and_no_other_is() {
        let mut page = head(true);
        let mut stats = PeerStats::default();
        stats.rails.push(RailStats::default());
        add(&mut page, &stats);
        let text = page.render();
        let docs = include_str!("../../../docs/operations.md");
        let found = expert_metrics::differences(&text, docs, &["atlas_expert_peer_"]);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn refusals_are_shown_by_reason_those_that_did_not_occur_too_and_each_is_in_the_docs() {
        let mut page = Page::new();
        let stats = PeerStats {
            refusals: vec![(Refusal::LimitAddress, 3)],
            ..PeerStats::default()
        };
        add(&mut page, &stats);
        let text = page.render();
        let docs = include_str!("../../../docs/operations.md");
        for why in Refusal::ALL {
            let count = if why == Refusal::LimitAddress { 3 } else { 0 };
            let line = format!(
                "atlas_expert_peer_connections_refused_total{{reason=\"{}\"}} {count}\n",
                why.name()
            );
            assert!(text.contains(&line), "{line} {text}");
            let row = format!("\n| `{}` | ", why.name());
            assert!(docs.contains(&row), "no row {row} in the docs");
        }
    }

    #[test]
    fn errors_are_shown_by_code_those_that_did_not_occur_too() {
        let mut page = Page::new();
        let stats = PeerStats {
            errors: vec![(ErrorCode::StoreUnreadable, 3)],
            ..PeerStats::default()
        };
        add(&mut page, &stats);
        let text = page.render();
        for line in [
            "atlas_expert_peer_errors_total{code=\"store_unreadable\"} 3\n",
            "atlas_expert_peer_errors_total{code=\"bad_frame\"} 0\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
