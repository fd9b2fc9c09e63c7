//! How long-running work tells its caller how far it is.

/// Receives progress; called from several threads at once, about once per megabyte.
pub trait Progress: Send + Sync {
    /// A step begins.
    fn start(&self, what: &str, total_bytes: u64);
    /// That many more bytes are done.
    fn advance(&self, bytes: u64);
    /// The step is over, well or not.
    fn finish(&self);
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn start(&self, _what: &str, _total_bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn finish(&self) {}
}
