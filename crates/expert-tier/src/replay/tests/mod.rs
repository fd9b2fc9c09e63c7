//! Tests of the replay, by part.

mod model;
mod size;
mod synth;
mod trace;

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::eviction::Eviction;

/// A trace of rows, through the format.
fn trace_of(rows: &[Row]) -> Trace {
    let mut text = Vec::new();
    for row in rows {
        write_row(&mut text, row).expect("memory takes everything");
    }
    Trace::read(&text[..]).expect("a trace")
}

fn synth_trace(spec: &SynthTrace) -> Trace {
    let rows: Vec<Row> = spec.rows().expect("a sound spec").collect();
    trace_of(&rows)
}

/// Small, skewed, with all that replays have to cope with.
fn small_spec() -> SynthTrace {
    SynthTrace {
        layers: 3,
        experts: 16,
        top_k: 4,
        steps: 60,
        seed: 5,
        zipf: 0.8,
        skew: 0.3,
        reuse: 0.4,
    }
}

/// A link of 1000 MB/s, records of 1 MB: a record takes a millisecond.
fn setup(slots: u32) -> Setup {
    Setup {
        slots,
        eviction: Eviction::Lru,
        prefetch: Prefetch::None,
        record_bytes: 1_000_000,
        link: Link::new(1_000_000_000, Duration::from_micros(20)),
        compute: Duration::from_micros(100),
        warm_up_steps: 0,
        seed: 0,
    }
}

/// Rows as routers may give them: layers left out, few or no experts, steps with gaps.
fn rows() -> impl Strategy<Value = Vec<Row>> {
    let experts = proptest::sample::subsequence((0..9u32).collect::<Vec<_>>(), 0..5);
    let row = (0..3u64, 0..3u32, experts.prop_shuffle());
    proptest::collection::vec(row, 1..80).prop_map(|drawn| {
        let mut at: (u64, u32) = (0, 0);
        let ascending = drawn.into_iter().map(|(later, layer, experts)| {
            let next = (at.0 + later, layer);
            at = match next > at {
                true => next,
                false => (at.0 + 1, layer),
            };
            Row {
                step: at.0,
                layer,
                experts,
            }
        });
        ascending.collect()
    })
}

fn evictions() -> impl Strategy<Value = Eviction> {
    prop_oneof![
        Just(Eviction::Lru),
        Just(Eviction::SEGMENTED),
        Just(Eviction::SegmentedLru {
            protected_percent: 40
        }),
    ]
}

fn prefetches() -> impl Strategy<Value = Prefetch> {
    prop_oneof![
        Just(Prefetch::None),
        Just(Prefetch::Oracle),
        Just(Prefetch::Repeat),
        (1..12u32).prop_map(|count| Prefetch::Random { count }),
    ]
}
