//! Records whose content changed under way are fetched once more where that was asked for: whole, from one content,
//! into the slot that was named, before the same deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{Model, Records, Sizes};
use atlas_expert_tests::net::proxy::Proxy;
use atlas_expert_tests::net::rig::{
    arena_for, assert_all_right, assert_right, batch, patient, serve, slot, unsettled,
};
use atlas_expert_tests::net::{SLACK, wait_until};
use expert_peer::Peer;
use expert_store::{Key, Store};
use expert_tier::{Deadline, EngineConfig, ExpertTier, RdmaTier, Record, TierBuilder, TierError};

/// A peer that changes its store while a batch is under way.
struct Net {
    store: Arc<Store>,
    records: Records,
    peer: Peer,
    proxy: Proxy,
    _model: Model,
}

impl Net {
    fn new() -> Self {
        let model = Model::bf16(Sizes::LARGE);
        let store = model.open();
        let peer = serve(store.clone());
        Self {
            records: model.records(),
            store,
            proxy: Proxy::start(peer.local_addr()),
            peer,
            _model: model,
        }
    }

    /// A tier that knows the catalogue and fetches again.
    fn tier(&self, builder: TierBuilder) -> RdmaTier {
        let arena = arena_for(&self.records, self.records.len() as u32);
        let builder = builder.replan_changed(true).engine(EngineConfig {
            // Little is on its way at a time, so that the change finds something to refuse.
            window_bytes: 256 << 10,
            read_bytes: 256 << 10,
            ..EngineConfig::default()
        });
        let tier = builder.connect(&self.proxy.addr(), arena).expect("a tier");
        assert_all_right(&tier, &self.records, self.records.len() as u32);
        tier
    }

    fn keys(&self) -> Vec<Key> {
        self.records.keys().copied().collect()
    }

    fn bytes(&self) -> u64 {
        self.records.values().map(|r| r.len() as u64).sum()
    }

    /// A batch of everything, with the store replaced when a part of it has come.
    fn fetch_and_reload(
        &self,
        tier: &RdmaTier,
        store: Arc<Store>,
    ) -> Vec<Result<Record, TierError>> {
        self.proxy.hold_after(self.bytes() / 4);
        std::thread::scope(|scope| {
            let keys = self.keys();
            let fetching = scope.spawn(move || tier.fetch_many(&batch(&keys), 0));
            wait_until("bytes are held back", || self.proxy.is_holding());
            self.peer.reload(store).expect("a reload");
            self.proxy.resume();
            fetching.join().expect("no panic").expect("a batch")
        })
    }
}

#[test]
fn records_that_changed_under_way_come_whole_from_the_new_content() {
    let net = Net::new();
    let tier = net.tier(patient());
    let old = tier
        .fetch(net.keys()[0], slot(0), 0)
        .expect("a record")
        .content();
    let other = Model::bf16(Sizes::LARGE.seed(2));
    let others = other.records();
    assert!(net.records.iter().all(|(key, bytes)| others[key] != *bytes));
    let fetched = net.fetch_and_reload(&tier, other.open());
    let mut new = 0;
    for (record, (key, place)) in fetched.into_iter().zip(batch(&net.keys())) {
        let record = record.expect("fetched again");
        assert_eq!((record.key(), record.lease().slot()), (key, place));
        match record.content() == old {
            true => assert_right(&record, &net.records),
            false => {
                assert_right(&record, &others);
                assert_eq!(Some(record.content().id), other.open().content_id());
                new += 1;
            }
        }
        assert!(record.is_verified());
    }
    assert!(new > 0);
    let stats = tier.stats();
    assert_eq!((stats.replanned, stats.verify_failures), (new, 0));
    assert_all_right(&tier, &others, net.records.len() as u32);
    assert_eq!(tier.stats().replanned, new, "nothing else changed");
}

#[test]
fn record_that_the_new_content_does_not_have_fails_as_changed() {
    let net = Net::new();
    let tier = net.tier(patient());
    // The second half of the batch is of a layer that it does not have.
    let smaller = Model::bf16(Sizes {
        layers: 1,
        ..Sizes::LARGE.seed(2)
    });
    let others = smaller.records();
    let fetched = net.fetch_and_reload(&tier, smaller.open());
    let (mut new, mut changed) = (0, 0);
    for (record, key) in fetched.into_iter().zip(net.keys()) {
        match record {
            Ok(record) if record.bytes() == net.records[&key] => {}
            Ok(record) => {
                assert_right(&record, &others);
                new += 1;
            }
            Err(TierError::ContentChanged { key: told }) => {
                assert_eq!(told, key);
                assert!(!others.contains_key(&key));
                changed += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(changed, 4, "one layer of four experts is gone");
    assert_eq!(tier.stats().replanned, new);
    wait_until("no READ is out", || unsettled(tier.arena()) == 0);
}

#[test]
fn content_other_than_the_expected_is_not_fetched_again() {
    let net = Net::new();
    let tier = net.tier(patient().expect_content_id(net.store.content_id()));
    let other = Model::bf16(Sizes::LARGE.seed(2));
    let fetched = net.fetch_and_reload(&tier, other.open());
    let mut changed = 0;
    for record in fetched {
        match record {
            Ok(record) => assert_right(&record, &net.records),
            Err(TierError::ContentChanged { .. }) => changed += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(changed > 0);
    assert_eq!(tier.stats().replanned, 0);
    let error = tier
        .fetch(net.keys()[0], slot(0), 0)
        .expect_err("another model");
    assert!(matches!(error, TierError::OtherContent { .. }), "{error}");
}

#[test]
fn second_try_ends_by_the_deadline_of_the_first() {
    let net = Net::new();
    let time = Duration::from_secs(3);
    let tier = net.tier(patient().deadline(Deadline {
        base: time,
        floor_bytes_per_s: 0,
    }));
    let other = Model::bf16(Sizes::LARGE.seed(2));
    net.proxy.hold_after(net.bytes() / 4);
    let start = Instant::now();
    let records = std::thread::scope(|scope| {
        let fetching = scope.spawn(|| tier.fetch_many(&batch(&net.keys()), 0));
        wait_until("bytes are held back", || net.proxy.is_holding());
        net.peer.reload(other.open()).expect("a reload");
        net.proxy.cut();
        // Enough to learn of the new content, and to ask for its description perhaps; not for records.
        net.proxy.hold_after(3000);
        fetching.join().expect("no panic").expect("a batch")
    });
    assert!(start.elapsed() >= time && start.elapsed() < SLACK);
    let mut failed = 0;
    for record in records {
        match record {
            Ok(record) => assert_right(&record, &net.records),
            Err(TierError::ContentChanged { .. } | TierError::Deadline { .. }) => failed += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(failed > 0);
    net.proxy.resume();
    let others = other.records();
    wait_until("all is fetched from the new content", || {
        let fetched = tier.fetch_many(&batch(&net.keys()), 0);
        fetched.is_ok_and(|records| {
            let whole = records
                .iter()
                .flatten()
                .filter(|r| r.bytes() == others[&r.key()]);
            whole.count() == others.len()
        })
    });
}
