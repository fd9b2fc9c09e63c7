//! What every backend has to do, one function per behaviour.

use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ArenaError, ExpertArena, ForeignMemory, SlotId};
use expert_store::Key;
use expert_tier::{
    Deadline, EngineConfig, ExpertTier, TierBuilder, TierError, TierKind, Verify,
    largest_image_bytes,
};

use super::model::{Model, Sizes};
use super::rig::{
    Backend, Rig, assert_all_right, assert_right, batch, largest, patient, slot, unsettled,
};
use super::{Random, SLACK, wait_until};

/// All records, fetched in batches, are what the source files hold.
pub fn every_record_equals_the_source_files(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(8);
    assert_all_right(&*tier, &rig.records, 8);
    let kind = match backend {
        Backend::Posix => TierKind::Posix,
        Backend::UmaInPlace | Backend::UmaPacked => TierKind::Uma,
        backend if backend.is_verbs() => TierKind::RdmaVerbs,
        _ => TierKind::Rdma,
    };
    assert_eq!(tier.kind(), kind);
    assert!(tier.healthy());
    assert_eq!(
        largest_image_bytes(&tier.info()),
        largest(&rig.records) as u64
    );
}

/// Records may be named twice in a batch; each lands where it was asked for.
pub fn record_named_twice_in_a_batch_lands_twice(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(6);
    let keys = rig.keys();
    let batch = batch(&[keys[1], keys[0], keys[1], keys[1], keys[0], keys[2]]);
    let fetched = tier.fetch_many(&batch, 0).expect("a batch");
    for (record, &(key, place)) in fetched.iter().zip(&batch) {
        let record = record.as_ref().expect("a record");
        assert_eq!((record.key(), record.lease().slot()), (key, place));
        assert_right(record, &rig.records);
    }
}

/// A batch that names a slot twice is refused as a whole and takes no slot.
pub fn slot_named_twice_in_a_batch_is_refused_and_nothing_is_taken(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(3);
    let keys = rig.keys();
    let twice = [(keys[0], slot(0)), (keys[1], slot(1)), (keys[2], slot(0))];
    let error = tier
        .fetch_many(&twice, 0)
        .expect_err("one slot, two records");
    assert!(is_slot_busy(&error), "{error}");
    assert_eq!(tier.arena().stats().free, 3);
    assert_all_right(&*tier, &rig.records, 3);
}

/// A slot can be used again once nobody leases its record, and not before.
pub fn slot_is_busy_while_leased_and_free_afterwards(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(1);
    let keys = rig.keys();
    let first = tier.fetch(keys[0], slot(0), 0).expect("a record");
    let residency = first.residency();
    let error = tier.fetch(keys[1], slot(0), 0).expect_err("a leased slot");
    assert!(is_slot_busy(&error), "{error}");
    assert_right(&first, &rig.records);
    drop(first);
    assert!(tier.arena().lease(&residency).is_ok(), "still resident");
    for &key in &keys {
        let record = tier.fetch(key, slot(0), 0).expect("a record");
        assert_right(&record, &rig.records);
    }
    let stale = tier.arena().lease(&residency);
    assert!(matches!(stale, Err(ArenaError::StaleResidency { .. })));
}

