//! Leases, residencies and fences: who may read, and when a slot may be reused.

mod common;

use common::{Switch, heap_arena, land, slot};
use expert_arena::{
    ArenaBuilder, ArenaError, ExpertArena, Fence, ForeignMemory, Lease, POISON_BYTE, Poison,
    SlotState,
};
use std::sync::Arc;
use std::time::Duration;

fn leased(arena: &Arc<ExpertArena>, index: u32) -> Lease {
    land(arena.begin_landing(slot(index), 5).unwrap(), b"image")
}

#[test]
fn last_lease_leaves_the_image_cached_and_it_can_be_leased_again() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    let residency = lease.residency();
    let second = lease.clone();
    lease.release();
    drop(second);
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Committed));
    assert_eq!(arena.stats().idle, 1);
    let again = arena.lease(&residency).unwrap();
    assert_eq!(&again[..], b"image");
    assert_eq!(again.residency(), residency);
}

#[test]
fn slot_with_a_lease_cannot_be_landed_in() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    let second = lease.clone();
    drop(lease);
    let error = arena.begin_landing(slot(0), 5).unwrap_err();
    let busy = ArenaError::SlotBusy {
        slot: slot(0),
        state: SlotState::Committed,
        readers: 1,
    };
    assert_eq!(error.to_string(), busy.to_string());
    assert_eq!(&second[..], b"image");
}

#[test]
fn residency_is_stale_once_the_slot_is_reused() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let old = leased(&arena, 0).residency();
    let landing = arena.begin_landing(slot(0), 5).unwrap();
    for during in [arena.lease(&old).map(drop), arena.evict(&old).map(drop)] {
        assert!(matches!(during, Err(ArenaError::StaleResidency { .. })));
    }
    let new = land(landing, b"other").residency();
    let error = arena.lease(&old).unwrap_err();
    let text = error.to_string();
    for part in [
        "slab 0 slot 0",
        "generation 1",
        "generation 2",
        "Committed",
        "fetch the record again",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
    assert!(arena.evict(&old).is_err());
    assert_eq!(&arena.lease(&new).unwrap()[..], b"other");
}

#[test]
fn residency_of_another_arena_is_refused_even_if_slot_and_generation_agree() {
    let here = heap_arena(1, 4096, Poison::Full);
    let there = heap_arena(1, 4096, Poison::Full);
    let _image = leased(&here, 0);
    let foreign = leased(&there, 0).residency();
    assert!(matches!(
        here.lease(&foreign),
        Err(ArenaError::WrongArena { .. })
    ));
    assert!(matches!(
        here.evict(&foreign),
        Err(ArenaError::WrongArena { .. })
    ));
}

#[test]
fn evicting_an_unread_image_frees_its_slot_at_once() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let residency = leased(&arena, 0).residency();
    assert!(arena.evict(&residency).unwrap());
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Free));
    assert!(matches!(
        arena.lease(&residency),
        Err(ArenaError::StaleResidency { .. })
    ));
    assert!(arena.evict(&residency).is_err());
    assert!(arena.acquire(1).is_ok());
}

/// The bytes in the middle of a slot that was landed in before, where the next landing leaves no poison of its own.
fn left_behind(arena: &Arc<ExpertArena>) -> Vec<u8> {
    let mut landing = arena.begin_landing(slot(0), 4096).unwrap();
    let range = landing.split(4096).unwrap();
    let mut bytes = vec![0; 2048];
    range.copy_out(1024, &mut bytes);
    bytes
}

fn arena_that_poisons(poison_freed: bool) -> Arc<ExpertArena> {
    let builder = ArenaBuilder::new()
        .slab(1, 4096)
        .foreign(ForeignMemory::heap(4096).unwrap())
        .poison(Poison::Marks)
        .poison_freed(poison_freed);
    Arc::new(builder.build().unwrap())
}

