use std::collections::{BTreeSet, HashMap};

use super::*;

/// Hits of LRU without prefetch, the plain way: the records in the order of their last use.
fn plain_lru_hits(rows: &[Row], slots: usize) -> u64 {
    let mut held: Vec<(u32, u32)> = Vec::new();
    let mut hits = 0;
    for row in rows {
        let wanted: Vec<(u32, u32)> = row.experts.iter().map(|&e| (row.layer, e)).collect();
        hits += wanted.iter().filter(|w| held.contains(w)).count() as u64;
        held.retain(|h| !wanted.contains(h));
        held.extend(wanted);
        let surplus = held.len().saturating_sub(slots);
        held.drain(..surplus);
    }
    hits
}

/// Fewest fetches over all choices of what to give up, for few records; from an empty arena, or
/// from the best that it can hold.
fn fewest_fetches(rows: &[Row], slots: usize, from_empty: bool) -> u64 {
    type State = BTreeSet<(u32, u32)>;
    let wanted_by = |row: &Row| -> State { row.experts.iter().map(|&e| (row.layer, e)).collect() };
    let subsets = |of: Vec<(u32, u32)>| {
        (0..1u32 << of.len()).map(move |chosen| -> State {
            let is_chosen = |at: &usize| chosen >> at & 1 == 1;
            (0..of.len()).filter(is_chosen).map(|at| of[at]).collect()
        })
    };
    let mut states = HashMap::from([(State::new(), 0)]);
    if !from_empty {
        let all: State = rows.iter().flat_map(wanted_by).collect();
        let held = subsets(all.into_iter().collect());
        states.extend(held.filter(|s| s.len() <= slots).map(|state| (state, 0)));
    }
    for row in rows {
        let wanted = wanted_by(row);
        let mut next: HashMap<State, u64> = HashMap::new();
        for (held, cost) in states {
            let cost = cost + wanted.difference(&held).count() as u64;
            for mut state in subsets(held.difference(&wanted).copied().collect()) {
                state.extend(wanted.iter().copied());
                if state.len() <= slots {
                    let best = next.entry(state).or_insert(u64::MAX);
                    *best = cost.min(*best);
                }
            }
        }
        states = next;
    }
    states.into_values().min().unwrap_or(0)
}

fn links() -> impl Strategy<Value = Link> {
    (
        1u64..4_000_000_000,
        0u64..300,
        1u64..9_000_000,
        1u64..3_000_000,
    )
        .prop_map(|(bytes_per_s, latency_us, window_bytes, read_bytes)| Link {
            bytes_per_s,
            latency: Duration::from_micros(latency_us),
            window_bytes,
            // Few enough READs a record for a test.
            read_bytes: read_bytes.max(1 << 14),
        })
}

