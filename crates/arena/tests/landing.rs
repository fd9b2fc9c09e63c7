//! Landings and ranges: what may be committed, and when a slot comes back.

mod common;

use common::{heap_arena, land, slot};
use expert_arena::{
    ArenaError, CommitError, Generation, POISON_BYTE, POISON_CHUNK_BYTES, POISON_MARK_BYTES,
    Poison, SlotState,
};

#[test]
fn image_is_readable_after_all_ranges_are_retired_in_any_order() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 10).unwrap();
    let mut first = landing.split(4).unwrap();
    let mut second = landing.split(6).unwrap();
    assert_eq!((second.offset(), second.len()), (4, 6));
    second.write(0, b"456789");
    second.retire();
    first.write(0, b"0123");
    first.retire();
    let lease = landing.commit().unwrap();
    assert_eq!(&lease[..], b"0123456789");
    assert_eq!(lease.generation(), Generation(1));
}

#[test]
fn commit_is_refused_while_a_range_is_outstanding_and_succeeds_later() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    let range = landing.split(8).unwrap();
    assert_eq!(landing.outstanding(), 1);
    let (landing, error) = landing.commit().unwrap_err();
    assert_eq!(
        error,
        CommitError::Outstanding {
            slot: slot(0),
            ranges: 1
        }
    );
    range.retire();
    assert_eq!(landing.outstanding(), 0);
    assert!(landing.commit().is_ok());
}

#[test]
fn commit_is_refused_while_a_part_was_never_split_off() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    landing.split(5).unwrap().retire();
    let (mut landing, error) = landing.commit().unwrap_err();
    let expected = CommitError::Partial {
        slot: slot(0),
        remaining_bytes: 3,
        image_bytes: 8,
    };
    assert_eq!(error, expected);
    landing.split(3).unwrap().retire();
    assert!(landing.commit().is_ok());
}

#[test]
fn commit_is_refused_for_ever_after_a_range_was_dropped() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    drop(landing.split(4));
    landing.split(4).unwrap().retire();
    let (landing, error) = landing.commit().unwrap_err();
    assert_eq!(error, CommitError::Tainted { slot: slot(0) });
    landing.abandon();
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Free));
    // The taint is the landing's, not the slot's.
    land(arena.begin_landing(slot(0), 1).unwrap(), b"x");
}

#[test]
fn split_refuses_nothing_and_too_much_and_changes_nothing() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    assert!(landing.split(0).is_none());
    assert!(landing.split(9).is_none());
    assert!(landing.split(usize::MAX).is_none());
    assert_eq!((landing.remaining(), landing.outstanding()), (8, 0));
}

#[test]
fn abandoned_slot_is_quarantined_until_the_last_range_is_gone() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    let first = landing.split(4).unwrap();
    let second = landing.split(4).unwrap();
    landing.abandon();
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Quarantined));
    let error = arena.begin_landing(slot(0), 1).unwrap_err();
    assert!(error.is_backpressure(), "{error}");
    assert!(matches!(
        arena.acquire(1),
        Err(ArenaError::NoFreeSlot { slots: 1, .. })
    ));
    first.retire();
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Quarantined));
    drop(second);
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Free));
    assert_eq!(arena.acquire(1).unwrap().generation(), Generation(2));
}

#[test]
fn range_cut_in_two_counts_as_two_and_joined_as_one() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    let mut left = landing.split(8).unwrap();
    let mut right = left.split_off(3);
    assert_eq!((left.offset(), left.len()), (0, 3));
    assert_eq!((right.offset(), right.len()), (3, 5));
    assert_eq!(landing.outstanding(), 2);
    left.write(0, b"abc");
    right.write(0, b"defgh");
    // The wrong order gives both back.
    let (right, left) = right.join(left).unwrap_err();
    let whole = left.join(right).unwrap();
    assert_eq!(
        (whole.offset(), whole.len(), landing.outstanding()),
        (0, 8, 1)
    );
    whole.retire();
    assert_eq!(&landing.commit().unwrap()[..], b"abcdefgh");
}

