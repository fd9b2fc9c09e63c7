//! How READs are shared between rails of unequal speed: pure functions of numbers.
//!
//! A posted READ cannot be recalled, so what a slow rail takes near the end of a request decides
//! when it ends. Each rail therefore takes a READ only when the others could not do all that waits
//! before it would be done with this one. For equal READs no assignment ends earlier.

/// A rail as a place to put work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Load {
    /// What it carries; above 0.
    pub(super) bytes_per_s: f64,
    /// Time until it has carried what is posted on it.
    pub(super) busy_s: f64,
}

impl Load {
    fn end_s(&self, bytes: f64) -> f64 {
        self.busy_s + bytes / self.bytes_per_s
    }
}

/// When `own` would be done with one more READ of `bytes`.
pub(super) fn end_s(own: Load, bytes: u64) -> f64 {
    own.end_s(bytes as f64)
}

/// Whether a rail should take a READ of `bytes`: true unless the others could do the whole backlog,
/// cut into READs of `read_bytes`, before this rail would be done with the one.
///
/// The rail that would be done first always may, as long as all are asked with the same
/// `read_bytes` and none with more `bytes` than that or than wait: somebody takes what waits.
pub(super) fn may_take(
    own: Load,
    bytes: u64,
    others: impl IntoIterator<Item = Load>,
    read_bytes: u64,
    backlog_bytes: u64,
) -> bool {
    let end_s = own.end_s(bytes as f64);
    // What waits may be less than a READ.
    let read_bytes = read_bytes.min(backlog_bytes).max(1);
    // A short rest beside whole READs can be taken by this rail, and it is done with it earlier.
    let waiting = match bytes < read_bytes {
        true => backlog_bytes.div_ceil(read_bytes),
        false => backlog_bytes / read_bytes,
    };
    let waiting = waiting.max(1) as f64;
    let mut done = 0.0;
    for other in others {
        let reads = (end_s - other.busy_s) * other.bytes_per_s / read_bytes as f64;
        // Strictly before: of two that would be done at once, each may. The tolerance is that of
        // the arithmetic.
        done += ((reads - 1e-6).ceil() - 1.0).max(0.0);
        if done >= waiting {
            return false;
        }
    }
    true
}

