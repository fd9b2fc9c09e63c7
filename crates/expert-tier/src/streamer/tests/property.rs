//! Random sequences of all that a streamer offers, against what must always be so.

use std::collections::HashSet;

use expert_arena::{Residency, SlotState};

use super::*;
use crate::mock::rng::SplitMix;
use crate::{Eviction, Ticket};

const LAYERS: u32 = 2;
const EXPERTS: u32 = 12;
const POOL: u32 = 6;
const SLAB: u32 = 3;

/// A record that a reader behind a fence may still look at.
struct Fenced {
    fence: Switch,
    residency: Residency,
    slot: SlotId,
}

/// A ticket and how many of its records were taken.
struct Open {
    ticket: Ticket,
    asked: usize,
    taken: usize,
}

struct Walk<'a> {
    disk: &'a Disk,
    streamer: ExpertStreamer,
    random: SplitMix,
    held: Vec<ExpertLease>,
    fenced: Vec<Fenced>,
    open: Vec<Open>,
    /// Leases that had to be had, and were.
    sure: u32,
}

impl<'a> Walk<'a> {
    fn new(disk: &'a Disk, seed: u64) -> Self {
        let mut random = SplitMix::new(seed);
        let eviction = *random.pick(&[Eviction::Lru, Eviction::SEGMENTED]);
        // Sometimes the tier admits less than the pool has room for.
        let admitted = *random.pick(&[2, u64::from(POOL)]);
        let engine = EngineConfig {
            inflight_max_bytes: admitted * RECORD_BYTES as u64,
            ..EngineConfig::default()
        };
        let tier = disk.tier(&arena(&[POOL, SLAB]), engine);
        let builder = StreamerBuilder::new().eviction(eviction).stream_slabs(1);
        Self {
            disk,
            streamer: builder.start(tier).expect("a streamer"),
            random,
            held: Vec::new(),
            fenced: Vec::new(),
            open: Vec::new(),
            sure: 0,
        }
    }

    fn layer(&mut self) -> u32 {
        self.random.below(u64::from(LAYERS)) as u32
    }

    fn experts(&mut self, most: u64) -> Vec<u32> {
        let count = self.random.between(1, most);
        let mut one = || self.random.below(u64::from(EXPERTS)) as u32;
        (0..count).map(|_| one()).collect()
    }

    fn keys(&mut self) -> Vec<Key> {
        let layer = self.layer();
        let experts = self.experts(4);
        experts.into_iter().map(|e| Key::new(layer, e)).collect()
    }

    /// Slots of the pool that somebody may use.
    fn used(&self) -> usize {
        let held = self.held.iter().map(ExpertLease::slot);
        let unfired = self.fenced.iter().filter(|f| !f.fence.fired());
        let used: HashSet<SlotId> = held.chain(unfired.map(|f| f.slot)).collect();
        used.iter().filter(|slot| slot.slab == 0).count()
    }

    fn lease(&mut self) {
        let (layer, experts) = (self.layer(), self.experts(3));
        let is_sure = self.open.is_empty() && self.used() + experts.len() <= POOL as usize;
        let time = match is_sure {
            true => SLACK,
            false => Duration::from_millis(self.random.below(3)),
        };
        let result = self.streamer.lease_many(layer, &experts, time);
        match result {
            Ok(leases) => {
                let got: Vec<u32> = leases.iter().map(|l| l.key().expert).collect();
                assert_eq!(got, experts);
                self.held.extend(leases);
                self.sure += u32::from(is_sure);
            }
            Err(error) => {
                assert!(!is_sure, "there is room, and still: {error}");
                let late = matches!(error, TierError::NotYet { .. } | TierError::Deadline { .. });
                assert!(late, "{error}");
            }
        }
    }

    fn release(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let lease = self.held.swap_remove(self.random.index(self.held.len()));
        self.disk.assert_right(std::slice::from_ref(&lease));
        if self.random.percent(50) {
            return;
        }
        let fence = Switch::default();
        if self.random.percent(30) {
            fence.fire();
        }
        self.fenced.push(Fenced {
            fence: fence.clone(),
            residency: lease.residency(),
            slot: lease.slot(),
        });
        lease.release_after(Box::new(fence));
    }

    fn fire(&mut self) {
        if !self.fenced.is_empty() {
            let at = self.random.index(self.fenced.len());
            self.fenced.swap_remove(at).fence.fire();
        }
    }

    fn submit(&mut self) {
        let class = *self.random.pick(&Class::ALL);
        let keys = self.keys();
        let time = *self.random.pick(&[Duration::from_millis(2), SLACK]);
        let ticket = self.streamer.submit(&keys, class, time).expect("room");
        self.open(ticket, keys.len());
    }

    fn stream(&mut self) {
        let (layer, experts) = (self.layer(), self.experts(u64::from(SLAB)));
        let time = *self.random.pick(&[Duration::from_millis(2), SLACK]);
        let ticket = self.streamer.stream_layer(layer, &experts, time);
        self.open(ticket.expect("room"), experts.len());
    }

    fn open(&mut self, ticket: Ticket, asked: usize) {
        self.open.push(Open {
            ticket,
            asked,
            taken: 0,
        });
    }

