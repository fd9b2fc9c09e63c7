//! `atlas-expert fetch`: every record, or some, through a backend into an arena, proven and timed.

mod report;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use expert_arena::{ArenaBuilder, ExpertArena, SlotId};
use expert_store::Key;
use expert_store::digest::PayloadDigest;
use expert_store::info::{StoreInfo, hex128};
use expert_store::progress::Progress;
use expert_store::select::Selection;
use expert_tier::{ExpertTier, Pending, TierError, largest_image_bytes};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::args::SelectArgs;
use super::measure::{cpu_seconds, per_gib, per_mille};
use super::output;
use super::source::{How, SourceArgs};
use super::{UsageError, bar, signals};
use report::{Report, text};

/// Records whose trouble is listed; more are counted.
const ERRORS_SHOWN: u64 = 20;

/// Fetch records through a backend, prove every byte and print a digest of all of them.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// MoE layers by dense index, counted from 0 (the end is not included): `0..4` or `0,2,8..12`
    #[arg(long, value_name = "RANGES")]
    layers: Option<String>,
    /// Experts of every layer: `0..64` or `0,2,8..12`
    #[arg(long, value_name = "RANGES")]
    experts: Option<String>,
    /// Records per request
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Requests under way at once
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    depth: u32,
    /// Fetch N records drawn at random instead of all in order
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    random: Option<u64>,
    /// Seed of the draw
    #[arg(long, value_name = "S", default_value_t = 0, requires = "random")]
    seed: u64,
    /// Do not compute the payload digest: for timing
    #[arg(long)]
    no_digest: bool,
    /// Passes over the same records
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Longest time for one request, milliseconds; default: 2000 and 1 per 10 kB
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    deadline_ms: Option<u64>,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
}

impl Args {
    fn selection(&self) -> anyhow::Result<Selection> {
        SelectArgs {
            layers: self.layers.clone(),
            experts: self.experts.clone(),
            shard: None,
        }
        .selection()
    }
}

/// Runs the command.
///
/// *Errors*: nothing could be fetched at all. Records that fail alone are listed, and the exit
/// code is 1.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cancel = signals::cancel_flag().context("installing signal handlers")?;
    let how = How {
        selection: args.selection()?,
        deadline: args.deadline_ms.map(Duration::from_millis),
        quiet: args.quiet || args.json,
    };
    let mut keys = Vec::new();
    let tier = args.source.open(&how, &cancel, &mut |info| {
        keys = select_keys(args, info)?;
        make_arena(args, info)
    })?;
    let mut fetch = Fetch::new(args, &*tier);
    fetch.run(&keys, &cancel)?;
    let report = fetch.report();
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&text(&report, tier.arena()))?,
    }
    Ok(ExitCode::from(u8::from(report.failed > 0)))
}

/// Two slabs or more: one batch lands while another is looked at.
fn make_arena(args: &Args, info: &StoreInfo) -> anyhow::Result<Arc<ExpertArena>> {
    let slot_bytes = usize::try_from(largest_image_bytes(info))?;
    let mut builder = ArenaBuilder::new();
    for _ in 0..args.depth {
        builder = builder.slab(args.batch, slot_bytes);
    }
    args.source.build_arena(builder)
}

