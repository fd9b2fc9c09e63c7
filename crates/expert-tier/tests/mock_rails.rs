//! What the engine guarantees, shown on the mock rail under a virtual clock: no test here depends on the machine's
//! speed. `docs/rails.md` says what the same is called over TCP and verbs.

mod common;
mod lab;

use std::time::Duration;

use common::TAG;
use expert_arena::SlotState;
use expert_store::catalogue::CHUNK_BYTES;
use expert_tier::engine::Failure;
use expert_tier::mock::{MockSpec, ReadFault};
use expert_tier::rail::ContentTag;
use expert_tier::{EngineConfig, OnFailure, Policy};
use lab::{Lab, PATIENCE, slot};

const POLICIES: [Policy; 3] = [Policy::HomeSteal, Policy::ExpertMod, Policy::Split];

const MB: u64 = 1_000_000;

/// Several chunks, the last one a part of one.
const RECORD: u64 = 3 * CHUNK_BYTES + 700;

fn config() -> EngineConfig {
    EngineConfig {
        read_bytes: CHUNK_BYTES,
        ..EngineConfig::default()
    }
}

/// Rails of these rates.
fn rails(mb_per_s: &[u64]) -> Vec<MockSpec> {
    let rails = mb_per_s.iter().map(|mb| MockSpec::steady(mb * MB));
    rails.collect()
}

#[test]
fn one_to_eight_rails_of_unequal_speed_bring_every_byte() {
    const RATES: [u64; 8] = [100, 25, 240, 12, 60, 500, 33, 150];
    for policy in POLICIES {
        for count in 1..=RATES.len() {
            let policy = EngineConfig { policy, ..config() };
            let mut lab = Lab::new(rails(&RATES[..count]), policy, RECORD);
            let experts: Vec<u32> = (0..24).collect();
            lab.fetch_right(&experts);
            let carried = lab.carried();
            assert!(carried.iter().all(|bytes| *bytes > 0), "{carried:?}");
            assert_eq!(carried.iter().sum::<u64>(), 24 * lab.image_bytes());
            lab.assert_settled();
        }
    }
}

#[test]
fn single_rail_is_a_pass_through_under_every_policy() {
    let mut ends = Vec::new();
    for policy in POLICIES {
        let mut lab = Lab::new(rails(&[50]), EngineConfig { policy, ..config() }, RECORD);
        let experts = [5, 2, 7, 2, 0];
        let began = lab.now;
        lab.fetch_right(&experts);
        ends.push(lab.now - began);
        // Record after record, READ after READ, each as large as it may be.
        let offsets = (0..4).map(|chunk| chunk * CHUNK_BYTES);
        let want: Vec<(u32, u64)> = experts
            .iter()
            .flat_map(|&expert| offsets.clone().map(move |at| (expert, at)))
            .collect();
        let posted = lab.posted.iter().map(|p| (p.expert, p.offset));
        assert_eq!(posted.collect::<Vec<_>>(), want, "{policy:?}");
    }
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
}

#[test]
fn each_policy_gives_a_rail_what_it_should() {
    // All of it at home on the first of two rails.
    let experts = [0, 2, 4, 6];
    for (policy, helps) in [(Policy::ExpertMod, false), (Policy::HomeSteal, true)] {
        let mut lab = Lab::new(
            rails(&[50, 50]),
            EngineConfig { policy, ..config() },
            RECORD,
        );
        lab.fetch_right(&experts);
        assert_eq!(
            lab.carried()[1] > 0,
            helps,
            "{policy:?}: {:?}",
            lab.carried()
        );
    }
    let policy = Policy::Split;
    let mut lab = Lab::new(
        rails(&[50; 4]),
        EngineConfig { policy, ..config() },
        64 * CHUNK_BYTES,
    );
    lab.fetch_right(&[3]);
    let (carried, fair) = (lab.carried(), lab.image_bytes() / 4);
    assert!(
        carried
            .iter()
            .all(|bytes| bytes.abs_diff(fair) <= 2 * CHUNK_BYTES),
        "one record over four equal rails: {carried:?}"
    );
}

#[test]
fn late_bytes_land_in_a_slot_that_is_nobodys_and_never_in_the_next_record() {
    let mut lab = Lab::new(rails(&[100]), config(), RECORD);
    lab.rails[0].arm(ReadFault::Late(Duration::from_millis(150)));
    let request = lab.submit_within(&[1], Duration::from_millis(50));
    let finished = lab.until_finished(request);
    assert!(matches!(finished.records[0], Err(Failure::Deadline(_))));
    assert_eq!(lab.slot_state(0), SlotState::Quarantined);
    assert!(lab.arena.begin_landing(slot(0), 1).is_err());
    // Another slot can be used meanwhile; its record comes after the late bytes.
    let request = lab.submit_into(&[(2, 1)], PATIENCE);
    lab.until_right(request, &[2]);
    lab.run_until("the late READs are back", |lab| {
        lab.slot_state(0) == SlotState::Free
    });
    let request = lab.submit_into(&[(3, 0)], PATIENCE);
    lab.until_right(request, &[3]);
    lab.assert_settled();
}