proptest! {
    #[test]
    fn lru_without_prefetch_hits_what_the_plain_model_hits(rows in rows(), more in 0..25u32) {
        let trace = trace_of(&rows);
        let slots = trace.widest().max(1) + more;
        let report = replay(&trace, &setup(slots)).expect("enough slots");
        prop_assert_eq!(report.hits, plain_lru_hits(&rows, slots as usize));
        prop_assert_eq!(report.misses, report.uses - report.hits);
    }

    #[test]
    fn more_slots_never_hit_less_under_lru(rows in rows()) {
        let trace = trace_of(&rows);
        let mut last = (0, f64::INFINITY);
        for slots in trace.widest().max(1)..=trace.distinct_records().max(1) {
            let report = replay(&trace, &setup(slots)).expect("enough slots");
            prop_assert!(report.hits >= last.0 && report.stall_us.mean <= last.1 + 1e-6);
            last = (report.hits, report.stall_us.mean);
        }
        prop_assert_eq!(last.0, trace.uses() - u64::from(trace.distinct_records()));
    }

    #[test]
    fn optimal_is_what_trying_everything_finds(
        picks in proptest::collection::vec(
            proptest::sample::subsequence((0..6u32).collect::<Vec<_>>(), 0..4), 1..14),
        more in 0..3u32,
    ) {
        let row = |(step, experts): (usize, Vec<u32>)| Row { step: step as u64, layer: 0, experts };
        let rows: Vec<Row> = picks.into_iter().enumerate().map(row).collect();
        let trace = trace_of(&rows);
        let slots = trace.widest().max(1) + more;
        let best = Optimal::new(&trace, 0).misses(slots);
        prop_assert_eq!(best, fewest_fetches(&rows, slots as usize, true));
        let warm = Optimal::new(&trace, 1).misses(slots);
        prop_assert_eq!(warm, fewest_fetches(&rows[1..], slots as usize, false));
    }

    /// Whatever the policy, the rule, the link and however tight the arena.
    #[test]
    fn accounts_add_up_and_no_one_moves_less_than_the_optimum(
        rows in rows(),
        more in 0..20u32,
        eviction in evictions(),
        prefetch in prefetches(),
        link in links(),
        record_bytes in 1u64..3_000_000,
        compute_us in 0u64..5000,
        warm_up in any::<proptest::sample::Index>(),
    ) {
        let trace = trace_of(&rows);
        let slots = trace.widest().max(1) + more;
        let setup = Setup {
            slots, eviction, prefetch, record_bytes, link,
            compute: Duration::from_micros(compute_us),
            warm_up_steps: warm_up.index(trace.steps() as usize) as u32,
            seed: 3,
        };
        let warm_up = setup.warm_up_steps;
        let report = replay(&trace, &setup).expect("enough slots");
        let counted = |at: &usize| trace.row(*at).step >= warm_up;
        let uses = (0..trace.row_count()).filter(counted).map(|at| trace.row(at).records.len());
        prop_assert_eq!(report.uses, uses.sum::<usize>() as u64);
        prop_assert_eq!(report.uses, trace.uses_after(warm_up));
        prop_assert_eq!(report.hits + report.late + report.misses, report.uses);
        let ahead = report.prefetched;
        prop_assert_eq!(ahead.useful + ahead.wasted, ahead.records);
        prop_assert!(report.late <= ahead.useful);
        let moved = (report.misses + ahead.records) * record_bytes;
        prop_assert!(report.bytes_moved <= moved);
        if warm_up == 0 {
            prop_assert_eq!(report.bytes_moved, moved);
        }
        let best = Optimal::new(&trace, warm_up).misses(slots);
        prop_assert!(report.misses + ahead.records >= best);
        if prefetch == Prefetch::None {
            prop_assert!(report.misses >= best && ahead.records == 0);
        }
        let by_layer = |f: fn(&LayerHits) -> u64| report.layers.iter().map(f).sum::<u64>();
        prop_assert_eq!(by_layer(|l| l.uses), report.uses);
        prop_assert_eq!(by_layer(|l| l.hits), report.hits);
        let stall = report.stall_us;
        prop_assert!(0.0 <= stall.p50 && stall.p50 <= stall.p99 && stall.p99 <= stall.max);
        prop_assert!(stall.mean <= stall.max * (1.0 + 1e-9) && report.step_us >= stall.mean);
        prop_assert_eq!(replay(&trace, &setup).expect("again"), report);
    }
}

/// Demands go first: what is in front of them is what prefetches may have posted, and no more.
#[test]
fn prefetch_delays_a_layer_by_half_a_window_at_most() {
    let spec = SynthTrace {
        experts: 256,
        zipf: 0.0,
        ..small_spec()
    };
    let trace = synth_trace(&spec);
    // Far more than the layer's time is enough for, and nearly all of it in vain.
    let prefetch = Prefetch::Random { count: 32 };
    let setup = Setup {
        prefetch,
        compute: Duration::from_micros(1),
        ..setup(trace.records())
    };
    let report = replay(&trace, &setup).expect("enough slots");
    // A record takes 1000 us, the latency is 20 us, half a window 2097.152 us.
    let fetched = (report.misses + report.late) as f64;
    let own = fetched * 1000.0 + trace.layer_visits() as f64 * 20.0;
    let in_front = report.stall_us.mean * f64::from(trace.steps()) - own;
    let most = trace.layer_visits() as f64 * 2097.152;
    assert!(in_front <= most + 1.0, "{in_front} of {most}");
    assert!(
        in_front > 0.5 * most,
        "{in_front} of {most}: prefetches use their share"
    );
}

