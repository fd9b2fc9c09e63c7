//! Several peers of one model: parts add up, replicas share the load and take over from each other, peers come and go,
//! and whoever does not belong gets nothing to say.

use std::sync::Arc;
use std::time::Duration;

use atlas_expert_tests::binary::expert;
use atlas_expert_tests::net::fake::{FakePeer, Reply, Script};
use atlas_expert_tests::net::model::Sizes;
use atlas_expert_tests::net::parts::Parts;
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::proxy::Proxy;
use atlas_expert_tests::net::rig::{
    arena_for, assert_all_right, assert_right, batch, patient, serve, slot, unsettled,
};
use atlas_expert_tests::net::wait_until;
use expert_store::info::{Whole, hex128};
use expert_store::{Key, OpenOptions, Store};
use expert_tier::rail::RailKind;
use expert_tier::stats::RailStats;
use expert_tier::{EngineConfig, ExpertTier, Policy, RdmaTier, Sources, TierBuilder, TierError};
use expert_wire::message::ErrorCode;

fn list(addrs: &[&dyn std::fmt::Display]) -> String {
    let addrs: Vec<String> = addrs.iter().map(|a| a.to_string()).collect();
    addrs.join(",")
}

fn connect(parts: &Parts, builder: TierBuilder, addrs: &str) -> Result<RdmaTier, TierError> {
    builder.connect(addrs, arena_for(&parts.records, parts.records.len() as u32))
}

fn refused(parts: &Parts, builder: TierBuilder, addrs: &str) -> TierError {
    match connect(parts, builder, addrs) {
        Ok(_) => panic!("{addrs} was accepted"),
        Err(error) => error,
    }
}

fn all_right(tier: &RdmaTier, parts: &Parts) {
    assert_all_right(tier, &parts.records, parts.records.len() as u32);
}

/// Whether all records come and are right; an error must be one that passes.
fn are_all_right(tier: &RdmaTier, parts: &Parts) -> bool {
    let keys: Vec<Key> = parts.records.keys().copied().collect();
    let fetched = match tier.fetch_many(&batch(&keys), 0) {
        Ok(fetched) => fetched,
        Err(TierError::Arena(_)) => return false,
        Err(error) => {
            assert!(error.is_retryable(), "{error}");
            return false;
        }
    };
    fetched.into_iter().all(|record| match record {
        Ok(record) => {
            assert_right(&record, &parts.records);
            true
        }
        Err(error) => {
            assert!(error.is_retryable(), "{error}");
            false
        }
    })
}

fn rail(tier: &RdmaTier, index: usize) -> RailStats {
    tier.stats().rails.swap_remove(index)
}

fn content(store: &Store) -> String {
    hex128(store.content_id().expect("checksums"))
}

/// An address where nobody listens, until the proxy leads somewhere.
fn nowhere() -> Proxy {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    drop(listener);
    Proxy::start(addr)
}

#[test]
fn two_shards_add_up_to_the_model() {
    let parts = Parts::new(Sizes::SMALL);
    let one = serve(parts.packed_shard(1, 2));
    let two = serve(parts.indexed_shard(2, 2));
    let addrs = list(&[&one.local_addr(), &two.local_addr()]);
    let tier = connect(&parts, patient(), &addrs).expect("a model");
    all_right(&tier, &parts);
    let info = tier.info();
    assert_eq!(info.content_id, Some(content(&parts.whole)));
    assert_eq!(info.layout_id, hex128(parts.whole.layout_id()));
    assert_eq!(info.layers, parts.whole.info().layers);
    // Half the experts of each layer are here, half there.
    for index in 0..2 {
        assert_eq!(rail(&tier, index).bytes, parts.bytes() / 2);
    }
    drop(tier);

    let store = parts.whole.path();
    let plain = expert(&[
        &"fetch",
        &"--expert-backend",
        &"posix",
        &"--store",
        &store,
        &"--json",
    ]);
    let both = expert(&[&"fetch", &"--expert-peer", &addrs, &"--json"]).json();
    assert_eq!(both["payload_digest"], plain.json()["payload_digest"]);
    assert_eq!(both["content_id"], content(&parts.whole));
    assert_eq!(both["rails"].as_array().map(Vec::len), Some(2));
    let alone = expert(&[
        &"fetch",
        &"--expert-peer",
        &one.local_addr().to_string(),
        &"--json",
    ]);
    let error = alone.error(1);
    assert!(error.contains("layers 0 to 2: experts 4..8"), "{error}");
}

