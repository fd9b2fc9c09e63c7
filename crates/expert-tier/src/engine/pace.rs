//! How fast a rail carries bytes while it has any to carry.

use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Pace {
    bytes_per_s: Option<f64>,
    /// The fastest that it was.
    best_bytes_per_s: f64,
    /// When it last got something to carry, or carried something.
    since: Option<Instant>,
    /// What landed since the last sample, and in how much time with something to carry.
    bytes: u64,
    busy: Duration,
    /// What is known is old: the next sample replaces it.
    is_old: bool,
    /// The same over longer.
    long_bytes: u64,
    long_busy: Duration,
    best_sustained_bytes_per_s: f64,
}

/// Shorter measurements say more of the driver's turns than of the rail.
const SAMPLE_MIN: Duration = Duration::from_millis(5);

/// What a rail carries over so much time cannot be a burst after a pause: a stall of the machine makes
/// two READs arrive at once, never a dozen.
const SUSTAINED_MIN: Duration = Duration::from_millis(250);

/// What a rail carries in this time is posted on it at once. Long against a round trip (so that it
/// never runs dry), short against a request (so that others can help).
const HORIZON_S: f64 = 0.020;

/// After so long without work a rail may have recovered from what made it slow: it is taken for as
/// fast as it ever was until it shows otherwise. Else a rail once slow would be left out for ever.
const FORGET: Duration = Duration::from_secs(1);

impl Pace {
    pub(super) fn posted(&mut self, was_idle: bool, now: Instant) {
        if was_idle {
            if !self.is_old && self.quiet_for(now) >= FORGET {
                self.is_old = true;
                self.bytes = 0;
                self.busy = Duration::ZERO;
            }
            self.since = Some(now);
        }
    }

    pub(super) fn landed(&mut self, bytes: u64, now: Instant) {
        let since = self.since.replace(now).unwrap_or(now);
        // What lands at one moment belongs to one sample: a driver that comes late finds much at
        // once.
        if now > since && self.busy >= SAMPLE_MIN {
            self.close_sample();
        }
        self.bytes += bytes;
        self.busy += now.saturating_duration_since(since);
        self.long_bytes += bytes;
        self.long_busy += now.saturating_duration_since(since);
        if self.long_busy >= SUSTAINED_MIN {
            let rate = self.long_bytes as f64 / self.long_busy.as_secs_f64();
            self.best_sustained_bytes_per_s = self.best_sustained_bytes_per_s.max(rate);
            self.long_bytes = 0;
            self.long_busy = Duration::ZERO;
        }
    }

    fn close_sample(&mut self) {
        let sample = self.bytes as f64 / self.busy.as_secs_f64();
        // The larger half of the weight is the past's: one late completion is no new rate.
        let rate = match self.bytes_per_s {
            Some(before) if !self.is_old => 0.6 * before + 0.4 * sample,
            _ => sample,
        };
        self.is_old = false;
        self.bytes_per_s = Some(rate);
        self.best_bytes_per_s = self.best_bytes_per_s.max(rate);
        self.bytes = 0;
        self.busy = Duration::ZERO;
    }

    /// What has landed and is no sample yet, as a rate.
    fn first_impression(&self) -> Option<f64> {
        let is_any = self.bytes > 0 && !self.busy.is_zero();
        is_any.then(|| self.bytes as f64 / self.busy.as_secs_f64())
    }

    /// Bytes that it carries within the horizon, where that is known.
    pub(super) fn horizon_bytes(&self) -> Option<u64> {
        let first = self.first_impression().filter(|_| self.busy >= SAMPLE_MIN);
        let rate = self.bytes_per_s.or(first)?;
        Some((rate * HORIZON_S) as u64)
    }

    /// The rate to plan with; never 0.
    pub(super) fn rate(&self, now: Instant, is_idle: bool) -> Option<f64> {
        let rate = match self.bytes_per_s {
            Some(_) if is_idle && self.quiet_for(now) >= FORGET => Some(self.best_bytes_per_s),
            Some(rate) => Some(rate),
            None => self.first_impression(),
        };
        rate.filter(|rate| *rate > 0.0)
    }

    /// The fastest that it was for a while; 0 until that is known.
    pub(super) fn best_sustained_bytes_per_s(&self) -> u64 {
        self.best_sustained_bytes_per_s as u64
    }

    /// Since it last got something to carry, or carried something.
    pub(super) fn quiet_for(&self, now: Instant) -> Duration {
        self.since
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    fn carry(pace: &mut Pace, now: &mut Instant, reads: u64, each: Duration) {
        for _ in 0..reads {
            pace.posted(true, *now);
            *now += each;
            pace.landed(1_000_000, *now);
        }
    }

    #[test]
    fn first_read_gives_a_first_impression() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        assert_eq!(pace.rate(now, true), None);
        carry(&mut pace, &mut now, 1, Duration::from_millis(1));
        assert!((pace.rate(now, true).unwrap() / MB - 1000.0).abs() < 1.0);
        assert_eq!(pace.horizon_bytes(), None, "too short to size a window by");
    }

    #[test]
    fn late_driver_that_finds_much_at_once_is_no_fast_rail() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        pace.posted(true, now);
        for _ in 0..20 {
            // Ten at once every 100 ms: 100 MB/s.
            now += Duration::from_millis(100);
            for _ in 0..10 {
                pace.landed(1_000_000, now);
            }
        }
        assert!((pace.best_bytes_per_s / MB - 100.0).abs() < 1.0);
        assert_eq!(pace.best_sustained_bytes_per_s(), 100_000_000);
    }

    #[test]
    fn rail_that_was_slow_is_tried_again_after_a_while() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        carry(&mut pace, &mut now, 20, Duration::from_millis(10));
        carry(&mut pace, &mut now, 20, Duration::from_millis(500));
        assert!(pace.rate(now, true).unwrap() < 3.0 * MB);
        now += Duration::from_secs(2);
        assert!(pace.rate(now, true).unwrap() > 90.0 * MB);
        carry(&mut pace, &mut now, 3, Duration::from_millis(20));
        assert!((pace.rate(now, true).unwrap() / MB - 50.0).abs() < 1.0);
    }
}
