//! Numbers from a seed: the same on every machine.

/// A stream of numbers (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// The stream of a seed and what it is for.
    pub(crate) fn new(seed: u64, purpose: [u32; 3]) -> Self {
        let mut this = Self(seed);
        for part in purpose {
            this.0 = this.next_u64() ^ u64::from(part);
        }
        this
    }

    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number of [-1, 1), a multiple of 2^-23: exact in an `f32`.
    pub(crate) fn unit(&mut self) -> f32 {
        let bits = (self.next_u64() >> 40) as i32; // 24 bits
        (bits - (1 << 23)) as f32 / (1 << 23) as f32
    }

    /// Fills a slice with such numbers.
    pub(crate) fn fill(&mut self, out: &mut [f32]) {
        out.fill_with(|| self.unit());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_by_seed_and_by_each_part_of_their_purpose() {
        let first = |seed, purpose| Random::new(seed, purpose).next_u64();
        let all = [
            first(1, [0, 0, 0]),
            first(2, [0, 0, 0]),
            first(1, [1, 0, 0]),
            first(1, [0, 1, 0]),
            first(1, [0, 0, 1]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{all:?}");
        }
        assert_eq!(first(1, [0, 0, 0]), all[0]);
    }

    #[test]
    fn numbers_fill_the_interval_and_stay_in_it() {
        let mut random = Random::new(3, [0; 3]);
        let numbers: Vec<f32> = (0..10_000).map(|_| random.unit()).collect();
        assert!(numbers.iter().all(|n| (-1.0..1.0).contains(n)));
        assert!(numbers.iter().any(|&n| n < -0.99) && numbers.iter().any(|&n| n > 0.99));
        let mean = numbers.iter().sum::<f32>() / numbers.len() as f32;
        assert!(mean.abs() < 0.05, "{mean}");
    }
}
