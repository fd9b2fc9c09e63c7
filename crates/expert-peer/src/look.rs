//! Looking for the next request for a while before going to sleep, one connection at a time: strangers
//! cannot make more than one processor look.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Answers of at most so many bytes are soon followed by the next request.
pub(crate) const SOON_BYTES: u32 = 256 << 10;

/// The connection that looks; the place is free again when this is dropped.
pub(crate) struct Looking<'a> {
    taken: &'a AtomicBool,
    until: Instant,
}

impl<'a> Looking<'a> {
    /// `None` where another connection looks, or there is no time to.
    pub(crate) fn begin(taken: &'a AtomicBool, time: Duration) -> Option<Self> {
        if time.is_zero() || taken.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(Self {
            taken,
            until: Instant::now() + time,
        })
    }

    /// Lets others run; false when the time is over.
    pub(crate) fn goes_on(&self) -> bool {
        std::thread::yield_now();
        Instant::now() < self.until
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.taken.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_looks_at_a_time_and_for_its_time() {
        let taken = AtomicBool::new(false);
        let first = Looking::begin(&taken, Duration::from_secs(600)).unwrap();
        assert!(first.goes_on());
        assert!(Looking::begin(&taken, Duration::from_secs(600)).is_none());
        drop(first);
        assert!(Looking::begin(&taken, Duration::ZERO).is_none());
        let short = Looking::begin(&taken, Duration::from_nanos(1)).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        assert!(!short.goes_on());
    }
}
