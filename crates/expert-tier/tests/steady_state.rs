//! In the steady state the engine allocates per request, a fixed number of times, and never per record or READ.

mod common;

use std::sync::Arc;

use allocation_counter::measure;
use common::{Catalogue, Hand};
use expert_store::catalogue::CHUNK_BYTES;
use expert_tier::{EngineConfig, Policy};

/// What a request costs: its list of results, its list of records, and what each rail had done when
/// it came.
const PER_REQUEST: u64 = 3;

const REQUESTS: u64 = 10;

/// Allocations of so many requests of the same shape, after as many that warmed the engine up.
fn allocations(rails: usize, policy: Policy, records: u32, chunks: u64) -> (u64, u64) {
    let catalogue = Arc::new(Catalogue::new(64, chunks * CHUNK_BYTES));
    let config = EngineConfig {
        policy,
        read_bytes: CHUNK_BYTES,
        ..EngineConfig::default()
    };
    let mut hand = Hand::new(rails, config, &catalogue, records, true);
    let mut round = |number: u64| {
        let keys = (0..u64::from(records)).map(|i| catalogue.key(number * 5 + i));
        let orders = hand.orders(keys);
        let mut reads = 0;
        let counted = measure(|| {
            hand.submit(orders);
            reads = hand.run();
            drop(hand.finished());
        });
        (reads, counted)
    };
    for number in 0..REQUESTS {
        round(number);
    }
    let (mut reads, mut allocated) = (0, 0);
    for number in 0..REQUESTS {
        let (more, counted) = round(REQUESTS + number);
        // The caller's list of orders is freed, and nothing stays.
        assert_eq!(counted.count_current, -1);
        reads += more;
        allocated += counted.count_total;
    }
    (reads, allocated)
}

#[test]
fn requests_allocate_the_same_however_many_records_and_reads_they_have() {
    for policy in [Policy::HomeSteal, Policy::ExpertMod, Policy::Split] {
        for rails in [1, 2, 4, 8] {
            for (records, chunks) in [(1, 1), (8, 4), (16, 2)] {
                let (reads, allocated) = allocations(rails, policy, records, chunks);
                assert_eq!(reads, REQUESTS * u64::from(records) * chunks);
                assert_eq!(
                    allocated,
                    REQUESTS * PER_REQUEST,
                    "{policy:?}, {rails} rails, {records} records of {chunks} READs"
                );
            }
        }
    }
}

#[test]
fn counter_sees_one_allocation() {
    let counted = measure(|| drop(std::hint::black_box(Box::new(1))));
    assert_eq!(counted.count_total, 1);
}
