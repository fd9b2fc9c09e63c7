//! Peers and networks that come and go: what was asked for completes when they are back in time, content is never
//! mixed, and memory that a late byte could reach is never handed out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{self, Model, Records, Sizes};
use atlas_expert_tests::net::proxy::Proxy;
use atlas_expert_tests::net::rig::{
    arena_for, assert_all_right, assert_right, batch, patient, serve, slot, unsettled,
};
use atlas_expert_tests::net::{SLACK, wait_until};
use expert_arena::{ArenaError, SlotState};
use expert_peer::Peer;
use expert_store::{Key, OpenOptions, Store};
use expert_tier::{
    Deadline, EngineConfig, ExpertTier, OnFailure, RdmaTier, TierBuilder, TierError,
    largest_image_bytes,
};

/// A model, its peer, and a network between the peer and the client.
struct Net {
    store: Arc<Store>,
    records: Records,
    peer: Option<Peer>,
    proxy: Proxy,
    _model: Model,
}

impl Net {
    fn new(sizes: Sizes) -> Self {
        let model = Model::bf16(sizes);
        let store = model.open();
        let peer = serve(store.clone());
        let proxy = Proxy::start(peer.local_addr());
        Self {
            records: model.records(),
            store,
            peer: Some(peer),
            proxy,
            _model: model,
        }
    }

    /// A tier that knows the catalogue, so that nothing but records crosses the network from now on.
    fn tier(&self, builder: TierBuilder) -> RdmaTier {
        let arena = arena_for(&self.records, self.count());
        let tier = builder.connect(&self.proxy.addr(), arena).expect("a tier");
        wait_until("all was fetched once", || {
            let (batch, time) = (batch(&self.keys()), Some(SLACK));
            let (records, _) = tier
                .submit(&batch, time)
                .expect("slots")
                .wait()
                .expect("an end");
            records.iter().all(Result::is_ok)
        });
        tier
    }

    fn count(&self) -> u32 {
        self.records.len() as u32
    }

    fn keys(&self) -> Vec<Key> {
        self.records.keys().copied().collect()
    }

    /// Ends the peer; its connections end with it.
    fn stop_peer(&mut self) {
        self.peer = None;
    }

    /// Starts a peer on a store, in the place of the one before.
    fn restart(&mut self, store: Arc<Store>) {
        self.stop_peer();
        let peer = serve(store);
        self.proxy.lead_to(peer.local_addr());
        self.peer = Some(peer);
    }

    fn bytes(&self) -> u64 {
        self.records.values().map(|r| r.len() as u64).sum()
    }
}

/// Fetches until it works; every failure on the way is one that a caller is told to repeat after.
fn fetch_until_right(tier: &RdmaTier, records: &Records) {
    let keys: Vec<Key> = records.keys().copied().collect();
    wait_until("all records are right", || {
        let fetched = match tier.fetch_many(&batch(&keys), 0) {
            Ok(fetched) => fetched,
            Err(TierError::Arena(ArenaError::SlotBusy { .. })) => return false,
            Err(error) => {
                assert!(error.is_retryable(), "{error}");
                return false;
            }
        };
        let mut complete = true;
        for record in fetched {
            match record {
                Ok(record) => assert_right(&record, records),
                Err(error) => {
                    assert!(error.is_retryable(), "{error}");
                    complete = false;
                }
            }
        }
        complete
    });
}

#[test]
fn fetch_after_a_restart_works_without_a_new_client() {
    let mut net = Net::new(Sizes::SMALL);
    let tier = net.tier(patient());
    for _ in 0..3 {
        net.restart(net.store.clone());
        assert_all_right(&tier, &net.records, net.count());
    }
    assert!(tier.healthy());
}

