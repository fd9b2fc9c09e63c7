use proptest::prelude::*;

use super::*;
use crate::mock::rng::SplitMix;

/// What a policy does, written down the plain way: vectors, oldest first, searched from end to end.
#[derive(Debug)]
struct Plain {
    protected_max: usize,
    probation: Vec<u32>,
    protected: Vec<u32>,
}

impl Plain {
    /// LRU is the case where nothing may be protected: a touched entry is demoted to the newest
    /// place at once.
    fn new(eviction: Eviction, capacity: u32) -> Self {
        let protected_max = match eviction {
            Eviction::Lru => 0,
            Eviction::SegmentedLru { protected_percent } => {
                capacity as usize * usize::from(protected_percent) / 100
            }
        };
        Self {
            protected_max,
            probation: Vec::new(),
            protected: Vec::new(),
        }
    }

    fn has(&self, entry: u32) -> bool {
        self.probation.contains(&entry) || self.protected.contains(&entry)
    }

    fn insert(&mut self, entry: u32) {
        match self.has(entry) {
            true => self.touch(entry),
            false => self.probation.push(entry),
        }
    }

    fn touch(&mut self, entry: u32) {
        if !self.has(entry) {
            return;
        }
        self.remove(entry);
        self.protected.push(entry);
        if self.protected.len() > self.protected_max {
            let oldest = self.protected.remove(0);
            self.probation.push(oldest);
        }
    }

    fn remove(&mut self, entry: u32) {
        self.probation.retain(|&e| e != entry);
        self.protected.retain(|&e| e != entry);
    }

    fn order(&self) -> Vec<u32> {
        [&self.probation[..], &self.protected[..]].concat()
    }
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Insert(u32),
    Touch(u32),
    Remove(u32),
    /// Give up the best that is not a multiple of this.
    Evict(u32),
}

/// All entries in the order in which they would be given up.
fn order(policy: &mut dyn EvictionPolicy) -> Vec<u32> {
    let mut offered = Vec::new();
    let none = policy.victim(&mut |entry| {
        offered.push(entry);
        false
    });
    assert_eq!(none, None, "all were refused");
    offered
}

fn apply(policy: &mut dyn EvictionPolicy, plain: &mut Plain, op: Op) {
    match op {
        Op::Insert(entry) => {
            policy.insert(entry);
            plain.insert(entry);
        }
        Op::Touch(entry) => {
            policy.touch(entry);
            plain.touch(entry);
        }
        Op::Remove(entry) => {
            policy.remove(entry);
            plain.remove(entry);
        }
        Op::Evict(leased) => {
            let victim = policy.victim(&mut |entry| entry % leased != 0);
            let want = plain.order().into_iter().find(|entry| entry % leased != 0);
            assert_eq!(victim, want);
            if let Some(victim) = victim {
                policy.remove(victim);
                plain.remove(victim);
            }
        }
    }
}

fn ops(capacity: u32) -> impl Strategy<Value = Vec<Op>> {
    // Touches and removals of what is not there, beyond the capacity too.
    let any = 0..capacity + 2;
    let op = prop_oneof![
        4 => (0..capacity).prop_map(Op::Insert),
        4 => any.clone().prop_map(Op::Touch),
        1 => any.prop_map(Op::Remove),
        2 => (1..6u32).prop_map(Op::Evict),
    ];
    proptest::collection::vec(op, 0..300)
}

fn evictions() -> impl Strategy<Value = Eviction> {
    prop_oneof![
        Just(Eviction::Lru),
        (1..=99u8).prop_map(|protected_percent| Eviction::SegmentedLru { protected_percent }),
    ]
}

proptest! {
    #[test]
    fn victims_come_in_the_order_of_the_plain_model(
        eviction in evictions(),
        (capacity, ops) in (1..40u32).prop_flat_map(|n| (Just(n), ops(n))),
    ) {
        let mut policy = eviction.build(capacity);
        let mut plain = Plain::new(eviction, capacity);
        for op in ops {
            apply(&mut *policy, &mut plain, op);
            prop_assert_eq!(order(&mut *policy), plain.order());
        }
    }

    #[test]
    fn names_are_read_as_they_are_written(eviction in evictions()) {
        prop_assert_eq!(eviction.to_string().parse::<Eviction>().ok(), Some(eviction));
    }
}

#[test]
fn long_run_at_full_capacity_keeps_every_entry() {
    for eviction in [Eviction::Lru, Eviction::SEGMENTED] {
        let capacity = 97;
        let mut rng = SplitMix::new(7);
        let mut policy = eviction.build(capacity);
        let mut plain = Plain::new(eviction, capacity);
        for step in 0..60_000 {
            let entry = rng.below(u64::from(capacity)) as u32;
            let op = match rng.below(8) {
                0..=3 => Op::Touch(entry),
                4..=6 => Op::Insert(entry),
                _ => Op::Evict(1 + entry % 5),
            };
            apply(&mut *policy, &mut plain, op);
            if step % 64 == 0 {
                assert_eq!(order(&mut *policy), plain.order(), "{eviction} step {step}");
            }
        }
        assert!(
            plain.order().len() > 60,
            "{eviction}: the cache was near full"
        );
    }
}

#[test]
fn scan_of_new_entries_leaves_protected_ones_alone() {
    let mut policy = Eviction::SEGMENTED.build(10);
    for entry in 0..8 {
        policy.insert(entry);
        policy.touch(entry);
    }
    for round in 0..100 {
        let place = match round {
            0 | 1 => 8 + round,
            _ => policy.victim(&mut |_| true).expect("ten entries"),
        };
        assert!(place >= 8, "round {round} gave up {place}");
        policy.remove(place);
        policy.insert(place);
    }
}

#[test]
fn unknown_names_say_what_there_is() {
    for bad in [
        "", "LRU", "fifo", "lru:80", "slru:", "slru:0", "slru:100", "slru:-1", "slru:8 ",
    ] {
        let error = bad.parse::<Eviction>().expect_err(bad).to_string();
        assert!(error.contains("lru, slru, or slru:PERCENT"), "{error}");
    }
}
