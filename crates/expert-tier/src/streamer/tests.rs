//! The streamer over a small store on disk, where its own numbers and its tier can be arranged.

mod property;
mod slots;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ExpertArena, Fence, ForeignMemory, SlotId};
use expert_store::info::StoreInfo;
use expert_store::synth::{SynthSpec, synth};
use expert_store::{Layer, OpenOptions, Store};
use expert_wire::Key;
use tempfile::TempDir;

use super::{Class, ExpertLease, ExpertStreamer, StreamerBuilder};
use crate::stats::TierStats;
use crate::{
    EngineConfig, ExpertTier, Pending, PosixTier, Record, TierBuilder, TierError, TierKind,
};

/// Longest time that anything may take which normally takes milliseconds.
const SLACK: Duration = Duration::from_secs(20);

/// Bytes of each record of [`Disk`]: three leaves of 256.
const RECORD_BYTES: usize = 768;

/// A store and what it holds.
struct Disk {
    store: Arc<Store>,
    records: BTreeMap<Key, Vec<u8>>,
    _dir: TempDir,
}

impl Disk {
    fn new(layers: u32, experts: u32, seed: u64) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let checkpoint = dir.path().join("checkpoint");
        let spec = SynthSpec {
            family: "qwen3-moe".into(),
            layers: Some(layers),
            experts: Some(experts),
            hidden: Some(16),
            inter: Some(8),
            shards: 1,
            seed,
            ..SynthSpec::default()
        };
        synth(&spec, &checkpoint).expect("synth");
        let store = Arc::new(Store::open(&checkpoint, &OpenOptions::default()).expect("a store"));
        let keys = (0..layers).flat_map(|l| (0..experts).map(move |e| Key::new(l, e)));
        let image = |key: Key| {
            let mut bytes = vec![0; RECORD_BYTES];
            store.read_image(key, 0, &mut bytes).expect("a record");
            (key, bytes)
        };
        Self {
            records: keys.map(image).collect(),
            store,
            _dir: dir,
        }
    }

    fn tier(&self, arena: &Arc<ExpertArena>, engine: EngineConfig) -> PosixTier {
        let builder = TierBuilder::new().engine(engine);
        let tier = builder.open_posix(self.store.clone(), arena.clone());
        tier.expect("a tier")
    }

    /// With slabs of so many slots, the last of them for streaming.
    fn streamer(&self, slabs: &[u32], stream_slabs: u32) -> ExpertStreamer {
        let tier = self.tier(&arena(slabs), EngineConfig::default());
        let builder = StreamerBuilder::new().stream_slabs(stream_slabs);
        builder.start(tier).expect("a streamer")
    }

    fn assert_right(&self, leases: &[ExpertLease]) {
        for lease in leases {
            assert!(lease[..] == self.records[&lease.key()], "{}", lease.key());
        }
    }
}

fn arena(slabs: &[u32]) -> Arc<ExpertArena> {
    let slots: u32 = slabs.iter().sum();
    // Slots begin at pages, whose size nobody knows here.
    let memory = ForeignMemory::heap((64 << 10) * slots as usize).expect("memory");
    let slab = |arena: ArenaBuilder, &slots: &u32| arena.slab(slots, RECORD_BYTES);
    let builder = slabs.iter().fold(ArenaBuilder::new(), slab);
    Arc::new(builder.foreign(memory).build().expect("an arena"))
}

