//! Drawing by Zipf's law, the same on every machine.

use crate::mock::rng::SplitMix;

/// Weights `1/1, 1/2^s, 1/3^s, …` as integers, summed up.
#[derive(Debug)]
pub(super) struct Zipf {
    /// Sum of the weights up to each rank, itself included.
    sums: Vec<u64>,
}

/// Draws that are tried before the ranks that are left are walked one by one.
const TRIES: usize = 8;

impl Zipf {
    pub(super) fn new(count: u32, exponent: f64) -> Self {
        let mut sum = 0;
        let weight = |rank: u32| {
            // 65,535 weights of 2^40 at most fit by far; none is zero, so each rank is drawn at times.
            let share = power(f64::from(rank) + 1.0, -exponent);
            ((share * (1u64 << 40) as f64) as u64).max(1)
        };
        let sums = (0..count)
            .map(|rank| {
                sum += weight(rank);
                sum
            })
            .collect();
        Self { sums }
    }

    /// A rank that is not `taken`, by weight among those. `None` where all are.
    pub(super) fn draw(&self, rng: &mut SplitMix, taken: impl Fn(usize) -> bool) -> Option<usize> {
        let all = *self.sums.last()?;
        for _ in 0..TRIES {
            let at = rng.below(all);
            let rank = self.sums.partition_point(|&sum| sum <= at);
            if !taken(rank) {
                return Some(rank);
            }
        }
        let free = |rank: &usize| !taken(*rank);
        let left: u64 = (0..self.sums.len())
            .filter(free)
            .map(|r| self.weight(r))
            .sum();
        let mut at = rng.below(left);
        (0..self.sums.len()).filter(free).find(|&rank| {
            let weight = self.weight(rank);
            let is_here = at < weight;
            at = at.saturating_sub(weight);
            is_here
        })
    }

    fn weight(&self, rank: usize) -> u64 {
        match rank {
            0 => self.sums[0],
            _ => self.sums[rank] - self.sums[rank - 1],
        }
    }
}

/// `base` to the `exponent`, for a base of at least 1.
///
/// The standard library's is the system's, and systems differ in the last digit. Here are only
/// operations that IEEE 754 defines to the bit, so a seed means one trace everywhere.
fn power(base: f64, exponent: f64) -> f64 {
    exp(exponent * ln(base))
}

const LN_2: f64 = std::f64::consts::LN_2;

/// Natural logarithm of a number of at least 1: halved until it is near 1, then
/// `2 artanh((m - 1) / (m + 1))`, whose series is short there.
fn ln(x: f64) -> f64 {
    let (mut m, mut halvings) = (x, 0.0);
    while m > 1.5 {
        m /= 2.0;
        halvings += 1.0;
    }
    let t = (m - 1.0) / (m + 1.0);
    let mut sum = 0.0;
    // |t| is at most 1/5 (1/7 below 1), so the last term is below 1e-17.
    for n in (0..12).rev() {
        sum = sum * t * t + 1.0 / f64::from(2 * n + 1);
    }
    2.0 * t * sum + halvings * LN_2
}

/// The exponential of a number that is not positive: halvings, and the Taylor series of the rest.
fn exp(x: f64) -> f64 {
    let halvings = (-x / LN_2).floor();
    if halvings >= 64.0 {
        return 0.0;
    }
    let rest = x + halvings * LN_2;
    let mut sum = 1.0;
    for n in (1..20).rev() {
        sum = 1.0 + sum * rest / f64::from(n);
    }
    sum / (1u64 << halvings as u32) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_is_near_the_libraries() {
        for base in [1.0f64, 1.5, 2.0, 3.0, 10.0, 127.0, 65_535.0] {
            for exponent in [0.0, -0.1, -0.7, -1.0, -2.5, -4.0] {
                let (ours, theirs) = (power(base, exponent), base.powf(exponent));
                assert!(
                    (ours / theirs - 1.0).abs() < 1e-13,
                    "{base}^{exponent}: {ours}, {theirs}"
                );
            }
        }
    }

    #[test]
    fn ranks_come_as_often_as_their_weights_say() {
        let zipf = Zipf::new(10, 1.0);
        let mut rng = SplitMix::new(1);
        let mut counts = [0u32; 10];
        let draws = 100_000;
        for _ in 0..draws {
            counts[zipf.draw(&mut rng, |_| false).expect("ten ranks")] += 1;
        }
        let harmonic: f64 = (1..=10).map(|k| 1.0 / f64::from(k)).sum();
        for (rank, count) in counts.iter().enumerate() {
            let want = f64::from(draws) / harmonic / (rank as f64 + 1.0);
            assert!(
                (f64::from(*count) / want - 1.0).abs() < 0.05,
                "{rank}: {count}, {want}"
            );
        }
    }

    #[test]
    fn what_is_taken_is_not_drawn_and_the_rest_keeps_its_weights() {
        // The first rank has nearly all the weight: draws beside it come from the walk.
        let zipf = Zipf::new(4, 4.0);
        let mut rng = SplitMix::new(2);
        let mut counts = [0u32; 4];
        for _ in 0..20_000 {
            counts[zipf
                .draw(&mut rng, |rank| rank == 0)
                .expect("three are left")] += 1;
        }
        assert_eq!(counts[0], 0);
        let ratio = f64::from(counts[1]) / f64::from(counts[2]);
        assert!((ratio / (1.5f64).powi(4) - 1.0).abs() < 0.1, "{counts:?}");
        assert_eq!(zipf.draw(&mut rng, |_| true), None);
    }
}
