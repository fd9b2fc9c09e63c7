//! What `pack` and `index` tell at the end.

use std::time::Instant;

use expert_store::build::Report;
use expert_store::info::hex128;
use serde::Serialize;

use super::output::{self, gb_per_s, grouped, human_bytes};

#[derive(Serialize)]
struct Built<'a> {
    store: String,
    records: u64,
    image_bytes: u64,
    store_bytes: u64,
    generation: u64,
    content_id: Option<String>,
    whole_content_id: &'a Option<String>,
    layout_id: String,
    payload_digest: Option<String>,
    seconds: f64,
    gb_per_s: f64,
    warnings: &'a [String],
}

/// Prints what was built. `bytes_read` tells whether records were read, or headers alone.
///
/// *Errors*: standard output cannot be written.
pub fn print(
    report: &Report,
    began: Instant,
    records_read: bool,
    json: bool,
) -> anyhow::Result<()> {
    let seconds = began.elapsed().as_secs_f64();
    let rate = match records_read {
        true => gb_per_s(report.image_bytes, seconds),
        false => 0.0,
    };
    let built = Built {
        store: report.path.display().to_string(),
        records: report.records,
        image_bytes: report.image_bytes,
        store_bytes: report.store_bytes,
        generation: report.generation,
        content_id: report.content_id.map(hex128),
        whole_content_id: &report.whole_content_id,
        layout_id: hex128(report.layout_id),
        payload_digest: report.payload_digest.map(hex128),
        seconds,
        gb_per_s: rate,
        warnings: &report.warnings,
    };
    if json {
        return output::print_json(&built);
    }
    let none = || "none: no checksums were computed".to_owned();
    let mut took = format!("{seconds:.2} s");
    if records_read {
        took.push_str(&format!(", {rate:.2} GB/s"));
    }
    let mut pairs = vec![
        ("store", built.store),
        ("generation", built.generation.to_string()),
        ("records", grouped(report.records)),
        ("expert weights", human_bytes(report.image_bytes)),
        ("on disk", human_bytes(report.store_bytes)),
        ("content id", built.content_id.unwrap_or_else(none)),
        ("payload-digest", built.payload_digest.unwrap_or_else(none)),
        ("took", took),
    ];
    if let Some(id) = &report.whole_content_id {
        pairs.push(("part of", id.clone()));
    }
    output::print(&output::pairs(&pairs))
}