/// The keys to fetch, in order of layer and expert, or drawn at random.
fn select_keys(args: &Args, info: &StoreInfo) -> anyhow::Result<Vec<Key>> {
    let selection = args.selection()?;
    let wanted = |ranges: &Option<Vec<std::ops::Range<u32>>>, n: u32| {
        ranges
            .as_ref()
            .is_none_or(|r| r.iter().any(|r| r.contains(&n)))
    };
    let mut keys = Vec::new();
    for layer in info
        .layers
        .iter()
        .filter(|l| wanted(&selection.layers, l.layer))
    {
        let held = |e| {
            layer
                .experts
                .iter()
                .any(|&[first, end]| (first..end).contains(&e))
        };
        if let Some(e) = (0..layer.num_experts)
            .find(|&e| selection.experts.is_some() && wanted(&selection.experts, e) && !held(e))
        {
            return Err(UsageError(format!(
                "--experts: expert {e} of layer {} is not in this store, which holds {}",
                layer.layer,
                output::ranges_text(&layer.experts)
            ))
            .into());
        }
        for &[first, end] in &layer.experts {
            keys.extend(
                (first..end)
                    .filter(|&e| wanted(&selection.experts, e))
                    .map(|e| Key::new(layer.layer, e)),
            );
        }
    }
    let last = |n: Option<u32>| n.map_or(0, |n| n.saturating_add(1));
    let layers_end = last(info.layers.last().map(|l| l.layer));
    let experts_end = info.layers.iter().map(|l| l.num_experts).max().unwrap_or(0);
    for (flag, ranges, end) in [
        ("--layers", &selection.layers, layers_end),
        ("--experts", &selection.experts, experts_end),
    ] {
        if let Some(range) = ranges.iter().flatten().find(|r| r.end > end) {
            return Err(UsageError(format!(
                "{flag} {}..{}: the store ends at {end}",
                range.start, range.end
            ))
            .into());
        }
    }
    if keys.is_empty() {
        return Err(UsageError("the selection holds no record of this store".into()).into());
    }
    Ok(match args.random {
        None => keys,
        Some(n) => {
            let mut random = ChaCha8Rng::seed_from_u64(args.seed);
            (0..n)
                .map(|_| keys[(random.next_u64() % keys.len() as u64) as usize])
                .collect()
        }
    })
}

struct Fetch<'a> {
    args: &'a Args,
    tier: &'a dyn ExpertTier,
    progress: Option<Arc<dyn Progress>>,
    digest: PayloadDigest,
    first_digest: Option<u128>,
    records: u64,
    failed: u64,
    bytes: u64,
    seconds: f64,
    cpu_seconds: f64,
    verify: Duration,
    all_verified: bool,
    record_us: Vec<u64>,
    batch_us: Vec<u64>,
}

impl<'a> Fetch<'a> {
    fn new(args: &'a Args, tier: &'a dyn ExpertTier) -> Self {
        Self {
            args,
            tier,
            progress: bar::progress(args.quiet || args.json),
            digest: PayloadDigest::new(),
            first_digest: None,
            records: 0,
            failed: 0,
            bytes: 0,
            seconds: 0.0,
            cpu_seconds: 0.0,
            verify: Duration::ZERO,
            all_verified: true,
            record_us: Vec::new(),
            batch_us: Vec::new(),
        }
    }

    fn run(&mut self, keys: &[Key], cancel: &AtomicBool) -> anyhow::Result<()> {
        if let Some(progress) = &self.progress {
            let mean = largest_image_bytes(&self.tier.info());
            progress.start(
                "fetching",
                mean.saturating_mul(keys.len() as u64)
                    .saturating_mul(u64::from(self.args.repeat)),
            );
        }
        let (start, cpu) = (Instant::now(), cpu_seconds());
        for _ in 0..self.args.repeat {
            self.digest = PayloadDigest::new();
            self.pass(keys, cancel)?;
            if self.failed == 0 && !self.args.no_digest {
                let value = self.digest.value();
                let first = *self.first_digest.get_or_insert(value);
                anyhow::ensure!(
                    first == value,
                    "two passes over the same records gave {} and {}: the content changed",
                    hex128(first),
                    hex128(value)
                );
            }
        }
        self.seconds = start.elapsed().as_secs_f64();
        self.cpu_seconds = cpu_seconds() - cpu;
        if let Some(progress) = &self.progress {
            progress.finish();
        }
        Ok(())
    }