#[test]
fn stall_without_prefetch_is_latency_and_wire_time_of_the_misses() {
    let trace = synth_trace(&small_spec());
    let report = replay(&trace, &setup(20)).expect("enough slots");
    let rows: Vec<Row> = small_spec().rows().expect("sound").collect();
    // Rows that miss wait one latency each, and each miss is a millisecond of the wire.
    let mut waiting = 0;
    for until in 1..=rows.len() {
        let before = plain_lru_hits(&rows[..until - 1], 20);
        let hits = plain_lru_hits(&rows[..until], 20) - before;
        waiting += u64::from(hits < 4);
    }
    let want = (waiting as f64 * 20.0 + report.misses as f64 * 1000.0) / 60.0;
    assert!(waiting > 60 && report.hits > 0);
    assert!(
        (report.stall_us.mean - want).abs() < 1e-6,
        "{} {want}",
        report.stall_us.mean
    );
    assert!((report.step_us - want - 300.0).abs() < 1e-6);
    assert!((report.steps_per_s - 1e6 / report.step_us).abs() < 1e-9);
}

#[test]
fn warm_up_is_replayed_and_not_counted() {
    let trace = synth_trace(&small_spec());
    let all = replay(&trace, &setup(20)).expect("enough slots");
    let with = |warm_up_steps| {
        let setup = Setup {
            warm_up_steps,
            ..setup(20)
        };
        replay(&trace, &setup)
    };
    let counted = with(59).expect("a step is left");
    // The last step alone: 12 of all uses, as they were, and a stall without the cold start's.
    assert_eq!(counted.uses, 12);
    let rows: Vec<Row> = small_spec().rows().expect("sound").collect();
    let before = plain_lru_hits(&rows[..177], 20);
    assert_eq!(counted.hits, plain_lru_hits(&rows, 20) - before);
    assert_eq!(counted.stall_us.mean, counted.stall_us.max);
    let half = with(30).expect("steps are left");
    assert!(half.hit_rate > all.hit_rate && half.stall_us.max < all.stall_us.max);
    assert_eq!(trace.first_uses(0), u64::from(trace.distinct_records()));
    assert!(trace.first_uses(30) < 6);
    let error = with(60).expect_err("nothing is left").to_string();
    assert!(error.contains("a warm-up of 60 steps leaves nothing to count of a trace of 60"));
}

#[test]
fn oracle_with_time_enough_leaves_the_first_layer_alone_to_wait() {
    let trace = synth_trace(&small_spec());
    let with = |prefetch, compute_us| {
        let setup = Setup {
            prefetch,
            compute: Duration::from_micros(compute_us),
            ..setup(12)
        };
        replay(&trace, &setup).expect("enough slots")
    };
    // Four records need 4020 us and a little.
    let oracle = with(Prefetch::Oracle, 4100);
    for layer in &oracle.layers[1..] {
        assert_eq!(layer.hits, layer.uses, "{layer:?}");
    }
    assert!(oracle.layers[0].hits < oracle.layers[0].uses);
    assert_eq!((oracle.late, oracle.prefetched.wasted), (0, 0));
    // With half the time some come late, and are waited for.
    let hurried = with(Prefetch::Oracle, 2000);
    assert!(hurried.late > 0 && hurried.hits < oracle.hits);
    assert!(hurried.stall_us.mean > oracle.stall_us.mean);
    let none = with(Prefetch::None, 2000);
    assert!(hurried.stall_us.mean < none.stall_us.mean);
}

