//! The arena as a device sees it: registered in slices that no slot straddles.

use crate::error::RdmaError;
use crate::memory::StableMemory;
use crate::mr::{Access, LocalKey, Mr};
use crate::pd::Pd;
use expert_arena::{ExpertArena, SlotId};
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Default of the largest slice: on some cards one landing region above 4 GiB costs a third of the speed.
pub const DEFAULT_SLICE_MAX_BYTES: u64 = 7 << 29;

/// An arena, registered for READs of this machine on one device.
pub struct LandingRegions {
    // Field order is drop order: the regions go before the memory. (Each keeps the memory alive as well.)
    slices: Vec<Slice>,
    scratch: Mr,
    pd: Arc<Pd>,
    arena: Arc<ExpertArena>,
}

/// One region, and where it starts and ends in the arena.
struct Slice {
    start: usize,
    end: usize,
    mr: Mr,
}

impl LandingRegions {
    /// Registers the whole arena, in slices of at most `slice_max_bytes` (and of the device's limit) cut between slots;
    /// as one region where the device or the memory's owner refuses parts.
    ///
    /// # Errors
    ///
    /// As [`Mr::register`]; [`RdmaError::RegionTooLarge`] for a slot that is larger than a region can be.
    pub fn register(
        pd: &Arc<Pd>,
        arena: &Arc<ExpertArena>,
        slice_max_bytes: u64,
    ) -> Result<Arc<Self>, RdmaError> {
        let device_max_bytes = pd.context().attributes().max_mr_bytes;
        let max_bytes = slice_max_bytes.min(device_max_bytes);
        let slots = slots(arena);
        let cuts = cut(&slots, arena.total_bytes(), max_bytes).map_err(|bytes| {
            RdmaError::RegionTooLarge {
                device: pd.context().name().to_owned(),
                bytes,
                limit_bytes: max_bytes,
            }
        })?;
        let memory: Arc<dyn StableMemory> = Arc::new(ArenaMemory(Arc::clone(arena)));
        let scratch = Mr::register(
            pd,
            Arc::new(Scratch::default()),
            0,
            1,
            Access::LandingLocalWrite,
        )?;
        let slices = match register_all(pd, &memory, &cuts) {
            Ok(slices) => slices,
            Err(error) if cuts.len() > 1 && wants_whole(&error) => {
                tracing::info!(
                    "{}: registering the arena in {} slices was refused ({error}); registering it as one region of {} \
                     bytes",
                    pd.context().name(),
                    cuts.len(),
                    arena.total_bytes()
                );
                register_all(pd, &memory, std::slice::from_ref(&(0..arena.total_bytes())))?
            }
            Err(error) => return Err(error),
        };
        Ok(Arc::new(Self {
            slices,
            scratch,
            pd: Arc::clone(pd),
            arena: Arc::clone(arena),
        }))
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<ExpertArena> {
        &self.arena
    }

    /// The domain that the regions are in.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Count of regions.
    pub fn region_count(&self) -> usize {
        self.slices.len()
    }

    /// Bytes of all regions.
    pub fn registered_bytes(&self) -> u64 {
        self.slices
            .iter()
            .map(|slice| slice.mr.bytes() as u64)
            .sum()
    }

    /// A byte that anything may be read into, for probes.
    pub(crate) fn scratch(&self) -> (u64, LocalKey) {
        (self.scratch.addr(), self.scratch.lkey())
    }

    /// The key of the region that has `len` bytes at `arena_offset`; `None` where no single one has all of them. Bytes
    /// of one slot always have one.
    pub fn lkey_for(&self, arena_offset: usize, len: usize) -> Option<LocalKey> {
        let end = arena_offset.checked_add(len)?;
        let after = self
            .slices
            .partition_point(|slice| slice.start <= arena_offset);
        let slice = &self.slices[after.checked_sub(1)?];
        (end <= slice.end).then(|| slice.mr.lkey())
    }
}

impl fmt::Debug for LandingRegions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LandingRegions")
            .field("device", &self.pd.context().name())
            .field("regions", &self.region_count())
            .field("bytes", &self.registered_bytes())
            .finish_non_exhaustive()
    }
}

/// Memory that probes write to and nobody reads.
#[derive(Default)]
struct Scratch(Box<UnsafeCell<[u8; 8]>>);

// SAFETY: nobody ever reads or writes the bytes but a device, through the address.
unsafe impl Sync for Scratch {}

// SAFETY: the heap keeps the bytes where they are until the box is dropped; their size is in the type.
unsafe impl StableMemory for Scratch {
    fn base(&self) -> *mut u8 {
        self.0.get().cast()
    }

    fn len_bytes(&self) -> usize {
        size_of::<[u8; 8]>()
    }
}

