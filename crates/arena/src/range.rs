//! Ranges of a landing: the right to write some bytes of an image, once.

use crate::arena::ExpertArena;
use crate::ids::{Generation, SlotId};
use std::fmt;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// The right to write some bytes of a landing. A posted READ owns it; its completion or error gives it back.
///
/// Ranges of a landing never overlap, by construction: they are split off in image order, can be cut and joined, and
/// cannot be cloned. A range ends in one of three ways: [`retire`](Self::retire) when its bytes are there and
/// verified, plain drop when they are not (the landing can then no longer be committed), and [`leak`](Self::leak)
/// when a device may still write to it.
///
/// The methods that touch memory ([`write`](Self::write), [`recv`](Self::recv), [`xxh3_64`](Self::xxh3_64) and the
/// others) need the range itself, which a READ in flight has: nothing can be read while a device writes it.
pub struct LandingRange {
    slot: SlotId,
    generation: Generation,
    offset: usize,
    len: usize,
    ending: Ending,
    // Last: dropping it may release the memory.
    arena: Arc<ExpertArena>,
}

/// What dropping a range means.
#[derive(Clone, Copy)]
enum Ending {
    Dropped,
    Retired,
    Leaked,
    Joined,
}

impl LandingRange {
    /// Takes over one range that the table already counts.
    pub(crate) fn new(
        arena: Arc<ExpertArena>,
        slot: SlotId,
        generation: Generation,
        offset: usize,
        len: usize,
    ) -> Self {
        Self {
            slot,
            generation,
            offset,
            len,
            ending: Ending::Dropped,
            arena,
        }
    }

    /// The slot.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The generation of the slot that this range belongs to.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The arena of the slot.
    pub fn arena(&self) -> &Arc<ExpertArena> {
        &self.arena
    }

    /// Bytes from the start of the image.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes from the start of the arena, for a device that registered it as one region.
    pub fn arena_offset(&self) -> usize {
        let slot = self.arena.slot_offset(self.slot);
        slot.expect("a range names a slot that exists") + self.offset
    }

    /// Count of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes, as an end of [`split_off`](Self::split_off) may.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for a device.
    ///
    /// Whoever writes through it, or has a device do so, keeps the range until the last such write is over and calls
    /// no other method of it that touches memory meanwhile; if it cannot know, it calls [`leak`](Self::leak).
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr(0, self.len)
    }

    /// Cuts the range: it keeps the first `at` bytes, the rest comes back.
    ///
    /// # Panics
    ///
    /// If `at` is more than [`len`](Self::len).
    #[must_use = "dropping a range without retiring it taints the landing"]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(
            at <= self.len,
            "a range of {} bytes cannot be cut at {at}",
            self.len
        );
        self.arena.table(self.slot.slab).range_out(self.slot.slot);
        let rest = Self::new(
            Arc::clone(&self.arena),
            self.slot,
            self.generation,
            self.offset + at,
            self.len - at,
        );
        self.len = at;
        rest
    }

    /// Joins this range with the one that starts where it ends.
    ///
    /// # Errors
    ///
    /// Both ranges come back if they are not neighbours in this order, in one landing.
    pub fn join(mut self, mut other: Self) -> Result<Self, (Self, Self)> {
        let neighbours = Arc::ptr_eq(&self.arena, &other.arena)
            && self.slot == other.slot
            && self.generation == other.generation
            && self.offset + self.len == other.offset;
        if !neighbours {
            return Err((self, other));
        }
        self.len += other.len;
        other.ending = Ending::Joined;
        Ok(self)
    }

    /// Copies `bytes` to byte `at` of the range.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        let target = self.ptr(at, bytes.len());
        // SAFETY: `ptr` checked that the target lies inside the range. The range is borrowed exclusively and covers
        // the bytes alone, so nobody else uses them, and no safe slice over them exists that `bytes` could be.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Writes `len` zeros to byte `at` of the range.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn fill_zero(&mut self, at: usize, len: usize) {
        let target = self.ptr(at, len);
        // SAFETY: `ptr` checked that the target lies inside the range, which is borrowed exclusively and covers the
        // bytes alone.
        unsafe { target.write_bytes(0, len) };
    }

    /// Copies bytes from byte `at` of the range out, to check a header before anything is committed.
    ///
    /// # Panics
    ///
    /// If the range ends before `out` is full.
    pub fn copy_out(&self, at: usize, out: &mut [u8]) {
        let source = self.ptr(at, out.len());
        // SAFETY: `ptr` checked that the source lies inside the range, whose bytes are initialised and which covers
        // them alone; while it is borrowed shared, nobody writes to it. `out` is exclusive and cannot overlap it.
        unsafe { source.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
    }

    /// The XXH3 hash (64 bits, seed 0) of `len` bytes from byte `at` of the range.
    ///
    /// # Panics
    ///
    /// If the range ends before that.
    pub fn xxh3_64(&self, at: usize, len: usize) -> u64 {
        let start = self.ptr(at, len);
        // SAFETY: `ptr` checked that the bytes lie inside the range; they are initialised. The range is here and
        // borrowed shared, so no READ owns it (see `as_mut_ptr`) and nobody writes to it. The slice ends with this
        // call and is never seen outside.
        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
        xxh3_64(bytes)
    }

    /// Ends the range: its bytes have landed and are verified.
    pub fn retire(mut self) {
        self.ending = Ending::Retired;
    }

    /// Ends the range although a device may still write to it: the slot is never used again, and the memory of the
    /// arena is never unmapped. Counted in [`ArenaStats::leaked`](crate::ArenaStats::leaked).
    pub fn leak(mut self) {
        self.ending = Ending::Leaked;
    }

    /// Whether `at..at + len` lies inside the range.
    pub(crate) fn contains(&self, at: usize, len: usize) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// The address of byte `at`, checked to have `len` bytes of this range behind it.
    pub(crate) fn ptr(&self, at: usize, len: usize) -> *mut u8 {
        assert!(
            self.contains(at, len),
            "{len} bytes at {at} do not lie inside a range of {} bytes",
            self.len
        );
        let slot = self.arena.slot_ptr(self.slot);
        // SAFETY: ranges are cut from images, images fit their slots, and slots lie inside the backing.
        unsafe { slot.add(self.offset + at) }
    }
}

impl Drop for LandingRange {
    fn drop(&mut self) {
        let slot = self.slot;
        match self.ending {
            Ending::Dropped => self
                .arena
                .end_use(slot, |table| table.range_dropped(slot.slot)),
            Ending::Retired => self
                .arena
                .end_use(slot, |table| table.range_retired(slot.slot, self.len)),
            Ending::Leaked => {
                tracing::warn!("{slot} is lost: a device may still write to it");
                self.arena.table(slot.slab).range_leaked(slot.slot);
            }
            Ending::Joined => self.arena.table(slot.slab).range_joined(slot.slot),
        }
    }
}

impl fmt::Debug for LandingRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LandingRange")
            .field("slot", &self.slot)
            .field("generation", &self.generation)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
