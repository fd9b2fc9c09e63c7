//! How much of a thread's time was work: what it ran, and what it waited for a processor.
//!
//! On a machine that is shared, a thread that has work all the time may run for half of it. Its
//! clock of processor time alone would call that idle.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The clock of the thread that made it.
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

    /// What another thread can see of it: nothing where the kernel does not keep the times of threads.
    pub(crate) fn time_from_elsewhere(&self) -> Option<Duration> {
        self.with_waits()
    }

    /// Time that the thread ran or waited to run, since it began; asked by that thread.
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

/// Work of threads that come and go, added up by themselves.
#[derive(Debug, Default)]
pub(crate) struct WorkSum(AtomicU64);

impl WorkSum {
    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Between two looks of a thread at its clock: a look is a system call, which is to cost nothing
/// beside the work that it tells of.
const LOOK: Duration = Duration::from_micros(500);

/// A thread's part of a [`WorkSum`]; of use to the thread that made it alone.
#[derive(Debug)]
pub(crate) struct WorkMeter {
    clock: WorkClock,
    told: Duration,
    looked_at: Instant,
}

impl WorkMeter {
    pub(crate) fn of_this_thread() -> Self {
        Self {
            clock: WorkClock::of_this_thread(),
            told: Duration::ZERO,
            looked_at: Instant::now(),
        }
    }

    /// Adds what the thread did since the last time, if that is a while ago.
    pub(crate) fn tell_now_and_then(&mut self, sum: &WorkSum) {
        let now = Instant::now();
        if now.saturating_duration_since(self.looked_at) >= LOOK {
            self.looked_at = now;
            self.tell(sum);
        }
    }

    /// Adds what the thread did since the last time.
    pub(crate) fn tell(&mut self, sum: &WorkSum) {
        let time = self.clock.time();
        let new = time.saturating_sub(self.told);
        self.told = time;
        sum.0.fetch_add(new.as_nanos() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_threads_adds_up_and_stays_when_they_are_gone() {
        let sum = WorkSum::default();
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut meter = WorkMeter::of_this_thread();
                    let until = Instant::now() + Duration::from_millis(50);
                    while Instant::now() < until {
                        meter.tell_now_and_then(&sum);
                    }
                    meter.tell(&sum);
                });
            }
        });
        let (each, time) = (began.elapsed(), sum.time());
        // Each worked, or waited for a processor, all the time; nothing is counted twice.
        assert!(time >= Duration::from_millis(70), "{time:?}");
        assert!(time <= 2 * each + Duration::from_millis(20), "{time:?}");
    }

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
