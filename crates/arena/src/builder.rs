//! Building an arena step by step.

use crate::arena::{ExpertArena, SlabLayout};
use crate::error::ArenaError;
use crate::foreign::ForeignMemory;
use crate::memory::{Backing, SLOT_ALIGN_BYTES, Wishes};
use crate::options::{HugePages, Lock, Poison};
use crate::system::System;
use std::path::Path;

/// Describes an arena: its slabs, and how its memory is to be had.
///
/// ```
/// use expert_arena::{ArenaBuilder, ForeignMemory};
///
/// let arena = ArenaBuilder::new()
///     .slab(2, 9_437_184)
///     .slab(4, 4096)
///     .foreign(ForeignMemory::heap(2 * 9_437_184 + 4 * 4096)?)
///     .build()?;
/// assert_eq!(arena.num_slabs(), 2);
/// # Ok::<(), expert_arena::ArenaError>(())
/// ```
#[derive(Debug, Default)]
#[must_use]
pub struct ArenaBuilder {
    slabs: Vec<(u32, usize)>,
    huge_pages: HugePages,
    lock: Lock,
    numa_node: Option<u32>,
    reserve_bytes: Option<u64>,
    poison: Poison,
    poison_freed: bool,
    foreign: Option<ForeignMemory>,
    device_base: Option<u64>,
    system: System,
}

impl ArenaBuilder {
    /// No slabs yet, and every choice at its default.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a slab: `slots` slots of `slot_bytes` bytes each. Slabs are slot classes: sizes may differ between them.
    ///
    /// *Shapes and units.* The size is rounded up to [`SLOT_ALIGN_BYTES`].
    pub fn slab(mut self, slots: u32, slot_bytes: usize) -> Self {
        self.slabs.push((slots, slot_bytes));
        self
    }

    /// Which pages to use; [`HugePages::Auto`] by default.
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// Whether to lock the memory; [`Lock::BestEffort`] by default. Foreign memory is never locked: its owner has
    /// pinned it or has not.
    pub fn lock(mut self, lock: Lock) -> Self {
        self.lock = lock;
        self
    }

    /// Binds the memory to one NUMA node, strictly. By default the kernel's policy decides.
    pub fn numa_node(mut self, node: u32) -> Self {
        self.numa_node = Some(node);
        self
    }

    /// Bytes of available memory that must stay free when the arena has taken its own.
    ///
    /// By default (`None`) that is the larger of 8 GB and 8 % of the memory in all; for an arena below 1 GiB it is at
    /// most 25 % of the memory in all, so that small arenas can be had on small machines. An explicit value is taken
    /// as it is. "Memory in all" and "available" are those of the machine, or of the control group (cgroup v2
    /// `memory.max`) where that is lower. Explicit huge pages and foreign memory were set aside before and are not
    /// checked.
    pub fn reserve_bytes(mut self, reserve_bytes: Option<u64>) -> Self {
        self.reserve_bytes = reserve_bytes;
        self
    }

    /// How much of a slot is poisoned before a landing.
    pub fn poison(mut self, poison: Poison) -> Self {
        self.poison = poison;
        self
    }

    /// Whether a slot is also poisoned, every byte of it, at the moment that it becomes Free: whoever kept an address
    /// beyond its lease then reads NaN at once, not only when the next image lands. For proofs: the slab's lock is held
    /// meanwhile. Off by default.
    ///
    /// A landing that begins in a Committed slot evicts and takes it in one step; there [`poison`](Self::poison) decides.
    pub fn poison_freed(mut self, poison_freed: bool) -> Self {
        self.poison_freed = poison_freed;
        self
    }

    /// Uses memory that someone else owns, instead of mapping any.
    pub fn foreign(mut self, memory: ForeignMemory) -> Self {
        self.foreign = Some(memory);
        self
    }

    /// The address of the arena's first byte for a device, where it is known beforehand; see also
    /// [`ExpertArena::set_device_base`]. It is never derived from the host address.
    pub fn device_base(mut self, device_base: Option<u64>) -> Self {
        self.device_base = device_base;
        self
    }

    /// Reads `/proc` and `/sys` below another directory.
    #[doc(hidden)]
    pub fn system_root(mut self, root: &Path) -> Self {
        self.system = System::at(root);
        self
    }