#[test]
fn ranges_of_different_slots_and_arenas_do_not_join() {
    let arena = heap_arena(2, 4096, Poison::Full);
    let other = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    let first = landing.split(4).unwrap();
    let mut second = arena.begin_landing(slot(1), 8).unwrap();
    let head = second.split(4).unwrap();
    let tail = second.split(4).unwrap();
    let (first, tail) = first.join(tail).unwrap_err();
    let mut foreign = other.begin_landing(slot(0), 8).unwrap();
    let foreign_head = foreign.split(4).unwrap();
    let foreign_tail = foreign.split(4).unwrap();
    let (first, foreign_tail) = first.join(foreign_tail).unwrap_err();
    assert_eq!(landing.outstanding(), 1);
    drop((first, head, tail, foreign_head, foreign_tail));
}

#[test]
#[should_panic(expected = "cannot be cut at 9")]
fn cutting_behind_the_end_panics() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    let _ = landing.split(8).unwrap().split_off(9);
}

#[test]
#[should_panic(expected = "do not lie inside a range of 4 bytes")]
fn writing_behind_the_end_of_a_range_panics_although_the_image_goes_on() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    landing.split(4).unwrap().write(1, b"1234");
}

#[test]
#[should_panic(expected = "do not lie inside")]
fn offset_that_overflows_panics() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    landing.split(8).unwrap().xxh3_64(usize::MAX, 2);
}

#[test]
fn hash_and_copy_see_what_was_written_relative_to_the_range() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 16).unwrap();
    let _first = landing.split(4).unwrap();
    let mut range = landing.split(12).unwrap();
    range.write(0, b"--header--!!");
    range.fill_zero(10, 2);
    let mut out = [0; 6];
    range.copy_out(2, &mut out);
    assert_eq!(&out, b"header");
    assert_eq!(range.xxh3_64(2, 8), xxhash_rust::xxh3::xxh3_64(b"header--"));
    assert_eq!(range.xxh3_64(10, 2), xxhash_rust::xxh3::xxh3_64(&[0, 0]));
}

