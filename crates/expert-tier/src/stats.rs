//! Numbers that the engine keeps: per rail and per request.

use std::time::Duration;

use expert_metrics::Buckets;
use serde::Serialize;

use crate::attribution::{Limit, LimitCounts};
use crate::rail::RailKind;
use crate::rails::uma::IoReport;

/// Counts durations in buckets that grow by a quarter: percentiles within 12 %, no allocation.
#[derive(Debug, Clone)]
pub struct Histogram {
    buckets: [u64; Self::BUCKETS],
    count: u64,
    sum_us: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: [0; Self::BUCKETS],
            count: 0,
            sum_us: 0,
        }
    }
}

impl Histogram {
    // Four buckets per power of two, 1 us to 2^32 us (71 minutes).
    const BUCKETS: usize = 32 * 4;

    fn bucket(us: u64) -> usize {
        let us = us.max(1);
        let power = us.ilog2();
        let quarter = match power {
            0 | 1 => (us - (1 << power)) << (2 - power),
            _ => (us >> (power - 2)) & 3,
        };
        ((power as usize) * 4 + quarter as usize).min(Self::BUCKETS - 1)
    }

    /// Upper end of a bucket, microseconds.
    fn upper_us(bucket: usize) -> u64 {
        let (power, quarter) = (bucket / 4, bucket as u64 % 4);
        (1u64 << power) + ((quarter + 1) << power) / 4
    }

    /// Counts one duration.
    pub fn record(&mut self, duration: Duration) {
        let us = duration.as_micros() as u64;
        self.buckets[Self::bucket(us)] += 1;
        self.count += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }

    /// Number of durations counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The same in the buckets of a metrics page, which end at powers of two.
    pub fn buckets(&self) -> Buckets {
        let ends = (0..Self::BUCKETS).map(Self::upper_us);
        Buckets::from_counts(ends.zip(self.buckets), self.sum_us)
    }

    /// The duration below which a share of all lies (0.5 = median), microseconds; 0 when empty.
    pub fn percentile_us(&self, share: f64) -> u64 {
        let rank = (share * self.count as f64).ceil() as u64;
        let mut seen = 0;
        for (i, n) in self.buckets.iter().enumerate() {
            seen += n;
            if seen >= rank && seen > 0 {
                return Self::upper_us(i);
            }
        }
        0
    }
}

/// Errors of one rail by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RailErrors {
    /// READs that came back because the rail went down.
    pub flushed: u64,
    /// Chunks that did not fit their checksum.
    pub checksum: u64,
    /// READs that the peer refused or answered wrongly.
    pub refused: u64,
    /// Times that the rail stood still.
    pub stalls: u64,
    /// Times that the rail went down, stalls included.
    pub downs: u64,
    /// Attempts to bring it back that failed.
    pub probes_failed: u64,
}

impl RailErrors {
    /// All of them.
    pub fn total(&self) -> u64 {
        // Stalls are downs, and each flushed READ follows from one.
        self.checksum + self.refused + self.downs + self.probes_failed
    }
}

/// A rail's numbers at one moment.
#[derive(Debug, Clone, Serialize)]
pub struct RailStats {
    /// Name for people.
    pub name: String,
    /// Kind.
    pub kind: RailKind,
    /// `up`, `suspect`, `quarantined`, `probing`.
    pub state: &'static str,
    /// Bytes of READs that completed well.
    pub bytes: u64,
    /// READs that completed well.
    pub reads: u64,
    /// Errors, all causes.
    pub errors: u64,
    /// Errors by cause.
    pub errors_by_cause: RailErrors,
    /// Changes of state since the start.
    pub state_changes: u64,
    /// Bytes posted and not completed.
    pub in_flight_bytes: u64,
    /// Median time from post to completion, microseconds.
    pub latency_p50_us: u64,
    /// 99th percentile of the same.
    pub latency_p99_us: u64,
    /// All times from post to completion.
    #[serde(skip)]
    pub latency: Histogram,
    /// Time that its own threads ran or waited for a processor, microseconds; 0 where it has none,
    /// or does not know.
    pub cpu_us: u64,
    /// Bytes of the arena that its card may write to; 0 where it has none.
    pub registered_bytes: u64,
    /// How files are read, where it reads files many at once.
    pub io: Option<IoReport>,
}

