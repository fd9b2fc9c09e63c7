//! Demand goes before what is guessed.

use super::*;
use crate::Class;

impl Bench {
    fn submit_as(&mut self, class: Class, experts: &[u32]) -> Handle {
        let orders = experts.iter().map(|&e| self.order(e)).collect();
        let deadline = self.now + Duration::from_secs(2);
        let submitted = self.engine.submit_as(self.now, deadline, class, orders);
        submitted.unwrap()
    }

    fn posted_experts(&self, rail: usize) -> Vec<u32> {
        self.posted[rail].iter().map(|r| r.key.expert).collect()
    }
}

/// A window of four chunks from the first READ on.
fn fixed_window() -> EngineConfig {
    EngineConfig {
        adapt_window: false,
        ..config()
    }
}

#[test]
fn prefetch_takes_half_of_the_window_and_demand_all_of_it() {
    let mut bench = Bench::new(1, fixed_window(), CHUNK_BYTES);
    bench.submit_as(Class::Prefetch, &[0, 1, 2, 3, 4, 5]);
    assert_eq!(bench.post_all(), 2, "half of four");
    bench.submit_as(Class::Demand, &[8, 9, 10]);
    bench.post_all();
    assert_eq!(bench.posted_experts(0), [0, 1, 8, 9]);
    // A guess that ends makes room for what is demanded, not for another guess.
    bench.land(0, 0);
    bench.post_all();
    assert_eq!(bench.posted_experts(0), [1, 8, 9, 10]);
    bench.run_to_end();
    assert!(bench.finished().is_complete() && bench.finished().is_complete());
    bench.assert_no_slot_leaked();
}

#[test]
fn stream_goes_between_demand_and_prefetch() {
    let mut bench = Bench::new(1, fixed_window(), CHUNK_BYTES);
    bench.submit_as(Class::Prefetch, &[0]);
    bench.submit_as(Class::Stream, &[1]);
    bench.submit_as(Class::Demand, &[2]);
    bench.post_all();
    assert_eq!(bench.posted_experts(0), [2, 1, 0]);
}

#[test]
fn promoted_guess_overtakes_the_others() {
    let mut bench = Bench::new(1, fixed_window(), 2 * CHUNK_BYTES);
    bench.submit_as(Class::Prefetch, &[0, 1]);
    let wanted = bench.submit_as(Class::Prefetch, &[2, 3]);
    assert_eq!(bench.post_all(), 2);
    bench.engine.promote(bench.now, wanted, Class::Demand);
    bench.post_all();
    assert_eq!(bench.posted_experts(0), [0, 0, 2, 2]);
    // To be more patient than before is no wish that is heard.
    bench.engine.promote(bench.now, wanted, Class::Prefetch);
    bench.run_to_end();
    let ends: Vec<Finished> = (0..2).map(|_| bench.finished()).collect();
    assert_eq!(ends[0].request, wanted);
    assert!(ends.iter().all(Finished::is_complete));
    bench.assert_no_slot_leaked();
}

#[test]
fn promoted_guess_that_is_repeated_overtakes_too() {
    let mut bench = Bench::new(1, fixed_window(), CHUNK_BYTES);
    let wanted = bench.submit_as(Class::Prefetch, &[0]);
    bench.submit_as(Class::Prefetch, &[1, 2, 3]);
    bench.post_all();
    let read = bench.posted[0].remove(0);
    bench.complete(0, read, Err(ReadError::Unavailable("busy".into())));
    bench.engine.promote(bench.now, wanted, Class::Demand);
    bench.post_all();
    assert_eq!(bench.posted_experts(0), [1, 0, 2]);
    bench.run_to_end();
    assert_eq!(bench.finished().request, wanted);
}

#[test]
fn prefetch_moves_when_nothing_else_is_under_way_whatever_the_window() {
    let config = EngineConfig {
        window_bytes: 1,
        ..fixed_window()
    };
    let mut bench = Bench::new(1, config, MEDIUM);
    bench.submit_as(Class::Prefetch, &[5]);
    bench.run_to_end();
    assert!(bench.finished().is_complete());
}

/// A rail in the order of its queue, as a NIC is: the demand waits for what is posted before it,
/// which is the prefetch half of the window.
#[test]
fn demand_behind_full_prefetch_waits_for_half_a_window_at_most() {
    let chunk_time = Duration::from_millis(1);
    let reads_until_demand = |prefetch: bool| {
        let mut bench = Bench::new(1, fixed_window(), CHUNK_BYTES);
        if prefetch {
            bench.submit_as(Class::Prefetch, &[0, 1, 2, 3, 4, 5, 6, 7]);
        }
        bench.post_all();
        let demand = bench.submit_as(Class::Demand, &[9]);
        let began = bench.now;
        loop {
            bench.post_all();
            bench.now += chunk_time;
            bench.land(0, 0);
            if let Some(finished) = bench.engine.poll_finished() {
                if finished.request == demand {
                    return (bench.now - began).as_millis();
                }
            }
        }
    };
    let half_window = 2; // chunks
    let (alone, beside) = (reads_until_demand(false), reads_until_demand(true));
    assert_eq!(alone, 1);
    assert_eq!(beside, alone + half_window);
}
