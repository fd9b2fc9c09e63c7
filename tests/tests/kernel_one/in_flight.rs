//! READs that are under way when something ends: the tier, the peer, or the time of a request.
//!
//! Client and peer have a device each at the ends of a cable that is held up. The time there and back stays below the
//! queue pairs' time-out, so that nothing is sent twice.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use atlas_expert_tests::guest;
use atlas_expert_tests::net::model::{Model, Records, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::rig::{
    arena_for, assert_all_right, assert_right, batch, patient, patient_verbs, slot, unsettled,
};
use atlas_expert_tests::net::{SLACK, wait_until};
use expert_arena::{ArenaError, ExpertArena};
use expert_store::Key;
use expert_tier::{EngineConfig, ExpertTier, Pending, RdmaTier, TierError, VerbsOptions};
use rustix::process::Signal;

use super::cable::{Cable, FAR, NEAR};

/// Half the time there and back; a queue pair repeats what is not answered within 67 ms.
const EACH_WAY_MS: u32 = 25;
/// 1024 records of 12,288 bytes.
const MANY: Sizes = Sizes {
    layers: 4,
    experts: 256,
    ..Sizes::TINY
};

struct Rig {
    tier: RdmaTier,
    peer: PeerProcess,
    cable: Cable,
    records: Records,
    _model: Model,
}

impl Rig {
    /// A tier with that many slots that posts whatever it is asked for, and knows the catalogue. Of what is posted,
    /// `read_depth` READs per queue pair are answered in the time there and back.
    fn new(sizes: Sizes, slots: u32, read_depth: u8) -> Self {
        let cable = Cable::new();
        let model = Model::bf16(sizes);
        let records = model.records();
        let peer = PeerProcess::start(&model.pack(), &["--rail", FAR]);
        let rail = NEAR.parse().expect("a device name");
        let builder = patient()
            .engine(EngineConfig {
                window_bytes: 64 << 20,
                adapt_window: false,
                ..EngineConfig::default()
            })
            .verbs(VerbsOptions {
                read_depth,
                ..patient_verbs(vec![rail])
            });
        let arena = arena_for(&records, slots);
        let tier = builder
            .connect(&peer.addr.to_string(), arena)
            .expect("a tier");
        for layer in 0..sizes.layers {
            let record = tier
                .fetch(Key::new(layer, 0), slot(0), 0)
                .expect("a record");
            assert_right(&record, &records);
        }
        Self {
            tier,
            peer,
            cable,
            records,
            _model: model,
        }
    }

    /// Begins 1000 READs and waits until all of them are posted.
    fn thousand_in_flight(&self) -> Pending {
        let keys: Vec<Key> = self.records.keys().copied().take(1000).collect();
        let pending = self
            .tier
            .submit(&batch(&keys), Some(SLACK))
            .expect("a batch");
        let mut most = 0;
        wait_until("a thousand READs are posted", || {
            most = most.max(self.tier.arena().stats().outstanding_ranges);
            // A few may have arrived before the last is posted.
            most >= 950
        });
        guest::figure("reads_in_flight", most);
        pending
    }
}

/// Drops a tier with a thousand READs posted; its memory is free afterwards.
fn drop_is_over_in_time(rig: Rig, name: &str) {
    let arena: &Arc<ExpertArena> = rig.tier.arena();
    let memory = Arc::downgrade(arena);
    let leaks = atlas_rdma::leaks();
    let start = Instant::now();
    drop(rig.tier);
    let took = start.elapsed();
    guest::figure(name, took.as_secs_f64());
    assert!(took < SLACK / 2, "{took:?}");
    wait_until("the arena is freed", || memory.strong_count() == 0);
    assert_eq!(atlas_rdma::leaks(), leaks);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_tier_dropped_with_a_thousand_reads_in_flight_frees_its_memory_in_time() {
    let rig = Rig::new(MANY, 1000, 1);
    rig.cable.slow_down(EACH_WAY_MS);
    drop(rig.thousand_in_flight());
    assert!(unsettled(rig.tier.arena()) > 0, "all READs were over");
    drop_is_over_in_time(rig, "drop_seconds");
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_tier_dropped_while_its_peer_is_dead_frees_its_memory_in_time() {
    let rig = Rig::new(MANY, 1000, 1);
    rig.cable.slow_down(EACH_WAY_MS);
    let pending = rig.thousand_in_flight();
    rig.peer.signal(Signal::KILL);
    drop(pending);
    drop_is_over_in_time(rig, "drop_seconds");
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_thousand_expired_requests_reset_no_rail_and_fail_nobody_else() {
    const EXPIRING: u32 = 1000;
    const OTHERS: u32 = 8;
    const SLOTS: u32 = 256;
    let rig = Rig::new(Sizes::TINY, OTHERS + SLOTS, 16);
    let keys: Vec<Key> = rig.records.keys().copied().collect();
    let before = rig.tier.stats().rails[0].clone();
    rig.cable.slow_down(EACH_WAY_MS);
    let ended = AtomicBool::new(false);
    let (others, expired, in_time) = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let mut count = 0u32;
            while !ended.load(Ordering::Relaxed) {
                for keys in keys.chunks(OTHERS as usize) {
                    for record in rig.tier.fetch_many(&batch(keys), 0).expect("a batch") {
                        assert_right(&record.expect("a record of others"), &rig.records);
                        count += 1;
                    }
                }
            }
            count
        });
        let mut under_way = VecDeque::new();
        let (mut expired, mut in_time) = (0u32, 0u32);
        let mut take = |pending: Pending| {
            let (records, _) = pending.wait().expect("an end");
            for record in records {
                match record {
                    Ok(record) => {
                        assert_right(&record, &rig.records);
                        in_time += 1;
                    }
                    Err(TierError::Deadline { .. }) => expired += 1,
                    Err(other) => panic!("{other}"),
                }
            }
        };
        for i in 0..EXPIRING {
            let one = [(keys[i as usize % keys.len()], slot(OTHERS + i % SLOTS))];
            // Less than it takes there and back, and enough to be posted.
            let time = Some(Duration::from_millis(30));
            let mut begun = None;
            wait_until("the slot is free again", || {
                match rig.tier.submit(&one, time) {
                    Ok(pending) => {
                        begun = Some(pending);
                        true
                    }
                    Err(TierError::Arena(ArenaError::SlotBusy { .. })) => false,
                    Err(other) => panic!("{other}"),
                }
            });
            under_way.push_back(begun.expect("begun above"));
            if under_way.len() > 64 {
                take(under_way.pop_front().expect("the oldest"));
            }
        }
        under_way.into_iter().for_each(&mut take);
        ended.store(true, Ordering::Relaxed);
        (others.join().expect("the others' thread"), expired, in_time)
    });
    assert_eq!((expired, in_time), (EXPIRING, 0));
    wait_until("no READ is out", || unsettled(rig.tier.arena()) == 0);
    rig.cable.speed_up();
    let after = rig.tier.stats().rails[0].clone();
    let late = (after.reads - before.reads).saturating_sub(u64::from(others));
    guest::figure("expired_requests", expired);
    guest::figure("reads_that_came_late", late);
    guest::figure("records_of_others", others);
    assert!(
        late >= u64::from(EXPIRING) / 2,
        "only {late} of {EXPIRING} were posted at all"
    );
    assert!(others > 0, "nobody else fetched");
    assert_eq!(
        (after.state, after.state_changes, after.errors),
        ("up", before.state_changes, before.errors)
    );
    assert_all_right(&rig.tier, &rig.records, 32);
}
