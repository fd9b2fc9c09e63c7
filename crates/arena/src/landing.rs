//! Landings: a slot that an image is arriving in.

use crate::arena::ExpertArena;
use crate::error::CommitError;
use crate::ids::{Generation, SlotId};
use crate::lease::Lease;
use crate::range::LandingRange;
use std::fmt;
use std::sync::Arc;

/// A slot that an image is arriving in; it owns the slot until it is committed or abandoned.
///
/// Bytes are handed out as [`LandingRange`]s, in image order and each once, so no two holders can ever write to the
/// same byte. Dropping a landing abandons it.
pub struct Landing {
    slot: SlotId,
    generation: Generation,
    image_bytes: usize,
    /// Bytes that were split off.
    next: usize,
    committed: bool,
    // Last: dropping it may release the memory.
    arena: Arc<ExpertArena>,
}

impl Landing {
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
            next: 0,
            committed: false,
            arena,
        }
    }

    /// The slot.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The generation that this landing gave the slot.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The arena of the slot.
    pub fn arena(&self) -> &Arc<ExpertArena> {
        &self.arena
    }

    /// Size of the image that is arriving.
    pub fn image_bytes(&self) -> usize {
        self.image_bytes
    }

    /// Bytes of the image that were not split off yet.
    pub fn remaining(&self) -> usize {
        self.image_bytes - self.next
    }

    /// The next `len` bytes of the image; `None` if `len` is 0 or more than [`remaining`](Self::remaining).
    pub fn split(&mut self, len: usize) -> Option<LandingRange> {
        if len == 0 || len > self.remaining() {
            return None;
        }
        let offset = self.next;
        self.next += len;
        self.arena.table(self.slot.slab).range_out(self.slot.slot);
        let arena = Arc::clone(&self.arena);
        Some(LandingRange::new(
            arena,
            self.slot,
            self.generation,
            offset,
            len,
        ))
    }

    /// Count of ranges that are held by someone, leaked ones included.
    pub fn outstanding(&self) -> usize {
        let ranges = self.arena.table(self.slot.slab).live_ranges(self.slot.slot);
        usize::try_from(ranges).unwrap_or(usize::MAX)
    }

    /// Makes the image readable: the rest of the slot is zeroed, and the first lease comes back.
    ///
    /// # Errors
    ///
    /// The landing comes back with [`CommitError::Outstanding`] or [`CommitError::Partial`] (retire or split the
    /// rest, then try again), [`CommitError::Tainted`] or [`CommitError::Leaked`] (abandon it).
    pub fn commit(mut self) -> Result<Lease, (Self, CommitError)> {
        let remaining = self.remaining();
        let check = self
            .arena
            .table(self.slot.slab)
            .check_commit(self.slot.slot, remaining);
        if let Err(error) = check {
            return Err((self, error));
        }
        // Nothing is left to split and no range is held, so this landing is the only one that knows the slot.
        self.arena.zero_padding(self.slot, self.image_bytes);
        self.arena.table(self.slot.slab).commit(self.slot.slot);
        self.committed = true;
        Ok(Lease::new(
            Arc::clone(&self.arena),
            self.slot,
            self.generation,
            self.image_bytes,
        ))
    }

    /// Gives the landing up: the slot is Free if no range is held, else Quarantined until the last one is gone.
    pub fn abandon(self) {
        drop(self);
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if !self.committed {
            self.arena
                .end_use(self.slot, |table| table.abandon(self.slot.slot));
        }
    }
}

impl fmt::Debug for Landing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Landing")
            .field("slot", &self.slot)
            .field("generation", &self.generation)
            .field("image_bytes", &self.image_bytes)
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
