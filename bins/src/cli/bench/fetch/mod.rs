//! `bench fetch`: records drawn at random, by one client or several, timed as a caller sees them.

mod client;
mod draw;
mod report;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use expert_arena::{ArenaBuilder, ExpertArena};
use expert_store::Key;
use expert_store::info::StoreInfo;
use expert_tier::largest_image_bytes;

use crate::cli::measure::cpu_seconds;
use crate::cli::source::{How, SourceArgs};
use crate::cli::{UsageError, output, signals};
use client::{Client, Load, Outcome};
use report::Report;

/// Measure how fast records come and how long a request takes, at random places, through any backend
///
/// Each client opens the backend for itself and asks for batches of records, the next when one of those under way
/// has arrived. With `--batch 1 --depth 1` the percentiles are the latency of one record. What is fetched first
/// to warm up is not counted; a record that fails ends the measurement.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Records that each client fetches
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    records: u64,
    /// Records per request
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Requests under way at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    depth: u32,
    /// Clients at once, each with connections and memory of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    clients: u32,
    /// Seed of the draw; client i, counted from 0, draws by seed + i
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Records that each client fetches before the clock starts; default: one request for each under way
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    warm_up: Option<u64>,
    /// Longest time for one request, milliseconds; default: 2000 and 1 per 10 kB
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    deadline_ms: Option<u64>,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Runs it.
///
/// *Errors*: a backend that cannot be opened, or a record that did not arrive.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cancel = signals::cancel_flag().context("installing signal handlers")?;
    let clients = open(args, &cancel)?;
    // Every client is warm before the first is measured.
    let warm_up = args
        .warm_up
        .unwrap_or(u64::from(args.batch) * u64::from(args.depth));
    side_by_side(&clients, |client| client.run(warm_up, !args.seed, &cancel))?;
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let outcomes = side_by_side(&clients, |client| {
        client.run(args.records, args.seed, &cancel)
    })?;
    let took = (began.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let report = Report::new(args, &clients, outcomes, took);
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&report.text(clients[0].arena()))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens the backend once for each client.
fn open(args: &Args, cancel: &AtomicBool) -> anyhow::Result<Vec<Client>> {
    let how = How {
        deadline: args.deadline_ms.map(Duration::from_millis),
        quiet: true,
        ..How::default()
    };
    let load = Load {
        batch: args.batch,
        depth: args.depth,
        deadline: how.deadline,
    };
    let one = |number: u32| {
        let mut keys = Vec::new();
        let tier = args.source.open(&how, cancel, &mut |info| {
            keys = all_keys(info)?;
            make_arena(args, info)
        })?;
        Ok(Client::new(number, tier, keys, load))
    };
    (0..args.clients).map(one).collect()
}

/// A slab for each request under way.
fn make_arena(args: &Args, info: &StoreInfo) -> anyhow::Result<Arc<ExpertArena>> {
    let slot_bytes = usize::try_from(largest_image_bytes(info))?;
    let slabs = (0..args.depth).fold(ArenaBuilder::new(), |builder, _| {
        builder.slab(args.batch, slot_bytes)
    });
    args.source.build_arena(slabs)
}

/// All records there are, in order of layer and expert.
fn all_keys(info: &StoreInfo) -> anyhow::Result<Vec<Key>> {
    let mut keys = Vec::new();
    for layer in &info.layers {
        for &[first, end] in &layer.experts {
            keys.extend((first..end).map(|expert| Key::new(layer.layer, expert)));
        }
    }
    match keys.is_empty() {
        true => Err(UsageError("there is no record to fetch".into()).into()),
        false => Ok(keys),
    }
}

/// Runs something for every client, each in a thread of its own, and waits for all.
///
/// *Errors*: the first client's that failed.
fn side_by_side(
    clients: &[Client],
    act: impl Fn(&Client) -> anyhow::Result<Outcome> + Sync,
) -> anyhow::Result<Vec<Outcome>> {
    let act = &act;
    std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter()
            .map(|client| scope.spawn(move || act(client)))
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(_) => Err(anyhow::anyhow!("a client's thread panicked")),
            })
            .collect()
    })
}
