//! Limits of machine, device and flags: what does not fit says so, what fits works from the smallest to the largest.

use std::process::{Command, Stdio};

use atlas_expert_tests::binary::{self, path};
use atlas_expert_tests::guest;
use atlas_expert_tests::net::process::PeerProcess;
use serde_json::Value;
use tempfile::TempDir;

use super::cable::{Cable, FAR, NEAR};
use super::programs::{
    Shape, digest, fetch, fetch_command, folder, number, packets, posix_digest, shell,
};

const MTU: u64 = 4096;

/// 16 records of 0.8 MiB.
const PLAIN: Shape = Shape {
    family: "qwen3-moe",
    layers: 2,
    experts: 8,
    hidden: 264,
    inter: 512,
};
/// Two records of 12.6 MB: more than soft-RoCE takes in one message.
const HUGE: Shape = Shape {
    family: "qwen3-moe",
    layers: 1,
    experts: 2,
    hidden: 2048,
    inter: 1024,
};

/// A packed store behind a peer.
struct Rig {
    peer: PeerProcess,
    digest: Value,
    _folder: TempDir,
}

impl Rig {
    fn new(shape: Shape, rail: &str) -> Self {
        let folder = folder();
        let store = shape.packed(folder.path());
        Self {
            peer: PeerProcess::start(&store, &["--rail", rail]),
            digest: posix_digest(&store),
            _folder: folder,
        }
    }

    /// Bytes fetched over rxe0, and the packets that it received for them.
    fn fetch(&self, flags: &[&str]) -> (u64, u64) {
        let before = packets(0);
        let flags = [&["--rail", "rxe0"], flags].concat();
        let report = fetch(&self.peer, &flags);
        assert_eq!(digest(&report), self.digest);
        (number(&report["bytes"]), packets(0) - before)
    }
}

/// The same command with a small limit on locked memory, and without the right to pass it.
fn with_little_locked_memory(command: &Command) -> Command {
    let mut limited = Command::new("prlimit");
    limited
        .args(["--memlock=1048576:1048576", "setpriv"])
        .args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"])
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null());
    limited
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_too_little_locked_memory_is_an_error_with_limit_and_need_or_a_loud_fallback() {
    let rig = Rig::new(PLAIN, "rxe0");
    let mut command = fetch_command(&rig.peer, &["--rail", "rxe0", "--require-rdma"]);
    let refused = binary::run(&mut with_little_locked_memory(&command));
    let error = refused.error(1);
    println!("{error}");
    for part in [
        "locked-memory limit is 1048576 bytes, need ",
        "ulimit -l",
        "rxe0",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let need = error.split("need ").nth(1).expect("seen above");
    let need: u64 = need
        .split(' ')
        .next()
        .and_then(|n| n.parse().ok())
        .expect("a number");
    // Two slabs of eight records each.
    assert!(need >= 16 * 264 * 512 * 6, "{error}");

    command = fetch_command(&rig.peer, &["--rail", "rxe0"]);
    let fell_back = binary::run(&mut with_little_locked_memory(&command));
    let report = fell_back.json();
    assert_eq!(digest(&report), rig.digest);
    assert_eq!(report["takeovers"], 1, "{report}");
    let rails = report["rails"].as_array().expect("rails");
    assert!(rails.iter().all(|r| r["kind"] == "tcp"), "{report}");
    for part in ["no verbs rail, records go over TCP", "locked-memory limit"] {
        assert!(fell_back.stderr.contains(part), "{fell_back:?}");
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_peer_with_too_little_locked_memory_says_limit_and_need() {
    let folder = folder();
    let store = PLAIN.packed(folder.path());
    let mut command = Command::new(path("atlas-expert-peer"));
    command
        .args(["--listen", "127.0.0.1:0", "--rail", "rxe0", "-q", "--store"])
        .arg(&store);
    let refused = binary::run(&mut with_little_locked_memory(&command));
    let error = refused.error(1);
    println!("{error}");
    assert!(
        error.contains("locked-memory limit is 1048576 bytes, need "),
        "{error}"
    );
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_mtu_is_the_smaller_of_what_client_and_both_ports_take() {
    let cable = Cable::new();
    let rig = Rig::new(PLAIN, FAR);
    // The packets that the client's device received for what it fetched, in bytes of payload.
    let bytes_per_packet = |name: &str, flags: &[&str]| {
        let before = cable.packets();
        let flags = [&["--rail", NEAR], flags].concat();
        let report = fetch(&rig.peer, &flags);
        assert_eq!(digest(&report), rig.digest);
        let each = number(&report["bytes"]) / (cable.packets() - before);
        guest::figure(name, each);
        each
    };
    let is_large = |each| (3072..=4096).contains(&each);
    let large = bytes_per_packet("bytes_per_packet_of_4096", &[]);
    assert!(is_large(large), "{large}");
    let small = bytes_per_packet("bytes_per_packet_of_1024", &["--mtu", "1024"]);
    assert!(small <= 1024, "{small}");
    cable.set_far_mtu(1500);
    let port = shell("ibv_devinfo -d rxe_far");
    assert!(port.contains("active_mtu:\t\t1024"), "{port}");
    let small = bytes_per_packet("bytes_per_packet_of_a_port_of_1024", &[]);
    assert!(small <= 1024, "{small}");
    cable.set_far_mtu(9000);
    let large = bytes_per_packet("bytes_per_packet_of_4096_again", &[]);
    assert!(is_large(large), "{large}");
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_read_depths_and_windows_from_one_read_on_work() {
    let rig = Rig::new(PLAIN, "rxe0");
    for flags in [
        ["--read-depth", "1"],
        ["--read-depth", "16"],
        ["--read-depth", "255"],
        ["--window-kib", "1"],
        ["--qps-per-rail", "1"],
        ["--qps-per-rail", "8"],
    ] {
        let (bytes, count) = rig.fetch(&flags);
        assert!(count >= bytes / MTU, "{flags:?}: {count} packets");
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_window_of_thousands_of_small_records_works() {
    let rig = Rig::new(Shape::TINY, "rxe0");
    let (bytes, count) = rig.fetch(&["--batch", "1024", "--window-kib", "65536"]);
    assert_eq!(bytes, Shape::TINY.records() * 12_288);
    assert!(count >= bytes / MTU, "{count} packets");
}

/// A device sends one packet for a request and gets one per MTU of it back; both ends are one device here.
#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_requests_from_4_kib_to_the_devices_largest_message_work() {
    let rig = Rig::new(HUGE, "rxe0");
    for kib in ["4", "64", "1024", "1048576"] {
        let (bytes, count) = rig.fetch(&["--read-kib", "16384", "--request-kib", kib]);
        guest::figure(&format!("requests_of_{kib}_kib_packets"), count);
        assert!(count >= bytes / MTU, "{count} packets");
        if kib == "4" {
            assert!(
                count >= 2 * (bytes / MTU),
                "not one request per packet: {count}"
            );
        }
    }
}
