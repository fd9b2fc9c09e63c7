//! Faults planted in a guest: `atlas-expert doctor` names each of them with the line that mends it, and that line does.

use std::process::Command;

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::guest;
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::wait_until;
use serde_json::Value;

use super::cable::{Cable, FAR, NEAR};
use super::programs::{Shape, folder, registers_mappings, run_shell, shell};

/// 16 records of 0.8 MiB.
const PLAIN: Shape = Shape {
    family: "qwen3-moe",
    layers: 2,
    experts: 8,
    hidden: 264,
    inter: 512,
};

/// Runs a shell command at the end, also of a test that fails.
struct Undo(&'static str);

impl Drop for Undo {
    fn drop(&mut self) {
        let done = run_shell(self.0);
        if done.code != Some(0) {
            eprintln!("{}: {done:?}", self.0);
        }
    }
}

fn command(flags: &[&str]) -> Command {
    let mut command = binary::command("atlas-expert", &[&"doctor"]);
    command
        .args(["--json", "--listen", "127.0.0.1:0", "--stall-ms", "5000"])
        .args(flags);
    command
}

fn report(output: &Output) -> Value {
    let report: Value =
        serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("no JSON: {e}: {output:?}"));
    let failed = report["level"] == "failure";
    assert_eq!(output.code, Some(i32::from(failed)), "{output:?}");
    report
}

fn examine(flags: &[&str]) -> Value {
    report(&binary::run(&mut command(flags)))
}

/// The findings of a check.
fn of<'a>(report: &'a Value, id: &str) -> Vec<&'a Value> {
    let findings = report["findings"].as_array().expect("findings");
    findings.iter().filter(|f| f["id"] == id).collect()
}

/// The finding of this level that says `what`; its fix.
fn fix<'a>(report: &'a Value, id: &str, level: &str, what: &str) -> &'a str {
    let found = of(report, id);
    let found = found.iter().find(|f| {
        f["level"] == level && f["what"].as_str().is_some_and(|text| text.contains(what))
    });
    found
        .and_then(|f| f["fix"].as_str())
        .unwrap_or_else(|| panic!("no {level} {id} with {what:?}: {report:#}"))
}

fn all_ok(report: &Value, ids: &[&str]) {
    for id in ids {
        let found = of(report, id);
        assert!(!found.is_empty(), "no {id}: {report:#}");
        assert!(found.iter().all(|f| f["level"] == "ok"), "{id}: {report:#}");
    }
}

