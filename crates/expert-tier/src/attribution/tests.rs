//! Each label by hand-made numbers, and a label for any numbers.

use super::*;
use proptest::prelude::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// 100 ms over two equal rails of 125 MB/s.
fn numbers() -> RequestNumbers {
    let rail = RailNumbers {
        bytes: 12_500_000,
        carried_bytes: 12_500_000,
        busy: ms(100),
        cpu: ms(5),
        best_bytes_per_s: 125_000_000,
        ..RailNumbers::new(RailKind::Tcp, 1)
    };
    RequestNumbers {
        total: ms(100),
        queued: ms(1),
        verify: ms(2),
        verify_bytes: 25_000_000,
        verify_best_bytes_per_s: 12_500_000_000,
        reads: 25,
        refused_reads: 0,
        driver_cpu: ms(3),
        cpus: 4,
        rails: vec![(0, rail), (1, rail)],
    }
}

fn label(change: impl FnOnce(&mut RequestNumbers)) -> &'static str {
    let mut numbers = numbers();
    change(&mut numbers);
    let limit = classify(&numbers);
    // The text has the label in it, and the numbers.
    assert!(!limit.to_string().is_empty());
    limit.name()
}

#[test]
fn rail_that_is_busy_longest_is_the_slowest() {
    let mut numbers = numbers();
    numbers.rails[1].1.busy = ms(60);
    let limit = classify(&numbers);
    assert_eq!(
        limit,
        Limit::NetworkSlowestRail {
            rail: 0,
            busy: ms(100),
            bytes_per_s: 125_000_000
        }
    );
    assert_eq!(
        limit.to_string(),
        "network, slowest rail: rail 0 was busy for 100.0ms at 125.0 MB/s"
    );
}

#[test]
fn one_rail_far_below_its_best_is_a_slow_path() {
    let slow = |n: &mut RequestNumbers| n.rails[1].1.best_bytes_per_s = 1_000_000_000;
    assert_eq!(label(slow), "network-slowest-rail");
}

#[test]
fn all_rails_far_below_their_best_are_a_slow_peer() {
    let slow = |n: &mut RequestNumbers| {
        for (_, rail) in &mut n.rails {
            rail.best_bytes_per_s = 1_000_000_000;
        }
    };
    assert_eq!(label(slow), "peer");
}

#[test]
fn refused_reads_are_the_peers() {
    assert_eq!(label(|n| n.refused_reads = 10), "peer");
    assert_eq!(label(|n| n.refused_reads = 1), "network-slowest-rail");
}

#[test]
fn rail_without_work_while_reads_wait_is_idle() {
    assert_eq!(label(|n| n.rails[1].1.idle = ms(40)), "network-rail-idle");
    assert_eq!(label(|n| n.rails[1].1.idle = ms(4)), "network-slowest-rail");
}

#[test]
fn files_are_the_disks() {
    let local = |n: &mut RequestNumbers| {
        for (_, rail) in &mut n.rails {
            rail.kind = RailKind::Local;
        }
    };
    assert_eq!(label(local), "disk");
}

#[test]
fn busy_threads_are_software() {
    // Per READ, on the driver's thread.
    assert_eq!(label(|n| n.driver_cpu = ms(90)), "software-client-cpu");
    // A rail's receiving thread.
    assert_eq!(label(|n| n.rails[0].1.cpu = ms(90)), "software-client-cpu");
    // Two threads of which each has half a processor left.
    let lanes = |n: &mut RequestNumbers| {
        n.rails[0].1.cpu = ms(90);
        n.rails[0].1.lanes = 2;
    };
    assert_eq!(label(lanes), "network-slowest-rail");
    // All processors together.
    let all = |n: &mut RequestNumbers| {
        n.cpus = 2;
        n.rails.iter_mut().for_each(|(_, rail)| rail.cpu = ms(79));
        n.driver_cpu = ms(10);
    };
    assert_eq!(label(all), "software-client-cpu");
}

