//! The frozen protocol's one-sided READs, against other people's implementations: a client and a server in C on
//! libibverbs (`tests/kernel/c`), written from the description alone.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::guest::{self, Agent, Signal};
use atlas_expert_tests::net::model::{self, Model, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::wait_until;
use expert_store::info::hex128;
use xxhash_rust::xxh3::xxh3_128;

/// For anything that a guest under emulation does in seconds.
const LONG: Duration = Duration::from_secs(60);
const RECORDS: u64 = 8;

/// A program of `tests/kernel/c`, where `scripts/kernel-test` built it.
fn program(name: &str) -> String {
    let folder = std::env::var("KERNEL_TEST_C")
        .expect("KERNEL_TEST_C: this runs inside a guest of `make kernel-test`");
    format!("{folder}/{name}")
}

struct V1Store {
    path: PathBuf,
    bytes: u64,
    digest: String,
    model: Model,
}

impl V1Store {
    fn new(seed: u64) -> Self {
        let model = Model::nvfp4(Sizes::V1.seed(seed));
        let path = model.pack_v1();
        // All records as they are stored, one after the other.
        let all: Vec<u8> = model::v1_records(&path).into_values().flatten().collect();
        Self {
            path,
            bytes: all.len() as u64,
            digest: hex128(xxh3_128(&all)),
            model,
        }
    }
}

fn serve(store: &Path, rails: usize) -> PeerProcess {
    let flags: Vec<String> = (0..rails).map(|i| format!("--rail=rxe{i}")).collect();
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    flags.extend(["--rdma", "require"]);
    PeerProcess::start(store, &flags)
}

/// The C client against a peer, comparing with the files of `expected`.
fn client_command(peer: &PeerProcess, expected: &Path, options: &str, rails: usize) -> String {
    let devices: Vec<String> = (0..rails).map(|i| format!("rxe{i}:1")).collect();
    format!(
        "exec {} {} {} {} {options} {}",
        program("v1_client"),
        peer.addr.ip(),
        peer.addr.port(),
        expected.display(),
        devices.join(" ")
    )
}

/// A server in C that the agent runs, and ends with the test.
struct CServer<'a> {
    agent: &'a Agent,
    addr: String,
}

impl<'a> CServer<'a> {
    fn start(agent: &'a Agent, store: &V1Store, rails: usize) -> Result<Self> {
        let devices: Vec<String> = (0..rails).map(|i| format!("rxe{i}:1")).collect();
        let command = format!(
            "exec {} {} 127.0.0.1 {}",
            program("v1_server"),
            store.path.display(),
            devices.join(" ")
        );
        agent.spawn("v1_server", &command)?;
        let line = agent.wait_line("v1_server", "listening ", LONG)?;
        let port = line.trim_start_matches("listening ");
        Ok(Self {
            agent,
            addr: format!("127.0.0.1:{port}"),
        })
    }

    /// Fetches with our client, over verbs or not at all.
    fn fetch(&self, rails: usize, flags: &[&str]) -> Output {
        let mut command = binary::command("atlas-expert", &[&"fetch", &"-q", &"--json"]);
        command
            .args(["--expert-backend", "rdma-verbs", "--require-rdma"])
            .args(["--expert-peer", &self.addr, "--stall-ms", "5000"])
            .args((0..rails).map(|i| format!("--rail=rxe{i}")))
            .args(flags)
            .env_remove("ATLAS_EXPERT_CONTENT_ID");
        binary::run(&mut command)
    }
}

