//! What a peer shows to those who watch it, as a process: metrics, health, readiness, the service
//! manager's socket, and what signals do to them.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use atlas_expert_tests::binary;
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::pages::{get, metric};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::raw::RawClient;
use atlas_expert_tests::net::{SLACK, wait_until};
use expert_wire::Key;
use expert_wire::message::ReadRequest;
use rustix::process::Signal;

#[test]
fn metrics_count_what_was_served_and_a_reload() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.checkpoint, &["--metrics", "0"]);
    let status = peer.metrics();
    assert!(status.ip().is_loopback(), "a port alone is one of loopback");
    assert_eq!(get(status, "/readyz"), (200, "ready\n".into()));
    assert_eq!(get(status, "/healthz"), (200, "ok\n".into()));
    assert_eq!(get(status, "/").0, 404);
    let peer_address = peer.addr.to_string();
    let rdma = [
        "fetch",
        "--expert-backend",
        "rdma",
        "--json",
        "--expert-peer",
    ];
    let fetched = binary::run(
        binary::command("atlas-expert", &[])
            .args(rdma)
            .arg(peer_address),
    );
    let bytes = fetched.json()["bytes"].as_f64().expect("a number");
    let sent = "atlas_expert_peer_sent_bytes_total";
    wait_until("all bytes are counted", || metric(status, sent) >= bytes);
    assert!(metric(status, "atlas_expert_peer_answer_seconds_count") > 0.0);
    assert_eq!(metric(status, "atlas_expert_peer_ready"), 1.0);
    assert_eq!(metric(status, "atlas_expert_peer_epoch"), 1.0);
    let name = model
        .checkpoint
        .file_name()
        .expect("a name")
        .to_string_lossy();
    assert!(
        !get(status, "/metrics").1.contains(&*name),
        "no names of files"
    );

    peer.signal(Signal::HUP);
    wait_until("the reload is counted", || {
        metric(status, "atlas_expert_peer_reloads_total") == 1.0
    });
    assert_eq!(metric(status, "atlas_expert_peer_epoch"), 2.0);
    wait_until("it is ready again", || get(status, "/readyz").0 == 200);
}

#[test]
fn reload_of_a_damaged_store_is_counted_and_the_peer_goes_on() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.checkpoint, &["--metrics", "0"]);
    let status = peer.metrics();
    // Renamed away, not written to: the files that are served stay what they are.
    for file in model.files() {
        let away = file.with_extension("away");
        std::fs::rename(&file, &away).expect("renaming");
        std::fs::write(&file, b"no checkpoint").expect("writing");
    }
    peer.signal(Signal::HUP);
    wait_until("the failure is counted", || {
        metric(status, "atlas_expert_peer_reloads_failed_total") == 1.0
    });
    assert_eq!(metric(status, "atlas_expert_peer_epoch"), 1.0);
    assert_eq!(get(status, "/readyz").0, 200);
    peer.signal(Signal::TERM);
    let output = peer.wait();
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(
        output.stderr.contains("serving what was there before"),
        "{output:?}"
    );
}

#[test]
fn peer_that_drains_is_alive_and_not_ready() {
    let model = Model::bf16(Sizes::LARGE);
    let flags = ["--metrics", "127.0.0.1:0", "--shutdown-timeout", "20"];
    let peer = PeerProcess::start(&model.checkpoint, &flags);
    let status = peer.metrics();
    // It asks for more than fits any buffer, and does not read: the peer waits for it.
    let (mut greedy, welcome) = RawClient::v2(peer.addr);
    for id in 1..100 {
        let request = ReadRequest {
            key: Key::new(0, 0),
            epoch: welcome.epoch,
            bytes: 1 << 20,
            offset: 0,
        };
        greedy.send_read(id, &request);
    }
    wait_until("answers are under way", || {
        metric(status, "atlas_expert_peer_answers_in_flight") == 1.0
    });
    peer.signal(Signal::TERM);
    wait_until("it is not ready", || get(status, "/readyz").0 == 503);
    let (_, body) = get(status, "/readyz");
    assert!(body.starts_with("draining"), "{body}");
    assert_eq!(get(status, "/healthz").0, 200);
    wait_until("nobody is let in", || {
        TcpStream::connect(peer.addr).is_err()
    });
    drop(greedy);
    let output = peer.wait();
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(TcpStream::connect(status).is_err());
}

#[test]
fn service_manager_is_told_when_the_peer_serves_and_when_it_ends() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(SLACK)).expect("a time-out");
    let said = || {
        let mut message = [0; 256];
        let bytes = socket.recv(&mut message).expect("a message");
        String::from_utf8_lossy(&message[..bytes])
            .trim_end()
            .to_owned()
    };
    let model = Model::bf16(Sizes::SMALL);
    let mut command = PeerProcess::command("127.0.0.1:0", &model.checkpoint, &[]);
    let peer = PeerProcess::spawn(command.env("NOTIFY_SOCKET", &path)).expect("a peer");
    assert_eq!(said(), "READY=1");
    assert!(
        peer.ready["metrics"].is_null(),
        "only where it was asked for"
    );
    peer.signal(Signal::TERM);
    assert_eq!(said(), "STOPPING=1");
    assert_eq!(peer.wait().code, Some(0));
}

#[test]
fn metrics_address_that_cannot_be_used_ends_the_peer_with_an_error_that_names_it() {
    let model = Model::bf16(Sizes::SMALL);
    let start = |address: &str| {
        PeerProcess::start_on("127.0.0.1:0", &model.checkpoint, &["--metrics", address])
            .err()
            .expect("no peer")
    };
    let output = start("nonsense");
    assert!(output.error(2).contains("--metrics nonsense"), "{output:?}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its address").to_string();
    let output = start(&address);
    let error = output.error(1);
    assert!(
        error.contains("--metrics") && error.contains(&address),
        "{error}"
    );
}

#[test]
fn a_slow_reader_of_metrics_keeps_no_peer_from_ending() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.checkpoint, &["--metrics", "0"]);
    let mut silent = TcpStream::connect(peer.metrics()).expect("a connection");
    silent.write_all(b"GET /metr").expect("sending");
    silent
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a time-out");
    peer.signal(Signal::TERM);
    assert_eq!(peer.wait().code, Some(0));
}
