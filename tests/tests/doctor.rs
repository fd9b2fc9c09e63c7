//! `atlas-expert doctor` as a user runs it: exit codes, both forms of its report, stores and peers with faults.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::model::{Model, Sizes, flip_unnoticed};
use atlas_expert_tests::net::process::PeerProcess;
use serde_json::Value;

const OTHER_ID: &str = "00000000000000000000000000000007";

/// The command, with none of the variables that it goes by. Port 0 is always free.
fn command(flags: &[&str]) -> Command {
    let mut command = binary::command("atlas-expert", &[&"doctor"]);
    command.args(flags);
    for name in ["PEER", "CONTENT_ID", "RAILS", "RDMA_DEV", "DUAL_RAIL"] {
        command.env_remove(format!("ATLAS_EXPERT_{name}"));
    }
    command
}

/// The report, and the exit code that goes with it.
fn examine(flags: &[&str]) -> Value {
    let output = binary::run(command(flags).args(["--json", "--listen", "127.0.0.1:0"]));
    let report: Value =
        serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("no JSON: {e}: {output:?}"));
    let failed = report["level"] == "failure";
    assert_eq!(output.code, Some(i32::from(failed)), "{output:?}");
    report
}

fn found<'a>(report: &'a Value, id: &str) -> &'a Value {
    let findings = report["findings"].as_array().expect("findings");
    findings
        .iter()
        .find(|f| f["id"] == id)
        .unwrap_or_else(|| panic!("no {id}: {report:#}"))
}

fn assert_level(report: &Value, id: &str, level: &str) {
    assert_eq!(found(report, id)["level"], level, "{report:#}");
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

#[test]
fn library_that_is_none_is_named_and_fails_only_where_verbs_are_wanted() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("libibverbs.so.1"), "no library\n").expect("a file");
    let run = |flags: &[&str]| -> Output {
        let mut command = command(&[&["--listen", "127.0.0.1:0"], flags].concat());
        binary::run(command.env("LD_LIBRARY_PATH", dir.path()))
    };
    let output = run(&[]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let mut lines = output.stdout.lines();
    let line = lines
        .find(|l| l.contains("libibverbs.so.1 cannot be used"))
        .unwrap_or_else(|| panic!("not named: {output:?}"));
    assert!(line.starts_with("warning  verbs-library "), "{line}");
    assert!(
        lines
            .next()
            .is_some_and(|l| l.starts_with("         means: "))
    );
    let fix = lines.next().expect("a fix");
    assert!(
        fix.starts_with("         fix:   apt install libibverbs1"),
        "{fix}"
    );

    for flags in [
        &["--expert-backend", "rdma-verbs"][..],
        &["--require-rdma"],
        &["--rail", "mlx5_0"],
    ] {
        let output = run(flags);
        assert_eq!(output.code, Some(1), "{flags:?}: {output:?}");
        assert!(
            output.stdout.contains("failure  verbs-library "),
            "{output:?}"
        );
    }
}

#[test]
fn sound_store_is_described_and_a_shorter_file_of_it_is_a_failure() {
    let model = Model::bf16(Sizes::SMALL);
    let store = model.pack();
    let report = examine(&["--store", path(&store)]);
    assert_level(&report, "store", "ok");
    assert_level(&report, "store-checksums", "ok");
    assert_level(&report, "store-memory", "ok");
    let what = found(&report, "store")["what"].as_str().expect("text");
    assert!(what.contains("24 records, 7.6 MB"), "{what}");

    let bare = examine(&["--store", path(&model.checkpoint)]);
    assert_level(&bare, "store", "ok");
    assert_level(&bare, "store-checksums", "warning");

    let files = std::fs::read_dir(&store).expect("a store");
    let records = files
        .map(|f| f.expect("an entry").path())
        .find(|p| p.extension().is_some_and(|e| e == "xp2"))
        .expect("records");
    let file = File::options().write(true).open(&records).expect("a file");
    let bytes = file.metadata().expect("its size").len();
    file.set_len(bytes - 1).expect("a shorter file");
    let report = examine(&["--store", path(&store)]);
    assert_level(&report, "store", "failure");
    let name = records
        .file_name()
        .and_then(|n| n.to_str())
        .expect("a name");
    let what = found(&report, "store")["what"].as_str().expect("text");
    assert!(what.contains(name), "{what}");
}