#[test]
fn padding_is_zero_once_committed() {
    for poison in [Poison::Full, Poison::Marks] {
        let arena = heap_arena(1, 8192, poison);
        land(arena.begin_landing(slot(0), 8192).unwrap(), &[7; 8192]).release();
        let lease = land(arena.begin_landing(slot(0), 5).unwrap(), b"image");
        let (image, padding) = lease.padded().split_at(5);
        assert_eq!(image, b"image");
        assert_eq!(padding.len(), 8192 - 5);
        assert!(padding.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn full_poison_covers_every_byte_of_an_earlier_image() {
    let arena = heap_arena(1, 4096, Poison::Full);
    land(arena.begin_landing(slot(0), 4096).unwrap(), &[7; 4096]).release();
    let mut landing = arena.begin_landing(slot(0), 4096).unwrap();
    let mut out = [0; 4096];
    landing.split(4096).unwrap().copy_out(0, &mut out);
    assert!(out.iter().all(|&byte| byte == POISON_BYTE));
}

#[test]
fn marks_poison_the_start_of_each_chunk_and_the_end_and_nothing_else() {
    let image_bytes = 2 * POISON_CHUNK_BYTES + 1000;
    let arena = heap_arena(1, image_bytes.next_multiple_of(4096), Poison::Marks);
    let old = vec![7; image_bytes];
    land(arena.begin_landing(slot(0), image_bytes).unwrap(), &old).release();
    let mut landing = arena.begin_landing(slot(0), image_bytes).unwrap();
    let mut out = vec![0; image_bytes];
    landing.split(image_bytes).unwrap().copy_out(0, &mut out);
    let mut expected = old;
    for start in [
        0,
        POISON_CHUNK_BYTES,
        2 * POISON_CHUNK_BYTES,
        image_bytes - POISON_MARK_BYTES,
    ] {
        expected[start..start + POISON_MARK_BYTES].fill(POISON_BYTE);
    }
    assert!(out == expected);
}

#[test]
fn marks_stay_inside_a_tiny_image() {
    let arena = heap_arena(2, 4096, Poison::Marks);
    let neighbour = land(arena.begin_landing(slot(1), 4096).unwrap(), &[7; 4096]);
    let mut landing = arena.begin_landing(slot(0), 10).unwrap();
    let mut out = [0; 10];
    landing.split(10).unwrap().copy_out(0, &mut out);
    assert_eq!(out, [POISON_BYTE; 10]);
    assert!(neighbour.iter().all(|&byte| byte == 7));
}

#[test]
fn leaked_range_keeps_its_slot_in_quarantine_for_ever() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let mut landing = arena.begin_landing(slot(0), 8).unwrap();
    landing.split(8).unwrap().leak();
    let (landing, error) = landing.commit().unwrap_err();
    assert_eq!(
        error,
        CommitError::Leaked {
            slot: slot(0),
            ranges: 1
        }
    );
    landing.abandon();
    assert_eq!(arena.slot_state(slot(0)), Some(SlotState::Quarantined));
    let stats = arena.stats();
    assert_eq!((stats.leaked, stats.quarantined, stats.free), (1, 1, 0));
    assert!(arena.acquire(1).is_err());
}

#[test]
fn landing_that_cannot_be_is_refused_with_the_reason() {
    let arena = heap_arena(1, 4096, Poison::Full);
    let error = arena.begin_landing(slot(0), 4097).unwrap_err();
    assert!(matches!(
        error,
        ArenaError::TooLarge {
            image_bytes: 4097,
            limit_bytes: 4096
        }
    ));
    assert!(!error.is_retryable());
    assert!(matches!(
        arena.acquire(4097),
        Err(ArenaError::TooLarge { .. })
    ));
    assert!(matches!(arena.acquire(0), Err(ArenaError::EmptyImage)));
    assert!(matches!(
        arena.begin_landing(slot(0), 0),
        Err(ArenaError::EmptyImage)
    ));
    let error = arena.begin_landing(slot(1), 1).unwrap_err();
    assert!(matches!(
        error,
        ArenaError::NoSuchSlot {
            slabs: 1,
            slots: 1,
            ..
        }
    ));
    assert_eq!(arena.stats().free, 1);
}

#[test]
fn acquire_takes_the_smallest_slab_that_fits_and_then_the_next() {
    use expert_arena::{ArenaBuilder, ForeignMemory, SlotId};
    let memory = ForeignMemory::heap(8192 + 4096 + 16384).unwrap();
    let builder = ArenaBuilder::new()
        .slab(1, 8192)
        .slab(1, 4096)
        .slab(1, 16384);
    let arena = std::sync::Arc::new(builder.foreign(memory).build().unwrap());
    let taken: Vec<_> = (0..3).map(|_| arena.acquire(100).unwrap()).collect();
    let slabs: Vec<u32> = taken.iter().map(|landing| landing.slot().slab).collect();
    assert_eq!(slabs, [1, 0, 2]);
    drop(taken);
    assert_eq!(
        arena.acquire(8193).unwrap().slot(),
        SlotId { slab: 2, slot: 0 }
    );
}

#[test]
fn ranges_land_from_many_threads_and_the_image_is_whole() {
    const PIECE: usize = 512;
    let pieces = if cfg!(miri) { 4 } else { 64 };
    let arena = heap_arena(1, pieces * PIECE, Poison::Full);
    let rounds = if cfg!(miri) { 2 } else { 50 };
    for round in 0..rounds {
        let mut landing = arena.begin_landing(slot(0), pieces * PIECE).unwrap();
        let ranges: Vec<_> = (0..pieces).map(|_| landing.split(PIECE).unwrap()).collect();
        std::thread::scope(|scope| {
            for mut range in ranges {
                scope.spawn(move || {
                    let value = (range.offset() / PIECE + round) as u8;
                    range.write(0, &[value; PIECE]);
                    range.retire();
                });
            }
        });
        let lease = landing.commit().unwrap();
        for (piece, bytes) in lease.chunks(PIECE).enumerate() {
            assert!(bytes.iter().all(|&byte| byte == (piece + round) as u8));
        }
    }
}
