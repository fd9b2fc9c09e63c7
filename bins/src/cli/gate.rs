//! `atlas-expert gate`: a forward pass from streamed experts, whose hash must be that of resident ones.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use expert_moe::gate::{self, Moved};
use expert_moe::{MoeError, Spec};
use expert_store::info::hex128;
use expert_store::{OpenOptions, Store, StoreError};
use expert_tier::StreamerBuilder;
use expert_tier::stats::RailStats;
use serde::Serialize;

use super::output::{self, grouped, human_bytes};
use super::source::{How, SourceArgs};
use super::{UsageError, signals};

/// Compute a mixture-of-experts forward pass on the CPU from leased records, and print the output's hash.
///
/// On one machine the hash is the same for every backend, and with --resident, exactly if each weight that was read had the
/// same bits (docs/gate.md).
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Read all experts of this store or checkpoint into memory instead: the reference
    #[arg(long, value_name = "PATH", conflicts_with_all = ["expert_peer", "store", "expert_backend"])]
    resident: Option<PathBuf>,
    /// Room in the arena, in layers: as many records as so many layers can need at once
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    layers_in_arena: u32,
    /// Tokens side by side
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    tokens: u32,
    /// Experts of each token in each layer
    #[arg(long, value_name = "K", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    top_k: u32,
    /// Passes through all layers
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps: u32,
    /// Seed of hidden states, norms and routers
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Longest time until the experts of one layer are there, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    deadline_ms: u64,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
    /// Do not tell of each step on standard error
    #[arg(short, long)]
    quiet: bool,
}

/// What one run found; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Report {
    backend: &'static str,
    hash: String,
    content_id: Option<String>,
    layers: usize,
    tokens: u32,
    top_k: u32,
    steps: u32,
    seed: u64,
    seconds: f64,
    records_needed: u64,
    #[serde(flatten)]
    streamed: Option<Streamed>,
}

/// What was moved, where experts were streamed.
#[derive(Debug, Serialize)]
struct Streamed {
    arena_slots: u64,
    hits: u64,
    misses: u64,
    misses_certain: u64,
    fetched: u64,
    missed_bytes: u64,
    transferred_bytes: u64,
    failed: u64,
    verified: bool,
    verify_failures: u64,
    fallbacks: u64,
    takeovers: u64,
    contradictions: Vec<String>,
    rails: Vec<RailStats>,
}

/// Runs the command.
///
/// *Errors*: experts that did not come, output that is not finite. Where what was moved does not add up, the report
/// says so, and the exit code is 1.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cancel = signals::cancel_flag().context("installing signal handlers")?;
    let report = match &args.resident {
        Some(path) => resident(args, path, &cancel),
        None => streamed(args, &cancel),
    }?;
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&text(&report))?,
    }
    let sound = report.streamed.is_none_or(|s| {
        s.contradictions.iter().for_each(output::print_error);
        s.contradictions.is_empty()
    });
    Ok(ExitCode::from(u8::from(!sound)))
}

fn resident(args: &Args, path: &PathBuf, cancel: &Arc<AtomicBool>) -> anyhow::Result<Report> {
    let store = Store::open(
        path,
        &OpenOptions {
            checksums: false,
            cancel: Some(cancel.clone()),
            ..OpenOptions::default()
        },
    )?;
    output::print_warnings(store.warnings());
    let began = Instant::now();
    let found = gate::run_resident(&store, args.spec(), args.steps, &mut |step, hash| {
        args.tell(cancel, step, hash)
    });
    let content_id = store.info().content_id.clone();
    let layers = store.info().layers.len();
    let seconds = began.elapsed().as_secs_f64();
    Ok(args.report(
        "resident",
        content_id,
        layers,
        seconds,
        &found.map_err(plain)?,
    ))
}

