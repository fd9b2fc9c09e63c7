//! A draw that is easily made elsewhere, too: what this is compared with reads the same records.

/// SplitMix64: the same seed gives the same numbers.
#[derive(Debug, Clone)]
pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next of `count` things; `count` is not 0.
    pub(super) fn index(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_other_implementations() {
        let mut draw = Draw::new(1_234_567);
        let numbers: Vec<u64> = (0..3).map(|_| draw.next()).collect();
        assert_eq!(
            numbers,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
        assert_eq!(Draw::new(1_234_567).index(110), 7);
    }
}