#[test]
fn slot_is_full_of_nan_once_it_is_free_where_that_was_asked_for() {
    for (poison_freed, left) in [(true, POISON_BYTE), (false, 7)] {
        type End = fn(&Arc<ExpertArena>, Lease);
        let ends: [(&str, End); 4] = [
            ("evicted", |arena, lease| {
                let residency = lease.residency();
                drop(lease);
                assert!(arena.evict(&residency).unwrap());
            }),
            ("evicted while leased", |arena, lease| {
                assert!(!arena.evict(&lease.residency()).unwrap());
                assert!(lease.iter().all(|&byte| byte == 7));
                drop(lease);
            }),
            ("released behind a fence", |arena, lease| {
                let fence = Switch::default();
                lease.release_after(Box::new(fence.clone()));
                arena.reap();
                fence.fire();
                assert_eq!(arena.reap().freed, 1);
            }),
            ("abandoned by a landing", |arena, lease| {
                drop(lease);
                let mut landing = arena.begin_landing(slot(0), 4096).unwrap();
                let mut range = landing.split(4096).unwrap();
                drop(landing);
                // Late, into quarantine.
                range.write(0, &[7; 4096]);
                drop(range);
            }),
        ];
        for (what, end) in ends {
            let arena = arena_that_poisons(poison_freed);
            let lease = land(arena.begin_landing(slot(0), 4096).unwrap(), &[7; 4096]);
            end(&arena, lease);
            assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Free), "{what}");
            let bytes = left_behind(&arena);
            assert!(bytes.iter().all(|&byte| byte == left), "{what}: {bytes:?}");
        }
    }
}

#[test]
fn cached_image_survives_its_last_lease_where_freed_slots_are_poisoned() {
    let arena = arena_that_poisons(true);
    let lease = leased(&arena, 0);
    let residency = lease.residency();
    drop(lease);
    assert_eq!(&arena.lease(&residency).unwrap()[..], b"image");
}

#[test]
fn evicting_a_leased_image_drains_until_the_last_lease_goes() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    let residency = lease.residency();
    assert!(!arena.evict(&residency).unwrap());
    assert!(!arena.evict(&residency).unwrap());
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Draining));
    assert!(arena.lease(&residency).is_err());
    assert!(arena.begin_landing(slot(0), 1).is_err());
    let second = lease.clone();
    drop(lease);
    assert_eq!(&second[..], b"image");
    drop(second);
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Free));
}

#[test]
fn release_after_drains_until_the_fence_has_fired() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    let residency = lease.residency();
    let fence = Switch::default();
    lease.release_after(Box::new(fence.clone()));
    for _ in 0..3 {
        let report = arena.reap();
        assert_eq!((report.fired, report.freed, report.pending), (0, 0, 1));
        assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Draining));
        assert!(arena.begin_landing(slot(0), 1).is_err());
        assert!(arena.lease(&residency).is_err());
    }
    fence.fire();
    let report = arena.reap();
    assert_eq!((report.fired, report.freed, report.pending), (1, 1, 0));
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Free));
    assert_eq!(arena.reap().fired, 0);
}

#[test]
fn release_after_waits_for_other_leases_and_fences_too() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    let (second, third) = (lease.clone(), lease.clone());
    let (early, late) = (Switch::default(), Switch::default());
    lease.release_after(Box::new(early.clone()));
    second.release_after(Box::new(late.clone()));
    early.fire();
    assert_eq!(arena.reap().freed, 0);
    assert_eq!(&third[..], b"image");
    drop(third);
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Draining));
    assert_eq!(arena.stats().pending_fences, 1);
    late.fire();
    assert_eq!(arena.reap().freed, 1);
}

#[test]
fn retain_until_keeps_the_image_cached_but_not_reusable() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    let residency = lease.residency();
    let fence = Switch::default();
    lease.retain_until(Box::new(fence.clone()));
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Committed));
    assert!(matches!(
        arena.begin_landing(slot(0), 1),
        Err(ArenaError::SlotBusy { readers: 1, .. })
    ));
    assert_eq!(&arena.lease(&residency).unwrap()[..], b"image");
    assert_eq!(arena.stats().idle, 0);
    fence.fire();
    assert_eq!(arena.reap().fired, 1);
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Committed));
    assert!(arena.begin_landing(slot(0), 1).is_ok());
}

