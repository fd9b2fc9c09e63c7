//! What a streamer counts.

use serde::Serialize;

use super::Inner;
use crate::sync::lock;

/// Kept by the streamer's thread and those who guess.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) fetched: u64,
    pub(super) fetched_bytes: u64,
    pub(super) failed: u64,
    pub(super) evictions: u64,
    pub(super) guesses: u64,
    pub(super) slots_out: u64,
    pub(super) slots_stuck: u64,
}

/// Numbers of a streamer since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StreamerStats {
    /// Records asked for that were in memory.
    pub hits: u64,
    /// Records asked for that were not.
    pub misses: u64,
    /// Records fetched, guesses included.
    pub fetched: u64,
    /// Their bytes, as record images.
    pub fetched_bytes: u64,
    /// Fetches that failed.
    pub failed: u64,
    /// Records given up to make room.
    pub evictions: u64,
    /// Records that [`super::ExpertStreamer::prefetch`] asked for.
    pub guesses: u64,
    /// Those of them that were needed later and found in memory.
    pub guesses_used: u64,
    /// Those that were needed while they were under way.
    pub guesses_late: u64,
    /// Records wanted and not in memory now.
    pub under_way: u64,
    /// Slots on their way back: a fence has not fired, or a rail may still write to them.
    pub slots_out: u64,
    /// Slots whose fence has not fired for ten seconds.
    pub slots_stuck: u64,
}

pub(super) fn collect(inner: &Inner) -> StreamerStats {
    let mut stats = StreamerStats::default();
    for shard in inner.layers.iter().flatten() {
        let residents = lock(&shard.residents);
        stats.hits += residents.hits;
        stats.misses += residents.misses;
        stats.guesses_used += residents.guesses_used;
    }
    let flights = lock(&inner.flights);
    stats.under_way = flights.len() as u64;
    stats.guesses_late = flights.guesses_late;
    drop(flights);
    let counters = lock(&inner.counters);
    stats.fetched = counters.fetched;
    stats.fetched_bytes = counters.fetched_bytes;
    stats.failed = counters.failed;
    stats.evictions = counters.evictions;
    stats.guesses = counters.guesses;
    stats.slots_out = counters.slots_out;
    stats.slots_stuck = counters.slots_stuck;
    stats
}
