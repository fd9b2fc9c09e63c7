//! The replay in earnest: records are fetched by a streamer, and time is the clock's.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use expert_wire::Key;

use super::prefetch::{Guesser, Prefetch};
use super::run::{LayerHits, Prefetched, Report, share, stall};
use super::trace::Trace;
use crate::error::TierError;
use crate::streamer::{ExpertStreamer, StreamerStats};

/// How a streamer is driven.
#[derive(Debug, Clone)]
pub struct Drive {
    /// What is fetched ahead.
    pub prefetch: Prefetch,
    /// Time that each layer computes once its experts are there: the caller's thread sleeps.
    pub compute: Duration,
    /// Steps at the beginning that fill the arena and are not counted.
    pub warm_up_steps: u32,
    /// Of [`Prefetch::Random`].
    pub seed: u64,
    /// Longest wait for one layer.
    pub deadline: Duration,
}

/// The end of a wait is met by looking at the clock: sleeping alone ends some time after it.
const SPIN: Duration = Duration::from_micros(100);

/// Replays a trace against a streamer, one step after the other. Leases are released when their
/// layer has computed.
///
/// *Errors*: [`TierError::Config`] where the trace is of a larger model than the store, or its
/// warm-up leaves nothing; the first that befell a record.
pub fn drive(trace: &Trace, streamer: &ExpertStreamer, drive: &Drive) -> Result<Report, TierError> {
    check(trace, streamer, drive)?;
    let experts = trace.experts();
    let mut guesser = Guesser::new(trace, drive.prefetch, drive.seed);
    let mut ahead = VecDeque::new();
    let mut stalls_us = vec![0.0; trace.steps() as usize];
    let mut before = Counts::of(streamer);
    let (mut began, mut is_counting) = (Instant::now(), drive.warm_up_steps == 0);
    for index in 0..trace.row_count() {
        let row = trace.row(index);
        if !is_counting && row.step >= drive.warm_up_steps {
            (before, began, is_counting) = (Counts::of(streamer), Instant::now(), true);
        }
        let wanted: Vec<u32> = row.records.iter().map(|record| record % experts).collect();
        let asked = Instant::now();
        let leases = streamer.lease_many(row.layer, &wanted, drive.deadline)?;
        stalls_us[row.step as usize] += asked.elapsed().as_secs_f64() * 1e6;
        ahead.clear();
        guesser.guess(trace, index, &mut ahead);
        let guesses: Vec<Key> = ahead
            .iter()
            .map(|record| Key::new(record / experts, record % experts))
            .collect();
        if !guesses.is_empty() {
            streamer.prefetch(&guesses);
        }
        compute(drive.compute);
        drop(leases);
    }
    let counted = &stalls_us[drive.warm_up_steps as usize..];
    Ok(before.report(&Counts::of(streamer), counted, began.elapsed()))
}

fn check(trace: &Trace, streamer: &ExpertStreamer, drive: &Drive) -> Result<(), TierError> {
    let info = streamer.tier().info();
    let layers = info.layers.iter().map(|l| l.layer + 1).max().unwrap_or(0);
    let experts = info.layers.iter().map(|l| l.num_experts).min().unwrap_or(0);
    let why = if trace.layers() > layers || trace.experts() > experts {
        format!(
            "the trace is of {} layers with {} experts, the store has {layers} with {experts}: take a trace of this model",
            trace.layers(),
            trace.experts()
        )
    } else if drive.warm_up_steps >= trace.steps() {
        format!(
            "a warm-up of {} steps leaves nothing to count of a trace of {}",
            drive.warm_up_steps,
            trace.steps()
        )
    } else {
        return Ok(());
    };
    Err(TierError::Config(why))
}

fn compute(time: Duration) {
    let end = Instant::now() + time;
    std::thread::sleep(time.saturating_sub(SPIN));
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// What the streamer has counted at one moment.
struct Counts {
    stats: StreamerStats,
    layers: Vec<(u32, u64, u64)>,
}

impl Counts {
    fn of(streamer: &ExpertStreamer) -> Self {
        Self {
            stats: streamer.stats(),
            layers: streamer.layer_uses(),
        }
    }

    fn report(&self, after: &Self, stalls_us: &[f64], took: Duration) -> Report {
        let (a, b) = (&self.stats, &after.stats);
        let (hits, missed) = (b.hits - a.hits, b.misses - a.misses);
        let late = b.guesses_late - a.guesses_late;
        let useful = b.guesses_used - a.guesses_used + late;
        let guesses = b.guesses - a.guesses;
        let step_us = took.as_secs_f64() * 1e6 / stalls_us.len() as f64;
        let layers = self.layers.iter().zip(&after.layers);
        Report {
            uses: hits + missed,
            hits,
            late,
            misses: missed.saturating_sub(late),
            hit_rate: share(hits, hits + missed),
            bytes_moved: b.fetched_bytes - a.fetched_bytes,
            stall_us: stall(stalls_us),
            step_us,
            steps_per_s: 1e6 / step_us.max(f64::MIN_POSITIVE),
            prefetched: Prefetched {
                records: guesses,
                useful,
                // What the warm-up guessed may be used later.
                wasted: guesses.saturating_sub(useful),
            },
            layers: layers
                .map(|(a, b)| (b.0, b.1 - a.1, b.2 - a.2))
                .filter(|(_, hits, misses)| hits + misses > 0)
                .map(|(layer, hits, misses)| LayerHits {
                    layer,
                    uses: hits + misses,
                    hits,
                    hit_rate: share(hits, hits + misses),
                })
                .collect(),
        }
    }
}
