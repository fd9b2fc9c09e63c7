//! Counts of slots, for metrics.

use crate::slot::{Slot, SlotState};

/// How many slots are in which state, and what holds them.
///
/// *Shapes and units.* All fields are counts at one moment; slabs are read one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaStats {
    /// Slots in all.
    pub slots: u64,
    /// Slots that may be acquired.
    pub free: u64,
    /// Slots into which bytes arrive.
    pub landing: u64,
    /// Slots with an image that may be leased.
    pub committed: u64,
    /// Slots whose image is on its way out while someone reads it.
    pub draining: u64,
    /// Slots whose landing was abandoned while ranges were outstanding.
    pub quarantined: u64,
    /// Slots lost for good, because a device may write to them for ever; also counted by their state.
    pub leaked: u64,
    /// Committed slots that nobody reads: what may be evicted at once.
    pub idle: u64,
    /// Leases that are held.
    pub leases: u64,
    /// Fences that have not been seen fired.
    pub pending_fences: u64,
    /// Ranges that are held, leaked ones included.
    pub outstanding_ranges: u64,
}

impl ArenaStats {
    pub(crate) fn add(&mut self, slots: &[Slot]) {
        for slot in slots {
            self.slots += 1;
            *match slot.state {
                SlotState::Free => &mut self.free,
                SlotState::Landing => &mut self.landing,
                SlotState::Committed => &mut self.committed,
                SlotState::Draining => &mut self.draining,
                SlotState::Quarantined => &mut self.quarantined,
            } += 1;
            self.leaked += u64::from(slot.leaked_ranges > 0);
            self.idle += u64::from(slot.state == SlotState::Committed && slot.readers() == 0);
            self.leases += slot.leases;
            self.pending_fences += slot.fences;
            self.outstanding_ranges += slot.live_ranges;
        }
    }
}
