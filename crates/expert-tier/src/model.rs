//! Capacity model: what rails of given rates can bring at best.
//!
//! *Shapes and units*: rates in bytes per second, sizes in bytes. Nothing here knows latencies,
//! processors or noise: it is the line that measurements are held against.

use std::time::Duration;

/// One request in the eyes of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of one object; it is cut into READs of its own.
    pub object_bytes: u64,
    /// Objects of a request.
    pub objects: u64,
    /// Bytes of one READ; the last one of an object may be shorter.
    pub read_bytes: u64,
}

impl Shape {
    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.object_bytes * self.objects
    }

    /// READs of the full size, over all objects.
    fn whole_reads(&self) -> u64 {
        self.object_bytes / self.read_bytes.max(1) * self.objects
    }
}

/// Sum of the rates: what is reached only by requests of any size cut at any byte.
pub fn theoretical_bytes_per_s(rates: &[u64]) -> u64 {
    rates.iter().sum()
}

/// Shortest time in which rails can bring a request in whole READs, none of them shared by two rails.
///
/// For one object it is what the best assignment reaches. For several it is a lower bound, tight but
/// for their short last READs: no assignment ends the whole READs earlier, and none carries bytes
/// faster than all rails together. `None` where no rail has a rate.
pub fn balanced_time(rates: &[u64], shape: &Shape) -> Option<Duration> {
    let all = theoretical_bytes_per_s(rates);
    if all == 0 {
        return None;
    }
    let together_s = shape.bytes() as f64 / all as f64;
    let (count, read_bytes) = (shape.whole_reads(), shape.read_bytes as f64);
    let mut loads = vec![0.0; rates.len()];
    let tail = shape.object_bytes % shape.read_bytes.max(1);
    let whole_s = if shape.objects == 1 && tail > 0 {
        // The short READ goes somewhere; wherever it is, the others are dealt out best.
        let with_tail_on = |rail: usize| {
            loads[rail] = tail as f64;
            let end_s = whole_reads_s(rates, &loads, count, read_bytes);
            loads[rail] = 0.0;
            end_s
        };
        (0..rates.len())
            .map(with_tail_on)
            .fold(f64::INFINITY, f64::min)
    } else {
        whole_reads_s(rates, &loads, count, read_bytes)
    };
    Some(Duration::from_secs_f64(together_s.max(whole_s)))
}

/// The same as a rate.
pub fn balanced_bytes_per_s(rates: &[u64], shape: &Shape) -> f64 {
    match balanced_time(rates, shape) {
        Some(time) if !time.is_zero() => shape.bytes() as f64 / time.as_secs_f64(),
        _ => 0.0,
    }
}