/// The arena's memory, kept by whoever registers it.
struct ArenaMemory(Arc<ExpertArena>);

// SAFETY: an arena's backing is one mapping (or the caller's own allocation, with the same promise) that is made with
// the arena, never moves and never changes its size, and is released when the last Arc is gone. What is written where
// is governed by landings and ranges, which the queues keep.
unsafe impl StableMemory for ArenaMemory {
    fn base(&self) -> *mut u8 {
        self.0.base_ptr()
    }

    fn len_bytes(&self) -> usize {
        self.0.total_bytes()
    }
}

fn register_all(
    pd: &Arc<Pd>,
    memory: &Arc<dyn StableMemory>,
    cuts: &[Range<usize>],
) -> Result<Vec<Slice>, RdmaError> {
    cuts.iter()
        .map(|cut| {
            let access = Access::LandingLocalWrite;
            let mr = Mr::register(pd, Arc::clone(memory), cut.start, cut.len(), access)?;
            Ok(Slice {
                start: cut.start,
                end: cut.end,
                mr,
            })
        })
        .collect()
}

/// Whether a slice was refused for being a part: what owners of foreign memory and their drivers answer then.
fn wants_whole(error: &RdmaError) -> bool {
    matches!(
        error.errno(),
        Some(libc::EINVAL | libc::EFAULT | libc::EOPNOTSUPP)
    )
}

/// Start and end of every slot, ascending.
fn slots(arena: &ExpertArena) -> Vec<Range<usize>> {
    let mut slots = Vec::new();
    for slab in 0..arena.num_slabs() {
        let bytes = arena.slot_bytes(slab);
        for slot in 0..arena.slots(slab) {
            if let Some(start) = arena.slot_offset(SlotId { slab, slot }) {
                slots.push(start..start + bytes);
            }
        }
    }
    slots.sort_by_key(|slot| slot.start);
    slots
}

/// Covers `0..total` with as few parts of at most `max_bytes` as go, cut where slots start; the bytes of a slot that
/// has more, if one does.
fn cut(slots: &[Range<usize>], total: usize, max_bytes: u64) -> Result<Vec<Range<usize>>, u64> {
    let mut cuts: Vec<Range<usize>> = Vec::new();
    let mut start = 0;
    for (index, slot) in slots.iter().enumerate() {
        // What lies between two slots goes with the first of them.
        let end = slots.get(index + 1).map_or(total, |next| next.start);
        if (end - start) as u64 <= max_bytes {
            continue;
        }
        if slot.start > start {
            cuts.push(start..slot.start);
            start = slot.start;
        }
        if (end - start) as u64 > max_bytes {
            return Err((end - start) as u64);
        }
    }
    if total > start {
        cuts.push(start..total);
    }
    Ok(cuts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of_sizes(sizes: &[usize]) -> (Vec<Range<usize>>, usize) {
        let mut at = 0;
        let slots = sizes.iter().map(|bytes| {
            let slot = at..at + bytes;
            at += bytes;
            slot
        });
        (slots.collect(), sizes.iter().sum())
    }

    #[test]
    fn slices_are_cut_between_slots_and_none_is_too_large() {
        let (slots, total) = of_sizes(&[4, 4, 4, 6]);
        assert_eq!(cut(&slots, total, 100).unwrap(), vec![0..18_usize; 1]);
        assert_eq!(cut(&slots, total, 9).unwrap(), [0..8, 8..12, 12..18]);
        assert_eq!(cut(&slots, total, 5).unwrap_err(), 6);
    }

    #[test]
    fn the_default_slice_is_three_and_a_half_gib() {
        assert_eq!(DEFAULT_SLICE_MAX_BYTES, 3_758_096_384);
    }

    proptest! {
        #[test]
        fn every_slot_lies_in_exactly_one_slice(
            sizes in prop::collection::vec(1_usize..50, 1..40),
            max_bytes in 1_u64..200,
        ) {
            let (slots, total) = of_sizes(&sizes);
            match cut(&slots, total, max_bytes) {
                Ok(cuts) => {
                    prop_assert_eq!(cuts[0].start, 0);
                    prop_assert_eq!(cuts[cuts.len() - 1].end, total);
                    prop_assert!(cuts.windows(2).all(|pair| pair[0].end == pair[1].start));
                    prop_assert!(cuts.iter().all(|cut| cut.len() as u64 <= max_bytes));
                    for slot in &slots {
                        let holders = cuts
                            .iter()
                            .filter(|cut| cut.start <= slot.start && slot.end <= cut.end);
                        prop_assert_eq!(holders.count(), 1);
                    }
                }
                Err(bytes) => prop_assert!(sizes.iter().any(|&size| size as u64 == bytes) && bytes > max_bytes),
            }
        }
    }
}
