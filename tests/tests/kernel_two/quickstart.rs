//! The lines of the quick start for RDMA, run as they stand in two guests: on soft-RoCE devices that they make themselves,
//! on devices that are there, and on devices with the names and the two subnets of a DGX Spark.

use anyhow::{Context, Result, anyhow, ensure};
use atlas_expert_tests::guest::{self, Agent};
use atlas_expert_tests::walkthrough::{Machine, Page, walk};
use serde_json::Value;

use crate::peer::PATIENCE;

const PAGE: &str = "docs/quickstart-two-machines.md";

/// Devices and links as the rig made them, and shell commands for both guests. `N` stands for 1 in the peer's guest and
/// for 2 in the client's. Dropping it brings the rig's devices back.
struct Guests {
    peer: Agent,
    client: Agent,
    folder: tempfile::TempDir,
}

impl Guests {
    /// Takes the rig's devices away in both guests, and runs a command.
    fn new(command: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let guests = Self {
            peer: Agent::of_the_run()?,
            client: Agent::local(folder.path())?,
            folder,
        };
        // A test that was ended half-way may have left others.
        guests.both(&as_the_rig_made_them())?;
        guests.both(&format!("{WITHOUT_DEVICES}{command}"))?;
        Ok(guests)
    }

    fn both(&self, command: &str) -> Result<()> {
        for (number, agent) in [("1", &self.peer), ("2", &self.client)] {
            let output = agent.run(&format!("set -e; N={number}\n{command}"), PATIENCE)?;
            ensure!(output.code == Some(0), "'{command}': {output:?}");
        }
        Ok(())
    }

    /// A terminal in each, peer first.
    fn machines(&self) -> Result<[Machine; 2]> {
        let told = |e| anyhow!("{e}");
        let made = self.peer.run("mktemp -d /run/tmp/home.XXXXXX", PATIENCE)?;
        let home = made.succeeded().stdout.trim().to_owned();
        let scp = format!("\"$AGENT\" call \"$KERNEL_TEST_AGENT\" \"cat '{home}/$1'\"");
        let peer = Agent::of_the_run()?;
        let peer = Machine::new(peer, "", &home, &scp).map_err(told)?;
        let client = Agent::local(&self.folder.path().join("terminal"))?;
        let home = self.folder.path().join("home");
        let home = home.to_str().context("a path in UTF-8")?;
        let client = Machine::new(client, "", home, &scp).map_err(told)?;
        Ok([peer, client])
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        if let Err(e) = self.both(&as_the_rig_made_them()) {
            eprintln!("the rig's devices are not back: {e:#}");
        }
    }
}

/// The devices and links of the rig, whatever is there.
fn as_the_rig_made_them() -> String {
    let links = guest::rails();
    format!(
        "{WITHOUT_DEVICES}
        {AS_RIG}
        for ((i = 0; i < {links}; i++)); do
            ip link set eth$i mtu 9000 up
            ip addr replace 10.77.$i.$N/24 dev eth$i
            rdma link add rxe$i type rxe netdev eth$i
        done
        rm -rf /run/tmp/home.* /usr/local/bin/atlas-expert /usr/local/bin/atlas-expert-peer"
    )
}

const WITHOUT_DEVICES: &str = "
for device in /sys/class/infiniband/*; do
    [ ! -e \"$device\" ] || rdma link delete ${device##*/}
done
";

/// Gives a link another name, no address, and the MTU that links begin with, and a device on it.
const RENAME: &str = "
rename() {
    ip link set $1 down
    ip addr flush dev $1
    ip link set $1 name $2
    ip link set $2 mtu 1500 up
    rdma link add $3 type rxe netdev $2
}
";

/// What [`RENAME`] did undone, where it was done.
const AS_RIG: &str = "
rename() {
    [ -e /sys/class/net/$1 ] || return 0
    ip link set $1 down
    ip addr flush dev $1
    ip link set $1 name $2
}
rename enp1s0f0np0 eth0
rename enp1s0f1np1 eth0
rename enP2p1s0f1np1 eth1
";

/// Runs the page, and the fetch that its lines lead to once more; its report.
fn run(way: &str, before: &str, values: &[(&str, &str)]) -> Result<Value> {
    let told = |e| anyhow!("{e}");
    let page = Page::read(PAGE).map_err(told)?;
    let guests = Guests::new(before)?;
    let [peer, client] = guests.machines()?;
    let walked = walk(&page, way, values, &peer, &client).map_err(told)?;
    let digest = walked.digest().map_err(told)?;
    let fetch = "atlas-expert fetch --expert-backend rdma-verbs --require-rdma --json -q";
    let report: Value = serde_json::from_str(&client.run(fetch).map_err(told)?)?;
    ensure!(report["verified"] == true, "{report:#}");
    ensure!(report["records"] == 32, "{report:#}");
    for name in ["failed", "verify_failures", "takeovers"] {
        ensure!(report[name] == 0, "{name}: {report:#}");
    }
    ensure!(report["payload_digest"] == digest, "{digest}: {report:#}");
    let verify = peer.run("atlas-expert verify --digest toy.store -q");
    let verify = verify.map_err(told)?;
    ensure!(
        verify.contains(&format!("payload-digest: {digest}")),
        "{verify}"
    );
    Ok(report)
}

/// The names of the rails that carried something.
fn carried(report: &Value) -> Result<Vec<&str>> {
    let rails = report["rails"].as_array().context("rails")?;
    let carried = rails.iter().filter(|r| r["bytes"] != 0);
    Ok(carried.filter_map(|r| r["name"].as_str()).collect())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn lines_for_soft_roce_lead_to_a_verified_fetch_by_reads() -> Result<()> {
    let values = [("PEER_ADDR", "10.77.0.1"), ("NETDEV", "eth0")];
    let report = run("soft-roce", "", &values)?;
    ensure!(carried(&report)? == ["verbs:rxe0"], "{report:#}");
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn lines_for_cards_lead_to_a_verified_fetch_by_reads() -> Result<()> {
    let values = [("PEER_ADDR", "10.77.0.1"), ("NETDEV", "enp1s0f0np0")];
    let card = format!(
        "{RENAME}
        rename eth0 enp1s0f0np0 mlx5_0
        ip addr add 10.77.0.$N/24 dev enp1s0f0np0"
    );
    let report = run("cards", &card, &values)?;
    ensure!(carried(&report)? == ["verbs:mlx5_0"], "{report:#}");
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn lines_for_a_pair_of_sparks_lead_to_a_verified_fetch_over_both_devices() -> Result<()> {
    let values = [("PEER_ADDR", "192.168.100.11")];
    // One port: two interfaces and two devices.
    let port = format!(
        "{RENAME}
        rename eth0 enp1s0f1np1 rocep1s0f1
        rename eth1 enP2p1s0f1np1 roceP2p1s0f1"
    );
    let report = run("spark", &port, &values)?;
    let names = ["verbs:roceP2p1s0f1", "verbs:rocep1s0f1"];
    ensure!(carried(&report)? == names, "{report:#}");
    Ok(())
}