/// When the last of `count` equal READs ends, on rails that have some bytes to carry already, each
/// given to the rail that ends it first: for equal work on machines of unequal speed that rule is
/// optimal.
fn whole_reads_s(rates: &[u64], loads: &[f64], count: u64, read_bytes: f64) -> f64 {
    // All but a few are dealt out at once by the rates; no rail gets more than the best
    // assignment would give it, beside a load of one READ at most.
    let all: f64 = rates.iter().map(|&r| r as f64).sum();
    let mut given: Vec<u64> = rates
        .iter()
        .map(|&r| (count as f64 * r as f64 / all).floor() as u64)
        .map(|n| n.saturating_sub(2))
        .collect();
    let mut last_s: f64 = 0.0;
    let end_s = |rail: usize, reads: u64| match rates[rail] {
        0 => f64::INFINITY,
        rate => (loads[rail] + reads as f64 * read_bytes) / rate as f64,
    };
    for (rail, &reads) in given.iter().enumerate() {
        if reads > 0 || loads[rail] > 0.0 {
            last_s = last_s.max(end_s(rail, reads));
        }
    }
    for _ in given.iter().sum::<u64>()..count {
        let first = (0..rates.len())
            .min_by(|&a, &b| end_s(a, given[a] + 1).total_cmp(&end_s(b, given[b] + 1)))
            .expect("a rail with a rate was seen above");
        given[first] += 1;
        last_s = last_s.max(end_s(first, given[first]));
    }
    last_s
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn mb_per_s(rates: &[u64], object_bytes: u64, read_bytes: u64) -> f64 {
        let shape = Shape {
            object_bytes,
            objects: 1,
            read_bytes,
        };
        balanced_bytes_per_s(rates, &shape) / 1e6
    }

    #[test]
    fn sixteen_pieces_dip_at_three_rails() {
        let bound = |rails| mb_per_s(&vec![125_000_000; rails], 64 * MIB, 4 * MIB);
        assert!((bound(1) - 125.0).abs() < 0.01);
        assert!((bound(2) - 250.0).abs() < 0.01);
        // Six of sixteen pieces on one rail.
        assert!((bound(3) - 333.33).abs() < 0.01, "{}", bound(3));
        assert!((bound(4) - 500.0).abs() < 0.01);
        assert!((bound(8) - 1000.0).abs() < 0.01);
    }

    #[test]
    fn unequal_rails_get_work_in_proportion() {
        let bound = mb_per_s(&[100_000_000, 25_000_000], 64 * MIB, 4 * MIB);
        // Thirteen pieces on the fast one, three on the slow one.
        assert!((bound - 123.08).abs() < 0.01, "{bound}");
    }

    #[test]
    fn rails_without_a_rate_carry_nothing() {
        let shape = Shape {
            object_bytes: MIB,
            objects: 1,
            read_bytes: MIB,
        };
        assert_eq!(balanced_time(&[0, 0], &shape), None);
        assert_eq!(balanced_time(&[], &shape), None);
        assert_eq!(
            balanced_time(&[0, MIB], &shape),
            Some(Duration::from_secs(1))
        );
    }

    /// Best makespan over every assignment of a few READs.
    fn exhaustive_s(rates: &[u64], sizes: &[u64]) -> f64 {
        fn go(rates: &[u64], sizes: &[u64], loads: &mut Vec<u64>) -> f64 {
            let Some((size, rest)) = sizes.split_first() else {
                let ends = loads.iter().zip(rates).map(|(l, r)| *l as f64 / *r as f64);
                return ends.fold(0.0, f64::max);
            };
            (0..rates.len())
                .map(|rail| {
                    loads[rail] += size;
                    let end = go(rates, rest, loads);
                    loads[rail] -= size;
                    end
                })
                .fold(f64::INFINITY, f64::min)
        }
        go(rates, sizes, &mut vec![0; rates.len()])
    }

    proptest! {
        #[test]
        fn bound_of_one_object_is_what_the_best_assignment_reaches(
            rates in proptest::collection::vec(1u64..1000, 1..4),
            reads in 1u64..8,
            tail in 0u64..100,
        ) {
            let shape = Shape { object_bytes: reads * 100 + tail, objects: 1, read_bytes: 100 };
            let bound = balanced_time(&rates, &shape).unwrap().as_secs_f64();
            let mut sizes = vec![100; reads as usize];
            sizes.push(tail);
            let best = exhaustive_s(&rates, &sizes);
            prop_assert!((bound - best).abs() <= best * 1e-6, "{bound} {best}");
        }

        #[test]
        fn another_rail_never_costs_anything(
            rates in proptest::collection::vec(1u64..1_000_000, 1..8),
            more in 0u64..1_000_000,
            object_bytes in 1u64..1_000_000,
            read_bytes in 1000u64..100_000,
        ) {
            let shape = Shape { object_bytes, objects: 2, read_bytes };
            let before = balanced_time(&rates, &shape).unwrap();
            let mut rates = rates;
            rates.push(more);
            let after = balanced_time(&rates, &shape).unwrap();
            prop_assert!(after <= before + Duration::from_nanos(2));
        }
    }
}
