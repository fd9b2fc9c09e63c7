//! A write by someone who does not own the memory: the fault that the rest of this crate makes impossible, for a
//! simulation that must show that it would see it.

use crate::arena::ExpertArena;
use crate::ids::SlotId;
use crate::lease::Lease;
use crate::range::LandingRange;
use crate::slot::SlotState;
use std::sync::Arc;

/// Remembers where a range was, after the range is gone. Negative controls of the simulation use it, nothing else.
///
/// It stands for a card that writes after its READ was given back. In real life such a write hits whatever the slot
/// holds by then; here it is let through only where it is no undefined behaviour.
#[doc(hidden)]
#[derive(Debug)]
pub struct DetachedWriter {
    slot: SlotId,
    /// From the start of the slot.
    offset: usize,
    len: usize,
    arena: Arc<ExpertArena>,
}

impl LandingRange {
    /// A writer to these bytes that outlives the range; see [`DetachedWriter`].
    #[doc(hidden)]
    pub fn detach_for_simulation(&self) -> DetachedWriter {
        DetachedWriter {
            slot: self.slot(),
            offset: self.offset(),
            len: self.len(),
            arena: Arc::clone(self.arena()),
        }
    }
}

impl DetachedWriter {
    /// Overwrites the bytes, whatever they hold now; `false` where it cannot be done now, and nothing is written.
    ///
    /// `leases` must contain every lease on the slot, lent exclusively so that no slice of the bytes exists; other
    /// leases in it do no harm. A slot into which an image is landing is refused.
    ///
    /// # Panics
    ///
    /// If there are more bytes than the range had.
    pub fn write(&self, bytes: &[u8], leases: &mut [&mut Lease]) -> bool {
        assert!(bytes.len() <= self.len, "more bytes than the range had");
        let lent = leases
            .iter()
            .filter(|l| l.slot() == self.slot && Arc::ptr_eq(l.arena(), &self.arena))
            .count() as u64;
        // Held until the bytes are written.
        let table = self.arena.table(self.slot.slab);
        let entry = table.slot(self.slot.slot);
        let settled = matches!(
            entry.state,
            SlotState::Free | SlotState::Committed | SlotState::Draining
        );
        if !settled || entry.readers() != lent {
            return false;
        }
        let slot = self.arena.slot_ptr(self.slot);
        // SAFETY: the range lay inside its slot, and slots lie inside the backing, which the Arc keeps alive.
        let target = unsafe { slot.add(self.offset) };
        // SAFETY: the target lies inside the slot (above; the length was checked). No range of a slot in one of
        // these states exists, every lease on it is borrowed exclusively for this call, so no slice of its bytes
        // exists, and there are no fences; the lock keeps it so, as landings and leases begin under it. `bytes` can
        // therefore not lie in the slot either.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        drop(table);
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::{ArenaBuilder, ForeignMemory};
    use std::sync::Arc;

    #[test]
    fn it_writes_only_where_nobody_can_look_meanwhile() {
        let memory = ForeignMemory::heap(4096).unwrap();
        let builder = ArenaBuilder::new().slab(1, 4096).foreign(memory);
        let arena = Arc::new(builder.build().unwrap());
        let mut landing = arena.acquire(4).unwrap();
        let mut range = landing.split(4).unwrap();
        range.write(0, b"good");
        let writer = range.detach_for_simulation();
        assert!(!writer.write(b"evil", &mut []), "it is landing");
        range.retire();
        let mut lease = landing.commit().unwrap();
        assert!(!writer.write(b"evil", &mut []), "the lease is not lent");
        assert_eq!(&lease[..], b"good");
        assert!(writer.write(b"evil", &mut [&mut lease]));
        assert_eq!(&lease[..], b"evil");
        let other = lease.clone();
        assert!(!writer.write(b"good", &mut [&mut lease]), "one of two");
        drop(other);
    }
}
