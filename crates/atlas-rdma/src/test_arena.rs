//! Small arenas for the tests of this crate.

use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, LandingRange};
use std::sync::Arc;

/// An arena of one slab on the heap.
pub(crate) fn arena(slots: u32, slot_bytes: usize) -> Arc<ExpertArena> {
    let memory = ForeignMemory::heap(slots as usize * slot_bytes).unwrap();
    let builder = ArenaBuilder::new().slab(slots, slot_bytes).foreign(memory);
    Arc::new(builder.build().unwrap())
}

/// One range over a whole slot.
pub(crate) fn range(arena: &Arc<ExpertArena>, bytes: usize) -> LandingRange {
    let mut landing = arena.acquire(bytes).unwrap();
    landing.split(bytes).unwrap()
}

/// Ranges over whole slots of an arena of their own.
pub(crate) fn ranges<const N: usize>(bytes: usize) -> [LandingRange; N] {
    let arena = arena(u32::try_from(N).unwrap(), bytes);
    std::array::from_fn(|_| range(&arena, bytes))
}
