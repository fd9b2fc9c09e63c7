//! Objects that could not be released: counted, never hidden.

use std::sync::atomic::{AtomicU64, Ordering};

static LEAKS: AtomicU64 = AtomicU64::new(0);

/// How many verbs objects, and memory behind them, this process gave up because releasing them failed. Anything but 0
/// is worth an alarm; each has a line in the log.
pub fn leaks() -> u64 {
    LEAKS.load(Ordering::Relaxed)
}

/// Logs and counts an object that stays behind.
pub(crate) fn leaked(device: &str, what: &str, errno: i32) {
    LEAKS.fetch_add(1, Ordering::Relaxed);
    let source = crate::error::os(errno);
    tracing::error!("{what} of RDMA device {device} was not released and is leaked: {source}");
}
