//! Two peers over verbs on two rails each: parts add up, and a replica that is killed is done without.

use std::time::{Duration, Instant};

use atlas_expert_tests::binary;
use atlas_expert_tests::net::process::PeerProcess;
use rustix::process::Signal;
use serde_json::Value;

use super::programs::{
    Shape, digest, fetch_command_from, fetch_from, folder, number, packets, posix_digest,
    rail_bytes,
};

const RAILS: [(&str, &str); 1] = [("ATLAS_EXPERT_RAILS", "rxe0,rxe1")];
/// For what takes seconds on a machine that emulates its processor.
const LONG: Duration = Duration::from_secs(60);
const MTU: u64 = 4096;

/// A peer of a store, or of a part of it, on the first two rails.
fn serve(store: &std::path::Path, flags: &[&str]) -> PeerProcess {
    let rails = ["--rail", "rxe0", "--rail", "rxe1", "--rdma", "require"];
    PeerProcess::start(store, &[&rails[..], flags].concat())
}

/// Bytes of a report's rails that have a peer's address in their names.
fn bytes_of(report: &Value, peer: &PeerProcess) -> u64 {
    let rails = report["rails"].as_array().expect("rails");
    let own = rails.iter().filter(|rail| {
        let name = rail["name"].as_str().expect("a name");
        name.ends_with(&peer.addr.to_string())
    });
    own.map(|rail| number(&rail["bytes"])).sum()
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_two_peers_with_half_of_the_records_each_add_up_over_two_rails() {
    let folder = folder();
    let store = Shape::UNEVEN.packed(folder.path());
    let one = serve(&store, &["--shard", "1/2"]);
    let two = serve(&store, &["--shard", "2/2"]);
    let before = [packets(0), packets(1)];
    let report = fetch_from(&[&one, &two], &[], &RAILS);
    assert_eq!(digest(&report), posix_digest(&store));
    let bytes = rail_bytes(&report);
    assert_eq!(bytes.len(), 4, "two rails to each of two peers: {report}");
    assert!(bytes.iter().all(|bytes| *bytes > 0), "{report}");
    // 13 experts: one peer has six of each layer, the other seven.
    let (of_one, of_two) = (bytes_of(&report, &one), bytes_of(&report, &two));
    assert_eq!(of_one + of_two, number(&report["bytes"]));
    let smaller = of_one.min(of_two);
    assert_eq!(smaller * 13, (of_one + of_two) * 6, "{report}");
    let carried: u64 = (0..2).map(|rail| packets(rail) - before[rail]).sum();
    assert!(
        carried >= number(&report["bytes"]) / MTU,
        "{carried} packets"
    );
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_replica_that_is_killed_in_mid_fetch_costs_no_record() {
    const PASSES: u64 = 6;
    let folder = folder();
    let store = Shape::UNEVEN.packed(folder.path());
    let stays = serve(&store, &[]);
    let dies = serve(&store, &[]);
    let want = posix_digest(&store);
    let pass_packets = Shape::UNEVEN.records() * 2 * 1_000_000 / MTU;
    let before = packets(0) + packets(1);
    let passes = PASSES.to_string();
    let report = std::thread::scope(|scope| {
        let fetch = scope.spawn(|| {
            let flags = ["--require-rdma", "--repeat", &passes];
            let mut command = fetch_command_from(&[&stays, &dies], &flags);
            binary::run(command.envs(RAILS)).json()
        });
        let limit = Instant::now() + LONG;
        while packets(0) + packets(1) - before < pass_packets {
            assert!(!fetch.is_finished(), "it ended before the peer did");
            assert!(Instant::now() < limit, "no pass within {LONG:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        dies.signal(Signal::KILL);
        fetch.join().expect("a fetch")
    });
    assert_eq!(
        digest(&report),
        want,
        "every pass has the same, or fetch fails"
    );
    for (name, want) in [("failed", 0), ("verify_failures", 0), ("takeovers", 0)] {
        assert_eq!(report[name], want, "{name}: {report}");
    }
    assert_eq!(
        number(&report["records"]),
        PASSES * Shape::UNEVEN.records(),
        "{report}"
    );
    let (of_one, of_other) = (bytes_of(&report, &stays), bytes_of(&report, &dies));
    assert_eq!(of_one + of_other, number(&report["bytes"]));
    assert!(of_other > 0 && of_other < of_one, "{report}");
    for rail in report["rails"].as_array().expect("rails") {
        let name = rail["name"].as_str().expect("a name");
        let is_dead = name.ends_with(&dies.addr.to_string());
        assert_eq!(rail["state"] != "up", is_dead, "{name}: {report}");
    }
}
