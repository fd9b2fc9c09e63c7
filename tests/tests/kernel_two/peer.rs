//! The other guest as these tests need it: a store made there, a peer that serves it, trouble on its links.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::binary;
use atlas_expert_tests::guest::{Agent, Signal};
use atlas_expert_tests::net::model::{Model, Records, Sizes};
use atlas_expert_tests::net::rig::{arena_for, patient, patient_verbs};
use atlas_rdma::choose::RailSpec;
use expert_arena::ExpertArena;
use expert_tier::{RdmaTier, TierBuilder, VerbsOptions};
use serde_json::Value;

/// Where the peer listens: on the management link, so that control bytes and the rails' are told apart.
pub(crate) const ADDR: &str = "10.78.0.1:9909";
/// For a command in a guest whose processor is emulated on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Of a link that is shaped. Slower ones would need longer for the 64 packets that soft-RoCE queues for
/// each queue pair than a queue pair waits for a packet, which is 67 ms, and carry repetitions alone.
pub(crate) const LINK_MBIT: u64 = 64;
/// Name of the peer's process at its agent.
const PEER: &str = "peer";

/// 16 records of 768 KiB: most of a second of two links of [`LINK_MBIT`].
pub(crate) const SIXTEEN: Sizes = Sizes {
    layers: 1,
    experts: 16,
    hidden: 512,
    inter: 256,
    seed: 41,
};

/// The peer's guest. Dropping it ends the peer, removes its files and undoes what was done to its links.
pub(crate) struct Host {
    pub(crate) agent: Agent,
    folder: String,
}

impl Host {
    pub(crate) fn new() -> Result<Self> {
        let agent = Agent::of_the_run()?;
        let made = agent.run("mktemp -d /run/tmp/test.XXXXXX", PATIENCE)?;
        let folder = made.succeeded().stdout.trim().to_owned();
        Ok(Self { agent, folder })
    }

    /// What a command that succeeds prints.
    pub(crate) fn run(&self, command: &str) -> Result<String> {
        let output = self.agent.run(command, PATIENCE)?;
        ensure!(output.code == Some(0), "'{command}': {output:?}");
        Ok(output.stdout)
    }

    /// A path in this test's folder there.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.folder)
    }

    /// Makes the same checkpoint there that [`Model::bf16`] makes here.
    pub(crate) fn synth(&self, name: &str, sizes: Sizes) -> Result<String> {
        let size = format!(
            "--family qwen3-moe --layers {} --experts {} --hidden {} --inter {} --shards 2",
            sizes.layers, sizes.experts, sizes.hidden, sizes.inter
        );
        self.synth_as(name, &size, sizes.seed)
    }

    /// Makes a checkpoint there.
    pub(crate) fn synth_as(&self, name: &str, flags: &str, seed: u64) -> Result<String> {
        let path = self.path(name);
        let program = binary::path("atlas-expert");
        let program = program.display();
        self.run(&format!(
            "{program} synth {flags} --seed {seed} -o {path} -q"
        ))?;
        Ok(path)
    }

    /// Serves a store, or a checkpoint, on the first `rails` rails, and waits until it listens.
    pub(crate) fn serve(&self, store: &str, rails: usize) -> Result<Peer<'_>> {
        let flags: String = (0..rails).map(|i| format!(" --rail rxe{i}")).collect();
        self.serve_with(store, &flags)
    }

    /// The same with other flags.
    pub(crate) fn serve_with(&self, store: &str, flags: &str) -> Result<Peer<'_>> {
        self.serve_closed(store, &format!("--allow-anonymous {flags}"))
    }

    /// The same for those that the flags let in.
    pub(crate) fn serve_closed(&self, store: &str, flags: &str) -> Result<Peer<'_>> {
        let program = binary::path("atlas-expert-peer");
        let command = format!(
            "exec {} --store {store} --listen 0.0.0.0:9909 --json -q {flags}",
            program.display()
        );
        let pid = self.agent.spawn(PEER, &command)?;
        self.agent
            .wait_line(PEER, "\"listening\"", PATIENCE)
            .with_context(|| format!("a peer that listens: {:?}", self.agent.output(PEER)))?;
        Ok(Peer { host: self, pid })
    }

    /// Limits what the peer sends over each of the first `rails` links.
    pub(crate) fn shape(&self, rails: usize) -> Result<()> {
        for rail in 0..rails {
            let shape = format!("root tbf rate {LINK_MBIT}mbit burst 128kb limit 20mb");
            self.run(&format!("tc qdisc add dev eth{rail} {shape}"))?;
        }
        Ok(())
    }

    /// Drops every RoCE packet that the peer sends over a link; TCP passes.
    pub(crate) fn drop_roce(&self, rail: usize) -> Result<()> {
        let udp_of_roce = "u32 match ip protocol 17 0xff match ip dport 4791 0xffff";
        self.run(&format!(
            "tc qdisc add dev eth{rail} root handle 1: prio && \
             tc filter add dev eth{rail} parent 1: protocol ip {udp_of_roce} action drop"
        ))?;
        Ok(())
    }

    /// Takes away what shapes a link or loses its packets.
    pub(crate) fn heal(&self, rail: usize) -> Result<()> {
        self.run(&format!("tc qdisc del dev eth{rail} root"))?;
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A test that failed half-way must not spoil the next one.
        let _ = self.agent.kill(PEER, Signal::Cont);
        let _ = self.agent.kill(PEER, Signal::Kill);
        let clean = format!("net reset; rm -rf {}", self.folder);
        let _ = self.agent.run(&clean, PATIENCE);
    }
}