/// Where the time of one request went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// From submission to the first READ posted.
    pub queued: Duration,
    /// From the first READ posted to the end.
    pub wire: Duration,
    /// From submission to the end.
    pub total: Duration,
    /// Sum of checksum time over all READs (of helper threads, too).
    pub verify: Duration,
    /// Bytes committed.
    pub bytes: u64,
    /// READs that came back, well or not.
    pub reads: u64,
    /// Those whose bytes had to be read again.
    pub retries: u64,
    /// What limited it.
    pub limit: Limit,
}

/// Median and 99th percentile of a duration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    /// Median, microseconds.
    pub p50_us: u64,
    /// 99th percentile, microseconds.
    pub p99_us: u64,
}

impl From<&Histogram> for Percentiles {
    fn from(histogram: &Histogram) -> Self {
        Self {
            p50_us: histogram.percentile_us(0.5),
            p99_us: histogram.percentile_us(0.99),
        }
    }
}

/// Where the time of all requests went.
#[derive(Debug, Clone, Default)]
pub struct RequestTimes {
    /// From submission to the first READ posted.
    pub queue: Histogram,
    /// From the first READ posted to the end.
    pub wire: Histogram,
    /// In which checksums were compared.
    pub verify: Histogram,
    /// From submission to the end.
    pub total: Histogram,
}

/// A tier's numbers at one moment.
#[derive(Debug, Clone, Serialize)]
pub struct TierStats {
    /// Per rail, in order of configuration.
    pub rails: Vec<RailStats>,
    /// Requests finished.
    pub requests: u64,
    /// Records committed.
    pub records: u64,
    /// Bytes committed.
    pub bytes: u64,
    /// Records that failed.
    pub failed: u64,
    /// Chunks that did not fit their checksum.
    pub verify_failures: u64,
    /// Records committed without a comparison of checksums.
    pub unverified: u64,
    /// Times that a READ was finished by another rail than the one it was first posted on.
    pub fallbacks: u64,
    /// Times that rails of a lower preference took over because no preferred one worked.
    pub takeovers: u64,
    /// Times that a peer was refused because of what it serves, or says that it does.
    pub peers_refused: u64,
    /// Requests refused with back-pressure.
    pub backpressure: u64,
    /// Records fetched once more because their content had changed under way.
    pub replanned: u64,
    /// Requests by what limited them.
    pub limits: LimitCounts,
    /// Per request, from submission to the first READ posted.
    pub queue: Percentiles,
    /// Per request, from the first READ posted to the end.
    pub wire: Percentiles,
    /// Per request, time in which checksums were compared.
    pub verify: Percentiles,
    /// Per request, from submission to the end.
    pub total: Percentiles,
    /// All of the four.
    #[serde(skip)]
    pub times: RequestTimes,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn percentile_lies_within_a_quarter_above_the_true_value(us in 1u64..1_000_000_000) {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_micros(us));
            let got = histogram.percentile_us(0.5);
            prop_assert!(got >= us && got <= us + us / 4 + 1, "{us} {got}");
        }
    }

    #[test]
    fn buckets_hold_what_was_recorded_below_the_next_power_of_two() {
        let mut histogram = Histogram::default();
        for us in [10, 100, 100, 5000] {
            histogram.record(Duration::from_micros(us));
        }
        let buckets = histogram.buckets();
        assert_eq!(buckets.sum(), Duration::from_micros(5210));
        for (end, below) in buckets.cumulative() {
            let want = [10e-6, 100e-6, 100e-6, 5000e-6].iter();
            let want = want.filter(|seconds| **seconds < end).count();
            assert_eq!(below, want as u64, "below {end} s");
        }
    }

    #[test]
    fn percentiles_follow_ranks() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile_us(0.99), 0);
        for us in [10, 10, 10, 1000] {
            histogram.record(Duration::from_micros(us));
        }
        assert!(histogram.percentile_us(0.5) < 20);
        assert!(histogram.percentile_us(0.99) >= 1000);
    }
}
