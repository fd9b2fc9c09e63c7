//! Memory that may be registered: it stays where it is for as long as its owner lives.

/// Memory that a device may be told of.
///
/// # Safety
///
/// `base()..base() + len_bytes()` is mapped, and belongs to this value alone, from the first call
/// until the value is dropped; both answers never change. Dropping it is what ends that, so whoever
/// registers it keeps it alive until the region is deregistered.
pub unsafe trait StableMemory: Send + Sync {
    /// First byte.
    fn base(&self) -> *mut u8;
    /// Count of bytes.
    fn len_bytes(&self) -> usize;
}
