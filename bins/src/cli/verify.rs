//! `verify`: every byte against its checksum.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use expert_store::OpenOptions;
use expert_store::info::hex128;
use expert_store::verify::{self, VerifyOptions, VerifyReport};
use serde::Serialize;

use super::args::{self, MovedArgs, RunArgs, SelectArgs, StackArgs};
use super::output::{self, gb_per_s, grouped, human_bytes};

/// Read a store and compare every byte with its checksum; each bad record and chunk is listed
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store
    store: PathBuf,
    /// Compute the payload digest as well, and compare it with the recorded one
    #[arg(long)]
    digest: bool,
    /// How many bad chunks are listed; all are counted
    #[arg(long, value_name = "N", default_value_t = 1000)]
    list: usize,
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    moved: MovedArgs,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Serialize)]
struct Verified<'a> {
    ok: bool,
    #[serde(flatten)]
    report: &'a VerifyReport,
    content_id: &'a Option<String>,
    /// Computed with `--digest` where every byte is right, else null.
    payload_digest: Option<String>,
    recorded_payload_digest: Option<String>,
    seconds: f64,
    gb_per_s: f64,
}

/// Runs it; exit code 1 where anything is bad.
///
/// *Errors*: the store cannot be opened or has no checksums, or an interrupt.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let open = OpenOptions {
        checkpoint_override: args.moved.checkpoint.clone(),
        ..args.stack.open_options(&args.select)?
    };
    let store = args::open(&args.store, &open)?;
    let began = Instant::now();
    let report = verify::verify(
        &store,
        &VerifyOptions {
            work: args.run.work_options()?,
            listed_max: args.list,
            payload_digest: args.digest,
        },
    )?;
    let seconds = began.elapsed().as_secs_f64();
    let recorded = store.recorded_payload_digest();
    let digest = report.payload_digest;
    let digest_differs = digest.is_some() && recorded.is_some() && digest != recorded;
    let verified = Verified {
        ok: report.is_ok() && !digest_differs,
        report: &report,
        content_id: &store.info().content_id,
        payload_digest: digest.map(hex128),
        recorded_payload_digest: recorded.map(hex128),
        seconds,
        gb_per_s: gb_per_s(report.bytes, seconds),
    };
    match args.run.json {
        true => output::print_json(&verified)?,
        false => output::print(&text(&verified))?,
    }
    Ok(match verified.ok {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn text(verified: &Verified<'_>) -> String {
    let report = verified.report;
    let mut out = String::new();
    for bad in &report.bad {
        out.push_str(&format!(
            "bad: layer {} expert {} chunk {}: checksum {:016x}, the catalogue says {:016x}\n",
            bad.key.layer, bad.key.expert, bad.chunk, bad.got, bad.want
        ));
    }
    for error in &report.errors {
        out.push_str(&format!("bad: {error}\n"));
    }
    let listed = (report.bad.len() + report.errors.len()) as u64;
    let all = report.bad_count + report.error_count;
    if all > listed {
        out.push_str(&format!("… and {} more\n", grouped(all - listed)));
    }
    let verdict = match (verified.ok, all) {
        (true, _) => "every byte is right".to_owned(),
        (false, 0) => format!(
            "BAD: the payload digest recorded is {}",
            verified
                .recorded_payload_digest
                .as_deref()
                .unwrap_or("none")
        ),
        (false, _) => format!(
            "BAD: {} chunks differ, {} other errors",
            grouped(report.bad_count),
            grouped(report.error_count)
        ),
    };
    let none = || "none".to_owned();
    out.push_str(&output::pairs(&[
        ("result", verdict),
        ("records", grouped(report.records)),
        ("bytes", human_bytes(report.bytes)),
        (
            "content id",
            verified.content_id.clone().unwrap_or_else(none),
        ),
        (
            "took",
            format!("{:.2} s, {:.2} GB/s", verified.seconds, verified.gb_per_s),
        ),
    ]));
    if let (None, Some(recorded)) = (&verified.payload_digest, &verified.recorded_payload_digest) {
        out.push_str(&format!(
            "recorded payload-digest (not computed): {recorded}\n"
        ));
    }
    if let Some(digest) = &verified.payload_digest {
        // Not aligned: scripts look for this line.
        out.push_str(&format!("payload-digest: {digest}\n"));
    }
    out
}
