use super::*;

/// The answer that bisection has to give: each size tried in turn.
fn scan(trace: &Trace, setup: &Setup, target: Target) -> Option<u32> {
    (trace.widest()..=trace.records()).find(|&slots| {
        let tried = Setup {
            slots,
            ..setup.clone()
        };
        target.is_met(&replay(trace, &tried).expect("enough slots"))
    })
}

#[test]
fn lru_needs_what_a_scan_over_all_sizes_finds() {
    let trace = synth_trace(&small_spec());
    let setup = setup(1);
    for target in [
        Target::HitRate(0.0),
        Target::HitRate(0.5),
        Target::HitRate(0.8),
        Target::StallUs(6000.0),
        Target::StallUs(3000.0),
    ] {
        let sizing = smallest(&trace, &setup, target).expect("sound");
        assert!(sizing.slots.is_some(), "{target:?}");
        assert_eq!(sizing.slots, scan(&trace, &setup, target), "{target:?}");
        assert!(sizing.is_least && target.is_met(&sizing.report));
    }
}

#[test]
fn other_policies_get_a_size_that_does_where_one_less_does_not() {
    let trace = synth_trace(&small_spec());
    for (eviction, prefetch) in [
        (Eviction::SEGMENTED, Prefetch::None),
        (Eviction::Lru, Prefetch::Repeat),
        (Eviction::SEGMENTED, Prefetch::Random { count: 3 }),
    ] {
        let setup = Setup {
            eviction,
            prefetch,
            ..setup(1)
        };
        let target = Target::HitRate(0.6);
        let sizing = smallest(&trace, &setup, target).expect("sound");
        let slots = sizing.slots.expect("reached");
        assert!(target.is_met(&sizing.report) && !sizing.is_least);
        let less = Setup {
            slots: slots - 1,
            ..setup
        };
        assert!(!target.is_met(&replay(&trace, &less).expect("enough slots")));
    }
}

#[test]
fn target_that_first_uses_forbid_is_not_reached() {
    let trace = synth_trace(&small_spec());
    let sizing = smallest(&trace, &setup(1), Target::HitRate(1.0)).expect("sound");
    assert_eq!(sizing.slots, None);
    let best = 1.0 - f64::from(trace.distinct_records()) / trace.uses() as f64;
    assert!((sizing.report.hit_rate - best).abs() < 1e-12);
    let sizing = smallest(&trace, &setup(1), Target::StallUs(0.0)).expect("sound");
    assert_eq!(sizing.slots, None);
}
