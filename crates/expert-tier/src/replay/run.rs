//! The replay itself.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

use super::cache::{Cache, State};
use super::prefetch::{Guesser, Prefetch};
use super::trace::{RowView, Trace};
use super::wire::{Class, Link, Wire, micros};
use crate::error::TierError;
use crate::eviction::Eviction;

/// What is replayed against.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Records that the arena has room for.
    pub slots: u32,
    /// What is given up when it is full.
    pub eviction: Eviction,
    /// What is fetched ahead.
    pub prefetch: Prefetch,
    /// Bytes of a record.
    pub record_bytes: u64,
    /// The way from the peer.
    pub link: Link,
    /// Time that each layer computes once its experts are there.
    pub compute: Duration,
    /// Steps at the beginning that fill the arena and are not counted.
    pub warm_up_steps: u32,
    /// Of [`Prefetch::Random`].
    pub seed: u64,
}

/// What came of the steps after the warm-up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Experts that layers asked for.
    pub uses: u64,
    /// Of those, the ones that were there.
    pub hits: u64,
    /// Of those, the ones whose prefetch had begun and was not complete.
    pub late: u64,
    /// Of those, the ones that were fetched on demand.
    pub misses: u64,
    /// Hits among uses.
    pub hit_rate: f64,
    /// Bytes of all records that were fetched, on demand or ahead.
    pub bytes_moved: u64,
    /// What steps waited for records.
    pub stall_us: Stall,
    /// Mean time of a step, waiting and computing.
    pub step_us: f64,
    /// Steps per second, one after the other.
    pub steps_per_s: f64,
    /// What was fetched ahead.
    pub prefetched: Prefetched,
    /// By layer; those that no row names are left out.
    pub layers: Vec<LayerHits>,
}

/// Time that a step waits, over all of its layers, microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Stall {
    /// Mean.
    pub mean: f64,
    /// Half of the steps wait no longer.
    pub p50: f64,
    /// 99 of 100 steps wait no longer.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

/// Records that were fetched ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Prefetched {
    /// All that were begun, and those of the warm-up that were not used yet when it ended.
    pub records: u64,
    /// Used before they were given up, late ones included.
    pub useful: u64,
    /// Given up unused, or unused to the end.
    pub wasted: u64,
}

/// Hits of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LayerHits {
    /// Dense index.
    pub layer: u32,
    /// Experts that it asked for.
    pub uses: u64,
    /// Those that were there.
    pub hits: u64,
    /// Hits among uses.
    pub hit_rate: f64,
}

/// Replays a trace.
///
/// *Errors*: [`TierError::Config`] where the arena cannot hold one layer's experts, or a number is
/// zero that must not be.
pub fn replay(trace: &Trace, setup: &Setup) -> Result<Report, TierError> {
    if let Some(why) = why_not(trace, setup) {
        return Err(TierError::Config(why));
    }
    let mut replay = Replay::new(trace, setup);
    for index in 0..trace.row_count() {
        replay.row(index);
    }
    Ok(replay.report())
}

fn why_not(trace: &Trace, setup: &Setup) -> Option<String> {
    let (slots, widest) = (setup.slots, trace.widest());
    if slots < widest.max(1) {
        let least = widest.max(1);
        return Some(format!(
            "an arena of {slots} slots cannot hold the {least} experts of one layer at once; use at least {least}"
        ));
    }
    let (warm_up, steps) = (setup.warm_up_steps, trace.steps());
    if warm_up >= steps {
        return Some(format!(
            "a warm-up of {warm_up} steps leaves nothing to count of a trace of {steps}"
        ));
    }
    let link = &setup.link;
    let positive = [
        ("bytes of a record", setup.record_bytes),
        ("bytes per second of the link", link.bytes_per_s),
        ("bytes of the window", link.window_bytes),
        ("bytes of a READ", link.read_bytes),
    ];
    let zero = positive.iter().find(|(_, value)| *value == 0)?;
    Some(format!("{} are 0, they are at least 1", zero.0))
}

