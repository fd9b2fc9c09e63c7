//! A random walk: whatever order things happen in, no rule is broken.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// One step of the random walk below.
#[derive(Debug, Clone)]
enum Step {
    Submit(Vec<u32>),
    Post(u8),
    Land(u8, u8),
    Corrupt(u8, u8),
    Down(u8),
    Ready(u8),
    Tick(u16),
    Cancel,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => proptest::collection::vec(0u32..16, 0..4).prop_map(Step::Submit),
        4 => (1u8..8).prop_map(Step::Post),
        8 => (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Step::Land(a, b)),
        1 => (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Step::Corrupt(a, b)),
        1 => any::<u8>().prop_map(Step::Down),
        2 => any::<u8>().prop_map(Step::Ready),
        2 => (0u16..400).prop_map(Step::Tick),
        1 => Just(Step::Cancel),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whatever order things happen in: no byte is outstanding twice, windows hold, what is
    /// committed is right, every request ends, no slot is lost.
    #[test]
    fn random_walk_never_breaks_a_rule(
        rails in 1usize..5,
        record_bytes in prop_oneof![Just(100u64), Just(CHUNK_BYTES), Just(MEDIUM), Just(9 * CHUNK_BYTES - 1)],
        policy in prop_oneof![Just(Policy::HomeSteal), Just(Policy::ExpertMod), Just(Policy::Split)],
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let config = EngineConfig { policy, ..config() };
        let window = config.window_bytes;
        let mut bench = Bench::new(rails, config, record_bytes);
        let mut wanted: HashMap<Handle, Vec<u32>> = HashMap::new();
        let mut quiescing: Vec<usize> = Vec::new();
        let mut ended = 0;
        for step in steps {
            match step {
                Step::Submit(experts) => {
                    if bench.next_slot as usize + experts.len() <= 24 {
                        let handle = bench.submit(&experts);
                        wanted.insert(handle, experts);
                    }
                }
                Step::Post(n) => {
                    for _ in 0..n {
                        if let Some((rail, read)) = bench.engine.next_post(bench.now) {
                            bench.posted[rail.0].push(read);
                        }
                    }
                }
                Step::Land(r, i) => {
                    let rail = r as usize % rails;
                    if !bench.posted[rail].is_empty() {
                        let index = i as usize % bench.posted[rail].len();
                        bench.land(rail, index);
                    }
                }
                Step::Corrupt(r, i) => {
                    let rail = r as usize % rails;
                    if !bench.posted[rail].is_empty() {
                        let index = i as usize % bench.posted[rail].len();
                        let mut read = bench.posted[rail].remove(index);
                        read.range.fill_zero(0, 1);
                        bench.complete(rail, read, Ok(Landed::default()));
                    }
                }
                Step::Down(r) => bench.event(r as usize % rails, RailEvent::Down("test".into())),
                Step::Ready(r) => bench.event(r as usize % rails, RailEvent::Ready(TAG)),
                Step::Tick(ms) => {
                    for action in bench.tick(Duration::from_millis(u64::from(ms))) {
                        match action {
                            Action::Quiesce(rail) => quiescing.push(rail.0),
                            Action::Probe(_) => {}
                        }
                    }
                }
                Step::Cancel => {
                    if let Some(&handle) = wanted.keys().next() {
                        bench.engine.cancel(bench.now, handle);
                    }
                }
            }
            while let Some(action) = bench.engine.poll_action() {
                if let Action::Quiesce(rail) = action {
                    quiescing.push(rail.0);
                }
            }
            // A rail that is told to stop gives everything back, then is quiesced.
            for rail in quiescing.drain(..) {
                for read in std::mem::take(&mut bench.posted[rail]) {
                    bench.complete(rail, read, Err(ReadError::Flushed));
                }
                bench.engine.handle_quiesced(bench.now, RailId(rail));
            }
            // The memory rule: no byte of a slot is outstanding twice, over all rails.
            let mut spans: Vec<_> = bench.posted.iter().flatten()
                .map(|r| (r.range.slot(), r.range.offset(), r.range.offset() + r.range.len()))
                .collect();
            spans.sort();
            prop_assert!(spans.windows(2).all(|w| w[0].0 != w[1].0 || w[0].2 <= w[1].1));
            for reads in &bench.posted {
                let out: u64 = reads.iter().map(Read::bytes).sum();
                prop_assert!(out <= window || reads.len() == 1);
            }
            while let Some(finished) = bench.engine.poll_finished() {
                ended += 1;
                let experts = wanted.remove(&finished.request).expect("ends once");
                for (record, expert) in finished.records.iter().zip(experts) {
                    if let Ok(committed) = record {
                        let lease = &committed.lease;
                        prop_assert!(lease[..] == images(lease.len() as u64)[expert as usize][..]);
                    }
                }
            }
        }
        // Everything ends by its deadline, and no slot is lost once the rails are empty.
        bench.tick(Duration::from_secs(10));
        while bench.engine.poll_finished().is_some() {
            ended += 1;
        }
        prop_assert_eq!(bench.engine.open_requests(), 0);
        prop_assert_eq!(ended as u64, bench.engine.stats().requests);
        for reads in std::mem::take(&mut bench.posted) {
            drop(reads);
        }
        bench.assert_no_slot_leaked();
    }
}
