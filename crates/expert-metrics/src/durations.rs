//! Durations in buckets of powers of two.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The first bucket ends at 2^4 us, 16 us: below that lies what no network does.
const FIRST_POWER: u32 = 4;
/// The last one with an end of its own ends at 2^24 us, 16.8 s: beyond every deadline by default.
const LAST_POWER: u32 = 24;
const ENDS: usize = (LAST_POWER - FIRST_POWER + 1) as usize;

/// What a histogram shows at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Buckets {
    /// Durations of each bucket alone; the last one has no upper end.
    counts: [u64; ENDS + 1],
    sum_us: u64,
}

impl Buckets {
    /// From counts by upper end, in microseconds, and the sum of all durations.
    ///
    /// A count goes to the first bucket that ends there or later.
    pub fn from_counts(counts: impl IntoIterator<Item = (u64, u64)>, sum_us: u64) -> Self {
        let mut buckets = Self {
            sum_us,
            ..Self::default()
        };
        for (end_us, count) in counts {
            buckets.counts[index(end_us)] += count;
        }
        buckets
    }

    /// Number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_us)
    }

    /// Upper ends in seconds, and how many durations lie below each.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let mut below = 0;
        (FIRST_POWER..=LAST_POWER)
            .zip(&self.counts)
            .map(move |(power, count)| {
                below += count;
                ((1u64 << power) as f64 / 1e6, below)
            })
    }
}

/// The bucket of a duration that ends a range of microseconds.
fn index(us: u64) -> usize {
    let power = us.max(1).next_power_of_two().trailing_zeros();
    (power.max(FIRST_POWER) - FIRST_POWER).min(ENDS as u32) as usize
}

/// Counts durations; may be shared by threads.
#[derive(Debug, Default)]
pub struct Durations {
    counts: [AtomicU64; ENDS + 1],
    sum_us: AtomicU64,
}

impl Durations {
    /// Counts one.
    pub fn record(&self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        // `next_power_of_two` of more would overflow; no wait lasts five hundred thousand years.
        let us = us.min(1 << 62);
        self.counts[index(us)].fetch_add(1, Relaxed);
        self.sum_us.fetch_add(us, Relaxed);
    }

    /// What was counted so far.
    pub fn snapshot(&self) -> Buckets {
        Buckets {
            counts: std::array::from_fn(|i| self.counts[i].load(Relaxed)),
            sum_us: self.sum_us.load(Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_below_every_end_that_it_does_not_exceed() {
        for (us, at_most) in [
            (0u64, 16e-6),
            (16, 16e-6),
            (17, 32e-6),
            (1000, 1024e-6),
            (16_777_216, 16.777216),
            (u64::MAX, f64::INFINITY),
        ] {
            let durations = Durations::default();
            durations.record(Duration::from_micros(us));
            let buckets = durations.snapshot();
            assert_eq!(buckets.count(), 1);
            for (end, below) in buckets.cumulative() {
                assert_eq!(below, u64::from(end >= at_most), "{us} us, {end} s");
            }
        }
    }

    #[test]
    fn counts_by_their_ends_are_the_same_as_durations_one_by_one() {
        let durations = Durations::default();
        for us in [20, 20, 500] {
            durations.record(Duration::from_micros(us));
        }
        assert_eq!(
            Buckets::from_counts([(20, 2), (512, 1)], 540),
            durations.snapshot()
        );
        assert_eq!(durations.snapshot().sum(), Duration::from_micros(540));
    }
}
