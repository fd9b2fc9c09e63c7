//! The bit-identity gate over verbs: the hash is that of resident weights, over one rail and over two.

use std::ffi::OsStr;

use atlas_expert_tests::binary;
use atlas_expert_tests::guest;
use atlas_expert_tests::net::gate::{FLAGS, SIZES_SMALL};
use atlas_expert_tests::net::process::PeerProcess;
use serde_json::Value;

use super::programs::{Shape, folder, number, packets, rail_bytes};

const MTU: u64 = 4096;

const SHAPE: Shape = Shape {
    family: "qwen3-moe",
    layers: SIZES_SMALL.layers,
    experts: SIZES_SMALL.experts,
    hidden: SIZES_SMALL.hidden,
    inter: SIZES_SMALL.inter,
};

fn gate(flags: &[&str]) -> Value {
    let mut args: Vec<&dyn AsRef<OsStr>> = vec![&"gate", &"--steps", &"3", &"--json", &"-q"];
    args.extend(FLAGS.iter().map(|f| f as &dyn AsRef<OsStr>));
    args.extend(flags.iter().map(|f| f as &dyn AsRef<OsStr>));
    binary::expert(&args).json()
}

/// Runs it over these rails, and panics unless every record came by READs, each time that it was needed, and was right.
fn every_record_comes_over_verbs_and_is_right(packed: bool, rails: usize) {
    let folder = folder();
    let store = match packed {
        true => SHAPE.packed(folder.path()),
        false => SHAPE.in_place(folder.path()),
    };
    let want = gate(&["--resident", store.to_str().expect("UTF-8")]);
    let names: Vec<String> = (0..rails).map(|i| format!("rxe{i}")).collect();
    let devices: Vec<&str> = names.iter().flat_map(|n| ["--rail", n.as_str()]).collect();
    let peer = PeerProcess::start(&store, &devices);
    let addr = peer.addr.to_string();
    let mut flags = vec!["--expert-backend", "rdma-verbs", "--require-rdma"];
    flags.extend(["--expert-peer", &addr, "--deadline-ms", "60000"]);
    flags.extend(["--stall-ms", "5000"]);
    flags.extend(&devices);
    let before: Vec<u64> = (0..rails).map(packets).collect();
    let report = gate(&flags);

    assert_eq!(report["hash"], want["hash"], "{report:#}");
    assert_eq!(report["records_needed"], want["records_needed"]);
    assert_eq!(report["hits"], 0, "{report:#}");
    assert_eq!(report["misses"], report["records_needed"], "{report:#}");
    assert_eq!(report["misses_certain"], report["misses"], "{report:#}");
    assert_eq!(report["verified"], true, "{report:#}");
    assert_eq!(report["takeovers"], 0, "{report:#}");
    let bytes = rail_bytes(&report);
    assert_eq!(bytes.len(), rails, "{report:#}");
    let all: u64 = bytes.iter().sum();
    assert_eq!(number(&report["transferred_bytes"]), all);
    // Gate, up and down, in BF16, without padding.
    let record_bytes = 3 * u64::from(SHAPE.hidden) * u64::from(SHAPE.inter) * 2;
    assert_eq!(all, number(&report["misses"]) * record_bytes);
    for (rail, bytes) in bytes.into_iter().enumerate() {
        assert_eq!(report["rails"][rail]["kind"], "verbs", "{report:#}");
        assert!(bytes > 0, "rail {rail} carried nothing: {report:#}");
        let count = packets(rail) - before[rail];
        assert!(count >= bytes / MTU, "{bytes} bytes in {count} packets");
    }
    guest::figure(
        "seconds",
        report["seconds"].as_f64().expect("a number of seconds"),
    );
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn forward_pass_over_verbs_is_that_of_resident_weights_in_place() {
    every_record_comes_over_verbs_and_is_right(false, 1);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn forward_pass_over_verbs_is_that_of_resident_weights_packed() {
    every_record_comes_over_verbs_and_is_right(true, 1);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn forward_pass_over_two_rails_is_that_of_resident_weights() {
    every_record_comes_over_verbs_and_is_right(false, 2);
}
