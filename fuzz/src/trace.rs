//! The target of routing traces.

use std::time::Duration;

use expert_tier::Eviction;
use expert_tier::replay::{
    Link, Optimal, Prefetch, Setup, Trace, TraceReader, replay, write_header, write_row,
};

/// Largest trace that is replayed: what is read takes memory in proportion to the input, the tables
/// of a replay in proportion to the records that the input only has to name.
const REPLAYED_MAX: u64 = 4096;

/// A trace: what is accepted is the same trace when it is written and read again, and a replay's
/// accounts add up in the smallest arena that holds one layer.
pub fn replay_trace(input: &[u8]) {
    let trace = match Trace::read(input) {
        Ok(trace) => trace,
        Err(error) => {
            drop(error.to_string());
            return;
        }
    };
    let mut reader = TraceReader::new(input).expect("accepted before");
    let mut written = Vec::new();
    write_header(&mut written, reader.header()).expect("memory takes everything");
    while let Some(row) = reader.next_row().expect("accepted before") {
        write_row(&mut written, &row).expect("memory takes everything");
    }
    let again = Trace::read(&written[..]).expect("our own text is accepted");
    assert_eq!(again, trace);
    assert_eq!(trace.first_uses(0), u64::from(trace.distinct_records()));
    if trace.uses() > REPLAYED_MAX || u64::from(trace.records()) > REPLAYED_MAX {
        return;
    }
    let slots = trace.widest().max(1);
    let best = Optimal::new(&trace, 0).misses(slots);
    for (eviction, prefetch) in [
        (Eviction::Lru, Prefetch::None),
        (Eviction::SEGMENTED, Prefetch::Random { count: 3 }),
    ] {
        let setup = Setup {
            slots,
            eviction,
            prefetch,
            record_bytes: 3 << 19,
            link: Link::new(1_000_000_000, Duration::from_micros(20)),
            compute: Duration::from_micros(700),
            warm_up_steps: 0,
            seed: 1,
        };
        let done = replay(&trace, &setup).expect("a sound setup");
        assert_eq!(done.hits + done.late + done.misses, trace.uses());
        let ahead = done.prefetched;
        assert_eq!(ahead.useful + ahead.wasted, ahead.records);
        assert!(done.misses + ahead.records >= best);
    }
}
