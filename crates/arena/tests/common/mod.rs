//! What the test files share: an arena on the heap, and a fence that is fired by hand.

#![allow(dead_code, reason = "each test file uses a part")]

use expert_arena::{
    ArenaBuilder, ExpertArena, Fence, ForeignMemory, Landing, Lease, Poison, SlotId,
};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const fn slot(slot: u32) -> SlotId {
    SlotId { slab: 0, slot }
}

/// One slab of `slots` slots of `slot_bytes` bytes, on the heap.
pub(crate) fn heap_arena(slots: u32, slot_bytes: usize, poison: Poison) -> Arc<ExpertArena> {
    let memory = ForeignMemory::heap(slots as usize * slot_bytes).unwrap();
    let builder = ArenaBuilder::new().slab(slots, slot_bytes).foreign(memory);
    Arc::new(builder.poison(poison).build().unwrap())
}

/// Writes `bytes` as the rest of the image and commits it.
pub(crate) fn land(mut landing: Landing, bytes: &[u8]) -> Lease {
    let mut range = landing.split(bytes.len()).unwrap();
    range.write(0, bytes);
    range.retire();
    landing.commit().unwrap()
}

/// Two pages that live as long as the process, as an engine's pool would.
pub(crate) fn lasting_pages() -> NonNull<u8> {
    #[repr(align(4096))]
    struct Pages([u8; 2 * 4096]);
    let pages = Box::leak(Box::new(Pages([0; 2 * 4096])));
    NonNull::from(&mut pages.0).cast()
}

/// A fence that fires when it is told to.
#[derive(Clone, Default)]
pub(crate) struct Switch(Arc<AtomicBool>);

impl Switch {
    pub(crate) fn fire(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Fence for Switch {
    fn fired(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
