use super::*;

/// Enough that a rule switched off is broken in several of them: 5 % or more of all seeds are.
const CONTROL_SEEDS: u64 = 150;

/// Lowest seed that fails without a rule.
fn first_failure_without(guard: &str) -> SimFailure {
    let config = SimConfig {
        guards: Guards::without(guard).expect("a guard"),
        ..SimConfig::default()
    };
    (0..CONTROL_SEEDS)
        .find_map(|seed| run(seed, &config).err())
        .unwrap_or_else(|| panic!("{CONTROL_SEEDS} seeds do not miss {guard}"))
}

#[test]
fn no_rule_is_broken_in_some_hundred_seeds() {
    let mut all = SimReport::default();
    for seed in 0..500 {
        match run(seed, &SimConfig::default()) {
            Ok(report) => all.add(&report),
            Err(failure) => panic!("{failure}"),
        }
    }
    // A simulation in which nothing happens proves nothing.
    assert!(all.records > 1000 && all.failed > 100, "{all:?}");
    // Neither do policies without anything to tell apart.
    let verified = all.records - all.unverified;
    assert!(verified > 1000 && all.unverified > 1000, "{all:?}");
    assert!(all.damaged > 10, "{all:?}");
    assert_eq!(all.faults.len(), 8, "{all:?}");
}

#[test]
fn stale_completion_that_counts_is_noticed() {
    let failure = first_failure_without("epoch");
    // The engine takes the record for complete; the arena, which counts for itself, does not.
    let told = ["incomplete", "cannot be committed"];
    assert!(
        told.iter().any(|t| failure.violation.contains(t)),
        "{failure}"
    );
}

#[test]
fn late_write_into_a_slot_that_was_given_away_is_noticed() {
    let failure = first_failure_without("memory-rule");
    assert!(failure.violation.contains("wrong bytes"), "{failure}");
}

#[test]
fn commit_of_bytes_that_never_came_is_noticed() {
    let failure = first_failure_without("commit-rule");
    assert!(failure.violation.contains("wrong bytes"), "{failure}");
}

#[test]
fn damage_that_is_not_compared_is_noticed() {
    let failure = first_failure_without("verify");
    assert!(failure.violation.contains("wrong bytes"), "{failure}");
}

#[test]
fn bytes_of_other_content_are_noticed() {
    first_failure_without("content");
}

#[test]
fn one_seed_gives_one_trace() {
    let config = SimConfig {
        trace: true,
        ..SimConfig::default()
    };
    for seed in [1, 2, 3] {
        let first = run(seed, &config).unwrap();
        let again = run(seed, &config).unwrap();
        assert_eq!(first.trace, again.trace);
        let without_lines = run(seed, &SimConfig::default()).unwrap();
        assert_eq!(first.trace_hash, without_lines.trace_hash);
        assert_ne!(first.trace_hash, run(seed + 1, &config).unwrap().trace_hash);
    }
}

#[test]
fn failing_seed_is_replayed_with_its_trace() {
    let failure = first_failure_without("memory-rule");
    let config = SimConfig {
        guards: Guards::without("memory-rule").expect("a guard"),
        trace: true,
    };
    let again = run(failure.seed, &config).unwrap_err();
    assert_eq!(again.violation, failure.violation);
    assert!(again.trace.iter().any(|l| l.contains("given back")));
}