    fn pass(&mut self, keys: &[Key], cancel: &AtomicBool) -> anyhow::Result<()> {
        let tier = self.tier;
        let mut under_way = std::collections::VecDeque::new();
        let mut batches = keys.chunks(self.args.batch as usize).enumerate();
        loop {
            while under_way.len() < self.args.depth as usize {
                let Some((i, batch)) = batches.next() else {
                    break;
                };
                let slab = i as u32 % self.args.depth;
                let batch: Vec<(Key, SlotId)> = batch
                    .iter()
                    .enumerate()
                    .map(|(slot, &key)| {
                        let slot = slot as u32;
                        (key, SlotId { slab, slot })
                    })
                    .collect();
                under_way.push_back(self.submit(tier, &batch)?);
            }
            let Some(pending) = under_way.pop_front() else {
                return Ok(());
            };
            anyhow::ensure!(!cancel.load(Ordering::Relaxed), "interrupted");
            self.take(pending)?;
        }
    }

    /// Slots of a batch that failed may still wait for a rail to let go of them.
    fn submit(&self, tier: &'a dyn ExpertTier, batch: &[(Key, SlotId)]) -> anyhow::Result<Pending> {
        let time = self.args.deadline_ms.map(Duration::from_millis);
        let limit = Instant::now() + time.unwrap_or(Duration::from_secs(2));
        loop {
            match tier.submit(batch, time) {
                Err(e) if is_slot_busy(&e) && Instant::now() < limit => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => return Ok(other?),
            }
        }
    }

    fn take(&mut self, pending: Pending) -> anyhow::Result<()> {
        let (records, stats) = pending.wait()?;
        let is_lost = !records.is_empty() && records.iter().all(Result::is_err);
        self.batch_us.push(stats.total.as_micros() as u64);
        self.verify += stats.verify;
        for record in records {
            match record {
                Ok(record) => {
                    self.records += 1;
                    self.bytes += record.bytes().len() as u64;
                    self.record_us.push(record.took().as_micros() as u64);
                    self.all_verified &= record.is_verified();
                    if !self.args.no_digest {
                        self.digest.update(record.class(), record.bytes());
                    }
                    if let Some(progress) = &self.progress {
                        progress.advance(record.bytes().len() as u64);
                    }
                }
                Err(e) => {
                    self.failed += 1;
                    match self.failed {
                        n if n <= ERRORS_SHOWN => output::print_error(&e),
                        n if n == ERRORS_SHOWN + 1 => {
                            output::print_error(&"… further ones are counted");
                        }
                        _ => {}
                    }
                }
            }
        }
        anyhow::ensure!(
            !is_lost || self.tier.healthy(),
            "nothing of a whole batch arrived and no rail works: giving up"
        );
        Ok(())
    }

    fn report(&mut self) -> Report {
        let stats = self.tier.stats();
        self.record_us.sort_unstable();
        self.batch_us.sort_unstable();
        Report {
            backend: self.args.source.backend_name(),
            records: self.records,
            failed: self.failed,
            bytes: self.bytes,
            seconds: self.seconds,
            gb_per_s: output::gb_per_s(self.bytes, self.seconds),
            record_p50_us: per_mille(&self.record_us, 500),
            record_p99_us: per_mille(&self.record_us, 990),
            batch_p50_us: per_mille(&self.batch_us, 500),
            batch_p99_us: per_mille(&self.batch_us, 990),
            cpu_seconds_per_gib: per_gib(self.cpu_seconds, self.bytes),
            verify_seconds: self.verify.as_secs_f64(),
            payload_digest: self.first_digest.map(hex128),
            content_id: self.tier.info().content_id,
            verify: self.args.source.verify_name(),
            verified: self.all_verified && self.records > 0,
            verify_failures: stats.verify_failures,
            fallbacks: stats.fallbacks,
            takeovers: stats.takeovers,
            peers_refused: stats.peers_refused,
            rails: stats.rails,
        }
    }
}

pub(super) fn is_slot_busy(error: &TierError) -> bool {
    matches!(
        error,
        TierError::Arena(expert_arena::ArenaError::SlotBusy { .. })
    )
}