    /// Takes one record of a ticket, waiting a little; forgets the ticket at its end.
    fn take(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.random.index(self.open.len());
        let soon = Instant::now() + Duration::from_millis(self.random.below(3));
        let open = &mut self.open[at];
        match open.ticket.next(soon) {
            None => {
                assert_eq!(open.taken, open.asked, "each record ends once");
                self.open.swap_remove(at);
            }
            Some(Ok(lease)) => {
                open.taken += 1;
                self.held.push(lease);
            }
            Some(Err(TierError::NotYet { missing, .. })) => {
                assert_eq!(missing + open.ticket.ready() + open.taken, open.asked);
            }
            Some(Err(error)) => {
                assert!(matches!(error, TierError::Deadline { .. }), "{error}");
                open.taken += 1;
            }
        }
    }

    fn give_up(&mut self) {
        if !self.open.is_empty() {
            let mut open = self.open.swap_remove(self.random.index(self.open.len()));
            if self.random.percent(50) {
                open.ticket.cancel();
                assert!(open.ticket.next(Instant::now()).is_none());
            }
        }
    }

    fn guess(&mut self) {
        let keys = self.keys();
        assert!(self.streamer.prefetch(&keys) <= keys.len());
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..=5 => self.lease(),
            6..=9 => self.release(),
            10 | 11 => self.fire(),
            12 => self.submit(),
            13..=15 => self.take(),
            16 | 17 => self.give_up(),
            18 => self.guess(),
            _ => self.stream(),
        }
        self.check();
    }

    /// What is so at any moment.
    fn check(&self) {
        self.disk.assert_right(&self.held);
        for one in &self.held {
            for other in &self.held {
                let same = one.key() == other.key();
                assert_eq!(same, one.slot() == other.slot(), "{one:?} {other:?}");
            }
        }
        let arena = self.streamer.arena();
        for fenced in self.fenced.iter().filter(|f| !f.fence.fired()) {
            let state = arena.slot_state(fenced.slot).expect("a slot");
            match state {
                SlotState::Committed => {
                    let lease = arena.lease(&fenced.residency).expect("the same record");
                    drop(lease);
                }
                // Given up, and waiting for the fence.
                SlotState::Draining => {}
                state => panic!("{} is {state} behind a fence", fenced.slot),
            }
        }
        assert!(self.residents() <= (POOL + SLAB) as usize);
    }

    /// So many experts of one layer that are not in memory.
    fn absent(&self, count: usize) -> (u32, Vec<u32>) {
        let absent = |layer: u32| -> Vec<u32> {
            let slots = self.streamer.table(layer).map(|table| table.slots());
            let is_here =
                |e: u32| slots.is_some_and(|s| s[e as usize].load(Ordering::Acquire) >= 0);
            (0..EXPERTS).filter(|&e| !is_here(e)).take(count).collect()
        };
        let mut layers = (0..LAYERS).map(|layer| (layer, absent(layer)));
        let found = layers.find(|(_, experts)| experts.len() == count);
        found.expect("less than half of all fit into the arena")
    }

    fn residents(&self) -> usize {
        let tables = (0..LAYERS).filter_map(|layer| self.streamer.table(layer));
        let slots = tables.flat_map(|table| table.slots());
        let taken: Vec<i32> = slots
            .map(|slot| slot.load(Ordering::Acquire))
            .filter(|&slot| slot >= 0)
            .collect();
        taken.len()
    }

    /// Lets go of everything: each ticket ends, and every slot can be had.
    fn end(mut self) -> u32 {
        for fenced in self.fenced.drain(..) {
            fenced.fence.fire();
        }
        self.held.clear();
        let limit = Instant::now() + SLACK;
        // Tickets wait for slots that others hold: all of them have their turn.
        while !self.open.is_empty() {
            assert!(Instant::now() < limit, "a ticket does not end");
            self.take();
            self.held.clear();
        }
        wait_until("nothing is under way", || {
            self.streamer.stats().under_way == 0
        });
        let (layer, slab) = self.absent(SLAB as usize);
        let ticket = self.streamer.stream_layer(layer, &slab, SLACK);
        let streamed = ticket.expect("room").all(Instant::now() + SLACK);
        let streamed = streamed.expect("the slab");
        self.disk.assert_right(&streamed);
        let (layer, pool) = self.absent(POOL as usize);
        let leases = self.streamer.lease_many(layer, &pool, SLACK);
        let leases = leases.expect("the pool");
        self.disk.assert_right(&leases);
        let slots = leases.iter().chain(&streamed).map(ExpertLease::slot);
        let slots: HashSet<SlotId> = slots.collect();
        assert_eq!(slots.len(), (POOL + SLAB) as usize);
        drop((leases, streamed));
        let streamer = self.streamer;
        wait_until("all slots are settled", || {
            let stats = streamer.arena().stats();
            stats.landing + stats.quarantined + stats.outstanding_ranges + stats.draining == 0
        });
        self.sure
    }
}

/// Says where a panic came from.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}", self.0);
        }
    }
}

#[test]
fn random_use_never_breaks_a_rule() {
    let disk = Disk::new(LAYERS, EXPERTS, 1);
    let mut sure = 0;
    for seed in 0..40 {
        let _seed = Seed(seed);
        let mut walk = Walk::new(&disk, seed);
        for _ in 0..200 {
            walk.step();
        }
        sure += walk.end();
    }
    assert!(sure > 100, "only {sure} leases had to be had");
}