fn keys(layer: u32, experts: std::ops::Range<u32>) -> Vec<Key> {
    experts.map(|expert| Key::new(layer, expert)).collect()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + SLACK;
    while !is_so() {
        assert!(Instant::now() < limit, "not within {SLACK:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Fires when it is told.
#[derive(Clone, Default)]
struct Switch(Arc<AtomicBool>);

impl Switch {
    fn fire(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Fence for Switch {
    fn fired(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Two stores of one shape that land in one arena; one of them answers.
struct Either {
    tiers: [PosixTier; 2],
    is_second: Arc<AtomicBool>,
    /// Whether a record tells what it is of.
    is_pinned: bool,
}

impl Either {
    fn now(&self) -> &PosixTier {
        &self.tiers[usize::from(self.is_second.load(Ordering::Relaxed))]
    }
}

impl ExpertTier for Either {
    fn fetch(&self, key: Key, slot: SlotId, stream: u64) -> Result<Record, TierError> {
        self.now().fetch(key, slot, stream)
    }

    fn fetch_many(
        &self,
        batch: &[(Key, SlotId)],
        stream: u64,
    ) -> Result<Vec<Result<Record, TierError>>, TierError> {
        self.now().fetch_many(batch, stream)
    }

    fn submit_as(
        &self,
        batch: &[(Key, SlotId)],
        class: Class,
        time: Option<Duration>,
    ) -> Result<Pending, TierError> {
        self.now().submit_as(batch, class, time)
    }

    fn find(&self, key: Key, time: Duration) -> Result<(Arc<Layer>, usize), TierError> {
        self.now().find(key, time)
    }

    fn knows(&self, key: Key) -> bool {
        self.now().knows(key)
    }

    fn arena(&self) -> &Arc<ExpertArena> {
        self.tiers[0].arena()
    }

    fn info(&self) -> StoreInfo {
        let mut info = self.tiers[0].info();
        info.content_id.take_if(|_| !self.is_pinned);
        info
    }

    fn stats(&self) -> TierStats {
        self.now().stats()
    }

    fn kind(&self) -> TierKind {
        self.now().kind()
    }

    fn healthy(&self) -> bool {
        self.now().healthy()
    }
}

/// A streamer over two stores, and what chooses the second one.
fn either(stores: [&Disk; 2], slots: u32, is_pinned: bool) -> (ExpertStreamer, Arc<AtomicBool>) {
    let arena = arena(&[slots]);
    let tiers = stores.map(|disk| disk.tier(&arena, EngineConfig::default()));
    assert!(tiers[0].info().content_id.is_some(), "it can be pinned");
    let is_second = Arc::new(AtomicBool::new(false));
    let tier = Either {
        tiers,
        is_second: is_second.clone(),
        is_pinned,
    };
    let streamer = StreamerBuilder::new().start(tier).expect("a streamer");
    (streamer, is_second)
}

#[test]
fn store_that_grew_is_followed_as_far_as_there_are_places() {
    let (disk, grown) = (Disk::new(1, 8, 1), Disk::new(2, 12, 2));
    let (streamer, is_second) = either([&disk, &grown], 4, false);
    disk.assert_right(&streamer.lease_many(0, &[0, 1], SLACK).unwrap());
    is_second.store(true, Ordering::Relaxed);
    for (layer, expert) in [(0, 8), (0, 11), (1, 0), (0, 9), (1, 3), (0, 10)] {
        let refused = streamer.lease_many(layer, &[expert], SLACK).unwrap_err();
        let is_said = matches!(refused, TierError::WrongRecord { .. });
        assert!(is_said, "layer {layer} expert {expert}: {refused}");
    }
    is_second.store(false, Ordering::Relaxed);
    let leases = streamer.lease_many(0, &[0, 1, 2, 3], SLACK).unwrap();
    disk.assert_right(&leases);
}

#[test]
fn record_of_another_model_costs_no_slot() {
    let (disk, other) = (Disk::new(1, 16, 1), Disk::new(1, 16, 2));
    let (streamer, is_second) = either([&disk, &other], 4, true);
    disk.assert_right(&streamer.lease_many(0, &[0], SLACK).unwrap());
    is_second.store(true, Ordering::Relaxed);
    for expert in 1..10 {
        let refused = streamer.lease_many(0, &[expert], SLACK).unwrap_err();
        assert!(
            matches!(refused, TierError::ContentChanged { .. }),
            "{refused}"
        );
    }
    is_second.store(false, Ordering::Relaxed);
    let leases = streamer.lease_many(0, &[10, 11, 12, 13], SLACK).unwrap();
    disk.assert_right(&leases);
}

#[test]
fn more_than_the_tier_admits_waits_for_its_turn() {
    let disk = Disk::new(1, 64, 1);
    let engine = EngineConfig {
        inflight_max_bytes: 3 * RECORD_BYTES as u64,
        ..EngineConfig::default()
    };
    let tier = disk.tier(&arena(&[64]), engine);
    let streamer = StreamerBuilder::new().start(tier).expect("a streamer");
    assert_eq!(streamer.prefetch(&keys(0, 0..8)), 8);
    let ticket = streamer
        .submit(&keys(0, 4..64), Class::Demand, SLACK)
        .unwrap();
    let leases = ticket.all(Instant::now() + SLACK).unwrap();
    assert_eq!(leases.len(), 60);
    disk.assert_right(&leases);
    wait_until("the guesses arrived", || streamer.stats().under_way == 0);
    let stats = streamer.stats();
    assert_eq!((stats.fetched, stats.failed), (64, 0));
    assert!(
        streamer.tier().stats().backpressure > 0,
        "the limit was met: else this shows nothing"
    );
}

#[test]
fn layers_of_one_slab_come_in_the_order_in_which_they_were_asked_for() {
    let disk = Disk::new(3, 4, 1);
    let streamer = disk.streamer(&[1, 4], 1);
    let experts = [0, 1, 2, 3];
    let limit = Instant::now() + SLACK;
    let ticket = |layer| streamer.stream_layer(layer, &experts, SLACK).unwrap();
    let first = ticket(0).all(limit).unwrap();
    let (second, third) = (ticket(1), ticket(2));
    drop(first);
    // Nobody takes the third's leases meanwhile: were it first, the second would wait for ever.
    disk.assert_right(&second.all(limit).unwrap());
    disk.assert_right(&third.all(limit).unwrap());
}

#[test]
fn layer_streams_again_in_another_order_beside_what_is_left_of_it() {
    let disk = Disk::new(1, 8, 1);
    let streamer = disk.streamer(&[1, 4], 1);
    let limit = Instant::now() + SLACK;
    for experts in [[1, 3, 5, 7], [3, 5, 2, 6], [6, 2, 1, 0], [0, 7, 6, 7]] {
        let ticket = streamer.stream_layer(0, &experts, SLACK).unwrap();
        let leases = ticket.all(limit).unwrap();
        disk.assert_right(&leases);
        let got: Vec<u32> = leases.iter().map(|l| l.key().expert).collect();
        assert_eq!(got, experts);
    }
    // What is under way for one call is in no other's way either.
    let tickets = [[1, 2, 3, 4], [4, 5, 1, 2]].map(|e| streamer.stream_layer(0, &e, SLACK));
    for ticket in tickets {
        disk.assert_right(&ticket.unwrap().all(limit).unwrap());
    }
}

#[test]
fn fences_of_records_that_are_not_kept_are_asked_when_a_slot_is_needed() {
    let disk = Disk::new(1, 16, 1);
    let streamer = disk.streamer(&[4], 0);
    for round in 0..4 {
        let batch = keys(0, round * 4..round * 4 + 4);
        let ticket = streamer.submit(&batch, Class::Stream, SLACK).unwrap();
        let leases = ticket.all(Instant::now() + SLACK).unwrap();
        disk.assert_right(&leases);
        let fence = Switch::default();
        for lease in leases {
            lease.release_after(Box::new(fence.clone()));
        }
        fence.fire();
    }
}

#[test]
fn fired_fences_are_let_go_while_nothing_needs_a_slot() {
    let disk = Disk::new(1, 4, 1);
    let streamer = disk.streamer(&[4], 0);
    let fence = Switch::default();
    for lease in streamer.lease_many(0, &[0, 1], SLACK).unwrap() {
        lease.release_after(Box::new(fence.clone()));
    }
    assert_eq!(Arc::strong_count(&fence.0), 3);
    fence.fire();
    wait_until("the fences were dropped", || {
        Arc::strong_count(&fence.0) == 1
    });
}

#[test]
fn demand_for_all_slots_is_not_starved_by_small_ones_that_come_later() {
    let disk = Disk::new(2, 64, 1);
    let streamer = disk.streamer(&[8], 0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3u32 {
            let (streamer, disk, is_over) = (&streamer, &disk, &is_over);
            scope.spawn(move || {
                let mut expert = thread;
                while !is_over.load(Ordering::Relaxed) {
                    expert = (expert + 3) % 64;
                    let lease = streamer.lease_many(0, &[expert], SLACK).unwrap();
                    disk.assert_right(&lease);
                }
            });
        }
        let result: Vec<_> = (0..20)
            .map(|i| {
                let from = i * 8 % 64;
                let experts: Vec<u32> = (from..from + 8).collect();
                streamer.lease_many(1, &experts, SLACK).map(|_| ())
            })
            .collect();
        is_over.store(true, Ordering::Relaxed);
        for result in result {
            result.unwrap();
        }
    });
}