#[test]
fn packed_in_place_and_local_replicas_are_interchangeable_and_share_the_load() {
    let parts = Parts::new(Sizes::SMALL);
    let one = serve(parts.packed());
    let two = serve(parts.whole.clone());
    let sources = Sources {
        local: Some(parts.model.open()),
        add_local: true,
        ..Sources::of_peers(&list(&[&one.local_addr(), &two.local_addr()])).expect("a list")
    };
    let arena = arena_for(&parts.records, parts.records.len() as u32);
    let tier = patient().connect_sources(&sources, arena).expect("a tier");
    for _ in 0..8 {
        all_right(&tier, &parts);
    }
    let rails = tier.stats().rails;
    let all: u64 = rails.iter().map(|r| r.bytes).sum();
    assert_eq!(all, 8 * parts.bytes());
    let shares: Vec<u64> = rails.iter().map(|r| r.bytes * 100 / all).collect();
    eprintln!("per cent of the bytes: {shares:?}");
    assert!(shares.iter().all(|&share| share > 0), "{shares:?}");
    drop(tier);

    // Two that are equal carry about the same.
    let addrs = list(&[&two.local_addr(), &one.local_addr()]);
    let tier = connect(&parts, patient(), &addrs).expect("a tier");
    for _ in 0..12 {
        all_right(&tier, &parts);
    }
    let share = rail(&tier, 0).bytes * 100 / (12 * parts.bytes());
    eprintln!("the first of two: {share} per cent");
    assert!((30..=70).contains(&share), "{share} per cent");
}

#[test]
fn peers_of_different_models_are_refused_by_name() {
    let parts = Parts::new(Sizes::TINY);
    let other = Parts::new(Sizes::TINY.seed(2));
    let one = serve(parts.packed_shard(1, 2));
    let two = serve(other.packed_shard(2, 2));
    let (a, b) = (one.local_addr().to_string(), two.local_addr().to_string());
    let addrs = list(&[&a, &b]);
    let error = refused(&parts, patient(), &addrs);
    assert!(
        matches!(error, TierError::DifferentContents { .. }),
        "{error}"
    );
    let text = error.to_string();
    for word in [&a, &b, &content(&parts.whole), &content(&other.whole)] {
        assert!(text.contains(word), "{word}: {text}");
    }
    // Insisting on one names the other.
    let expect = patient().expect_content_id(parts.whole.content_id());
    let error = refused(&parts, expect, &addrs);
    assert!(
        matches!(&error, TierError::OtherContent { addr, .. } if *addr == b),
        "{error}"
    );
    // A local store of another model is no replica either.
    let sources = Sources {
        local: Some(other.whole.clone()),
        ..Sources::of_peers(&a).expect("a list")
    };
    let error = patient().allow_missing(true).describe_sources(&sources);
    assert!(
        matches!(error, Err(TierError::DifferentContents { .. })),
        "{error:?}"
    );
}

#[test]
fn what_cannot_be_proven_to_be_the_same_is_no_replica() {
    let parts = Parts::new(Sizes::TINY);
    let unhashed = OpenOptions {
        checksums: false,
        ..OpenOptions::default()
    };
    let bare = Store::open(&parts.model.checkpoint, &unhashed).expect("a checkpoint");
    let one = serve(parts.whole.clone());
    let two = serve(Arc::new(bare));
    let (a, b) = (one.local_addr(), two.local_addr());
    let error = refused(&parts, patient(), &list(&[&a, &b]));
    let text = error.to_string();
    assert!(
        matches!(error, TierError::Unproven { .. }) && text.contains(&b.to_string()),
        "{text}"
    );
}

#[test]
fn missing_records_are_named_at_connect_and_come_with_a_peer_that_joins() {
    let parts = Parts::new(Sizes::TINY);
    let one = serve(parts.packed_shard(1, 2));
    let later = nowhere();
    let addrs = list(&[&one.local_addr(), &later.addr()]);
    let error = refused(&parts, patient(), &addrs);
    assert!(matches!(error, TierError::Missing { .. }), "{error}");
    assert!(
        error.to_string().contains("layers 0 to 1: experts 8..16"),
        "{error}"
    );
    assert!(
        error.to_string().contains(&one.local_addr().to_string()),
        "{error}"
    );

    let tier = connect(&parts, patient().allow_missing(true), &addrs).expect("half a model");
    assert_eq!(tier.info().layers[0].experts, [[0, 8]]);
    let here = tier
        .fetch(Key::new(1, 7), slot(0), 0)
        .expect("held by the first");
    assert_right(&here, &parts.records);
    drop(here);
    let error = tier
        .fetch(Key::new(1, 8), slot(0), 0)
        .expect_err("held by nobody");
    assert!(matches!(error, TierError::Unavailable { .. }), "{error}");
    let error = tier
        .fetch(Key::new(1, 16), slot(0), 0)
        .expect_err("not in the model");
    assert!(matches!(error, TierError::NoSuchRecord { .. }), "{error}");

    let two = serve(parts.indexed_shard(2, 2));
    later.lead_to(two.local_addr());
    wait_until("the second half is there", || are_all_right(&tier, &parts));
    assert_eq!(tier.info().layers, parts.whole.info().layers);
    assert_eq!(tier.stats().peers_refused, 0);
    assert!(rail(&tier, 1).bytes > 0);
}