#[test]
fn checksum_failure_names_the_chunk_and_fails_its_record_alone() {
    for fault in [ReadFault::Corrupt, ReadFault::Short] {
        let once = EngineConfig {
            retries: 0,
            ..config()
        };
        let mut lab = Lab::new(rails(&[100]), once, RECORD);
        let request = lab.submit(&[4, 5]);
        // Two of the four READs of the first record are on their way well.
        lab.run_until("two READs are posted", |lab| lab.posted.len() >= 2);
        let next = lab.posted.len();
        lab.rails[0].arm(fault);
        let finished = lab.until_finished(request);
        let bad = lab.posted[next];
        let (failed, whole) = match bad.expert {
            4 => (0, 1),
            _ => (1, 0),
        };
        let Err(Failure::Checksum(told)) = &finished.records[failed] else {
            panic!("{fault:?}: {finished:?}");
        };
        assert_eq!(u64::from(told.chunk), bad.offset / CHUNK_BYTES, "{fault:?}");
        assert_ne!(told.got, told.want);
        lab.assert_right(&finished.records[whole], [4, 5][whole]);
        assert_eq!(lab.engine.stats().verify_failures, 1);
        drop(finished);
        lab.run_until("no READ is out", Lab::is_settled);
    }
}

#[test]
fn under_delivery_is_noticed_and_made_good_by_a_second_read() {
    let mut lab = Lab::new(rails(&[100]), config(), RECORD);
    for times in 1..=5 {
        lab.rails[0].arm(ReadFault::Short);
        lab.fetch_right(&[times]);
        assert_eq!(lab.engine.stats().verify_failures, u64::from(times));
    }
    assert_eq!(lab.engine.stats().failed, 0);
}

#[test]
fn only_rail_that_is_cut_fails_the_request_safely_or_completes_it_as_asked() {
    let cut = |on_failure| {
        let mut lab = Lab::new(
            rails(&[20]),
            EngineConfig {
                on_failure,
                ..config()
            },
            RECORD,
        );
        let request = lab.submit(&[0, 1, 2]);
        lab.run_for(Duration::from_millis(20));
        lab.rails[0].disconnect(Duration::from_millis(300));
        (lab, request)
    };
    let (mut lab, request) = cut(OnFailure::FailFast);
    let began = lab.now;
    let finished = lab.until_finished(request);
    assert!(lab.now - began < Duration::from_millis(10), "at once");
    let failed = |r: &Result<_, _>| matches!(r, Err(Failure::RailFailed(_)));
    assert!(finished.records.iter().all(failed), "{finished:?}");
    assert_eq!(lab.arena.stats().committed, 0, "nothing of it is returned");
    lab.run_until("no READ is out", Lab::is_settled);
    // It works again afterwards.
    lab.run_until("the rail is up", |lab| lab.engine.is_healthy());
    lab.fetch_right(&[0, 1, 2]);

    let (mut lab, request) = cut(OnFailure::Failover);
    lab.until_right(request, &[0, 1, 2]);
    let stats = lab.engine.stats();
    assert_eq!((stats.rails[0].errors_by_cause.downs, stats.failed), (1, 0));
    lab.assert_settled();
}

#[test]
fn timeout_changes_nothing_that_is_readable() {
    let mut lab = Lab::new(rails(&[100]), config(), RECORD);
    let kept = lab.fetch(&[6]).records.remove(0).expect("a record").lease;
    let request = lab.submit_into(&[(7, 1)], PATIENCE);
    let cached = match &lab.until_finished(request).records[0] {
        Ok(committed) => committed.lease.residency(),
        Err(failure) => panic!("{failure:?}"),
    };
    let before = lab.arena.stats();
    // One slot is free, the other has a record that nobody leases: it makes room at once.
    lab.rails[0].stall(Duration::from_millis(100));
    let request = lab.submit_into(&[(8, 2), (9, 1)], Duration::from_millis(50));
    let finished = lab.until_finished(request);
    let expired = |r: &Result<_, _>| matches!(r, Err(Failure::Deadline(_)));
    assert!(finished.records.iter().all(expired), "{finished:?}");
    assert!(
        kept[..] == *lab.catalogue.image(TAG, 6),
        "what is leased stays"
    );
    assert!(lab.arena.lease(&kept.residency()).is_ok());
    assert!(
        lab.arena.lease(&cached).is_err(),
        "it made room, and nothing took its name"
    );
    let after = lab.arena.stats();
    assert_eq!(
        (after.leases, after.committed),
        (before.leases, before.committed - 1)
    );
    lab.run_until("no READ is out", Lab::is_settled);
    assert!(lab.arena.lease(&cached).is_err());
    for place in [1, 2] {
        assert_eq!(
            lab.slot_state(place),
            SlotState::Free,
            "late bytes made no record"
        );
    }
    assert!(kept[..] == *lab.catalogue.image(TAG, 6));
}