#[test]
fn evicting_a_retained_image_drains_until_its_fence_has_fired() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    let residency = lease.residency();
    let fence = Switch::default();
    lease.retain_until(Box::new(fence.clone()));
    assert!(!arena.evict(&residency).unwrap());
    fence.fire();
    assert_eq!(arena.reap().freed, 1);
}

#[test]
fn one_reap_is_bounded_and_later_ones_reach_every_slot() {
    const SLOTS: u32 = 100;
    let arena = heap_arena(SLOTS, 4096, Poison::Marks);
    let fence = Switch::default();
    for index in 0..SLOTS {
        leased(&arena, index).release_after(Box::new(fence.clone()));
    }
    assert_eq!(arena.reap().pending, 64);
    fence.fire();
    let first = arena.reap();
    assert_eq!((first.fired, first.freed), (64, 64));
    assert_eq!(arena.reap().freed, 36);
    assert_eq!(arena.stats().free, u64::from(SLOTS));
}

#[test]
fn fence_that_never_fires_is_named_and_blocks_only_its_slot() {
    let arena = heap_arena(2, 4096, Poison::Full);
    leased(&arena, 1).release_after(Box::new(Switch::default()));
    arena.reap();
    let waiting = arena.waiting_slots(Duration::ZERO);
    assert_eq!(waiting.len(), 1);
    assert_eq!(waiting[0].0, slot(1));
    assert!(arena.waiting_slots(Duration::from_secs(3600)).is_empty());
    assert_eq!(arena.acquire(1).unwrap().slot(), slot(0));
}

struct Bomb;

impl Fence for Bomb {
    fn fired(&self) -> bool {
        panic!("a fence that panics")
    }
}

#[test]
fn fence_that_panics_keeps_its_slot_from_reuse_and_drop_survives_it() {
    let arena = heap_arena(1, 4096, Poison::Full);
    leased(&arena, 0).release_after(Box::new(Bomb));
    let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| arena.reap()));
    assert!(polled.is_err());
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Draining));
    assert_eq!(arena.reap().fired, 0);
    assert!(arena.begin_landing(slot(0), 1).is_err());

    let unpolled = heap_arena(1, 4096, Poison::Full);
    leased(&unpolled, 0).release_after(Box::new(Bomb));
    drop(unpolled);
}

/// A fence that looks at the arena while it is polled.
struct Nosy(Arc<ExpertArena>);

impl Fence for Nosy {
    fn fired(&self) -> bool {
        self.0.stats().draining == 1
    }
}

#[test]
fn fence_may_use_the_arena_while_it_is_polled() {
    let arena = heap_arena(1, 4096, Poison::Full);
    leased(&arena, 0).release_after(Box::new(Nosy(Arc::clone(&arena))));
    assert_eq!(arena.reap().freed, 1);
}

#[test]
fn lease_outlives_the_arena_handle() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let lease = leased(&arena, 0);
    drop(arena);
    let reader = std::thread::spawn(move || lease.to_vec());
    assert_eq!(reader.join().unwrap(), b"image");
}

#[test]
fn readers_and_a_writer_on_two_threads_never_mix_generations() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let rounds: u64 = if cfg!(miri) { 10 } else { 5000 };
    let (send, receive) = std::sync::mpsc::channel();
    let writer = Arc::clone(&arena);
    let writing = std::thread::spawn(move || {
        for _ in 0..rounds {
            let landing = loop {
                match writer.begin_landing(slot(0), 64) {
                    Ok(landing) => break landing,
                    Err(error) => assert!(error.is_retryable(), "{error}"),
                }
                std::thread::yield_now();
            };
            let value = landing.generation().0 as u8;
            let lease = land(landing, &[value; 64]);
            send.send(lease.residency()).unwrap();
        }
    });
    let mut read = 0;
    for residency in receive {
        match arena.lease(&residency) {
            Ok(lease) => {
                let value = residency.generation().0 as u8;
                assert!(lease.iter().all(|&byte| byte == value));
                read += 1;
            }
            Err(error) => assert!(
                matches!(error, ArenaError::StaleResidency { .. }),
                "{error}"
            ),
        }
    }
    writing.join().unwrap();
    // The last one is never overwritten.
    assert!(read >= 1);
    assert_eq!(arena.stats().leases, 0);
}
