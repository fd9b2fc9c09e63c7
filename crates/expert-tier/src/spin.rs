//! Looking for a while before going to sleep.
//!
//! A record of some kilobytes is there after some tens of microseconds, of which most is the time that
//! processors take to wake up. Who waits for so little looks a while first, and lets others run in
//! between; who waits for more sleeps at once, because there the processor has better things to do.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What comes so soon that it is looked for.
pub(crate) const SOON_BYTES: u64 = 256 << 10;

/// Threads of this process that look just now; no more than processors.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

struct Looking;

impl Looking {
    fn begin() -> Option<Self> {
        static MAX: OnceLock<usize> = OnceLock::new();
        let max = *MAX.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
        let mine = Self;
        (LOOKING.fetch_add(1, Ordering::Relaxed) < max).then_some(mine)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        LOOKING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns when `done` says so, after `time` at the latest, or at once where enough others look.
pub(crate) fn spin(time: Duration, mut done: impl FnMut() -> bool) {
    if time.is_zero() || done() {
        return;
    }
    let Some(_looking) = Looking::begin() else {
        return;
    };
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::thread::yield_now();
        if done() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_ends_with_what_it_waits_for_or_with_its_time() {
        let mut looks = 0;
        spin(Duration::from_secs(600), || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
        spin(Duration::from_millis(1), || false);
        spin(Duration::ZERO, || panic!("nothing to look for"));
    }
}
