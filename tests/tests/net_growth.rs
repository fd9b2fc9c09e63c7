//! Whoever connects and leaves, again and again, leaves nothing behind. Alone in its file: it counts threads and
//! descriptors of its own process, which tests beside it would disturb.

use std::fs;

use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::rig::{arena_for, assert_right, patient, serve, slot};
use atlas_expert_tests::net::wait_until;
use expert_store::Key;
use expert_tier::ExpertTier;

fn count(what: &str) -> usize {
    fs::read_dir(format!("/proc/self/{what}"))
        .expect("procfs")
        .count()
}

#[test]
fn two_hundred_clients_that_come_and_go_leave_no_thread_and_no_descriptor() {
    let model = Model::bf16(Sizes::TINY);
    let records = model.records();
    let peer = serve(model.open());
    let addr = peer.local_addr().to_string();
    let cycle = |n: u32| {
        let builder = patient().streams(1 + n % 3);
        let tier = builder
            .connect(&addr, arena_for(&records, 2))
            .expect("a tier");
        let key = Key::new(n % 2, n % 16);
        // One fetched, one given up on the way.
        let record = tier.fetch(key, slot(0), 0).expect("a record");
        assert_right(&record, &records);
        drop(tier.submit(&[(key, slot(1))], None).expect("a slot"));
    };
    (0..3).for_each(cycle);
    wait_until("all connections ended", || {
        peer.stats().connections_active == 0
    });
    let (threads, descriptors) = (count("task"), count("fd"));
    (0..200).for_each(cycle);
    wait_until("threads ended and descriptors closed", || {
        count("task") <= threads && count("fd") <= descriptors
    });
    assert_eq!(peer.stats().connections_active, 0);
}
