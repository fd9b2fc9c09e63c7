//! How much of a thread's time was work: what it ran, and what it waited for a processor.
//!
//! On a machine that is shared, a thread that has work all the time may run for half of it. Its
//! clock of processor time alone would call that idle.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The clock of the thread that made it; of use to that thread alone.
#[derive(Debug)]
pub(crate) struct WorkClock {
    /// Time on a processor and time in its queue, nanoseconds; where the kernel keeps them.
    schedstat: Option<File>,
}

impl WorkClock {
    pub(crate) fn of_this_thread() -> Self {
        Self {
            schedstat: File::open("/proc/thread-self/schedstat").ok(),
        }
    }

    /// Time that the thread ran or waited to run, since it began.
    pub(crate) fn time(&self) -> Duration {
        self.with_waits().unwrap_or_else(|| {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            Duration::try_from(time).unwrap_or_default()
        })
    }

    fn with_waits(&self) -> Option<Duration> {
        let mut text = [0; 64];
        let len = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        let mut numbers = std::str::from_utf8(&text[..len]).ok()?.split_whitespace();
        let mut number = || numbers.next()?.parse::<u64>().ok();
        let (ran, waited) = (number()?, number()?);
        // A kernel that does not count says 0.
        (ran > 0).then(|| Duration::from_nanos(ran + waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn work_counts_and_sleep_does_not() {
        let clock = WorkClock::of_this_thread();
        let before = clock.time();
        std::thread::sleep(Duration::from_millis(50));
        let slept = clock.time() - before;
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(50) {
            std::hint::spin_loop();
        }
        let worked = clock.time() - before - slept;
        // However busy the machine is: what was not run was waited for.
        assert!(worked >= Duration::from_millis(35), "{worked:?}");
        assert!(slept < worked, "{slept:?} {worked:?}");
    }
}