/// Bytes of the backlog that a rail should still take, if all are to be done at the same moment;
/// 0 where it is busy beyond that.
pub(super) fn fair_bytes(
    own: Load,
    others: impl IntoIterator<Item = Load> + Clone,
    backlog_bytes: u64,
) -> u64 {
    let all = || std::iter::once(own).chain(others.clone());
    // Rails that are busy beyond the common end take no part in it. Leaving them out makes it
    // earlier, which may leave out more: one round per rail is enough.
    let mut limit_s = f64::INFINITY;
    for _ in 0..super::RAILS_MAX {
        let (mut work, mut rate) = (backlog_bytes as f64, 0.0);
        for load in all().filter(|l| l.busy_s <= limit_s) {
            work += load.busy_s * load.bytes_per_s;
            rate += load.bytes_per_s;
        }
        if rate <= 0.0 {
            return 0;
        }
        let before_s = std::mem::replace(&mut limit_s, work / rate);
        if !all().any(|l| l.busy_s <= before_s && l.busy_s > limit_s) {
            break;
        }
    }
    ((limit_s - own.busy_s).max(0.0) * own.bytes_per_s) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{self, Shape};
    use proptest::prelude::*;

    fn others(loads: &[Load], own: usize) -> impl Iterator<Item = Load> + Clone + '_ {
        let rest = loads.iter().enumerate().filter(move |(i, _)| *i != own);
        rest.map(|(_, l)| *l)
    }

    fn load() -> impl Strategy<Value = Load> {
        (1.0f64..1000.0, prop_oneof![Just(0.0), 0.0f64..10.0]).prop_map(|(bytes_per_s, busy_s)| {
            Load {
                bytes_per_s,
                busy_s,
            }
        })
    }

    /// Rails of exact rates that take READs by the rule, with one more posted than is under way.
    fn makespan_s(rates: &[u64], reads: u64, read_bytes: u64, window: usize) -> f64 {
        let mut ends: Vec<Vec<f64>> = vec![Vec::new(); rates.len()];
        let mut waiting = reads;
        let mut now: f64 = 0.0;
        loop {
            let before = waiting;
            for rail in 0..rates.len() {
                let loads: Vec<Load> = (0..rates.len())
                    .map(|r| Load {
                        bytes_per_s: rates[r] as f64,
                        busy_s: ends[r].last().map_or(0.0, |end| (end - now).max(0.0)),
                    })
                    .collect();
                let out = ends[rail].iter().filter(|end| **end > now).count();
                let backlog = waiting * read_bytes;
                if waiting > 0
                    && out < window
                    && may_take(
                        loads[rail],
                        read_bytes,
                        others(&loads, rail),
                        read_bytes,
                        backlog,
                    )
                {
                    waiting -= 1;
                    let end = now + end_s(loads[rail], read_bytes);
                    ends[rail].push(end);
                }
            }
            if waiting < before {
                continue;
            }
            let next = ends.iter().flatten().filter(|end| **end > now);
            match next.copied().reduce(f64::min) {
                Some(next) => now = next,
                None => {
                    assert_eq!(waiting, 0, "somebody takes what waits");
                    return now;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn somebody_takes_what_waits(
            loads in proptest::collection::vec(load(), 1..8),
            sizes in proptest::collection::vec(1u64..=1000, 8),
            backlog in 1u64..100_000,
        ) {
            let taken = (0..loads.len()).any(|i| {
                may_take(loads[i], sizes[i].min(backlog), others(&loads, i), 1000, backlog)
            });
            prop_assert!(taken);
        }

        #[test]
        fn rail_stands_back_only_where_others_end_the_rest_before_it(
            loads in proptest::collection::vec(load(), 2..8),
            backlog in 1u64..100_000,
        ) {
            if !may_take(loads[0], 1000, others(&loads, 0), 1000, backlog) {
                let end = end_s(loads[0], 1000);
                let done: f64 = others(&loads, 0)
                    .map(|l| ((end - l.busy_s) * l.bytes_per_s).max(0.0))
                    .sum();
                // A short rest goes beside the whole READs, wherever there is room.
                let whole = backlog.max(1000) / 1000 * 1000;
                prop_assert!(done >= whole.min(backlog) as f64);
            }
        }

        #[test]
        fn shares_add_up_to_the_backlog(
            loads in proptest::collection::vec(load(), 1..8),
            backlog in 1u64..100_000,
        ) {
            let sum: u64 = (0..loads.len())
                .map(|i| fair_bytes(loads[i], others(&loads, i), backlog))
                .sum();
            prop_assert!(sum <= backlog + 1 && sum + 8 >= backlog, "{sum} of {backlog}");
        }

        #[test]
        fn whole_reads_end_when_the_best_assignment_does(
            rates in proptest::collection::vec(20u64..4000, 1..9),
            reads in 1u64..80,
        ) {
            let shape = Shape { object_bytes: reads * 1000, objects: 1, read_bytes: 1000 };
            let best = model::balanced_time(&rates, &shape).unwrap().as_secs_f64();
            let got = makespan_s(&rates, reads, 1000, 1);
            prop_assert!(got <= best * 1.001 + 1e-6, "{got} {best}");
            // What is posted ahead may end a READ later than it could.
            let ahead = makespan_s(&rates, reads, 1000, 2);
            prop_assert!(ahead <= best * 1.001 + 1e-6, "{ahead} {best}");
        }
    }

    #[test]
    fn slow_rail_leaves_the_last_reads_to_a_fast_one() {
        let fast = Load {
            bytes_per_s: 100.0,
            busy_s: 0.0,
        };
        let slow = Load {
            bytes_per_s: 25.0,
            busy_s: 0.0,
        };
        assert!(may_take(slow, 10, [fast], 10, 1000));
        assert!(!may_take(slow, 10, [fast], 10, 30));
        assert!(may_take(fast, 10, [slow], 10, 10));
    }
}