#[test]
fn repeat_is_right_where_routing_repeats_and_random_mostly_wrong() {
    let spec = SynthTrace {
        reuse: 1.0,
        experts: 64,
        ..small_spec()
    };
    let trace = synth_trace(&spec);
    let with = |prefetch| {
        let setup = Setup {
            prefetch,
            compute: Duration::from_micros(5000),
            // One layer and a bit: nothing is left of a layer when its turn comes again.
            ..setup(8)
        };
        replay(&trace, &setup).expect("enough slots")
    };
    let repeat = with(Prefetch::Repeat);
    assert_eq!(repeat.prefetched.wasted, 0);
    assert_eq!(
        repeat.prefetched.useful,
        59 * 2 * 4,
        "all but the first step and layer"
    );
    let random = with(Prefetch::Random { count: 4 });
    assert!(random.prefetched.wasted > 5 * random.prefetched.useful);
    assert_eq!(with(Prefetch::None).hits, 0);
}

#[test]
fn prefetch_gives_up_nothing_that_its_layer_leases_or_it_wants_itself() {
    // Two layers that alternate over an arena that holds both: nothing is ever fetched again.
    let spec = SynthTrace {
        layers: 2,
        reuse: 1.0,
        ..small_spec()
    };
    let trace = synth_trace(&spec);
    for prefetch in [Prefetch::Oracle, Prefetch::Repeat] {
        let report = replay(
            &trace,
            &Setup {
                prefetch,
                ..setup(8)
            },
        )
        .expect("enough slots");
        assert_eq!(report.misses + report.prefetched.records, 8, "{prefetch}");
    }
    // Only half of the next layer fits beside a leased one, by chance ones too.
    let random = Prefetch::Random { count: 16 };
    let report = replay(
        &trace,
        &Setup {
            prefetch: random,
            ..setup(6)
        },
    )
    .expect("enough slots");
    assert!(report.prefetched.records > 0);
}

#[test]
fn segmented_lru_keeps_favourites_through_a_scan() {
    // Two favourites, used in each step; from the third on, six more that never come again.
    let mut rows = Vec::new();
    for step in 0..50u32 {
        let row = |layer, experts| Row {
            step: u64::from(step),
            layer,
            experts,
        };
        rows.push(row(0, vec![0, 1]));
        if step >= 2 {
            rows.extend((1..4).map(|layer| row(layer, vec![2 * step, 2 * step + 1])));
        }
    }
    let trace = trace_of(&rows);
    let hits = |eviction| {
        let setup = Setup {
            eviction,
            ..setup(6)
        };
        replay(&trace, &setup).expect("enough slots").hits
    };
    assert_eq!(hits(Eviction::Lru), 4);
    assert_eq!(hits(Eviction::SEGMENTED), 2 * 49);
}

#[test]
fn arena_below_one_layer_and_zero_rates_are_wrong_usage() {
    let trace = synth_trace(&SynthTrace {
        top_k: 8,
        ..small_spec()
    });
    let error = replay(&trace, &setup(4)).expect_err("too few");
    assert_eq!(
        error.to_string(),
        "an arena of 4 slots cannot hold the 8 experts of one layer at once; use at least 8"
    );
    let zero_rate = Link {
        bytes_per_s: 0,
        ..setup(8).link
    };
    let error = replay(
        &trace,
        &Setup {
            link: zero_rate,
            ..setup(8)
        },
    )
    .expect_err("no rate");
    assert!(
        error
            .to_string()
            .contains("bytes per second of the link are 0")
    );
    let error = replay(
        &trace,
        &Setup {
            record_bytes: 0,
            ..setup(8)
        },
    )
    .expect_err("no bytes");
    assert!(error.to_string().contains("bytes of a record are 0"));
}

#[test]
fn rules_are_read_as_they_are_written() {
    for text in ["none", "oracle", "repeat", "random:1", "random:65535"] {
        assert_eq!(text.parse::<Prefetch>().expect(text).to_string(), text);
    }
    for bad in [
        "",
        "all",
        "random",
        "random:",
        "random:0",
        "random:65536",
        "Oracle",
    ] {
        let error = bad.parse::<Prefetch>().expect_err(bad).to_string();
        assert!(
            error.contains("none, oracle, repeat, or random:N"),
            "{error}"
        );
    }
}