#[test]
fn part_alone_is_a_model_where_it_is_what_was_asked_for() {
    let parts = Parts::new(Sizes::TINY);
    let store = parts.packed_shard(1, 2);
    let peer = serve(store.clone());
    let builder = patient().expect_content_id(store.content_id());
    let tier = connect(&parts, builder, &peer.local_addr().to_string()).expect("a part");
    assert_eq!(tier.info().content_id, Some(content(&store)));
    let record = tier.fetch(Key::new(0, 3), slot(0), 0).expect("a record");
    assert_right(&record, &parts.records);
}

/// What a fake peer says of a store, as if it were a part of something else.
fn claiming(store: Arc<Store>, whole: Whole) -> FakePeer {
    let mut script = Script::new(store, |_, _| Reply::Right);
    script.on_info = Box::new(move |mut info| {
        info.whole = Some(whole.clone());
        info
    });
    FakePeer::serving(script)
}

#[test]
fn peer_that_claims_a_whole_it_is_no_part_of_is_refused_by_name() {
    let parts = Parts::new(Sizes::TINY);
    let other = Parts::new(Sizes::TINY.seed(2));
    let one = serve(parts.packed_shard(1, 2));
    let whole = parts
        .packed_shard(2, 2)
        .info()
        .whole
        .clone()
        .expect("a whole");
    let liar = claiming(other.packed_shard(2, 2), whole.clone());
    let error = refused(&parts, patient(), &list(&[&one.local_addr(), &liar.addr()]));
    assert!(
        matches!(&error, TierError::Catalogue { addr, .. } if *addr == liar.addr()),
        "{error}"
    );
    // Whose layers are not even those of the whole.
    let mut fewer = whole;
    fewer.layers[0].experts = vec![[0, 2]];
    let liar = claiming(parts.packed_shard(2, 2), fewer);
    let error = refused(&parts, patient(), &list(&[&one.local_addr(), &liar.addr()]));
    assert!(
        matches!(&error, TierError::Catalogue { addr, .. } if *addr == liar.addr()),
        "{error}"
    );
    assert_eq!(liar.reads(), 0);
}

#[test]
fn liar_that_joins_later_gets_no_reads_and_is_counted() {
    let parts = Parts::new(Sizes::TINY);
    let other = Parts::new(Sizes::TINY.seed(2));
    let one = serve(parts.whole.clone());
    let later = nowhere();
    let addrs = list(&[&one.local_addr(), &later.addr()]);
    let tier = connect(&parts, patient(), &addrs).expect("a model");
    let whole = parts
        .packed_shard(2, 2)
        .info()
        .whole
        .clone()
        .expect("a whole");
    let liar = claiming(other.packed_shard(2, 2), whole);
    later.lead_to(liar.addr().parse().expect("an address"));
    wait_until("the liar was looked at", || tier.stats().peers_refused == 1);
    all_right(&tier, &parts);
    assert_eq!(liar.reads(), 0);
    assert_eq!(tier.stats().peers_refused, 1);
}

#[test]
fn replica_that_lacks_or_damages_what_it_claims_is_made_up_for_by_the_other() {
    let parts = Parts::new(Sizes::SMALL);
    let honest = serve(parts.whole.clone());
    let liar = FakePeer::serving(Script::new(parts.whole.clone(), |_, request| match request
        .key
        .expert
    {
        0..=2 => Reply::Error(ErrorCode::NoSuchExpert),
        3..=5 => Reply::Corrupt,
        _ => Reply::Right,
    }));
    let addrs = list(&[&liar.addr(), &honest.local_addr()]);
    let tier = connect(&parts, patient(), &addrs).expect("a model");
    for _ in 0..3 {
        all_right(&tier, &parts);
    }
    assert!(liar.reads() > 0);
    assert_eq!(tier.stats().failed, 0);
    assert!(rail(&tier, 0).errors > 0);
    assert_eq!(rail(&tier, 1).errors, 0);
}