/// The line before its explanation in brackets.
fn line(fix: &str) -> &str {
    fix.split("    (").next().expect("the first part")
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_finds_both_ends_of_a_sound_machine_as_they_should_be() {
    let folder = folder();
    let store = PLAIN.packed(folder.path());
    let peer = PeerProcess::start(&store, &["--rdma", "require"]);
    let store = store.to_str().expect("a path in UTF-8");
    let addr = peer.addr.to_string();
    let flags = [
        "--expert-backend",
        "rdma-verbs",
        "--expert-peer",
        &addr,
        "--store",
        store,
    ];
    let report = examine(&flags);
    assert_ne!(report["level"], "failure", "{report:#}");
    all_ok(
        &report,
        &[
            "verbs-library",
            "kernel-modules",
            "rdma-devices",
            "device-nodes",
            "device-opens",
            "registration",
            "port-state",
            "gid",
            "mtu",
            "rails",
            "memlock",
            "store",
            "peer-record",
            "peer-rails",
            "peer-pairing",
            "peer-mtu",
            "peer-read",
        ],
    );
    for id in ["device-opens", "port-state", "peer-pairing", "peer-read"] {
        assert_eq!(of(&report, id).len(), guest::rails(), "{id}: {report:#}");
    }
    let is_mapped = of(&report, "file-mapping")
        .iter()
        .all(|f| f["level"] == "ok");
    assert_eq!(is_mapped, registers_mappings(), "{report:#}");
    if !registers_mappings() {
        let mend = fix(&report, "file-mapping", "warning", "cannot be registered");
        assert!(mend.contains("Linux 6.2"), "{mend}");
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_a_link_that_is_down_and_its_line_brings_it_up() {
    let _cable = Cable::new();
    shell("ip link set dev near down");
    let what = "rxe_near port 1 is down";
    // Nobody named it, and others work.
    let report = examine(&["--expert-backend", "rdma-verbs"]);
    fix(&report, "port-state", "warning", what);
    let report = examine(&["--rail", NEAR]);
    let mend = fix(&report, "port-state", "failure", what);
    assert_eq!(mend, "ip link set dev near up");
    shell(mend);
    let is_active = || {
        let report = examine(&["--rail", NEAR]);
        let states = of(&report, "port-state");
        let texts = states.iter().filter_map(|f| f["what"].as_str());
        texts
            .into_iter()
            .any(|w| w.starts_with("rxe_near port 1 is active"))
    };
    // The kernel tells the device a little later.
    wait_until("an active port", is_active);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_an_mtu_of_1024_at_either_end_and_its_line_mends_it() {
    let cable = Cable::new();
    let folder = folder();
    let store = PLAIN.packed(folder.path());
    cable.set_far_mtu(1500);
    let peer = PeerProcess::start(&store, &["--rail", FAR]);
    let addr = peer.addr.to_string();
    let report = examine(&["--rail", NEAR, "--expert-peer", &addr]);
    let mend = fix(
        &report,
        "mtu",
        "warning",
        "rxe_far port 1 sends packets of 1024 bytes",
    );
    assert_eq!(line(mend), "ip link set dev far mtu 9000");
    let both = fix(
        &report,
        "peer-mtu",
        "warning",
        "packets of 4096 and 1024 bytes",
    );
    assert!(both.contains("on the peer"), "{both}");
    // It works all the same.
    all_ok(&report, &["peer-read"]);
    shell(line(mend));
    let report = examine(&["--rail", NEAR, "--expert-peer", &addr]);
    all_ok(&report, &["peer-mtu"]);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_64_kib_of_locked_memory_without_the_capability() {
    let limited = |flags: &[&str]| {
        let command = command(flags);
        let mut limited = Command::new("prlimit");
        limited
            .args(["--memlock=65536:65536", "setpriv"])
            .args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"])
            .arg(command.get_program())
            .args(command.get_args());
        report(&binary::run(&mut limited))
    };
    let found = limited(&["--expert-backend", "rdma-verbs", "--arena-gb", "0.001"]);
    let mend = fix(
        &found,
        "memlock",
        "failure",
        "limited to 65536 bytes; an arena on 1 rails needs 1000000",
    );
    assert!(mend.contains("ulimit -l unlimited"), "{mend}");
    fix(
        &found,
        "registration",
        "failure",
        "locked-memory limit is 65536 bytes",
    );
    // TCP needs none of it.
    let found = limited(&["--arena-gb", "0.001"]);
    assert_ne!(found["level"], "failure", "{found:#}");
    // With the capability the limit does not count.
    let mut command = command(&["--expert-backend", "rdma-verbs", "--arena-gb", "0.001"]);
    let mut root = Command::new("prlimit");
    root.arg("--memlock=65536:65536")
        .arg(command.get_program())
        .args(command.get_args());
    all_ok(
        &report(&binary::run(&mut root)),
        &["memlock", "registration"],
    );
    all_ok(&report(&binary::run(&mut command)), &["memlock"]);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_a_gid_index_that_is_empty() {
    let report = examine(&["--rail", "rxe0:1:77"]);
    let mend = fix(
        &report,
        "gid",
        "failure",
        "rxe0 port 1 has no GID at index 77",
    );
    let flag = line(mend).split("--rail ").nth(1).expect("a flag");
    let report = examine(&["--rail", flag]);
    all_ok(&report, &["gid", "rails"]);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_a_device_without_permission_and_its_line_mends_it() {
    let nodes: Vec<String> = std::fs::read_dir("/dev/infiniband")
        .expect("devices")
        .map(|e| {
            e.expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|n| n.starts_with("uverbs"))
        .collect();
    let _open = Undo("chmod a+rw /dev/infiniband/uverbs*");
    shell("chmod 0600 /dev/infiniband/uverbs*");
    let as_nobody = || {
        let command = command(&["--expert-backend", "rdma-verbs"]);
        let mut nobody = Command::new("setpriv");
        nobody
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(command.get_program())
            .args(command.get_args());
        report(&binary::run(&mut nobody))
    };
    let found = as_nobody();
    let refused = of(&found, "device-permissions");
    assert_eq!(refused.len(), guest::rails(), "{found:#}");
    assert_eq!(nodes.len(), guest::rails(), "{nodes:?}");
    for finding in refused {
        assert_eq!(finding["level"], "failure", "{found:#}");
        shell(line(finding["fix"].as_str().expect("a fix")));
    }
    let found = as_nobody();
    assert!(of(&found, "device-permissions").is_empty(), "{found:#}");
    assert_eq!(
        of(&found, "device-opens").len(),
        guest::rails(),
        "{found:#}"
    );
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_device_files_that_a_container_was_not_given() {
    // A mount namespace of its own, where /dev/infiniband is empty.
    let command = command(&["--expert-backend", "rdma-verbs"]);
    let mut inside = Command::new("unshare");
    inside
        .args(["--mount", "sh", "-c"])
        .arg("mount -t tmpfs none /dev/infiniband && exec \"$@\"")
        .arg("sh")
        .arg(command.get_program())
        .args(command.get_args());
    let found = report(&binary::run(&mut inside));
    let mend = fix(&found, "device-nodes", "failure", "/dev/infiniband/uverbs");
    assert!(mend.contains("--device=/dev/infiniband"), "{mend}");
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_a_network_namespace_that_lacks_the_interfaces() {
    let _gone = Undo("ip netns delete doctor");
    shell("ip netns add doctor && ip -n doctor link set lo up");
    let command = command(&["--expert-backend", "rdma-verbs"]);
    let mut inside = Command::new("ip");
    inside
        .args(["netns", "exec", "doctor"])
        .arg(command.get_program())
        .args(command.get_args());
    let found = report(&binary::run(&mut inside));
    let mend = fix(&found, "network-namespace", "failure", "rxe0 port 1");
    assert!(mend.contains("--network=host"), "{mend}");
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn doctor_names_two_ports_in_one_subnet_and_its_line_mends_it() {
    let _cable = Cable::new();
    let _back = Undo("sysctl -w net.ipv4.conf.all.arp_ignore=0 net.ipv4.conf.all.arp_announce=0");
    let report = examine(&[]);
    let what = "rxe_far port 1 and rxe_near port 1 are in one subnet";
    let mend = fix(&report, "shared-subnet", "warning", what);
    shell(line(mend));
    let report = examine(&[]);
    all_ok(&report, &["shared-subnet"]);
}
