//! The programs in one guest, run as a user would: stores made, fetched over verbs, and compared with plain reads.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::guest;
use atlas_expert_tests::net::process::PeerProcess;
use serde_json::Value;
use tempfile::TempDir;

/// A checkpoint to make up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) family: &'static str,
    pub(crate) layers: u32,
    pub(crate) experts: u32,
    pub(crate) hidden: u32,
    pub(crate) inter: u32,
}

impl Shape {
    /// 26 records of nearly 2 MiB; 13 experts divide by no count of rails.
    pub(crate) const UNEVEN: Self = Self {
        family: "qwen3-moe",
        layers: 2,
        experts: 13,
        hidden: 680,
        inter: 512,
    };
    /// 1024 records of 12 KiB.
    pub(crate) const TINY: Self = Self {
        family: "qwen3-moe",
        layers: 4,
        experts: 256,
        hidden: 64,
        inter: 32,
    };

    /// How many records it has.
    pub(crate) fn records(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.experts)
    }

    /// Makes it up in a new folder.
    pub(crate) fn checkpoint(&self, folder: &Path) -> PathBuf {
        let out = folder.join("checkpoint");
        let text = |n: u32| n.to_string();
        binary::expert(&[
            &"synth",
            &"--family",
            &self.family,
            &"--layers",
            &text(self.layers),
            &"--experts",
            &text(self.experts),
            &"--hidden",
            &text(self.hidden),
            &"--inter",
            &text(self.inter),
            &"--shards",
            &"4",
            &"--output",
            &out,
            &"-q",
        ])
        .succeeded();
        out
    }

    /// An in-place store of it.
    pub(crate) fn in_place(&self, folder: &Path) -> PathBuf {
        self.store(folder, "index", "in-place")
    }

    /// A packed store of it.
    pub(crate) fn packed(&self, folder: &Path) -> PathBuf {
        self.store(folder, "pack", "packed")
    }

    fn store(&self, folder: &Path, verb: &str, name: &str) -> PathBuf {
        let checkpoint = self.checkpoint(folder);
        let out = folder.join(name);
        binary::expert(&[&verb, &checkpoint, &"--output", &out, &"-q"]).succeeded();
        out
    }
}

/// A folder in memory that goes when it is dropped.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// A command that fetches everything by one-sided READs and nothing else, with time for a machine that emulates its
/// processor; it prints JSON.
pub(crate) fn fetch_command(peer: &PeerProcess, flags: &[&str]) -> Command {
    fetch_command_from(&[peer], flags)
}

/// The same from several peers.
pub(crate) fn fetch_command_from(peers: &[&PeerProcess], flags: &[&str]) -> Command {
    let addrs: Vec<String> = peers.iter().map(|peer| peer.addr.to_string()).collect();
    let addrs = addrs.join(",");
    let mut args: Vec<&dyn AsRef<OsStr>> = vec![
        &"fetch",
        &"--expert-backend",
        &"rdma-verbs",
        &"--expert-peer",
        &addrs,
        &"--deadline-ms",
        &"60000",
        &"--stall-ms",
        &"5000",
        &"--json",
    ];
    args.extend(flags.iter().map(|f| f as &dyn AsRef<OsStr>));
    binary::command("atlas-expert", &args)
}

/// Runs [`fetch_command`] with `--require-rdma`; panics unless everything came over verbs at the first try.
pub(crate) fn fetch(peer: &PeerProcess, flags: &[&str]) -> Value {
    fetch_with(peer, flags, &[])
}

/// The same with variables of the environment.
pub(crate) fn fetch_with(peer: &PeerProcess, flags: &[&str], env: &[(&str, &str)]) -> Value {
    fetch_from(&[peer], flags, env)
}

/// The same from several peers.
pub(crate) fn fetch_from(peers: &[&PeerProcess], flags: &[&str], env: &[(&str, &str)]) -> Value {
    let mut command = fetch_command_from(peers, flags);
    command.arg("--require-rdma").envs(env.iter().copied());
    let report = binary::run(&mut command).json();
    for (name, want) in [("failed", 0), ("verify_failures", 0), ("takeovers", 0)] {
        assert_eq!(report[name], want, "{name}: {report}");
    }
    for rail in report["rails"].as_array().expect("rails") {
        assert_eq!(rail["kind"], "verbs", "{report}");
        assert_eq!(rail["errors"], 0, "{report}");
    }
    report
}

/// The digest of all records of a store, read plainly.
pub(crate) fn posix_digest(store: &Path) -> Value {
    let args: [&dyn AsRef<OsStr>; 6] = [
        &"fetch",
        &"--expert-backend",
        &"posix",
        &"--store",
        &store,
        &"--json",
    ];
    let report = binary::expert(&args).json();
    digest(&report)
}

/// The digest in a report.
pub(crate) fn digest(report: &Value) -> Value {
    let digest = report["payload_digest"].clone();
    assert!(digest.is_string(), "no digest: {report}");
    digest
}

/// A number in JSON.
pub(crate) fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

/// Bytes of each rail of a report, in order.
pub(crate) fn rail_bytes(report: &Value) -> Vec<u64> {
    let rails = report["rails"].as_array().expect("rails");
    rails.iter().map(|r| number(&r["bytes"])).collect()
}

/// What a rail's device has received, in packets.
pub(crate) fn packets(rail: usize) -> u64 {
    guest::rail_counter(rail, "rcvd_pkts")
}

/// Runs a shell command that must succeed; its standard output.
pub(crate) fn shell(command: &str) -> String {
    run_shell(command).succeeded().stdout
}

/// Runs a shell command.
pub(crate) fn run_shell(command: &str) -> Output {
    binary::run(
        Command::new("bash")
            .args(["-c", command])
            .stdin(Stdio::null()),
    )
}

/// A field of `/proc/PID/status` or of `/proc/meminfo`, in bytes.
pub(crate) fn proc_bytes(path: &str, field: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let value = text.lines().find_map(|l| l.strip_prefix(field));
    let value = value.and_then(|v| v.strip_prefix(':'));
    let kib: u64 = value
        .and_then(|v| v.trim().strip_suffix("kB"))
        .and_then(|v| v.trim().parse().ok())
        .unwrap_or_else(|| panic!("no {field} in {path}"));
    kib << 10
}

/// Whether this kernel registers read-only mappings of files: Linux 6.2 and later.
pub(crate) fn registers_mappings() -> bool {
    let series = std::env::var("KERNEL_TEST_KERNEL").expect("a guest of make kernel-test");
    let mut numbers = series
        .split('.')
        .map(|n| n.parse::<u32>().expect("a number"));
    (numbers.next(), numbers.next()) >= (Some(6), Some(2))
}