#[test]
fn replica_takes_over_in_the_middle_of_a_request() {
    let parts = Parts::new(Sizes::SMALL);
    let store = parts.whole.clone();
    let one = PeerProcess::start(store.path(), &[]);
    let two = serve(parts.packed());
    let way = Proxy::start(one.addr);
    let addrs = list(&[&way.addr(), &two.local_addr()]);
    let tier = connect(&parts, patient(), &addrs).expect("a model");
    all_right(&tier, &parts); // the catalogue is here
    let keys: Vec<Key> = parts.records.keys().copied().collect();
    // READs are under way on the first, and it dies.
    way.hold_after(100_000);
    let pending = tier.submit(&batch(&keys), None).expect("a request");
    wait_until("the first peer stopped in the middle", || way.is_holding());
    drop(one); // by SIGKILL
    way.cut();
    let (records, _) = pending.wait().expect("an end");
    for record in records {
        assert_right(&record.expect("a record"), &parts.records);
    }
    let (before, errors) = (rail(&tier, 0).bytes, rail(&tier, 0).errors);
    assert!(errors > 0 && tier.stats().failed == 0);

    // It comes back and does its share again.
    let one = PeerProcess::start(store.path(), &[]);
    way.resume();
    way.lead_to(one.addr);
    wait_until("the first works again", || {
        all_right(&tier, &parts);
        rail(&tier, 0).bytes > before
    });
    wait_until("every slot is settled", || unsettled(tier.arena()) == 0);
}

#[test]
fn peer_that_goes_over_to_another_model_gets_no_reads_until_it_comes_back() {
    let parts = Parts::new(Sizes::TINY);
    let other = Parts::new(Sizes::TINY.seed(2));
    let one = serve(parts.whole.clone());
    let two = serve(parts.packed());
    let addrs = list(&[&one.local_addr(), &two.local_addr()]);
    let tier = connect(&parts, patient(), &addrs).expect("a model");
    all_right(&tier, &parts);
    one.reload(other.whole.clone()).expect("a reload");
    for _ in 0..3 {
        all_right(&tier, &parts);
    }
    wait_until("the change was noticed", || tier.stats().peers_refused == 1);
    let before = rail(&tier, 0).bytes;
    all_right(&tier, &parts);
    assert_eq!(rail(&tier, 0).bytes, before, "it serves another model");
    one.reload(parts.whole.clone()).expect("a reload");
    wait_until("it takes part again", || {
        all_right(&tier, &parts);
        rail(&tier, 0).bytes > before
    });
}

#[test]
fn shards_that_all_go_over_to_a_new_model_are_followed() {
    let parts = Parts::new(Sizes::TINY);
    let next = Parts::new(Sizes::TINY.seed(2));
    let one = serve(parts.packed_shard(1, 2));
    let two = serve(parts.packed_shard(2, 2));
    let addrs = list(&[&one.local_addr(), &two.local_addr()]);
    let tier = connect(&parts, patient(), &addrs).expect("a model");
    all_right(&tier, &parts);
    one.reload(next.packed_shard(1, 2)).expect("a reload");
    two.reload(next.packed_shard(2, 2)).expect("a reload");
    wait_until("the new model comes", || {
        let keys: Vec<Key> = next.records.keys().copied().collect();
        let Ok(fetched) = tier.fetch_many(&batch(&keys), 0) else {
            return false;
        };
        let is_new = tier.info().content_id == Some(content(&next.whole));
        let records: Vec<_> = fetched.into_iter().flatten().collect();
        let count = records.len();
        for record in records {
            // Of one model or of the other, never of both.
            let is_old = record.bytes() == parts.records[&record.key()];
            assert!(is_old || record.bytes() == next.records[&record.key()]);
        }
        is_new && count == keys.len()
    });
    all_right(&tier, &next);
}