#[test]
fn fetch_at_once_after_a_long_absence_works() {
    let mut net = Net::new(Sizes::TINY);
    let tier = net.tier(patient());
    net.stop_peer();
    // Several attempts to connect fail meanwhile.
    std::thread::sleep(Duration::from_secs(1));
    assert!(!tier.healthy());
    net.restart(net.store.clone());
    assert_all_right(&tier, &net.records, net.count());
}

#[test]
fn longest_back_off_leaves_time_within_the_default_deadline() {
    // Else a fetch made just after the peer came back could end before the rail is tried again.
    let jitter = 1.25;
    let longest = EngineConfig::default().backoff_max.mul_f64(jitter);
    assert!(longest < Deadline::default().base * 3 / 4);
}

#[test]
fn fetch_while_the_peer_is_away_ends_by_its_deadline_and_says_why() {
    let mut net = Net::new(Sizes::TINY);
    let tier = net.tier(patient());
    net.stop_peer();
    let start = Instant::now();
    let time = Duration::from_millis(300);
    let pending = tier.submit(&batch(&net.keys()), Some(time)).expect("slots");
    for record in pending.wait().expect("an end").0 {
        let error = record.expect_err("no peer");
        assert!(matches!(error, TierError::Deadline { .. }), "{error}");
        assert!(error.to_string().contains("is not up"), "{error}");
    }
    assert!(start.elapsed() < SLACK);
    assert!(!tier.healthy());
    net.restart(net.store.clone());
    assert_all_right(&tier, &net.records, net.count());
}

#[test]
fn batch_in_flight_completes_when_the_peer_is_back_in_time() {
    let mut net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient());
    for held in [0, 16, 700_000, net.bytes() / 2] {
        net.proxy.hold_after(held);
        let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
        wait_until("bytes are held back", || net.proxy.is_holding());
        net.restart(net.store.clone());
        net.proxy.cut();
        net.proxy.resume();
        let (records, _) = pending.wait().expect("an end");
        for record in records {
            assert_right(&record.expect("back in time"), &net.records);
        }
    }
    let stats = tier.stats();
    assert!(stats.rails[0].errors_by_cause.downs >= 4);
    assert_eq!((stats.failed, stats.verify_failures), (0, 0));
}

#[test]
fn batch_in_flight_fails_at_once_where_it_is_told_to() {
    let mut net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient().engine(EngineConfig {
        on_failure: OnFailure::FailFast,
        ..EngineConfig::default()
    }));
    net.proxy.hold_after(500_000);
    let start = Instant::now();
    let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
    wait_until("bytes are held back", || net.proxy.is_holding());
    net.stop_peer();
    net.proxy.cut();
    net.proxy.resume();
    for record in pending.wait().expect("an end").0 {
        let error = record.expect_err("the rail failed");
        assert!(matches!(error, TierError::RailFailed { .. }), "{error}");
    }
    assert!(start.elapsed() < SLACK, "not the deadline's work");
    wait_until("no READ is out", || unsettled(tier.arena()) == 0);
}

