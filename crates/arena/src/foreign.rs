//! Memory that someone else owns: an engine's pinned pool, or a plain heap block.

use crate::error::ArenaError;
use crate::memory::SLOT_ALIGN_BYTES;
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

/// Memory that the arena uses but does not own.
///
/// The arena neither pre-faults, locks nor binds it: that is the owner's business. It is kept alive until the last
/// arena, landing, range and lease is gone.
pub struct ForeignMemory {
    base: NonNull<u8>,
    bytes: usize,
    device_base: Option<u64>,
    // Last, because dropping it may release the memory.
    keep_alive: Box<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is only an address here; the constructor's contract says that any thread may use the memory, and
// the keep-alive is Send itself.
unsafe impl Send for ForeignMemory {}
// SAFETY: as above; a shared ForeignMemory gives out the address and nothing else, and the keep-alive is Sync.
unsafe impl Sync for ForeignMemory {}

impl ForeignMemory {
    /// Memory of an engine, at `base`, of `bytes` bytes; `device_base` is its address for a device, if it has one.
    ///
    /// *Shapes and units.* `base` must be a multiple of [`SLOT_ALIGN_BYTES`], which is checked when the arena is
    /// built, as is the size.
    ///
    /// # Safety
    ///
    /// Until `keep_alive` is dropped, `base..base + bytes` must be one mapped, readable and writable allocation, of
    /// initialised bytes, which any thread may use, and which nothing outside the arena and the devices that were
    /// handed its ranges writes to. Outside readers may read only what a lease covers, while they hold it.
    pub unsafe fn new(
        base: NonNull<u8>,
        bytes: usize,
        device_base: Option<u64>,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            base,
            bytes,
            device_base,
            keep_alive,
        }
    }

    /// A zeroed block of the heap: no huge pages, no pre-faulting, no locking, and no system call but the allocator's.
    ///
    /// For tests, for Miri, and for tools that never give the memory to a device. `bytes` is rounded up to
    /// [`SLOT_ALIGN_BYTES`].
    ///
    /// # Errors
    ///
    /// [`ArenaError::Map`] when the allocator has no such block, or `bytes` cannot be addressed.
    pub fn heap(bytes: usize) -> Result<Self, ArenaError> {
        let refused = || ArenaError::Map {
            bytes,
            source: std::io::ErrorKind::OutOfMemory.into(),
        };
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(SLOT_ALIGN_BYTES)
            .ok_or_else(refused)?;
        let layout = Layout::from_size_align(rounded, SLOT_ALIGN_BYTES).map_err(|_| refused())?;
        // SAFETY: the layout has a size of at least SLOT_ALIGN_BYTES, so it is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base).ok_or_else(refused)?;
        let block = HeapBlock { base, layout };
        // SAFETY: the block was just allocated with this size and zeroed, and is freed only when `block` is dropped;
        // its address is known to nobody else.
        Ok(unsafe { Self::new(base, rounded, None, Box::new(block)) })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn device_base(&self) -> Option<u64> {
        self.device_base
    }

    /// Keeps the memory alive for ever.
    pub(crate) fn leak(self) {
        std::mem::forget(self.keep_alive);
    }
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignMemory")
            .field("base", &self.base)
            .field("bytes", &self.bytes)
            .field("device_base", &self.device_base)
            .finish_non_exhaustive()
    }
}

/// Frees a heap block when the arena is done with it.
struct HeapBlock {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns the block, and the global allocator may free on any thread.
unsafe impl Send for HeapBlock {}
// SAFETY: a shared HeapBlock offers nothing to do.
unsafe impl Sync for HeapBlock {}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: the block came from alloc_zeroed with this layout, and is freed once, here.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}