/// Hits among uses; all of nothing is there.
pub(super) fn share(hits: u64, uses: u64) -> f64 {
    match uses {
        0 => 1.0,
        _ => hits as f64 / uses as f64,
    }
}

struct Replay<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    cache: Cache,
    wire: Wire,
    /// Records to fetch ahead that are not begun.
    ahead: VecDeque<u32>,
    /// Records that the layer at hand still waits for.
    missing: u32,
    /// Slot and state of each record of the row at hand.
    found: Vec<(u32, Option<State>)>,
    guesser: Guesser,
    /// By step.
    stalls_us: Vec<f64>,
    /// By layer: uses and hits.
    layers: Vec<(u64, u64)>,
    /// Rows that are counted; what follows is of them alone.
    visits: u64,
    late: u64,
    misses: u64,
    /// Prefetches begun.
    begun: u64,
    /// Prefetches of the warm-up that were not used when it ended.
    carried: u64,
    useful: u64,
}

impl<'a> Replay<'a> {
    fn new(trace: &'a Trace, setup: &'a Setup) -> Self {
        // More slots than records are never used.
        let slots = setup.slots.min(trace.records().max(trace.widest()).max(1));
        let layers = trace.layers() as usize;
        Self {
            trace,
            setup,
            cache: Cache::new(setup.eviction, slots, trace.records()),
            wire: Wire::new(&setup.link),
            ahead: VecDeque::new(),
            missing: 0,
            found: Vec::new(),
            guesser: Guesser::new(trace, setup.prefetch, setup.seed),
            stalls_us: vec![0.0; trace.steps() as usize],
            layers: vec![(0, 0); layers],
            visits: 0,
            late: 0,
            misses: 0,
            begun: 0,
            carried: 0,
            useful: 0,
        }
    }

    /// The warm-up is over: what is there stays, and counting begins.
    fn begin_counting(&mut self) {
        self.carried = self.cache.unused();
        self.cache.wasted = 0;
        self.layers.fill((0, 0));
        (self.visits, self.late, self.misses) = (0, 0, 0);
        (self.begun, self.useful) = (0, 0);
    }

    /// One layer of one step: wait for its experts, use them, compute.
    fn row(&mut self, index: usize) {
        let row = self.trace.row(index);
        let is_first = index == 0 || self.trace.row(index - 1).step != row.step;
        if is_first && row.step == self.setup.warm_up_steps {
            self.begin_counting();
        }
        self.visits += 1;
        // What the prefetch did not begin is either demanded now or no longer expected.
        self.ahead.clear();
        self.cache.next_round();
        let began_us = self.wire.now_us();
        self.demand(&row);
        while self.missing > 0 {
            self.next_event();
        }
        self.stalls_us[row.step as usize] += self.wire.now_us() - began_us;
        // In the order of the row, whatever came first: so an arena with more slots always holds
        // what a smaller one does (LRU without prefetch).
        for (slot, state) in self.found.drain(..) {
            self.cache.used(slot, state);
        }
        self.guesser.guess(self.trace, index, &mut self.ahead);
        for record in &self.ahead {
            if let Some((slot, _)) = self.cache.find(*record) {
                self.cache.want(slot);
            }
        }
        self.advance(self.wire.now_us() + micros(self.setup.compute));
    }

    fn demand(&mut self, row: &RowView<'_>) {
        let Self {
            cache, wire, found, ..
        } = self;
        // All that is there is leased before room is made for the rest.
        for &record in row.records {
            let there = cache.find(record);
            let mut is_hit = false;
            match there {
                Some((slot, state)) => {
                    cache.lease(slot);
                    is_hit = state != State::Loading;
                    self.late += u64::from(!is_hit);
                    self.useful += u64::from(state != State::Ready);
                    if !is_hit {
                        wire.promote(slot);
                        self.missing += 1;
                    }
                    found.push((slot, Some(state)));
                }
                None => found.push((u32::MAX, None)),
            }
            let (uses, hits) = &mut self.layers[row.layer as usize];
            *uses += 1;
            *hits += u64::from(is_hit);
        }
        for (at, &record) in row.records.iter().enumerate() {
            if self.found[at].1.is_some() {
                continue;
            }
            // Where all else is a prefetch on its way, one of those has to land first.
            let slot = loop {
                match self.cache.take_for_demand(record) {
                    Some(slot) => break slot,
                    None => self.next_event(),
                }
            };
            self.found[at].0 = slot;
            self.wire
                .start(Class::Demand, slot, self.setup.record_bytes);
            self.missing += 1;
            self.misses += 1;
        }
    }