#[test]
fn restart_with_another_model_is_noticed_and_nothing_is_mixed() {
    let mut net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient());
    let other = Model::bf16(Sizes::LARGE.seed(2));
    let others = other.records();
    assert!(net.records.iter().all(|(key, bytes)| others[key] != *bytes));
    net.proxy.hold_after(net.bytes() / 3);
    let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
    wait_until("bytes are held back", || net.proxy.is_holding());
    net.restart(other.open());
    net.proxy.cut();
    net.proxy.resume();
    let mut changed = 0;
    for record in pending.wait().expect("an end").0 {
        match record {
            Ok(record) => assert_right(&record, &net.records),
            Err(TierError::ContentChanged { .. }) => changed += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(changed > 0);
    assert_all_right(&tier, &others, net.count());
    assert_eq!(tier.info().content_id, other.open().info().content_id);
    assert_eq!(tier.stats().verify_failures, 0);
}

#[test]
fn restart_with_a_model_of_another_shape_works_where_the_slots_are_large_enough() {
    let mut net = Net::new(Sizes::SMALL);
    let tier = net.tier(patient());
    let smaller = Model::bf16(Sizes {
        layers: 2,
        experts: 5,
        hidden: 128,
        inter: 72,
        seed: 9,
    });
    let larger = Model::bf16(Sizes::LARGE);
    net.restart(smaller.open());
    fetch_until_right(&tier, &smaller.records());
    net.restart(larger.open());
    let mut refused = None;
    wait_until("the new model is known", || {
        refused = tier.fetch(Key::new(1, 3), slot(0), 0).err();
        largest_image_bytes(&tier.info()) > 1_000_000
    });
    let refused = refused.expect("too large");
    assert!(
        matches!(refused, TierError::SlotTooSmall { .. }),
        "{refused}"
    );
    net.restart(net.store.clone());
    fetch_until_right(&tier, &net.records);
}

#[test]
fn expected_content_is_insisted_on_after_a_restart_and_served_again_when_it_is_back() {
    let mut net = Net::new(Sizes::SMALL);
    let tier = net.tier(patient().expect_content_id(net.store.content_id()));
    let other = Model::bf16(Sizes::SMALL.seed(2));
    net.restart(other.open());
    wait_until("the other model is refused by name", || {
        match tier.fetch(Key::new(0, 0), slot(0), 0) {
            Ok(_) => panic!("a record of another model"),
            Err(TierError::ContentChanged { .. }) => false,
            Err(TierError::OtherContent { want, .. }) => {
                assert_eq!(Some(want), net.store.info().content_id);
                true
            }
            Err(error) => panic!("{error}"),
        }
    });
    assert_eq!(tier.arena().stats().leases, 0);
    net.restart(net.store.clone());
    wait_until("the right model is served again", || {
        match tier.fetch(Key::new(0, 0), slot(0), 0) {
            Ok(record) => {
                assert_right(&record, &net.records);
                true
            }
            Err(TierError::OtherContent { .. } | TierError::ContentChanged { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    });
    assert_all_right(&tier, &net.records, net.count());
}

#[test]
fn without_checksums_a_restart_counts_as_other_content() {
    let mut net = Net::new(Sizes::LARGE);
    let bare = || {
        let options = OpenOptions {
            checksums: false,
            ..OpenOptions::default()
        };
        Arc::new(Store::open(&net._model.checkpoint, &options).expect("a store"))
    };
    let (first, second) = (bare(), bare());
    net.restart(first);
    let tier = net.tier(patient());
    net.proxy.hold_after(net.bytes() / 3);
    let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
    wait_until("bytes are held back", || net.proxy.is_holding());
    net.restart(second);
    net.proxy.cut();
    net.proxy.resume();
    let records = pending.wait().expect("an end").0;
    let changed = |r: &Result<_, TierError>| matches!(r, Err(TierError::ContentChanged { .. }));
    assert!(
        records.iter().any(changed),
        "nothing proves that it is the same"
    );
    drop(records);
    fetch_until_right(&tier, &net.records);
}

#[test]
fn reload_of_the_same_content_in_mid_batch_disturbs_nothing() {
    let net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient().streams(3));
    let peer = net.peer.as_ref().expect("a peer");
    net.proxy.hold_after(net.bytes() / 4);
    let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
    wait_until("bytes are held back", || net.proxy.is_holding());
    peer.reload(net.store.clone()).expect("a reload");
    net.proxy.resume();
    for record in pending.wait().expect("an end").0 {
        assert_right(&record.expect("the same content"), &net.records);
    }
    for _ in 0..5 {
        peer.reload(net.store.clone()).expect("a reload");
        assert_all_right(&tier, &net.records, net.count());
    }
    assert_eq!(tier.stats().rails[0].errors_by_cause.downs, 0);
}

#[test]
fn reload_of_other_content_in_mid_batch_mixes_nothing() {
    let net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient().streams(3).engine(EngineConfig {
        // Little is on its way at a time, so that the reload finds something to refuse.
        window_bytes: 256 << 10,
        read_bytes: 256 << 10,
        ..EngineConfig::default()
    }));
    let other = Model::bf16(Sizes::LARGE.seed(2));
    let (peer, others) = (net.peer.as_ref().expect("a peer"), other.records());
    let stores = [(other.open(), &others), (net.store.clone(), &net.records)];
    let mut now = &net.records;
    for (store, next) in stores {
        net.proxy.hold_after(net.bytes() / 4);
        let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
        wait_until("bytes are held back", || net.proxy.is_holding());
        peer.reload(store).expect("a reload");
        net.proxy.resume();
        let mut changed = 0;
        for record in pending.wait().expect("an end").0 {
            match record {
                Ok(record) => assert_right(&record, now),
                Err(TierError::ContentChanged { .. }) => changed += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(changed > 0);
        fetch_until_right(&tier, next);
        now = next;
    }
    assert_eq!(tier.stats().verify_failures, 0);
}

#[test]
fn stalled_network_is_torn_down_after_the_stall_time_and_the_batch_completes_afterwards() {
    let net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient().stall(Duration::from_millis(200)));
    net.proxy.hold_after(net.bytes() / 2);
    let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
    wait_until("the rail is torn down", || {
        tier.stats().rails[0].errors_by_cause.stalls == 1
    });
    assert!(!tier.healthy());
    assert!(!pending.is_done());
    net.proxy.resume();
    for record in pending.wait().expect("an end").0 {
        assert_right(&record.expect("over a new connection"), &net.records);
    }
    assert!(tier.healthy());
}

#[test]
fn network_that_stays_stalled_ends_the_batch_by_its_deadline() {
    let net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient().stall(Duration::from_millis(100)));
    net.proxy.hold_after(net.bytes() / 2);
    let start = Instant::now();
    let time = Duration::from_millis(600);
    let pending = tier.submit(&batch(&net.keys()), Some(time)).expect("slots");
    let (records, _) = pending.wait().expect("an end");
    assert!(start.elapsed() < SLACK);
    let mut expired = 0;
    for record in records {
        match record {
            Ok(record) => assert_right(&record, &net.records),
            Err(TierError::Deadline { .. }) => expired += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(expired > 0);
    net.proxy.resume();
    fetch_until_right(&tier, &net.records);
}

#[test]
fn tier_dropped_behind_a_stalled_network_ends_within_seconds() {
    let net = Net::new(Sizes::LARGE);
    for stall in [Duration::from_millis(50), Duration::from_secs(60)] {
        let tier = net.tier(patient().streams(2).stall(stall));
        let memory = Arc::downgrade(tier.arena());
        net.proxy.hold_after(net.bytes() / 2);
        let pending = tier.submit(&batch(&net.keys()), None).expect("slots");
        wait_until("bytes are held back", || net.proxy.is_holding());
        // With the short stall time it is being connected again, in vain, by then.
        std::thread::sleep(Duration::from_millis(300));
        let start = Instant::now();
        drop(pending);
        drop(tier);
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            start.elapsed()
        );
        wait_until("the arena is freed", || memory.strong_count() == 0);
        net.proxy.resume();
    }
}

#[test]
fn late_bytes_of_an_expired_request_never_reach_the_next_record_of_its_slot() {
    let net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient().stall(Duration::from_secs(600)));
    let keys = net.keys();
    for round in 0..3 {
        net.proxy.hold_after(100_000);
        let time = Duration::from_millis(500);
        let pending = tier
            .submit(&[(keys[0], slot(0))], Some(time))
            .expect("a slot");
        let error = pending
            .wait()
            .expect("an end")
            .0
            .remove(0)
            .expect_err("held back");
        assert!(matches!(error, TierError::Deadline { .. }), "{error}");
        // Bytes for it are still on their way, so the slot is nobody's.
        assert_eq!(
            tier.arena().slot_state(slot(0)),
            Some(SlotState::Quarantined)
        );
        let error = tier
            .submit(&[(keys[1], slot(0))], None)
            .err()
            .expect("a busy slot");
        assert!(matches!(
            error,
            TierError::Arena(ArenaError::SlotBusy { .. })
        ));
        let next = tier
            .submit(&[(keys[1], slot(1))], None)
            .expect("another slot");
        net.proxy.resume();
        let record = next.wait().expect("an end").0.remove(0).expect("a record");
        assert_right(&record, &net.records);
        wait_until("the late bytes came and went", || {
            tier.arena().slot_state(slot(0)) == Some(SlotState::Free)
        });
        let record = tier
            .fetch(keys[2 + round], slot(0), 0)
            .expect("a free slot");
        assert_right(&record, &net.records);
    }
    // All over the first connection.
    assert_eq!(tier.stats().rails[0].errors_by_cause.downs, 0);
}

#[test]
fn slot_of_an_expired_request_is_free_after_its_connection_was_torn_down() {
    let net = Net::new(Sizes::LARGE);
    let tier = net.tier(patient().stall(Duration::from_millis(500)));
    let keys = net.keys();
    net.proxy.hold_after(100_000);
    let time = Duration::from_millis(300);
    let pending = tier
        .submit(&[(keys[0], slot(0))], Some(time))
        .expect("a slot");
    pending
        .wait()
        .expect("an end")
        .0
        .remove(0)
        .expect_err("held back");
    // Nobody waits for a record any more, and still the stall is noticed.
    wait_until("the slot is free", || {
        tier.arena().slot_state(slot(0)) == Some(SlotState::Free)
    });
    assert_eq!(tier.stats().rails[0].errors_by_cause.stalls, 1);
    net.proxy.resume();
    let record = tier.fetch(keys[1], slot(0), 0).expect("a record");
    assert_right(&record, &net.records);
}

#[test]
fn rail_that_flaps_again_and_again_comes_back_each_time() {
    let net = Net::new(Sizes::SMALL);
    let tier = net.tier(patient().streams(2));
    std::thread::scope(|scope| {
        let fetching = scope.spawn(|| {
            for _ in 0..15 {
                assert_all_right(&tier, &net.records, net.count());
            }
        });
        while !fetching.is_finished() {
            net.proxy.cut();
            std::thread::sleep(Duration::from_millis(40));
        }
        fetching.join().expect("all records, in spite of the flaps");
    });
    wait_until("the rail is up again", || tier.healthy());
    assert_all_right(&tier, &net.records, net.count());
    let rail = &tier.stats().rails[0];
    assert!(rail.errors_by_cause.downs > 0);
    assert_eq!(rail.errors_by_cause.checksum, 0);
}

#[test]
fn v1_peer_that_restarts_is_connected_to_again() {
    let model = Model::nvfp4(Sizes::V1);
    let path = model.pack_v1();
    let records = model::v1_records(&path);
    let peer = serve(model::open(&path));
    let proxy = Proxy::start(peer.local_addr());
    let count = records.len() as u32;
    let builder = patient().protocol(expert_wire::client::Protocol::V1);
    let tier = builder
        .connect(&proxy.addr(), arena_for(&records, count))
        .expect("a tier");
    assert_all_right(&tier, &records, count);
    drop(peer);
    let peer = serve(model::open(&path));
    proxy.lead_to(peer.local_addr());
    // v1 has no identity: a new run of the peer counts as other content, which is told once.
    let key = *records.keys().next().expect("a record");
    wait_until("the new run is known", || {
        match tier.fetch(key, slot(0), 0) {
            Ok(_) => true,
            Err(TierError::ContentChanged { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    });
    assert_all_right(&tier, &records, count);
}
