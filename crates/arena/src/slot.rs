//! The state machine of the slots of one slab. It knows no memory, no threads and no arena: only who may do what.
//!
//! ```text
//!  Free ──begin──► Landing ──commit──► Committed ──evict, release_after──► Draining ──last reader gone──► Free
//!   ▲                 │                    │  └──────evict without readers──────────────────────────────► Free
//!   │                 └─abandon─► Quarantined ──last range gone──► Free
//!   └── begin on a Committed slot without readers is an eviction and a begin in one step
//! ```
//!
//! A *reader* is a lease or a fence that has not fired; a *range* is a piece of a landing that someone (a NIC, a
//! thread in `recv`) may write to. Counters are 64 bits wide, so that a caller that forgets handles in a loop cannot
//! wrap one to zero.

use crate::error::CommitError;
use crate::fence::PendingFence;
use crate::ids::{Generation, SlotId};
use std::fmt;

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotState {
    /// Nothing is in it and nobody uses it.
    Free,
    /// Bytes are arriving; nobody may read them.
    Landing,
    /// It holds a complete, verified image, which may be read.
    Committed,
    /// It holds an image on its way out: readers remain, new ones are refused.
    Draining,
    /// Its landing was given up while ranges were outstanding: someone may still write to it.
    Quarantined,
}

impl fmt::Display for SlotState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Free => "Free",
            Self::Landing => "Landing",
            Self::Committed => "Committed",
            Self::Draining => "Draining",
            Self::Quarantined => "Quarantined",
        })
    }
}

/// One slot's record.
pub(crate) struct Slot {
    pub(crate) state: SlotState,
    pub(crate) generation: u64,
    pub(crate) image_bytes: usize,
    /// Ranges that were handed out and neither retired nor dropped; leaked ones stay in it for ever.
    pub(crate) live_ranges: u64,
    pub(crate) leaked_ranges: u64,
    retired_bytes: usize,
    tainted: bool,
    pub(crate) leases: u64,
    /// Fences that have not been seen fired. Counted apart from `pending`, from which they are taken while they are
    /// polled: if polling panics, the count keeps the slot from being reused.
    pub(crate) fences: u64,
    pub(crate) pending: Vec<PendingFence>,
    /// Whether the slot stands in the arena's queue of slots with fences, or is being polled.
    queued: bool,
    /// Place in the free list, while Free.
    free_index: usize,
}

impl Slot {
    pub(crate) fn readers(&self) -> u64 {
        self.leases + self.fences
    }
}

/// All slots of one slab.
pub(crate) struct SlotTable {
    slab: u32,
    slots: Vec<Slot>,
    /// Indices of Free slots; the last is the next to be taken.
    free: Vec<u32>,
}