#[test]
fn request_beyond_the_budget_is_refused_and_admitted_later() {
    let small = EngineConfig {
        inflight_max_bytes: RECORD,
        ..config()
    };
    let mut lab = Lab::new(rails(&[100]), small, RECORD);
    let first = lab.submit(&[0, 1, 2]);
    let refused = lab
        .try_submit_into(&[(3, 3)], PATIENCE)
        .expect_err("over the budget");
    assert_eq!(refused.limit, RECORD);
    assert_eq!(
        (refused.asked, refused.inflight),
        (lab.image_bytes(), 3 * lab.image_bytes())
    );
    assert_eq!(lab.slot_state(3), SlotState::Free, "the slot came back");
    lab.until_right(first, &[0, 1, 2]);
    let again = lab.submit_into(&[(3, 3)], PATIENCE);
    lab.until_right(again, &[3]);
    assert_eq!(lab.engine.stats().backpressure, 1);
}

#[test]
fn content_that_changed_is_refused_and_nothing_is_mixed() {
    let other = ContentTag {
        id: TAG.id + 1,
        instance: None,
    };
    let mut lab = Lab::new(rails(&[20, 20]), config(), RECORD);
    let experts = [0, 1, 2, 3, 4, 5];
    let request = lab.submit(&experts);
    lab.run_until("a record is whole", |lab| lab.arena.stats().committed > 0);
    for rail in &mut lab.rails {
        rail.switch_content(other);
    }
    let finished = lab.until_finished(request);
    let mut refused = 0;
    for (record, expert) in finished.records.iter().zip(experts) {
        match record {
            Err(Failure::ContentChanged) => refused += 1,
            record => lab.assert_right(record, expert),
        }
    }
    assert!(refused > 0 && refused < experts.len(), "{refused}");
    // Planned for the old content: refused at once. For the new: its bytes.
    drop(finished);
    let request = lab.submit(&[0]);
    let finished = lab.until_finished(request);
    assert!(matches!(finished.records[0], Err(Failure::ContentChanged)));
    lab.content = other;
    lab.verify = false; // the catalogue has the sums of the other one
    lab.fetch_right(&experts);
}

#[test]
fn rail_that_flapped_carries_its_share_again() {
    let mut lab = Lab::new(rails(&[50, 50]), config(), 8 * CHUNK_BYTES);
    let experts: Vec<u32> = (0..8).collect();
    for _ in 0..4 {
        let request = lab.submit(&experts);
        lab.run_for(Duration::from_millis(30));
        lab.rails[0].disconnect(Duration::from_millis(40));
        lab.until_right(request, &experts);
    }
    assert!(lab.engine.stats().rails[0].errors_by_cause.downs >= 4);
    lab.run_until("both rails are up", |lab| {
        lab.engine.stats().rails.iter().all(|r| r.state == "up")
    });
    let before = lab.carried();
    lab.fetch_right(&experts);
    let after = lab.carried();
    let share = |rail: usize| (after[rail] - before[rail]) as f64 / (8 * lab.image_bytes()) as f64;
    assert!((share(0) - 0.5).abs() < 0.1, "{}", share(0));
}

#[test]
fn stalled_rail_delays_the_others_by_no_more_than_the_stall_detector() {
    let stall = MockSpec::steady(1).capabilities.stall;
    let experts: Vec<u32> = (0..8).collect();
    // All that there is to do, by the one rail that works.
    let mut alone = Lab::new(rails(&[50]), config(), 4 * CHUNK_BYTES);
    let began = alone.now;
    alone.fetch_right(&experts);
    let alone = alone.now - began;
    for at_ms in [0, 10, 40, 80] {
        let mut lab = Lab::new(rails(&[50, 50]), config(), 4 * CHUNK_BYTES);
        let began = lab.now;
        let request = lab.submit(&experts);
        lab.run_for(Duration::from_millis(at_ms));
        lab.rails[0].stall(Duration::from_secs(3600));
        lab.until_right(request, &experts);
        let took = lab.now - began;
        assert!(
            took <= alone + stall + Duration::from_millis(at_ms + 20),
            "{at_ms} ms: {took:?}"
        );
        assert_eq!(lab.engine.stats().rails[0].errors_by_cause.stalls, 1);
        // It is not asked again while it stands still.
        let began = lab.now;
        lab.fetch_right(&experts);
        assert!(lab.now - began <= alone + Duration::from_millis(20));
    }
}

#[test]
fn requests_of_every_odd_shape_end_well() {
    for bytes in [
        1,
        255,
        257,
        4096,
        CHUNK_BYTES - 1,
        CHUNK_BYTES + 1,
        2 * CHUNK_BYTES + 12_345,
    ] {
        for policy in POLICIES {
            let config = EngineConfig { policy, ..config() };
            let mut lab = Lab::new(rails(&[80, 30, 55]), config, bytes);
            lab.fetch_right(&[]);
            lab.fetch_right(&[3]);
            lab.fetch_right(&[5, 5, 1, 5]);
            lab.fetch_right(&[0, 1, 2, 3, 4, 5, 6, 7]);
            lab.assert_settled();
        }
    }
}
