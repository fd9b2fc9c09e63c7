//! Which records are read, and what is told of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::Error;

/// Records of one size, drawn by a seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) record_bytes: u64,
    /// Records that the file holds, one after the other from its start.
    pub(crate) among: u64,
    /// Records to read.
    pub(crate) records: usize,
    /// Records under way at once.
    pub(crate) batch: usize,
    pub(crate) seed: u64,
}

impl Work {
    pub(crate) fn check(&self, threads: usize) -> Result<(), Error> {
        let sizes = 1..=1 << 30;
        let counts = 1..=1 << 20;
        if sizes.contains(&self.record_bytes)
            && counts.contains(&self.records)
            && counts.contains(&self.batch)
            && self.among > 0
            && (1..=64).contains(&threads)
            && self.record_bytes.saturating_mul(self.batch as u64) <= 16 << 30
        {
            return Ok(());
        }
        Err(format!("{self:?} with {threads} threads: every number has to be at least 1, a record at most 1 GiB, a batch 16 GiB, threads 64").into())
    }

    /// Offsets of the records, in the order in which they are asked for: SplitMix64, as `atlas-expert bench fetch` draws.
    pub(crate) fn offsets(&self) -> Vec<u64> {
        let mut state = self.seed;
        let mut next = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        };
        (0..self.records)
            .map(|_| next() % self.among * self.record_bytes)
            .collect()
    }
}

/// When it began, and the processor time of this process then.
pub(crate) struct Clock(Instant, f64);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now(), cpu_seconds())
    }

    /// Prints what it took since.
    pub(crate) fn report(&self, work: &Work, mut took: Vec<Duration>) {
        let (seconds, cpu) = (self.0.elapsed().as_secs_f64(), cpu_seconds() - self.1);
        took.sort_unstable();
        let percentile = |percent: usize| {
            let rank = (took.len() * percent).div_ceil(100).max(1);
            took.get(rank - 1).map_or(0.0, |d| d.as_secs_f64() * 1e6)
        };
        println!(
            "{{\"bytes\": {}, \"records\": {}, \"seconds\": {seconds}, \"cpu_seconds\": {cpu}, \
             \"record_p50_us\": {:.1}, \"record_p99_us\": {:.1}}}",
            work.records as u64 * work.record_bytes,
            work.records,
            percentile(50),
            percentile(99),
        );
    }
}

/// Processor time of this process so far, all its threads.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Memory that was written to once.
pub(crate) fn prefaulted(bytes: u64) -> Vec<u8> {
    vec![1; bytes as usize]
}

/// Whether a record is what the file has there.
pub(crate) fn compare(file: &Path, offset: u64, record: &[u8]) -> Result<(), Error> {
    let mut wanted = vec![0; record.len()];
    File::open(file)?.read_exact_at(&mut wanted, offset)?;
    match record == wanted {
        true => Ok(()),
        false => Err(format!(
            "{} bytes at {offset} differ from {}",
            record.len(),
            file.display()
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draw_is_the_one_of_bench_fetch() {
        let work = Work {
            record_bytes: 10,
            among: 110,
            records: 2,
            batch: 1,
            seed: 1_234_567,
        };
        // SplitMix64's first numbers modulo 110.
        let first = 6_457_827_717_110_365_317 % 110 * 10;
        let second = 3_203_168_211_198_807_973 % 110 * 10;
        assert_eq!(work.offsets(), [first, second]);
    }
}
