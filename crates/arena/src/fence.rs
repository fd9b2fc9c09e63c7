//! Fences: when a reader that the CPU does not see has finished.

use std::time::Instant;

/// Tells when an asynchronous reader, such as a GPU stream, has finished with a slot.
pub trait Fence: Send {
    /// Whether the reader has finished. Once true, it stays true.
    ///
    /// It is polled by [`ExpertArena::reap`](crate::ExpertArena::reap) and when the arena is dropped; it must not
    /// block. No lock of the arena is held during the call.
    fn fired(&self) -> bool;
}

/// What one call of [`ExpertArena::reap`](crate::ExpertArena::reap) found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReapReport {
    /// Fences that had fired and are gone now.
    pub fired: usize,
    /// Slots that became Free through that.
    pub freed: usize,
    /// Fences of the slots looked at that have not fired.
    pub pending: usize,
}

/// A fence and when it was attached.
pub(crate) struct PendingFence {
    pub(crate) fence: Box<dyn Fence>,
    pub(crate) since: Instant,
}
