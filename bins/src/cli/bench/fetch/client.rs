//! One client: a tier of its own, and requests that follow each other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expert_arena::{ExpertArena, SlotId};
use expert_store::Key;
use expert_tier::stats::TierStats;
use expert_tier::{ExpertTier, Pending};

use super::draw::Draw;
use crate::cli::fetch::is_slot_busy;

/// What a client asks for at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub(super) batch: u32,
    pub(super) depth: u32,
    pub(super) deadline: Option<Duration>,
}

/// A client and where it fetches from.
pub(super) struct Client {
    number: u32,
    tier: Box<dyn ExpertTier>,
    keys: Vec<Key>,
    load: Load,
}

/// What one client got.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) records: u64,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) unverified: u64,
    /// From a request's submission to its results in the caller's hands, nanoseconds, in order.
    pub(super) request_ns: Vec<u64>,
    /// From a request's submission to a record's commit.
    pub(super) record_ns: Vec<u64>,
}

impl Client {
    pub(super) fn new(number: u32, tier: Box<dyn ExpertTier>, keys: Vec<Key>, load: Load) -> Self {
        Self {
            number,
            tier,
            keys,
            load,
        }
    }

    pub(super) fn arena(&self) -> &Arc<ExpertArena> {
        self.tier.arena()
    }

    pub(super) fn stats(&self) -> TierStats {
        self.tier.stats()
    }

    pub(super) fn content_id(&self) -> Option<String> {
        self.tier.info().content_id
    }

    /// Records there are to draw from.
    pub(super) fn among(&self) -> u64 {
        self.keys.len() as u64
    }

    /// Fetches so many records, drawn by the seed.
    ///
    /// *Errors*: one that did not arrive, an interrupt.
    pub(super) fn run(
        &self,
        records: u64,
        seed: u64,
        cancel: &AtomicBool,
    ) -> anyhow::Result<Outcome> {
        let mut draw = Draw::new(seed.wrapping_add(u64::from(self.number)));
        let mut outcome = Outcome::default();
        let mut under_way: VecDeque<(Instant, Pending)> = VecDeque::new();
        let mut batch: Vec<(Key, SlotId)> = Vec::with_capacity(self.load.batch as usize);
        let (mut left, mut slab) = (records, 0);
        let began = Instant::now();
        loop {
            while left > 0 && under_way.len() < self.load.depth as usize {
                let count = left.min(self.load.batch.into());
                batch.clear();
                batch.extend((0..count as u32).map(|slot| {
                    let key = self.keys[draw.index(self.keys.len())];
                    (key, SlotId { slab, slot })
                }));
                let asked = Instant::now();
                under_way.push_back((asked, self.submit(&batch, asked)?));
                left -= count;
                slab = (slab + 1) % self.load.depth;
            }
            let Some((asked, pending)) = under_way.pop_front() else {
                break;
            };
            anyhow::ensure!(!cancel.load(Ordering::Relaxed), "interrupted");
            let (arrived, _) = pending.wait()?;
            outcome.request_ns.push(nanoseconds(asked.elapsed()));
            for record in arrived {
                let record = record?;
                outcome.records += 1;
                outcome.bytes += record.bytes().len() as u64;
                outcome.unverified += u64::from(!record.is_verified());
                outcome.record_ns.push(nanoseconds(record.took()));
            }
        }
        outcome.seconds = began.elapsed().as_secs_f64();
        Ok(outcome)
    }

    /// A slot may still be in the hands of a rail for a moment.
    fn submit(&self, batch: &[(Key, SlotId)], asked: Instant) -> anyhow::Result<Pending> {
        let limit = asked + self.load.deadline.unwrap_or(Duration::from_secs(2));
        loop {
            match self.tier.submit(batch, self.load.deadline) {
                Err(e) if is_slot_busy(&e) && Instant::now() < limit => {
                    std::thread::sleep(Duration::from_micros(100));
                }
                other => return Ok(other?),
            }
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
