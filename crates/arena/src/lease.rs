//! Leases: reading a committed image.

use crate::arena::ExpertArena;
use crate::fence::{Fence, PendingFence};
use crate::ids::{Generation, Residency, SlotId};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

/// A guard over a committed image: while it is held, the slot is neither reused nor written to.
///
/// It derefs to the bytes of the image. Clones count. When the last lease is dropped, the image stays cached
/// (Committed) and can be leased again, unless it was evicted meanwhile.
pub struct Lease {
    slot: SlotId,
    generation: Generation,
    image_bytes: usize,
    // Last: dropping it may release the memory.
    arena: Arc<ExpertArena>,
}

impl Lease {
    /// Takes over one lease that the table already counts.
    pub(crate) fn new(
        arena: Arc<ExpertArena>,
        slot: SlotId,
        generation: Generation,
        image_bytes: usize,
    ) -> Self {
        Self {
            slot,
            generation,
            image_bytes,
            arena,
        }
    }

    /// The slot.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The generation of the slot.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The arena of the slot.
    pub fn arena(&self) -> &Arc<ExpertArena> {
        &self.arena
    }

    /// A note of this image, to lease it again later.
    pub fn residency(&self) -> Residency {
        self.arena.residency(self.slot, self.generation)
    }

    /// The address of the image's first byte.
    pub fn host_ptr(&self) -> *const u8 {
        self.arena.slot_ptr(self.slot)
    }

    /// The address of the image for a device, if someone supplied the arena's device base.
    pub fn dev_va(&self) -> Option<u64> {
        self.arena.slot_dev_va(self.slot)
    }

    /// The whole slot: the image, and zeros up to the slot's size.
    pub fn padded(&self) -> &[u8] {
        let bytes = self.arena.slot_bytes(self.slot.slab);
        // SAFETY: the slot's bytes lie inside the backing, which the Arc keeps alive, and are initialised (anonymous
        // memory is zero, foreign memory is so by contract). This lease is counted, so the slot is Committed or
        // Draining: no range exists, nobody writes, and the lock that the commit and this lease both took orders the
        // writes before. The slice cannot outlive the lease.
        unsafe { std::slice::from_raw_parts(self.host_ptr(), bytes) }
    }

    /// Releases the lease; the same as dropping it.
    pub fn release(self) {
        drop(self);
    }

    /// Releases the lease and gives the image up: the slot is Draining until `fence` has fired (and other leases are
    /// gone), then Free. New leases are refused meanwhile.
    ///
    /// [`ExpertArena::reap`] polls the fence. To keep the image cached, use [`retain_until`](Self::retain_until).
    pub fn release_after(self, fence: Box<dyn Fence>) {
        self.fence(fence, true);
    }

    /// Releases the lease and keeps the image cached: the slot stays Committed and can be leased, but is not reused
    /// before `fence` has fired.
    ///
    /// [`ExpertArena::reap`] polls the fence.
    pub fn retain_until(self, fence: Box<dyn Fence>) {
        self.fence(fence, false);
    }

    /// The fence is counted before the lease goes, so the slot has a reader all the time.
    fn fence(self, fence: Box<dyn Fence>, drain: bool) {
        let since = Instant::now();
        let pending = PendingFence { fence, since };
        self.arena.add_fence(self.slot, pending, drain);
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        self.arena.table(self.slot.slab).lease_again(self.slot.slot);
        Self::new(
            Arc::clone(&self.arena),
            self.slot,
            self.generation,
            self.image_bytes,
        )
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.padded()[..self.image_bytes]
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.arena
            .end_use(self.slot, |table| table.lease_gone(self.slot.slot));
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("slot", &self.slot)
            .field("generation", &self.generation)
            .field("image_bytes", &self.image_bytes)
            .finish_non_exhaustive()
    }
}
