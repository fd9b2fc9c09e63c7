//! What measurements share: processor time and percentiles.

use rustix::time::{ClockId, clock_gettime};

/// CPU time of this process so far, all threads.
pub(super) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// CPU seconds for each GiB, 0 where there are no bytes.
pub(super) fn per_gib(cpu_seconds: f64, bytes: u64) -> f64 {
    match bytes {
        0 => 0.0,
        bytes => cpu_seconds / (bytes as f64 / f64::from(1 << 30)),
    }
}

/// Nearest-rank percentile of sorted numbers, 0 where there are none; `tenths` of a percent.
pub(super) fn per_mille(sorted: &[u64], tenths: usize) -> u64 {
    let rank = (sorted.len() * tenths).div_ceil(1000);
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_take_the_nearest_rank() {
        assert_eq!(per_mille(&[], 500), 0);
        assert_eq!(per_mille(&[5], 990), 5);
        assert_eq!(per_mille(&[1, 2, 3, 4], 500), 2);
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(per_mille(&hundred, 990), 99);
        assert_eq!(per_mille(&hundred, 999), 100);
        assert_eq!(per_mille(&hundred, 1000), 100);
    }
}