fn streamed(args: &Args, cancel: &Arc<AtomicBool>) -> anyhow::Result<Report> {
    let spec = args.spec();
    let how = How {
        quiet: args.quiet || args.json,
        ..How::default()
    };
    let tier = args.source.open(&how, cancel, &mut |info| {
        let arena = gate::arena(info, &spec, args.layers_in_arena).map_err(plain)?;
        args.source.build_arena(arena)
    })?;
    let streamer = StreamerBuilder::new().start(tier)?;
    let time = Duration::from_millis(args.deadline_ms);
    let began = Instant::now();
    let found = gate::run_streamed(&streamer, spec, args.steps, time, &mut |step, hash| {
        args.tell(cancel, step, hash)
    });
    let found = found.map_err(plain)?;
    let seconds = began.elapsed().as_secs_f64();
    let info = streamer.tier().info();
    let (backend, layers) = (args.source.backend_name(), info.layers.len());
    let mut report = args.report(backend, info.content_id, layers, seconds, &found);
    report.streamed = found.moved.map(|moved| {
        let stats = streamer.tier().stats();
        Streamed::new(&moved, found.needed, stats)
    });
    Ok(report)
}

impl Args {
    fn spec(&self) -> Spec {
        Spec {
            tokens: self.tokens as usize,
            top_k: self.top_k as usize,
            seed: self.seed,
        }
    }

    /// After each step.
    fn tell(&self, cancel: &AtomicBool, step: u32, hash: u128) -> Result<(), MoeError> {
        if cancel.load(Ordering::Relaxed) {
            return Err(StoreError::Interrupted.into());
        }
        if !self.quiet {
            output::print_note(&format!("step {step} of {}: {}", self.steps, hex128(hash)));
        }
        Ok(())
    }

    fn report(
        &self,
        backend: &'static str,
        content_id: Option<String>,
        layers: usize,
        seconds: f64,
        found: &gate::Report,
    ) -> Report {
        Report {
            backend,
            hash: hex128(found.hash),
            content_id,
            layers,
            tokens: self.tokens,
            top_k: self.top_k,
            steps: found.steps,
            seed: self.seed,
            seconds,
            records_needed: found.needed,
            streamed: None,
        }
    }
}

impl Streamed {
    fn new(moved: &Moved, needed: u64, stats: expert_tier::stats::TierStats) -> Self {
        Self {
            arena_slots: moved.slots,
            hits: moved.hits,
            misses: moved.misses,
            misses_certain: moved.misses_certain,
            fetched: moved.fetched,
            missed_bytes: moved.missed_bytes,
            transferred_bytes: moved.transferred_bytes,
            failed: moved.failed,
            verified: moved.unverified == 0,
            verify_failures: stats.verify_failures,
            fallbacks: stats.fallbacks,
            takeovers: stats.takeovers,
            contradictions: moved.contradictions(needed),
            rails: stats.rails,
        }
    }
}

/// The error below, so that its exit code is that of other commands.
fn plain(error: MoeError) -> anyhow::Error {
    match error {
        MoeError::Spec(why) => UsageError(why).into(),
        MoeError::Tier(error) => error.into(),
        MoeError::Store(error) => error.into(),
        error => error.into(),
    }
}

fn text(report: &Report) -> String {
    let mut pairs = vec![
        ("backend", report.backend.to_owned()),
        (
            "computed",
            format!(
                "{} steps of {} layers, {} tokens, {} experts of each, in {:.2} s",
                report.steps, report.layers, report.tokens, report.top_k, report.seconds
            ),
        ),
        ("records needed", grouped(report.records_needed)),
    ];
    if let Some(moved) = &report.streamed {
        pairs.extend([
            ("arena", format!("{} records", grouped(moved.arena_slots))),
            (
                "found, fetched",
                format!("{}, {}", grouped(moved.hits), grouped(moved.fetched)),
            ),
            (
                "transferred",
                format!(
                    "{}; the records that were missing have {}",
                    human_bytes(moved.transferred_bytes),
                    human_bytes(moved.missed_bytes)
                ),
            ),
            (
                "checksums",
                match moved.verified {
                    true => "every chunk compared".to_owned(),
                    false => "NOT compared for all".to_owned(),
                },
            ),
        ]);
    }
    // Not aligned: scripts look for this line.
    format!("{}hash: {}\n", output::pairs(&pairs), report.hash)
}