    /// Lets the link work up to a time.
    fn advance(&mut self, until_us: f64) {
        self.fill();
        while self.wire.next_done_us().is_some_and(|t| t <= until_us) {
            self.complete();
            self.fill();
        }
        self.wire.go_to(until_us);
    }

    /// Lets the link work until one more READ is complete.
    fn next_event(&mut self) {
        self.fill();
        // Whoever waits, waits for a record on its way: a demanded one, or a prefetch where every
        // slot that is not leased is taken by one (slots are at least what a layer leases).
        assert!(
            self.wire.next_done_us().is_some(),
            "nothing is on the wire to wait for"
        );
        self.complete();
    }

    fn complete(&mut self) {
        if let Some(slot) = self.wire.complete() {
            self.missing -= u32::from(self.cache.landed(slot));
        }
    }

    /// Posts what has room: demands, then prefetches that were begun, then new ones.
    fn fill(&mut self) {
        let record_bytes = self.setup.record_bytes;
        self.wire.post();
        while self.wire.has_room_for_prefetch(record_bytes) {
            let Some(record) = self.ahead.pop_front() else {
                return;
            };
            if self.cache.find(record).is_some() {
                continue;
            }
            if let Some(slot) = self.cache.take_for_prefetch(record) {
                self.begun += 1;
                self.wire.start(Class::Prefetch, slot, record_bytes);
                self.wire.post();
            }
        }
    }

    fn report(self) -> Report {
        let uses = self.layers.iter().map(|(uses, _)| uses).sum();
        let hits = self.layers.iter().map(|(_, hits)| hits).sum();
        let stalls_us = &self.stalls_us[self.setup.warm_up_steps as usize..];
        let computes = self.visits as f64 * micros(self.setup.compute);
        let stall_us = stall(stalls_us);
        let step_us = stall_us.mean + computes / stalls_us.len() as f64;
        let moved = self.misses + self.begun;
        let layers = (0..).zip(self.layers);
        Report {
            uses,
            hits,
            late: self.late,
            misses: self.misses,
            hit_rate: share(hits, uses),
            bytes_moved: moved.saturating_mul(self.setup.record_bytes),
            stall_us,
            step_us,
            steps_per_s: match step_us > 0.0 {
                true => 1e6 / step_us,
                // Nothing takes time: there is no rate to tell.
                false => 0.0,
            },
            prefetched: Prefetched {
                records: self.carried + self.begun,
                useful: self.useful,
                wasted: self.cache.wasted + self.cache.unused(),
            },
            layers: layers
                .filter(|(_, (uses, _))| *uses > 0)
                .map(|(layer, (uses, hits))| LayerHits {
                    layer,
                    uses,
                    hits,
                    hit_rate: share(hits, uses),
                })
                .collect(),
        }
    }
}

pub(super) fn stall(by_step_us: &[f64]) -> Stall {
    let mut by_step_us = by_step_us.to_vec();
    let count = by_step_us.len();
    let mean = by_step_us.iter().sum::<f64>() / count.max(1) as f64;
    by_step_us.sort_by(f64::total_cmp);
    // Nearest rank: the least of which that many percent are not above it.
    let percentile = |percent: usize| {
        let rank = (count * percent).div_ceil(100).max(1);
        by_step_us.get(rank - 1).copied().unwrap_or(0.0)
    };
    Stall {
        mean,
        p50: percentile(50),
        p99: percentile(99),
        max: percentile(100),
    }
}