/// A peer that listens on [`ADDR`], and on the rails' addresses.
pub(crate) struct Peer<'a> {
    host: &'a Host,
    pub(crate) pid: u32,
}

impl Peer<'_> {
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        self.host.agent.kill(PEER, signal)?;
        Ok(())
    }

    /// Kills it, and waits until it is gone with its queue pairs.
    pub(crate) fn kill(self) -> Result<()> {
        self.signal(Signal::Kill)?;
        self.host.agent.wait(PEER, PATIENCE)?;
        Ok(())
    }

    /// What it has written: standard output and standard error.
    pub(crate) fn output(&self) -> Result<(String, String)> {
        Ok(self.host.agent.output(PEER)?)
    }

    /// Seconds of processor time of all its threads, in their own code and in system calls.
    pub(crate) fn cpu_seconds(&self) -> Result<f64> {
        let stat = self.host.run(&format!("cat /proc/{}/stat", self.pid))?;
        // The second field is the name, which may hold anything.
        let (_, rest) = stat.rsplit_once(')').context("a name in /proc/PID/stat")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        let per_second: f64 = self.host.run("getconf CLK_TCK")?.trim().parse()?;
        Ok(ticks as f64 / per_second)
    }
}

/// The first `count` rails of this guest.
fn rails(count: usize) -> Vec<RailSpec> {
    (0..count)
        .map(|i| format!("rxe{i}").parse().expect("a device name"))
        .collect()
}

/// What the records of a model are; nothing of it stays in this guest's file system.
pub(crate) fn records_of(sizes: Sizes) -> Records {
    Model::bf16(sizes).records()
}

/// A tier over the first `count` rails with `slots` slots in its arena, and nothing but verbs.
pub(crate) fn tier(records: &Records, slots: u32, count: usize) -> Result<RdmaTier> {
    tier_with(patient(), verbs(count), records, slots)
}

/// Verbs on the first `count` rails, and nothing else. One queue pair each, for the sake of shaped links.
pub(crate) fn verbs(count: usize) -> VerbsOptions {
    VerbsOptions {
        qps_per_rail: 1,
        ..patient_verbs(rails(count))
    }
}

/// The same with other settings.
pub(crate) fn tier_with(
    builder: TierBuilder,
    verbs: VerbsOptions,
    records: &Records,
    slots: u32,
) -> Result<RdmaTier> {
    let arena: Arc<ExpertArena> = arena_for(records, slots);
    Ok(builder
        .connect_timeout(Duration::from_secs(15))
        .verbs(verbs)
        .connect(ADDR, arena)?)
}

/// `atlas-expert fetch --expert-backend rdma-verbs --require-rdma` over the first `count` rails.
pub(crate) fn fetch(count: usize, more: &[&str]) -> Result<Value> {
    let rails: Vec<String> = (0..count).map(|i| format!("rxe{i}")).collect();
    let mut args = vec!["fetch", "--expert-backend", "rdma-verbs", "--require-rdma"];
    args.extend([
        "--expert-peer",
        ADDR,
        "--json",
        "-q",
        "--deadline-ms",
        "60000",
    ]);
    // A busy host stops both guests for longer than a network would.
    args.extend(["--stall-ms", "5000"]);
    for rail in &rails {
        args.extend(["--rail", rail]);
    }
    args.extend(more);
    let args: Vec<&dyn AsRef<std::ffi::OsStr>> = args
        .iter()
        .map(|a| a as &dyn AsRef<std::ffi::OsStr>)
        .collect();
    let output = binary::expert(&args);
    ensure!(output.code == Some(0), "{output:?}");
    Ok(output.json())
}