#[test]
fn peer_that_never_answers_holds_nobody_up() {
    let parts = Parts::new(Sizes::TINY);
    let silent = FakePeer::silent();
    let two = serve(parts.whole.clone());
    let addrs = list(&[&silent.addr(), &two.local_addr()]);
    for policy in [Policy::HomeSteal, Policy::ExpertMod, Policy::Split] {
        let builder = patient()
            .connect_timeout(Duration::from_millis(700))
            .engine(EngineConfig {
                policy,
                ..EngineConfig::default()
            });
        let tier = connect(&parts, builder, &addrs).expect("a model");
        all_right(&tier, &parts);
        assert_eq!(rail(&tier, 0).bytes, 0);
    }
    // Nobody answers at all: each is named.
    let other = FakePeer::silent();
    let builder = patient().connect_timeout(Duration::from_millis(300));
    let error = refused(&parts, builder, &list(&[&silent.addr(), &other.addr()]));
    assert!(matches!(error, TierError::Connect { .. }), "{error}");
    for addr in [silent.addr(), other.addr()] {
        assert!(error.to_string().contains(&addr), "{error}");
    }
}

#[test]
fn local_store_takes_over_when_all_peers_die_and_hands_back() {
    let parts = Parts::new(Sizes::TINY);
    let way = nowhere();
    let sources = Sources {
        local: Some(parts.packed()),
        ..Sources::of_peers(&way.addr()).expect("a list")
    };
    let arena = arena_for(&parts.records, parts.records.len() as u32);
    // Nobody is there at the start.
    let tier = patient().connect_sources(&sources, arena).expect("a tier");
    all_right(&tier, &parts);
    assert_eq!(tier.stats().takeovers, 1);
    let local = rail(&tier, 1);
    assert_eq!((local.kind, local.bytes), (RailKind::Uma, parts.bytes()));

    let mut peer = Some(serve(parts.whole.clone()));
    way.lead_to(peer.as_ref().expect("a peer").local_addr());
    wait_until("the peer carries it", || {
        let local = rail(&tier, 1).bytes;
        all_right(&tier, &parts);
        rail(&tier, 1).bytes == local
    });
    assert!(rail(&tier, 0).bytes >= parts.bytes());

    let (remote, local) = (rail(&tier, 0).bytes, rail(&tier, 1).bytes);
    peer.take();
    way.cut();
    all_right(&tier, &parts);
    assert!(rail(&tier, 1).bytes > local);
    assert_eq!(tier.stats().takeovers, 2);

    peer = Some(serve(parts.packed_shard(1, 1)));
    way.lead_to(peer.as_ref().expect("a peer").local_addr());
    wait_until("it hands back", || {
        all_right(&tier, &parts);
        rail(&tier, 0).bytes > remote
    });
}

#[test]
fn local_store_makes_up_for_what_the_peer_damages() {
    let parts = Parts::new(Sizes::SMALL);
    let store = parts.whole.clone();
    let liar = FakePeer::serving(Script::new(store, |_, request| match request.key.expert {
        0 => Reply::Error(ErrorCode::NoSuchExpert),
        1 => Reply::Corrupt,
        _ => Reply::Right,
    }));
    let sources = Sources {
        local: Some(parts.packed()),
        ..Sources::of_peers(&liar.addr()).expect("a list")
    };
    let arena = arena_for(&parts.records, parts.records.len() as u32);
    let tier = patient().connect_sources(&sources, arena).expect("a tier");
    all_right(&tier, &parts);
    let stats = tier.stats();
    assert_eq!((stats.failed, stats.takeovers), (0, 0));
    // No more than what the peer could not bring: two of eight experts.
    let local = rail(&tier, 1).bytes;
    assert!(local > 0 && local <= parts.bytes() / 4, "{local}");
}

#[test]
fn local_part_makes_up_for_what_peers_lack() {
    let parts = Parts::new(Sizes::TINY);
    let one = serve(parts.packed_shard(1, 2));
    let addr = one.local_addr().to_string();
    let path = parts.indexed_shard_path(2, 2);
    let fetched = expert(&[
        &"fetch",
        &"--expert-peer",
        &addr,
        &"--local-store",
        &path,
        &"--json",
    ]);
    let fetched = fetched.json();
    assert_eq!(fetched["content_id"], content(&parts.whole));
    assert_eq!(fetched["failed"], 0);
    assert_eq!(fetched["records"], parts.records.len());
    let bytes = |i: usize| fetched["rails"][i]["bytes"].as_u64().expect("a number");
    assert_eq!((bytes(0), bytes(1)), (parts.bytes() / 2, parts.bytes() / 2));
    for (flags, fault) in [
        (["--expert-peer", "127.0.0.1:1,127.0.0.1:1"], "named twice"),
        (["--expert-peer", "127.0.0.1:1,"], "host:port"),
    ] {
        let output = expert(&[&"fetch", &flags[0], &flags[1]]);
        assert!(output.error(2).contains(fault), "{output:?}");
    }
}
