//! Peers and clients that are killed at random moments: the peer's port is free at once and the next peer serves
//! right bytes, and a peer whose clients are killed is as it was before they came.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use atlas_expert_tests::binary::{self, expert};
use atlas_expert_tests::killed::{Moments, kill, run_and_kill, start};
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::pages::{get, metric};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::{SLACK, wait_until};
use rustix::process::Signal;

/// Random kills of each test.
const KILLS: usize = 50;

/// 16 records of 317,184 bytes.
const SIZES: Sizes = Sizes {
    layers: 2,
    ..Sizes::SMALL
};

/// A client that fetches everything once.
fn fetch(addr: &str) -> Command {
    let mut command = binary::command("atlas-expert", &[&"fetch", &"-q", &"--json"]);
    command
        .args(["--expert-backend", "rdma", "--expert-peer", addr])
        .env_remove("ATLAS_EXPERT_PEER")
        .env_remove("ATLAS_EXPERT_CONTENT_ID")
        .env_remove("ATLAS_EXPERT_TOKEN_FILE");
    command
}

/// The digest of what a client fetched.
fn fetched(addr: &str) -> String {
    let report = binary::run(&mut fetch(addr)).json();
    let digest = report["payload_digest"].as_str().expect("a digest");
    digest.to_owned()
}

/// The same, read from the disk.
fn digest(store: &Path) -> String {
    let verified = expert(&[&"verify", &store, &"--digest", &"--json"]).json();
    let digest = verified["payload_digest"].as_str().expect("a digest");
    digest.to_owned()
}

/// An address of loopback that is this test's alone, so that nobody takes the port while no peer has it.
fn own_address(test: u8) -> String {
    let process = std::process::id();
    format!("127.{test}.{}.{}", process >> 8 & 255, 1 + process % 254)
}

/// Ends a client that should end by itself.
fn output(mut client: Child) -> binary::Output {
    let limit = Instant::now() + SLACK;
    while client.try_wait().expect("waiting for a child").is_none() {
        if Instant::now() >= limit {
            let _ = client.kill();
            panic!("the client does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = client.wait_with_output().expect("its words");
    binary::Output {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn killed_peer_leaves_its_port_to_the_next_one_which_serves_right_bytes() {
    let model = Model::bf16(SIZES);
    let store = model.pack();
    let want = digest(&store);
    let first = PeerProcess::start_on(&format!("{}:0", own_address(71)), &store, &[]);
    let first = first.expect("a peer");
    let addr = first.addr.to_string();
    drop(first);
    let mut moments = Moments::of("killed peer", || {
        let peer = PeerProcess::start_on(&addr, &store, &[]).expect("a peer");
        assert_eq!(fetched(&addr), want);
        drop(peer);
    });
    let (mut killed, mut carried_on) = (0, 0);
    for _ in 0..KILLS {
        let peer = start(&mut PeerProcess::command(&addr, &store, &[]));
        let client = fetch(&addr)
            .args(["--wait", "10"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a client");
        std::thread::sleep(moments.moment());
        killed += usize::from(kill(peer));
        let next = PeerProcess::start_on(&addr, &store, &[])
            .unwrap_or_else(|output| panic!("the port is not free: {output:?}"));
        assert_eq!(next.addr.to_string(), addr);
        // It fetched before, or carries on with the next peer, or says once what went wrong.
        let output = output(client);
        match output.code {
            Some(0) => {
                assert_eq!(output.json()["payload_digest"], want.as_str());
                carried_on += 1;
            }
            _ => drop(output.error(1)),
        }
        assert_eq!(fetched(&addr), want);
    }
    eprintln!("killed peer: {killed} before their end, {carried_on} clients carried on");
    assert_eq!(killed, KILLS, "a peer ended by itself");
    assert!(carried_on > 0);
}

#[test]
fn peer_killed_while_it_reloads_leaves_its_port_and_the_new_store() {
    let stores = [1, 2].map(|seed| {
        let model = Model::bf16(SIZES.seed(seed));
        let digest = digest(&model.index());
        (model, digest)
    });
    let store = stores[0].0.pack();
    let start = |addr: &str| {
        let flags = ["--metrics", "0"];
        PeerProcess::start_on(addr, &store, &flags).unwrap_or_else(|output| panic!("{output:?}"))
    };
    let reloads = "atlas_expert_peer_reloads_total";
    let mut peer = start(&format!("{}:0", own_address(72)));
    let (addr, mut done) = (peer.addr.to_string(), 0.0);
    let mut moments = Moments::of("reload", || {
        peer.signal(Signal::HUP);
        done += 1.0;
        wait_until("it is reloaded", || metric(peer.metrics(), reloads) == done);
    });
    for i in 1..=KILLS / 2 {
        let (model, want) = &stores[i % 2];
        let checkpoint = &model.checkpoint;
        expert(&[&"pack", checkpoint, &"-o", &store, &"--replace", &"-q"]).succeeded();
        peer.signal(Signal::HUP);
        std::thread::sleep(moments.moment());
        // Dropped is killed.
        drop(peer);
        peer = start(&addr);
        assert_eq!(fetched(&addr), *want);
    }
}

#[test]
fn killed_client_leaves_the_peer_as_it_was_and_the_next_one_gets_right_bytes() {
    let model = Model::bf16(SIZES);
    let store = model.pack();
    let want = digest(&store);
    let peer = PeerProcess::start(&store, &["--metrics", "0"]);
    let (addr, status) = (peer.addr.to_string(), peer.metrics());
    let mut moments = Moments::of("killed client", || assert_eq!(fetched(&addr), want));
    let idle = |when: &str| {
        wait_until(when, || {
            let now = |name| metric(status, &format!("atlas_expert_peer_{name}"));
            now("connections") == 0.0 && now("answers_in_flight") == 0.0
        });
    };
    let count = |what: &str| {
        let entries = fs::read_dir(format!("/proc/{}/{what}", peer.pid()));
        entries.expect("a process that runs").count()
    };
    idle("before");
    let before = (count("fd"), count("task"));
    let mut killed = 0;
    for _ in 0..KILLS {
        killed += usize::from(run_and_kill(&mut fetch(&addr), moments.moment()));
        idle("after a kill");
        assert_eq!(fetched(&addr), want);
    }
    eprintln!("killed client: {killed} before their end");
    assert!(
        killed > KILLS / 4,
        "{killed}: the moments were not those of the work"
    );
    idle("at the end");
    // The first look may have seen the end of a connection that was counted out already.
    wait_until("nothing of them is left", || {
        count("fd") <= before.0 && count("task") <= before.1
    });
    let (_, page) = get(status, "/metrics");
    let refused = page
        .lines()
        .filter(|l| l.starts_with("atlas_expert_peer_connections_refused_total{"));
    let refused: Vec<&str> = refused.collect();
    assert!(
        !refused.is_empty() && refused.iter().all(|l| l.ends_with(" 0")),
        "{refused:?}"
    );
    assert_eq!(get(status, "/healthz").0, 200);
}