impl Drop for CServer<'_> {
    fn drop(&mut self) {
        let _ = self.agent.kill("v1_server", Signal::Kill);
        let _ = self.agent.wait("v1_server", LONG);
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_client_in_c_reads_every_record_of_our_peer_over_one_rail_and_over_all() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let store = V1Store::new(1);
    let peer = serve(&store.path, guest::rails());
    for rails in [1, guest::rails()] {
        let before: Vec<u64> = packets(rails);
        let command = client_command(&peer, &store.path, "", rails);
        let output = agent.run(&command, LONG)?.succeeded();
        let want = format!("read {RECORDS} records, {} bytes\n", store.bytes);
        ensure!(output.stdout == want, "{output:?}");
        for (rail, (before, now)) in before.iter().zip(packets(rails)).enumerate() {
            let least = store.bytes / rails as u64 / 4096;
            ensure!(now - before >= least, "rail {rail}: {before} to {now}");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_client_in_c_that_wants_more_rails_than_the_peer_has_is_hung_up() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let store = V1Store::new(1);
    let peer = serve(&store.path, 1);
    let output = agent.run(&client_command(&peer, &store.path, "", 2), LONG)?;
    ensure!(
        output
            .error(1)
            .contains("the server hung up in the handshake"),
        "{output:?}"
    );
    // It is no harm to others.
    agent
        .run(&client_command(&peer, &store.path, "", 1), LONG)?
        .succeeded();
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_client_in_c_is_hung_up_by_a_reload_and_saw_no_byte_of_the_other_store() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let stores = [V1Store::new(1), V1Store::new(2)];
    let link = stores[0].model.beside("served");
    symlink(&stores[0].path, &link)?;
    let peer = serve(&link, 2);
    let command = client_command(&peer, &stores[0].path, "--again", 2);
    agent.spawn("v1_client", &command)?;
    agent.wait_line("v1_client", "read 8 records", LONG)?;
    let next = stores[0].model.beside("next");
    symlink(&stores[1].path, &next)?;
    std::fs::rename(&next, &link)?;
    peer.signal(rustix::process::Signal::HUP);
    let ended = agent.wait("v1_client", LONG)?;
    let (stdout, stderr) = agent.output("v1_client")?;
    ensure!(ended.code == Some(0), "{ended:?}: {stdout}{stderr}");
    ensure!(stdout.contains("hung up after"), "{stdout}{stderr}");
    let command = client_command(&peer, &stores[1].path, "", 2);
    agent.run(&command, LONG)?.succeeded();
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_fetch_from_a_server_in_c_has_the_digest_of_the_files_over_one_rail_and_over_two()
-> Result<()> {
    let agent = Agent::of_the_run()?;
    let store = V1Store::new(1);
    let posix = binary::expert(&[
        &"fetch",
        &"-q",
        &"--json",
        &"--expert-backend",
        &"posix",
        &"--store",
        &store.path,
    ]);
    ensure!(posix.json()["payload_digest"] == store.digest.as_str());
    let server = CServer::start(&agent, &store, 2)?;
    for rails in [1, 2] {
        let before = packets(rails);
        let report = server.fetch(rails, &["--policy", "expert-mod"]).json();
        ensure!(report["payload_digest"] == store.digest.as_str());
        ensure!(report["records"] == RECORDS && report["bytes"] == store.bytes);
        for (rail, (before, now)) in before.iter().zip(packets(rails)).enumerate() {
            let told = &report["rails"][rail];
            ensure!(told["kind"] == "verbs-v1", "{report}");
            ensure!(told["bytes"] == store.bytes / rails as u64, "{report}");
            let least = store.bytes / rails as u64 / 4096;
            ensure!(now - before >= least, "rail {rail}: {before} to {now}");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_fetch_ends_with_an_error_when_the_server_in_c_is_killed_in_the_middle() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let store = V1Store::new(1);
    let server = CServer::start(&agent, &store, 1)?;
    let before = guest::rail_counter(0, "rcvd_pkts");
    let flags = ["--repeat", "100000", "--deadline-ms", "3000"];
    let output = std::thread::scope(|scope| -> Result<Output> {
        let fetch = scope.spawn(|| server.fetch(1, &flags));
        wait_until("READs go over the rail", || {
            guest::rail_counter(0, "rcvd_pkts") - before > 2 * store.bytes / 4096
        });
        agent.kill("v1_server", Signal::Kill)?;
        let start = std::time::Instant::now();
        let output = fetch.join().expect("a fetch that ends");
        ensure!(start.elapsed() < LONG, "{:?}", start.elapsed());
        Ok(output)
    })?;
    ensure!(output.code == Some(1), "{output:?}");
    ensure!(output.stderr.contains("error: "), "{output:?}");
    ensure!(!output.stderr.contains("panicked"), "{output:?}");
    Ok(())
}

fn packets(rails: usize) -> Vec<u64> {
    (0..rails)
        .map(|rail| guest::rail_counter(rail, "rcvd_pkts"))
        .collect()
}
