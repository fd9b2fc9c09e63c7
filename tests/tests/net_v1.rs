//! The frozen protocol, against other people's implementations: a client and a server in Python, written from the
//! description alone.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::SLACK;
use atlas_expert_tests::net::model::{self, Model, Records, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::rig::{arena_for, assert_all_right, patient};
use expert_arena::SlotId;
use expert_store::Key;
use expert_store::info::hex128;
use expert_tier::{ExpertTier, TierError};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

fn python(script: &str) -> Command {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("python")
        .join(script);
    let mut command = Command::new("python3");
    command.arg(path).stdin(Stdio::null());
    command
}

/// A v1 server in Python. Killed when it is dropped, and ends by itself where that does not happen.
struct V1Server {
    child: Child,
    addr: String,
}

impl V1Server {
    fn start(store: &Path, faults: &[&str]) -> Self {
        let mut child = python("v1_server.py")
            .arg(store)
            .args(["--seconds", "120"])
            .args(faults)
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3, which scripts/bootstrap installs");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let addr = line
            .trim()
            .strip_prefix("listening ")
            .expect("an address")
            .to_owned();
        Self { child, addr }
    }
}

impl Drop for V1Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct V1Store {
    path: std::path::PathBuf,
    records: Records,
    _model: Model,
}

impl V1Store {
    fn new() -> Self {
        let model = Model::nvfp4(Sizes::V1);
        let path = model.pack_v1();
        Self {
            records: model::v1_records(&path),
            path,
            _model: model,
        }
    }

    fn fetch(&self, server: &V1Server, flags: &[&str]) -> Output {
        let mut command = binary::command("atlas-expert", &[&"fetch", &"-q", &"--json"]);
        command
            .args(["--expert-backend", "rdma", "--expert-peer", &server.addr])
            .args(flags)
            .env_remove("ATLAS_EXPERT_CONTENT_ID");
        binary::run(&mut command)
    }

    /// Of all records as they are stored, one after the other.
    fn payload_digest(&self) -> String {
        let all: Vec<u8> = self.records.values().flatten().copied().collect();
        hex128(xxh3_128(&all))
    }
}

#[test]
fn client_in_python_fetches_every_record_from_our_peer() {
    let store = V1Store::new();
    let peer = PeerProcess::start(&store.path, &[]);
    let out = tempfile::tempdir().expect("a folder");
    let output = binary::run(
        python("v1_client.py")
            .arg(peer.addr.to_string())
            .args(["--check-header", "--out"])
            .arg(out.path()),
    )
    .succeeded();
    let mut sha256 = Sha256::new();
    for (key, record) in &store.records {
        sha256.update(record);
        let name = format!("{}_{}.bin", key.layer, key.expert);
        let got = fs::read(out.path().join(name)).expect("a record");
        assert!(got == *record, "{key}");
    }
    let sha256: String = sha256
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    assert!(output.stdout.starts_with(&sha256), "{output:?}");
}

#[test]
fn client_in_python_is_told_of_a_record_that_does_not_exist() {
    let store = V1Store::new();
    let peer = PeerProcess::start(&store.path, &[]);
    for records in ["9:0", "0:99", "4294967295:0"] {
        let mut command = python("v1_client.py");
        command
            .arg(peer.addr.to_string())
            .args(["--records", records]);
        let output = binary::run(&mut command);
        assert_eq!(output.code, Some(1), "{output:?}");
        assert!(output.stderr.contains("status 1"), "{output:?}");
    }
}

#[test]
fn client_in_python_is_turned_away_by_a_peer_without_a_v1_store() {
    let model = Model::nvfp4(Sizes::V1);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let output = binary::run(python("v1_client.py").arg(peer.addr.to_string()));
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stderr.contains("lacks"), "{output:?}");
}

#[test]
fn our_client_fetches_every_record_from_a_server_in_python() {
    let store = V1Store::new();
    let server = V1Server::start(&store.path, &[]);
    let arena = arena_for(&store.records, store.records.len() as u32);
    let tier = patient().connect(&server.addr, arena).expect("a tier");
    assert_all_right(&tier, &store.records, store.records.len() as u32);
    for flags in [
        &[][..],
        &["--streams", "3"],
        &["--batch", "1", "--depth", "1"],
    ] {
        let report = store.fetch(&server, flags).json();
        assert_eq!(report["records"], 8);
        assert_eq!(report["payload_digest"], store.payload_digest());
        // v1 carries no checksums, and the report does not claim any.
        assert_eq!(report["verified"], false);
        assert!(report["content_id"].is_null());
        assert_eq!(report["rails"][0]["kind"], "tcp-v1");
    }
}

#[test]
fn server_that_answers_with_another_expert_is_refused() {
    let store = V1Store::new();
    let server = V1Server::start(&store.path, &["--answer-wrong-expert"]);
    let arena = arena_for(&store.records, 1);
    let tier = patient().connect(&server.addr, arena).expect("a tier");
    let key = Key::new(1, 2);
    let error = tier
        .fetch(key, SlotId { slab: 0, slot: 0 }, 0)
        .expect_err("another expert");
    assert!(
        matches!(&error, TierError::WrongRecord { key: named, why } if *named == key && why.contains("layer 1 expert 3")),
        "{error}"
    );
    assert_eq!(tier.arena().stats().committed, 0);
    // One connection: its end takes what others have under way with it.
    let output = store.fetch(&server, &["--streams", "1"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(
        output
            .stderr
            .contains("layer 0 expert 0: the peer answered with layer 0 expert 1"),
        "{output:?}"
    );
}

#[test]
fn server_that_damages_record_headers_is_refused() {
    let store = V1Store::new();
    // Bits of magic, version, layer and geometry.
    for bit in ["0", "32", "64", "130"] {
        let server = V1Server::start(&store.path, &["--flip-bit", bit]);
        let output = store.fetch(&server, &[]);
        assert_eq!(output.code, Some(1), "{output:?}");
        assert!(
            output.stderr.contains("nothing was committed"),
            "{output:?}"
        );
    }
}

#[test]
fn server_with_faults_ends_fetch_in_time_with_exit_code_1_and_the_reason() {
    let store = V1Store::new();
    // A server that closes on requests that it has not read resets the connection: one at a time.
    let one_by_one = [
        "--deadline-ms",
        "300",
        "--batch",
        "1",
        "--depth",
        "1",
        "--layers",
        "0",
    ];
    for (faults, time, reason) in [
        (&["--silent"][..], &[][..], "the handshake timed out after"),
        (&["--garbage"], &[], "no expert peer"),
        (
            &["--announce-bytes", "4294967295"],
            &[],
            "exceeds the limit",
        ),
        (&["--announce-bytes", "0"], &[], "no expert peer"),
        (&["--answer-error"], &[], "status 1"),
        (
            &["--close-mid-record", "1000"],
            &one_by_one,
            "in the middle of a record",
        ),
        (
            &["--close-mid-record", "0"],
            &one_by_one,
            "in the middle of a record",
        ),
        (
            &["--stall-after", "3"],
            &["--deadline-ms", "500"],
            "not complete after 500ms",
        ),
    ] {
        let server = V1Server::start(&store.path, faults);
        let start = Instant::now();
        let output = store.fetch(&server, time);
        assert!(start.elapsed() < SLACK);
        assert_eq!(output.code, Some(1), "{faults:?}: {output:?}");
        assert!(output.stderr.contains(reason), "{faults:?}: {output:?}");
        assert!(
            !output.stderr.contains("panicked"),
            "{faults:?}: {output:?}"
        );
    }
}