#[test]
fn busy_threads_that_hash_are_verification() {
    let hash = |n: &mut RequestNumbers| {
        n.driver_cpu = ms(90);
        n.verify = ms(80);
        n.verify_bytes = 1_000_000_000;
    };
    assert_eq!(label(hash), "software-verification");
}

#[test]
fn hashing_at_half_its_best_or_moving_alone_is_memory_bandwidth() {
    let cold = |n: &mut RequestNumbers| {
        n.driver_cpu = ms(90);
        n.verify = ms(80);
        n.verify_bytes = 400_000_000;
    };
    assert_eq!(label(cold), "memory-bandwidth");
    let moving = |n: &mut RequestNumbers| {
        n.rails[0].1.cpu = ms(90);
        n.rails[0].1.carried_bytes = 600_000_000;
    };
    assert_eq!(label(moving), "memory-bandwidth");
}

#[test]
fn waiting_behind_others_is_back_pressure_and_for_a_rail_is_not() {
    assert_eq!(label(|n| n.queued = ms(60)), "back-pressure");
    let down = |n: &mut RequestNumbers| {
        n.queued = ms(60);
        n.rails[1].1.idle = ms(60);
    };
    assert_eq!(label(down), "network-rail-idle");
}

#[test]
fn nothing_is_known_of_no_time() {
    assert_eq!(label(|n| n.total = Duration::ZERO), "unknown");
}

#[test]
fn counts_are_told_by_name() {
    let mut counts = LimitCounts::default();
    counts.count(&Limit::Unknown);
    counts.count(&classify(&numbers()));
    counts.count(&classify(&numbers()));
    assert_eq!(counts.get("network-slowest-rail"), 2);
    let json = serde_json::to_value(counts).unwrap();
    assert_eq!(json["unknown"], 1);
    assert_eq!(json["back-pressure"], 0);
}

fn duration() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::ZERO),
        (0u64..10_000_000_000).prop_map(Duration::from_nanos)
    ]
}

fn rail() -> impl Strategy<Value = (usize, RailNumbers)> {
    let kind = prop_oneof![Just(RailKind::Tcp), Just(RailKind::Local)];
    let bytes = || prop_oneof![Just(0), 0u64..1 << 40];
    let times = (duration(), duration(), duration());
    (0usize..64, kind, 0u32..8, bytes(), times, bytes()).prop_map(
        |(rail, kind, lanes, bytes, (busy, idle, cpu), best_bytes_per_s)| {
            let numbers = RailNumbers {
                kind,
                lanes,
                bytes,
                carried_bytes: bytes,
                busy,
                idle,
                cpu,
                best_bytes_per_s,
            };
            (rail, numbers)
        },
    )
}

proptest! {
    #[test]
    fn every_request_that_took_time_has_a_label(
        times in (duration(), duration(), duration(), duration()),
        counts in (0u64..1 << 40, 0u64..1 << 40, 0u64..1000, 0u64..1000, 0u32..256),
        rails in proptest::collection::vec(rail(), 0..9),
    ) {
        let (total, queued, verify, driver_cpu) = times;
        let (verify_bytes, verify_best_bytes_per_s, reads, refused_reads, cpus) = counts;
        let numbers = RequestNumbers {
            total, queued, verify, verify_bytes, verify_best_bytes_per_s, reads, refused_reads,
            driver_cpu, cpus, rails: rails.clone(),
        };
        let limit = classify(&numbers);
        prop_assert_eq!(limit == Limit::Unknown, total.is_zero());
        prop_assert!(!limit.to_string().is_empty());
        // A rail that is named is one of those given.
        let named = match limit {
            Limit::NetworkSlowestRail { rail, .. }
            | Limit::NetworkRailIdle { rail, .. }
            | Limit::Disk { rail, .. } => Some(rail),
            _ => None,
        };
        prop_assert!(named.is_none_or(|n| rails.iter().any(|(rail, _)| *rail == n)));
    }
}
