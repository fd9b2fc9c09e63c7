//! A generator of our own, so that a seed in an old bug report still means the same run.

use std::time::Duration;

/// splitmix64.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix(u64);

impl SplitMix {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to `end`, exclusive; 0 when that is empty.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// From `first` to `last`, both included.
    pub(crate) fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn index(&mut self, count: usize) -> usize {
        self.below(count as u64) as usize
    }

    pub(crate) fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.index(items.len())]
    }

    /// Each order of magnitude from `first` to `last` is equally likely.
    pub(crate) fn magnitude(&mut self, first: u64, last: u64) -> u64 {
        let share = self.below(1 << 53) as f64 / (1u64 << 53) as f64;
        (first as f64 * (last as f64 / first as f64).powf(share)) as u64
    }

    pub(crate) fn duration(&mut self, first_us: u64, last_us: u64) -> Duration {
        Duration::from_micros(self.magnitude(first_us, last_us))
    }
}