#[test]
fn peer_over_tcp_is_proven_and_measured() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.pack(), &["--rdma", "off"]);
    let addr = peer.addr.to_string();
    let report = examine(&["--expert-peer", &addr]);
    for id in [
        "peer-connect",
        "peer-protocol",
        "peer-content",
        "peer-record",
        "peer-read",
    ] {
        assert_level(&report, id, "ok");
    }
    // It has no rail: that is said, and no failure unless verbs are wanted.
    assert_level(&report, "peer-rails", "warning");
    let record = found(&report, "peer-record")["what"]
        .as_str()
        .expect("text");
    assert!(
        record.contains("317184 bytes, every checksum right"),
        "{record}"
    );
    let read = found(&report, "peer-read")["what"].as_str().expect("text");
    assert!(read.contains("Gbit/s"), "{read}");

    // The environment names it as well.
    let output = binary::run(
        command(&["--json", "--listen", "127.0.0.1:0"]).env("ATLAS_EXPERT_PEER", &addr),
    );
    assert!(output.stdout.contains("peer-record"), "{output:?}");

    let report = examine(&["--expert-peer", &addr, "--expert-backend", "rdma-verbs"]);
    assert_level(&report, "peer-rails", "failure");
}

#[test]
fn damaged_record_is_the_peers_fault_and_want_of_memory_is_not() {
    let model = Model::bf16(Sizes::TINY);
    let store = model.pack();
    // Behind the header of the first record.
    flip_unnoticed(&store.join("layer_00000.xp2"), 300);
    let peer = PeerProcess::start(&store, &["--rdma", "off"]);
    let addr = peer.addr.to_string();
    let report = examine(&["--expert-peer", &addr]);
    assert_level(&report, "peer-record", "failure");
    let record = found(&report, "peer-record");
    let what = record["what"].as_str().expect("text");
    assert!(what.contains("checksum"), "{what}");
    let fix = record["fix"].as_str().expect("a fix");
    assert!(fix.starts_with("atlas-expert verify"), "{fix}");

    let report = examine(&["--expert-peer", &addr, "--reserve-gb", "900000"]);
    for id in ["peer-record", "peer-read"] {
        let fix = found(&report, id)["fix"].as_str().expect("a fix");
        assert!(fix.contains("--reserve-gb"), "{id}: {fix}");
    }
}

#[test]
fn peer_with_other_content_is_a_failure_and_nothing_is_fetched_from_it() {
    let model = Model::bf16(Sizes::TINY);
    let peer = PeerProcess::start(&model.pack(), &["--rdma", "off"]);
    let addr = peer.addr.to_string();
    let report = examine(&["--expert-peer", &addr, "--expect-content-id", OTHER_ID]);
    assert_level(&report, "peer-content", "failure");
    let content = found(&report, "peer-content")["what"]
        .as_str()
        .expect("text");
    assert!(content.contains(OTHER_ID), "{content}");
    let findings = report["findings"].as_array().expect("findings");
    assert!(
        findings.iter().all(|f| f["id"] != "peer-record"),
        "{report:#}"
    );
}

#[test]
fn peer_of_version_1_is_examined_as_far_as_it_tells() {
    let model = Model::nvfp4(Sizes::V1);
    let fake = model.pack_v1();
    let peer = PeerProcess::start(&fake, &["--rdma", "off"]);
    let addr = peer.addr.to_string();
    let report = examine(&["--expert-peer", &addr]);
    assert_level(&report, "peer-connect", "ok");
    assert_level(&report, "peer-record", "ok");
}

#[test]
fn peer_that_does_not_listen_or_is_none_is_a_failure_in_time() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let closed = free.local_addr().expect("its address").to_string();
    drop(free);
    let report = examine(&["--expert-peer", &closed]);
    assert_level(&report, "peer-connect", "failure");
    let fix = found(&report, "peer-connect")["fix"]
        .as_str()
        .expect("a fix");
    assert!(fix.contains("atlas-expert-peer --listen"), "{fix}");

    // Accepts into its backlog and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = silent.local_addr().expect("its address").to_string();
    let report = examine(&["--expert-peer", &addr]);
    assert_level(&report, "peer-connect", "failure");
}

#[test]
fn port_in_use_and_arena_larger_than_memory_are_failures_where_asked_for() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("its address").to_string();
    let output = binary::run(&mut command(&["--listen", &addr, "--arena-gb", "900000"]));
    assert_eq!(output.code, Some(1), "{output:?}");
    for failure in ["failure  listen-port ", "failure  memory-floor "] {
        assert!(output.stdout.contains(failure), "{failure}: {output:?}");
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    for flags in [
        &["--arena-gb", "many"][..],
        &["--listen", "nowhere"],
        &["--expert-peer", "no-port"],
        &["--expect-content-id", "7"],
        &["--rail", "a:b:c:d"],
        &["--mtu", "1500"],
    ] {
        let output = binary::run(&mut command(flags));
        assert_eq!(output.code, Some(2), "{flags:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{flags:?}: {output:?}");
    }
}