impl SlotTable {
    pub(crate) fn new(slab: u32, count: u32) -> Self {
        let slots = (0..count).map(|index| Slot {
            state: SlotState::Free,
            generation: 0,
            image_bytes: 0,
            live_ranges: 0,
            leaked_ranges: 0,
            retired_bytes: 0,
            tainted: false,
            leases: 0,
            fences: 0,
            pending: Vec::new(),
            queued: false,
            free_index: (count - 1 - index) as usize,
        });
        Self {
            slab,
            slots: slots.collect(),
            free: (0..count).rev().collect(),
        }
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(crate) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    /// Starts a landing in a slot that is Free, or Committed without readers.
    pub(crate) fn begin(&mut self, slot: u32, image_bytes: usize) -> Option<Generation> {
        let state = self.slot(slot).state;
        match state {
            SlotState::Free => self.unlink_free(slot),
            SlotState::Committed if self.slot(slot).readers() == 0 => {}
            _ => return None,
        }
        let entry = self.slot_mut(slot);
        entry.state = SlotState::Landing;
        entry.generation += 1;
        entry.image_bytes = image_bytes;
        entry.live_ranges = 0;
        entry.retired_bytes = 0;
        entry.tainted = false;
        Some(Generation(entry.generation))
    }

    /// Starts a landing in any Free slot.
    pub(crate) fn begin_any(&mut self, image_bytes: usize) -> Option<(u32, Generation)> {
        let slot = *self.free.last()?;
        let generation = self.begin(slot, image_bytes)?;
        Some((slot, generation))
    }

    pub(crate) fn range_out(&mut self, slot: u32) {
        self.slot_mut(slot).live_ranges += 1;
    }

    /// Two ranges became one.
    pub(crate) fn range_joined(&mut self, slot: u32) {
        self.slot_mut(slot).live_ranges -= 1;
    }

    pub(crate) fn range_retired(&mut self, slot: u32, bytes: usize) {
        self.slot_mut(slot).retired_bytes += bytes;
        self.range_gone(slot);
    }

    pub(crate) fn range_dropped(&mut self, slot: u32) {
        self.slot_mut(slot).tainted = true;
        self.range_gone(slot);
    }

    fn range_gone(&mut self, slot: u32) {
        let entry = self.slot_mut(slot);
        entry.live_ranges -= 1;
        if entry.state == SlotState::Quarantined && entry.live_ranges == 0 {
            self.link_free(slot);
        }
    }

    /// The range stays live for ever, so the slot can neither be committed nor leave quarantine.
    pub(crate) fn range_leaked(&mut self, slot: u32) {
        self.slot_mut(slot).leaked_ranges += 1;
    }

    /// Ranges that are held by someone, leaked ones included.
    pub(crate) fn live_ranges(&self, slot: u32) -> u64 {
        self.slot(slot).live_ranges
    }

    /// Whether every byte of the image was handed out, came back and was vouched for.
    pub(crate) fn check_commit(
        &self,
        slot: u32,
        remaining_bytes: usize,
    ) -> Result<(), CommitError> {
        let entry = self.slot(slot);
        let slot = SlotId {
            slab: self.slab,
            slot,
        };
        if entry.leaked_ranges > 0 {
            let ranges = entry.leaked_ranges;
            return Err(CommitError::Leaked { slot, ranges });
        }
        if entry.tainted {
            return Err(CommitError::Tainted { slot });
        }
        if entry.live_ranges > 0 {
            let ranges = entry.live_ranges;
            return Err(CommitError::Outstanding { slot, ranges });
        }
        if remaining_bytes > 0 {
            return Err(CommitError::Partial {
                slot,
                remaining_bytes,
                image_bytes: entry.image_bytes,
            });
        }
        assert_eq!(
            entry.retired_bytes, entry.image_bytes,
            "{slot}: all ranges are back, but not all bytes"
        );
        Ok(())
    }

    /// Makes a landing that passed [`check_commit`](Self::check_commit) readable, with one lease.
    pub(crate) fn commit(&mut self, slot: u32) {
        let entry = self.slot_mut(slot);
        entry.state = SlotState::Committed;
        entry.leases = 1;
    }

    pub(crate) fn abandon(&mut self, slot: u32) {
        if self.slot(slot).live_ranges == 0 {
            self.link_free(slot);
        } else {
            self.slot_mut(slot).state = SlotState::Quarantined;
        }
    }

    /// A lease on a Committed slot of this generation.
    pub(crate) fn lease(&mut self, slot: u32, generation: Generation) -> bool {
        let entry = self.slot_mut(slot);
        let fresh = entry.state == SlotState::Committed && entry.generation == generation.0;
        if fresh {
            entry.leases += 1;
        }
        fresh
    }

    /// One more of a lease that exists, whatever the state.
    pub(crate) fn lease_again(&mut self, slot: u32) {
        self.slot_mut(slot).leases += 1;
    }

    pub(crate) fn lease_gone(&mut self, slot: u32) {
        self.slot_mut(slot).leases -= 1;
        self.settle(slot);
    }

    /// Adds a fence to a slot that is leased; says whether the slot must be put into the queue of slots with fences.
    /// With `drain`, the slot starts its way out.
    pub(crate) fn add_fence(&mut self, slot: u32, fence: PendingFence, drain: bool) -> bool {
        let entry = self.slot_mut(slot);
        entry.fences += 1;
        entry.pending.push(fence);
        if drain {
            entry.state = SlotState::Draining;
        }
        !std::mem::replace(&mut entry.queued, true)
    }

    /// Takes a slot's fences for polling.
    pub(crate) fn take_fences(&mut self, slot: u32) -> Vec<PendingFence> {
        std::mem::take(&mut self.slot_mut(slot).pending)
    }

    /// Gives back those that have not fired; says whether the slot became Free and whether it must be queued again.
    pub(crate) fn return_fences(
        &mut self,
        slot: u32,
        mut unfired: Vec<PendingFence>,
        fired: u64,
    ) -> (bool, bool) {
        let entry = self.slot_mut(slot);
        unfired.append(&mut entry.pending);
        entry.pending = unfired;
        entry.fences -= fired;
        entry.queued = !entry.pending.is_empty();
        let queued = entry.queued;
        (self.settle(slot), queued)
    }

    /// Starts the way out of a slot that holds an image of this generation: `Some(true)` if it is Free now,
    /// `Some(false)` if readers remain, `None` if it does not hold it.
    pub(crate) fn evict(&mut self, slot: u32, generation: Generation) -> Option<bool> {
        let entry = self.slot_mut(slot);
        let holds = matches!(entry.state, SlotState::Committed | SlotState::Draining);
        if !holds || entry.generation != generation.0 {
            return None;
        }
        entry.state = SlotState::Draining;
        Some(self.settle(slot))
    }

    /// Frees a Draining slot whose last reader is gone.
    fn settle(&mut self, slot: u32) -> bool {
        let entry = self.slot(slot);
        let done = entry.state == SlotState::Draining && entry.readers() == 0;
        if done {
            self.link_free(slot);
        }
        done
    }

    fn link_free(&mut self, slot: u32) {
        let free_index = self.free.len();
        let entry = self.slot_mut(slot);
        entry.state = SlotState::Free;
        entry.free_index = free_index;
        // The capacity was reserved for all slots, so this never allocates.
        self.free.push(slot);
    }

    fn unlink_free(&mut self, slot: u32) {
        let free_index = self.slot(slot).free_index;
        let removed = self.free.swap_remove(free_index);
        debug_assert_eq!(removed, slot);
        if let Some(&moved) = self.free.get(free_index) {
            self.slot_mut(moved).free_index = free_index;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_list_survives_taking_slots_out_of_its_middle() {
        let mut table = SlotTable::new(0, 4);
        assert!(table.begin(1, 1).is_some());
        assert!(table.begin(3, 1).is_some());
        table.abandon(1);
        let mut taken: Vec<u32> = std::iter::from_fn(|| table.begin_any(1))
            .map(|(slot, _)| slot)
            .collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        assert!((0..4).all(|slot| table.slot(slot).state == SlotState::Landing));
    }

    #[test]
    fn first_slot_is_handed_out_first() {
        let mut table = SlotTable::new(0, 3);
        assert_eq!(table.begin_any(1).map(|(slot, _)| slot), Some(0));
        assert_eq!(table.begin_any(1).map(|(slot, _)| slot), Some(1));
    }
}
