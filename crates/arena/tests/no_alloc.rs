//! Steady use allocates nothing. A file of its own, because it counts the allocations of the whole process.

mod common;

use common::{heap_arena, slot};
use expert_arena::Poison;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    let arena = heap_arena(4, 8192, Poison::Marks);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for round in 0..100 {
        let mut landing = arena.acquire(8000).unwrap();
        let mut first = landing.split(4000).unwrap();
        let second = first.split_off(1000);
        first.write(0, b"bytes");
        first.join(second).unwrap().retire();
        landing.split(4000).unwrap().retire();
        let lease = landing.commit().unwrap();
        let residency = lease.residency();
        lease.clone().release();
        lease.release();
        arena.lease(&residency).unwrap().release();
        arena.reap();
        assert!(arena.evict(&residency).unwrap());
        let chosen = arena.begin_landing(slot(round % 4), 1).unwrap();
        chosen.abandon();
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(allocations, 0, "steady use must not allocate");
    // The counter counts: this does allocate.
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 1);
    println!("landings, leases and releases allocate nothing: ok");
}
