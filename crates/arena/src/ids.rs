//! Names of slots and of what is in them.

use std::fmt;

/// The place of one slot: which slab, and which slot of that slab.
///
/// *Shapes and units.* Both are indices from 0, not counts and not bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId {
    /// Index of the slab (a slot class: all slots of a slab have one size).
    pub slab: u32,
    /// Index of the slot within its slab.
    pub slot: u32,
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slab {} slot {}", self.slab, self.slot)
    }
}

/// How often a slot has been given to a landing; it grows by one at each reuse.
///
/// A slot that was never used has generation 0, so every landing and every lease has at least 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {}", self.0)
    }
}

/// A note of which record image was where: small, copyable, and checked when it is used.
///
/// A residency keeps nothing alive. [`ExpertArena::lease`](crate::ExpertArena::lease) turns it into a
/// [`Lease`](crate::Lease) while the slot still holds that generation, and refuses it afterwards. It also remembers
/// which arena of this process it came from, because two arenas may agree on slot and generation while they hold
/// different records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Residency {
    pub(crate) arena: u64,
    pub(crate) slot: SlotId,
    pub(crate) generation: Generation,
}

impl Residency {
    /// The slot that held the image.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The generation of the slot at that time.
    pub fn generation(&self) -> Generation {
        self.generation
    }
}

impl fmt::Display for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.slot, self.generation)
    }
}