/// A slot that is too small is refused with both sizes, before anything is sent.
pub fn slot_that_is_too_small_is_refused_with_the_sizes(backend: Backend) {
    let rig = Rig::new(backend);
    let small = ArenaBuilder::new()
        .slab(2, 4096)
        .foreign(ForeignMemory::heap(8192).expect("memory"))
        .build()
        .expect("an arena");
    let tier = rig.connect(patient(), Arc::new(small)).expect("a tier");
    let key = rig.keys()[0];
    let error = tier.fetch(key, slot(1), 0).expect_err("a small slot");
    let bytes = rig.records[&key].len() as u64;
    let TierError::SlotTooSmall { need, have, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((need, have), (bytes, 4096));
}

/// A slot that does not exist is refused.
pub fn slot_that_does_not_exist_is_refused(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(1);
    for place in [slot(1), SlotId { slab: 9, slot: 0 }] {
        let error = tier
            .fetch(rig.keys()[0], place, 0)
            .expect_err("no such slot");
        let arena = matches!(error, TierError::Arena(ArenaError::NoSuchSlot { .. }));
        assert!(arena, "{error}");
    }
}

/// Layers and experts that do not exist are refused by name, and take no slot.
pub fn layer_or_expert_that_does_not_exist_is_refused(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(2);
    let good = rig.keys()[0];
    for bad in [
        Key::new(99, 0),
        Key::new(0, 99),
        Key::new(u32::MAX, u32::MAX),
        Key::new(0, u32::MAX),
    ] {
        let error = tier
            .fetch_many(&batch(&[good, bad]), 0)
            .expect_err("no such record");
        assert!(
            matches!(error, TierError::NoSuchRecord { key, .. } if key == bad),
            "{error}"
        );
        assert!(!error.is_retryable());
        assert_eq!(tier.arena().stats().free, 2);
    }
}

/// A zero expert is no record and no mistake either: it has an error of its own.
pub fn zero_expert_is_refused_as_what_it_is(backend: Backend) {
    let model = Model::bf16(Sizes::SMALL).with_zero_experts(4);
    let rig = Rig::of(backend, model);
    let tier = rig.tier(1);
    for (expert, is_zero) in [(8, true), (11, true), (12, false)] {
        let key = Key::new(0, expert);
        let error = tier.fetch(key, slot(0), 0).expect_err("no bytes");
        match error {
            TierError::IdentityExpert { key: named } => assert!(is_zero && named == key),
            TierError::NoSuchRecord { key: named, .. } => assert!(!is_zero && named == key),
            other => panic!("{other}"),
        }
    }
    assert_all_right(&*tier, &rig.records, 1);
}

/// A stream other than 0 is refused before anything is done.
pub fn stream_other_than_zero_is_refused(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(1);
    let key = rig.keys()[0];
    for stream in [1, u64::MAX] {
        let error = tier.fetch(key, slot(0), stream).expect_err("no ordering");
        assert!(
            matches!(error, TierError::UnsupportedStream { stream: s } if s == stream),
            "{error}"
        );
        let error = tier
            .fetch_many(&[(key, slot(0))], stream)
            .expect_err("the same");
        assert!(matches!(error, TierError::UnsupportedStream { .. }));
    }
    assert_eq!(tier.arena().stats().free, 1);
}

/// A request larger than window and in-flight budget is windowed, not refused.
pub fn batch_larger_than_window_and_budget_completes(backend: Backend) {
    let rig = Rig::new(backend);
    let builder = patient().engine(EngineConfig {
        window_bytes: 1,
        read_bytes: 1,
        inflight_max_bytes: 1,
        ..EngineConfig::default()
    });
    let slots = rig.records.len() as u32;
    let tier = rig.connect(builder, rig.arena(slots)).expect("a tier");
    assert_all_right(&*tier, &rig.records, slots);
}

/// Checksums are compared always, at the first fetch, or never, as asked; a record says which.
pub fn checksums_are_compared_as_often_as_asked(backend: Backend) {
    let rig = Rig::new(backend);
    // v1 carries none.
    let has_checksums = !backend.is_v1();
    for (verify, want) in [
        (Verify::Always, [true, true]),
        (Verify::First, [true, false]),
        (Verify::Off, [false, false]),
    ] {
        let builder = patient().verify(verify);
        let tier = rig.connect(builder, rig.arena(1)).expect("a tier");
        let mut unverified = 0;
        for want in want {
            for &key in &rig.keys() {
                let record = tier.fetch(key, slot(0), 0).expect("a record");
                assert_right(&record, &rig.records);
                assert_eq!(
                    record.is_verified(),
                    want && has_checksums,
                    "{verify:?} {key}"
                );
                unverified += u64::from(!record.is_verified());
            }
        }
        assert_eq!(tier.stats().unverified, unverified);
    }
}

/// A cancelled batch ends at once: each record came whole, or not at all, and every slot is free again soon.
pub fn cancelled_batch_ends_at_once_and_frees_its_slots(backend: Backend) {
    let rig = Rig::new(backend);
    let slots = rig.records.len() as u32;
    let tier = rig.tier(slots);
    for _ in 0..20 {
        let start = Instant::now();
        let pending = tier.submit(&batch(&rig.keys()), None).expect("a batch");
        pending.cancel();
        let (records, _) = pending.wait().expect("an end");
        assert!(start.elapsed() < SLACK);
        assert_eq!(records.len(), rig.records.len());
        for record in records {
            match record {
                Ok(record) => assert_right(&record, &rig.records),
                Err(TierError::Cancelled { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        wait_until("no READ is out", || unsettled(tier.arena()) == 0);
    }
    assert_all_right(&*tier, &rig.records, slots);
}

/// A batch without time ends at once with the deadline's error, and the next one works.
pub fn expired_batch_ends_with_the_deadlines_error(backend: Backend) {
    let rig = Rig::new(backend);
    let slots = rig.records.len() as u32;
    let tier = rig.tier(slots);
    // Knows the catalogue before time is short.
    assert_all_right(&*tier, &rig.records, slots);
    let start = Instant::now();
    let pending = tier
        .submit(&batch(&rig.keys()), Some(Duration::ZERO))
        .expect("a batch");
    let (records, _) = pending.wait().expect("an end");
    assert!(start.elapsed() < SLACK);
    for record in records {
        let error = record.expect_err("no time");
        assert!(matches!(error, TierError::Deadline { .. }), "{error}");
        assert!(error.is_retryable());
    }
    wait_until("no READ is out", || unsettled(tier.arena()) == 0);
    assert_all_right(&*tier, &rig.records, slots);
}

/// A batch that ran out of time changes nothing that can be read: what is leased stays, what made room is gone for good,
/// and no slot holds a record that was not there before.
pub fn timeout_changes_nothing_that_is_readable(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(3);
    let keys = rig.keys();
    let kept = tier.fetch(keys[0], slot(0), 0).expect("a record");
    let cached = tier
        .fetch(keys[1], slot(1), 0)
        .map(|record| record.residency())
        .expect("a record");
    assert!(tier.arena().lease(&cached).is_ok());
    let late = [(keys[2], slot(2)), (keys[3], slot(1))];
    let pending = tier.submit(&late, Some(Duration::ZERO)).expect("a batch");
    for record in pending.wait().expect("an end").0 {
        let error = record.expect_err("no time");
        assert!(matches!(error, TierError::Deadline { .. }), "{error}");
    }
    assert_right(&kept, &rig.records);
    assert_eq!(tier.arena().stats().leases, 1);
    wait_until("no READ is out", || unsettled(tier.arena()) == 0);
    // Late bytes, if there were any, made no record either.
    assert_right(&kept, &rig.records);
    assert!(tier.arena().lease(&kept.residency()).is_ok());
    let stale = tier.arena().lease(&cached);
    assert!(matches!(stale, Err(ArenaError::StaleResidency { .. })));
    assert_eq!(tier.arena().stats().free, 2);
    for record in tier.fetch_many(&late, 0).expect("a batch") {
        assert_right(&record.expect("a record"), &rig.records);
    }
}

/// A batch of nothing is done when it is asked for.
pub fn empty_batch_is_done_at_once(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(1);
    assert!(tier.fetch_many(&[], 0).expect("a batch").is_empty());
    let pending = tier.submit(&[], Some(Duration::ZERO)).expect("a batch");
    let (records, stats) = pending.wait().expect("an end");
    assert_eq!((records.len(), stats.bytes, stats.reads), (0, 0, 0));
    assert_eq!(tier.arena().stats().free, 1);
    assert_all_right(&*tier, &rig.records, 1);
}

/// Records that are smaller than a chunk, and records and leaves whose sizes are no multiple of anything.
pub fn records_of_odd_sizes_equal_the_source(backend: Backend) {
    // Leaves of 2 * 7 * 13 bytes; and of 2 * 401 * 331, which is more than a chunk and no multiple of 4.
    for (hidden, inter) in [(13, 7), (401, 331)] {
        let odd = Sizes {
            hidden,
            inter,
            ..Sizes::V1
        };
        // Scales of blocks of sixteen are what v1 has.
        let blocks = Sizes {
            hidden: 16 * hidden,
            inter: 16 * inter.min(37),
            ..Sizes::V1
        };
        let model = match backend.is_v1() {
            true => Model::nvfp4(blocks),
            false => Model::bf16(odd),
        };
        let rig = Rig::of(backend, model);
        let tier = rig.tier(8);
        assert_all_right(&*tier, &rig.records, 3);
        assert_all_right(&*tier, &rig.records, 8);
    }
}

/// A tier that is dropped with requests under way is gone within seconds, and its memory with it.
pub fn tier_dropped_with_requests_under_way_frees_its_memory(backend: Backend) {
    let rig = Rig::new(backend);
    let slots = rig.records.len() as u32;
    let arena = rig.arena(slots);
    let memory = Arc::downgrade(&arena);
    let tier = rig.connect(patient(), arena).expect("a tier");
    let start = Instant::now();
    drop(tier.submit(&batch(&rig.keys()), None).expect("a batch"));
    drop(tier);
    assert!(start.elapsed() < SLACK);
    wait_until("the arena is freed", || memory.strong_count() == 0);
}

/// Records in any order, again and again, in slots chosen at random.
pub fn records_in_random_order_and_random_slots_equal_the_source(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(8);
    let keys = rig.keys();
    let mut random = Random(0x5eed);
    for _ in 0..20 {
        let mut free: Vec<u32> = (0..8).collect();
        let batch: Vec<(Key, SlotId)> = (0..1 + random.below(8))
            .map(|_| {
                let place = free.swap_remove(random.below(free.len()));
                (keys[random.below(keys.len())], slot(place))
            })
            .collect();
        let fetched = tier.fetch_many(&batch, 0).expect("a batch");
        for (record, (key, _)) in fetched.into_iter().zip(batch) {
            let record = record.expect("a record");
            assert_eq!(record.key(), key);
            assert_right(&record, &rig.records);
        }
    }
}

/// Eight threads share one tier, each with slots of its own.
pub fn eight_threads_fetch_at_once(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(16);
    let keys = rig.keys();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (tier, keys, records) = (&*tier, &keys, &rig.records);
            scope.spawn(move || {
                let mut random = Random(u64::from(thread));
                for _ in 0..10 {
                    let two =
                        [0, 1].map(|i| (keys[random.below(keys.len())], slot(2 * thread + i)));
                    for record in tier.fetch_many(&two, 0).expect("a batch") {
                        assert_right(&record.expect("a record"), records);
                    }
                }
            });
        }
    });
    assert_eq!(tier.stats().records, 8 * 10 * 2);
}

/// Several connections, or reader threads, under one tier.
pub fn several_streams_carry_one_tier(backend: Backend) {
    let rig = Rig::new(backend);
    let slots = rig.records.len() as u32;
    for streams in [2, 7] {
        let builder = patient().streams(streams);
        let tier = rig.connect(builder, rig.arena(slots)).expect("a tier");
        assert_all_right(&*tier, &rig.records, slots);
    }
}

/// Memory of the arena's own, locked and pre-faulted as far as the machine lets it.
pub fn records_land_in_memory_that_the_arena_mapped(backend: Backend) {
    let rig = Rig::new(backend);
    let arena = ExpertArena::new(2, 4, largest(&rig.records)).expect("an arena");
    let tier = rig.connect(patient(), Arc::new(arena)).expect("a tier");
    let batch: Vec<(Key, SlotId)> = (0..8)
        .zip(rig.keys())
        .map(|(i, key)| {
            let (slab, slot) = (i / 4, i % 4);
            (key, SlotId { slab, slot })
        })
        .collect();
    for record in tier.fetch_many(&batch, 0).expect("a batch") {
        assert_right(&record.expect("a record"), &rig.records);
    }
}

/// Slots of several sizes: a record goes into any that it fits.
pub fn slots_of_several_sizes_take_what_fits(backend: Backend) {
    let rig = Rig::new(backend);
    let bytes = largest(&rig.records).next_multiple_of(4096);
    let total = 4096 + bytes + 3 * bytes;
    let arena = ArenaBuilder::new()
        .slab(1, 4096)
        .slab(1, bytes)
        .slab(1, 3 * bytes)
        .foreign(ForeignMemory::heap(total).expect("memory"))
        .build()
        .expect("an arena");
    let tier = rig.connect(patient(), Arc::new(arena)).expect("a tier");
    for &key in &rig.keys() {
        for (slab, fits) in [(0, false), (1, true), (2, true)] {
            match tier.fetch(key, SlotId { slab, slot: 0 }, 0) {
                Ok(record) => assert_right(&record, &rig.records),
                Err(TierError::SlotTooSmall { .. }) => assert!(!fits),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

/// The tier counts each byte once, and so does the peer: they came over the network, and only once.
pub fn bytes_counted_are_records_times_their_size_on_both_ends(backend: Backend) {
    let rig = Rig::new(backend);
    let tier = rig.tier(5);
    assert_all_right(&*tier, &rig.records, 5);
    assert_all_right(&*tier, &rig.records, 5);
    let bytes: usize = 2 * rig.records.values().map(Vec::len).sum::<usize>();
    let stats = tier.stats();
    assert_eq!(stats.records, 2 * rig.records.len() as u64);
    assert_eq!(stats.bytes, bytes as u64);
    assert_eq!((stats.failed, stats.verify_failures), (0, 0));
    assert_eq!((stats.fallbacks, stats.backpressure), (0, 0));
    let rails: u64 = stats.rails.iter().map(|r| r.bytes).sum();
    assert_eq!(rails, bytes as u64);
    assert!(stats.rails.iter().all(|r| r.errors == 0));
    if let Some(peer) = rig.peer() {
        // The peer counts an answer after its last byte has left.
        wait_until("the peer counted all", || {
            peer.stats().payload_bytes_sent == bytes as u64
        });
        assert_eq!(peer.stats().replies_broken_off, 0);
    }
}

/// What the threads of a rail work is told of it, so that a request can say that the processor limited it.
pub fn processor_time_of_a_rails_threads_is_counted(backend: Backend) {
    const STREAMS: u32 = 2;
    let rig = Rig::new(backend);
    let slots = rig.records.len() as u32;
    let start = Instant::now();
    let tier = rig
        .connect(patient().streams(STREAMS), rig.arena(slots))
        .expect("a tier");
    let cpu_us = || tier.stats().rails[0].cpu_us;
    wait_until("the threads worked", || {
        assert_all_right(&*tier, &rig.records, slots);
        cpu_us() > 0
    });
    let before = cpu_us();
    wait_until("they worked on", || {
        assert_all_right(&*tier, &rig.records, slots);
        cpu_us() > before
    });
    // No thread works for longer than it lives, but for the grain of the kernel's count.
    let most = STREAMS * start.elapsed() + Duration::from_millis(50);
    let cpu = Duration::from_micros(cpu_us());
    assert!(cpu <= most, "{cpu:?} of {most:?}");
}

/// A model that is not the expected one is refused at once; the expected one is not.
pub fn content_other_than_expected_is_refused(backend: Backend) {
    let rig = Rig::new(backend);
    // The peer may know a content id; what v1 carries has none.
    let id = match backend {
        backend if backend.is_v1() => None,
        _ => rig.store.content_id(),
    };
    let other = patient().expect_content_id(Some(0x1234));
    let error = rig
        .connect(other, rig.arena(1))
        .err()
        .expect("another model");
    assert!(matches!(error, TierError::OtherContent { .. }), "{error}");
    assert!(!error.is_retryable());
    let same = patient().expect_content_id(id);
    let tier = rig.connect(same, rig.arena(1)).expect("the same model");
    assert_all_right(&*tier, &rig.records, 1);
}

/// Deadlines grow with the bytes asked for, at the rate given.
pub fn deadline_in_proportion_to_bytes_is_enough_for_a_large_batch(backend: Backend) {
    let rig = Rig::new(backend);
    let slots = rig.records.len() as u32;
    let builder = TierBuilder::new().deadline(Deadline {
        base: Duration::from_millis(1),
        floor_bytes_per_s: 500_000,
    });
    let tier = rig.connect(builder, rig.arena(slots)).expect("a tier");
    // The catalogue has only the fixed part; it is known before.
    warm_up(&*tier, &rig);
    assert_all_right(&*tier, &rig.records, slots);
}

/// Fetches a record of each layer, repeating what a short deadline cuts off.
fn warm_up(tier: &dyn ExpertTier, rig: &Rig) {
    for key in rig.keys() {
        wait_until("the catalogue is known", || {
            let pending = tier.submit(&[(key, slot(0))], Some(SLACK));
            pending.is_ok_and(|p| p.wait().is_ok_and(|(r, _)| r.iter().all(Result::is_ok)))
        });
    }
}

fn is_slot_busy(error: &TierError) -> bool {
    matches!(error, TierError::Arena(ArenaError::SlotBusy { .. }))
}
