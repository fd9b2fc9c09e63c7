//! Which slot is given out, with the test in the place of the streamer's thread.

use std::sync::Mutex;

use super::super::residents::{Held, LayerShard};
use super::super::slots::{Layers, Slots, Uses};
use super::*;
use crate::Eviction;
use crate::sync::lock;

/// One layer of 16 experts, and slots of a kind.
struct Book {
    disk: Disk,
    tier: PosixTier,
    slots: Slots,
    shards: Vec<Option<LayerShard>>,
    uses: Mutex<Uses>,
}

impl Book {
    fn new(arena: Arc<ExpertArena>, stream_slabs: &[u32]) -> Self {
        let disk = Disk::new(1, 16, 1);
        let count = (0..arena.num_slabs()).map(|slab| arena.slots(slab)).sum();
        Self {
            tier: disk.tier(&arena, EngineConfig::default()),
            slots: Slots::new(arena, stream_slabs.to_vec()),
            shards: vec![Some(LayerShard::new(16))],
            uses: Mutex::new(Uses::new(Eviction::Lru.build(count))),
            disk,
        }
    }

    fn take(&mut self, need_bytes: usize) -> Option<SlotId> {
        let layers = Layers(&self.shards);
        self.slots.take(need_bytes, &layers, &self.uses)
    }

    /// Fetches a record into a slot, and puts it among the residents.
    fn hold(&mut self, expert: u32, slot: SlotId, keep: bool) {
        let key = Key::new(0, expert);
        let record = self.tier.fetch(key, slot, 0).expect("a record");
        let entry = self.slots.hold(slot, key, keep, &self.uses);
        let held = Arc::new(Held::new(record, entry, false, Arc::default()));
        let shard = self.shards[0].as_ref().expect("the layer");
        lock(&shard.residents).insert(held);
    }

    fn lease(&self, expert: u32, tick: u64) -> ExpertLease {
        let shard = self.shards[0].as_ref().expect("the layer");
        let lease = lock(&shard.residents).lease(expert, tick);
        lease.expect("a resident")
    }

    fn is_resident(&self, expert: u32) -> bool {
        let shard = self.shards[0].as_ref().expect("the layer");
        lock(&shard.residents).contains(expert)
    }
}

fn slot(slab: u32, slot: u32) -> SlotId {
    SlotId { slab, slot }
}

#[test]
fn smallest_slots_that_fit_come_first_and_those_for_streaming_never() {
    const SMALL: usize = 64 << 10;
    let memory = ForeignMemory::heap(6 * 2 * SMALL).expect("memory");
    let sizes = [(2, 2 * SMALL), (2, SMALL), (1, 2 * SMALL)];
    let slab = |arena: ArenaBuilder, (slots, bytes)| arena.slab(slots, bytes);
    let builder = sizes.into_iter().fold(ArenaBuilder::new(), slab);
    let arena = Arc::new(builder.foreign(memory).build().expect("an arena"));
    let mut book = Book::new(arena, &[2]);
    let order = [slot(1, 0), slot(1, 1), slot(0, 0), slot(0, 1)];
    let entries = order.map(|slot| book.slots.entry(slot));
    assert_eq!(entries, [2, 3, 0, 1], "numbered over all slabs");
    for want in order {
        assert_eq!(book.take(1), Some(want));
    }
    assert_eq!(book.take(1), None);
    book.slots.give_back(slot(1, 1));
    assert_eq!(book.take(SMALL + 1), None, "too small");
    assert_eq!(book.take(SMALL), Some(slot(1, 1)));
}

#[test]
fn what_is_not_to_be_kept_goes_first_then_what_was_not_used_longest() {
    let mut book = Book::new(arena(&[4]), &[]);
    for (expert, keep) in [(0, true), (1, true), (2, false), (3, false)] {
        let slot = book.take(RECORD_BYTES).expect("a free slot");
        book.hold(expert, slot, keep);
    }
    drop(book.lease(0, 1));
    let leased = book.lease(2, 2);
    // Leased ones are passed over, whatever they are.
    for (given_up, left) in [(3, vec![0, 1, 2]), (1, vec![0, 2]), (0, vec![2])] {
        let slot = book.take(RECORD_BYTES).expect("a slot");
        assert!(!book.is_resident(given_up), "expert {given_up} goes");
        assert!(left.iter().all(|&expert| book.is_resident(expert)));
        assert_eq!(
            book.tier.arena().slot_state(slot),
            Some(expert_arena::SlotState::Free)
        );
    }
    assert_eq!(book.take(RECORD_BYTES), None);
    assert_eq!(book.slots.evictions, 3);
    book.disk.assert_right(std::slice::from_ref(&leased));
    drop(leased);
    assert!(book.take(RECORD_BYTES).is_some());
}

#[test]
fn slot_that_a_rail_may_write_to_is_out_until_it_may_not() {
    let mut book = Book::new(arena(&[1]), &[]);
    let slot = book.take(RECORD_BYTES).expect("a free slot");
    let arena = book.tier.arena().clone();
    let mut landing = arena.begin_landing(slot, RECORD_BYTES).expect("a landing");
    let range = landing.split(RECORD_BYTES).expect("all of it");
    landing.abandon();
    book.slots.give_back(slot);
    assert_eq!((book.take(RECORD_BYTES), book.slots.out()), (None, 1));
    drop(range);
    assert_eq!(book.take(RECORD_BYTES), Some(slot));
    assert_eq!(book.slots.out(), 0);
}

#[test]
fn record_behind_a_fence_goes_last_and_its_slot_comes_when_it_fires() {
    let mut book = Book::new(arena(&[2]), &[]);
    for expert in 0..2 {
        let slot = book.take(RECORD_BYTES).expect("a free slot");
        book.hold(expert, slot, true);
    }
    let fence = Switch::default();
    let lease = book.lease(0, 1);
    let fenced = lease.slot();
    lease.release_after(Box::new(fence.clone()));
    drop(book.lease(1, 2));
    let other = book.take(RECORD_BYTES).expect("the one without");
    assert!(other != fenced && book.is_resident(0));
    assert_eq!(book.take(RECORD_BYTES), None);
    assert!(!book.is_resident(0), "on its way out");
    assert_eq!(book.slots.out(), 1);
    fence.fire();
    assert_eq!(book.take(RECORD_BYTES), Some(fenced));
}