    /// Takes the memory.
    ///
    /// # Errors
    ///
    /// A layout that cannot be: correct the call. [`ArenaError::NotEnoughMemory`], [`ArenaError::Lock`],
    /// [`ArenaError::Numa`], [`ArenaError::HugePagesUnavailable`]: the machine does not have it; the text says which
    /// setting to change.
    pub fn build(self) -> Result<ExpertArena, ArenaError> {
        let (slabs, total_bytes) = lay_out(&self.slabs)?;
        let mut device_base = self.device_base;
        let (backing, report) = match self.foreign {
            Some(memory) => {
                let refused = |option| Err(ArenaError::ForeignOption { option });
                if self.huge_pages == HugePages::Require {
                    return refused("huge_pages(HugePages::Require)");
                }
                if self.numa_node.is_some() {
                    return refused("numa_node");
                }
                device_base = match (memory.device_base(), device_base) {
                    (Some(first), Some(second)) if first != second => {
                        return Err(ArenaError::DeviceBaseConflict { first, second });
                    }
                    (first, second) => first.or(second),
                };
                Backing::foreign(total_bytes, memory)?
            }
            None => {
                let wishes = Wishes {
                    huge_pages: self.huge_pages,
                    lock: self.lock,
                    numa_node: self.numa_node,
                    reserve_bytes: self.reserve_bytes,
                };
                Backing::map(total_bytes, &wishes, &self.system)?
            }
        };
        Ok(ExpertArena::assemble(
            slabs,
            backing,
            report,
            self.poison,
            self.poison_freed,
            device_base,
        ))
    }
}

/// Puts the slabs one after the other.
fn lay_out(slabs: &[(u32, usize)]) -> Result<(Vec<SlabLayout>, usize), ArenaError> {
    if slabs.is_empty() {
        return Err(ArenaError::NoSlabs);
    }
    let mut layouts = Vec::with_capacity(slabs.len());
    let mut total: usize = 0;
    for (index, &(slots, asked_bytes)) in slabs.iter().enumerate() {
        // More slabs than a u32 counts would need more memory than exists for this very list.
        let slab = u32::try_from(index).unwrap_or(u32::MAX);
        if slots == 0 || asked_bytes == 0 {
            return Err(ArenaError::EmptySlab {
                slab,
                slots,
                slot_bytes: asked_bytes,
            });
        }
        let sizes = asked_bytes
            .checked_next_multiple_of(SLOT_ALIGN_BYTES)
            .and_then(|slot_bytes| {
                let bytes = slot_bytes.checked_mul(usize::try_from(slots).ok()?)?;
                let end = total.checked_add(bytes)?;
                (end <= isize::MAX as usize).then_some((slot_bytes, end))
            });
        let Some((slot_bytes, end)) = sizes else {
            return Err(ArenaError::LayoutOverflow {
                slab,
                slots,
                slot_bytes: asked_bytes,
                limit: isize::MAX as usize,
            });
        };
        layouts.push(SlabLayout {
            offset: total,
            slot_bytes,
            slots,
        });
        total = end;
    }
    Ok((layouts, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_lie_one_after_the_other_in_rounded_slots() {
        let (slabs, total) = lay_out(&[(2, 5000), (3, 1)]).unwrap();
        assert_eq!(slabs[0].slot_bytes, 8192);
        assert_eq!(slabs[1].offset, 16384);
        assert_eq!(slabs[1].slot_bytes, 4096);
        assert_eq!(total, 16384 + 3 * 4096);
    }

    #[test]
    fn sizes_that_overflow_are_refused_and_named() {
        let half = isize::MAX as usize / 2;
        for slabs in [
            &[(1, usize::MAX)][..],
            &[(u32::MAX, half)][..],
            &[(1, half), (2, half)][..],
        ] {
            let error = lay_out(slabs).unwrap_err();
            assert!(
                matches!(error, ArenaError::LayoutOverflow { .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn empty_layouts_are_refused() {
        assert!(matches!(lay_out(&[]), Err(ArenaError::NoSlabs)));
        for empty in [(0, 1), (1, 0)] {
            let result = lay_out(&[(1, 1), empty]);
            assert!(matches!(result, Err(ArenaError::EmptySlab { slab: 1, .. })));
        }
    }
}
