//! Many connections, one after the other: nothing of them stays.

use std::fs;
use std::time::{Duration, Instant};

use atlas_expert_tests::guest;
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::rig::{arena_for, assert_right, patient, patient_verbs, slot};
use atlas_expert_tests::net::wait_until;
use expert_tier::ExpertTier;

use super::programs::{proc_bytes, shell};

/// What the kernel has of each kind of RDMA object, and what two processes have open.
fn held(peer: u32) -> (String, usize, usize) {
    let open = |process: &str| {
        let folder = format!("/proc/{process}/fd");
        fs::read_dir(folder).expect("its descriptors").count()
    };
    (
        shell("rdma resource show"),
        open("self"),
        open(&peer.to_string()),
    )
}

/// The same, once nothing of it changes any more.
fn at_rest(peer: u32) -> (String, usize, usize) {
    let mut last = held(peer);
    wait_until("connections end", || {
        std::thread::sleep(Duration::from_secs(1));
        let now = held(peer);
        std::mem::replace(&mut last, now) == last
    });
    last
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_two_hundred_connects_leave_no_queue_pair_region_descriptor_or_memory() {
    const CONNECTS: u32 = 200;
    const WARM_UP: u32 = 20;
    const AT_ONCE: u32 = 4;
    let model = Model::bf16(Sizes::TINY);
    let records = model.records();
    let keys: Vec<_> = records.keys().copied().collect();
    let peer = PeerProcess::start(&model.pack(), &["--rail", "rxe0"]);
    let addr = peer.addr.to_string();
    let connect = |i: u32| {
        let rail = "rxe0".parse().expect("a device name");
        let tier = patient()
            .verbs(patient_verbs(vec![rail]))
            .connect(&addr, arena_for(&records, 1))
            .expect("a tier");
        let record = tier
            .fetch(keys[i as usize % keys.len()], slot(0), 0)
            .expect("a record");
        assert_right(&record, &records);
    };
    let peers_status = format!("/proc/{}/status", peer.pid());
    let memory = || [&peers_status, "/proc/self/status"].map(|s| proc_bytes(s, "RssAnon"));
    let connect_all = |count: u32| {
        std::thread::scope(|scope| {
            for thread in 0..AT_ONCE {
                let connect = &connect;
                scope.spawn(move || (thread..count).step_by(AT_ONCE as usize).for_each(connect));
            }
        });
    };
    connect_all(WARM_UP);
    let idle = at_rest(peer.pid());
    let before = memory();
    let start = Instant::now();
    connect_all(CONNECTS);
    let each = start.elapsed() / CONNECTS;
    guest::figure("connect_ms", each.as_secs_f64() * 1e3);
    assert_eq!(at_rest(peer.pid()), idle);
    let after = memory();
    for (who, (before, after)) in ["peer", "client"].iter().zip(before.into_iter().zip(after)) {
        guest::figure(&format!("{who}_grew_bytes"), after.saturating_sub(before));
        // A queue with its tables is a megabyte: one that stays behind now and then shows.
        assert!(
            after < before + (4 << 20),
            "the {who} grew from {before} to {after} bytes"
        );
    }
}
