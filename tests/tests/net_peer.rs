//! The programs as a user runs them: a peer that strangers try to bother, and `atlas-expert fetch`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::model::{self, Model, Records, Sizes, flip_unnoticed, place_of};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::raw::{RawClient, frame};
use atlas_expert_tests::net::rig::{arena_for, assert_all_right, batch, patient};
use atlas_expert_tests::net::{Random, SLACK, wait_until};
use expert_store::Key;
use expert_tier::{ExpertTier, RdmaTier, TierBuilder};
use expert_wire::frame::{FrameHeader, FrameKind};
use expert_wire::limits;
use expert_wire::message::{
    CatalogueRequest, ClientHello, ErrorCode, ErrorFrame, ReadRequest, Role, Welcome,
};
use expert_wire::v1;
use rustix::process::Signal;

const BAD: Key = Key::new(1, 3);

fn tier(peer: &PeerProcess, records: &Records) -> RdmaTier {
    let arena = arena_for(records, records.len() as u32);
    patient()
        .connect(&peer.addr.to_string(), arena)
        .expect("a tier")
}

fn assert_serves(peer: &PeerProcess, records: &Records) {
    assert_all_right(&tier(peer, records), records, records.len() as u32);
}

/// `atlas-expert fetch` with these flags, where no store is.
fn fetch(flags: &[&str]) -> Output {
    fetch_with(&[], flags)
}

fn fetch_with(variables: &[(&str, &str)], flags: &[&str]) -> Output {
    let empty = tempfile::tempdir().expect("an empty folder");
    let mut command = binary::command("atlas-expert", &[&"fetch", &"-q"]);
    command
        .args(flags)
        .current_dir(empty.path())
        .env_remove("ATLAS_EXPERT_PEER")
        .env_remove("ATLAS_EXPERT_CONTENT_ID")
        .envs(variables.iter().copied());
    binary::run(&mut command)
}

fn fetch_posix(store: &Path, flags: &[&str]) -> Output {
    let store = store.to_str().expect("a path in UTF-8");
    let posix = ["--expert-backend", "posix", "--store", store, "--json"];
    fetch(&[&posix, flags].concat())
}

fn fetch_rdma(peer: &PeerProcess, flags: &[&str]) -> Output {
    let addr = peer.addr.to_string();
    let rdma = ["--expert-backend", "rdma", "--expert-peer", &addr, "--json"];
    fetch(&[&rdma, flags].concat())
}

#[test]
fn client_that_sends_garbage_is_hung_up_on_and_others_are_served() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let records = model.records();
    let tier = tier(&peer, &records);
    let hello = ClientHello {
        version_min: 2,
        version_max: 2,
        client_id: 1,
        role: Role::Stream,
    };
    let oversized = FrameHeader {
        payload_bytes: u32::MAX,
        kind: FrameKind::Data,
        id: 1,
    };
    let after_hello = |bytes: &[u8]| {
        let mut all = vec![v1::MODE_V2];
        all.extend(frame(FrameKind::ClientHello, 0, &hello.encode()));
        all.extend(bytes);
        all
    };
    for garbage in [
        Random(1).bytes(1 << 16),
        b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        vec![v1::MODE_VERBS],
        [vec![v1::MODE_V2], Random(2).bytes(4096)].concat(),
        [vec![v1::MODE_V2], frame(FrameKind::Read, 1, &[0; 24])].concat(),
        after_hello(&oversized.encode()),
        after_hello(&frame(FrameKind::Data, 1, &[0; 64])),
        after_hello(&frame(FrameKind::Read, 1, &[0; 23])),
        after_hello(&frame(FrameKind::Ping, 1, &[0; 65])),
        after_hello(&Random(3).bytes(1 << 16)),
    ] {
        let mut client = RawClient::connect(peer.addr);
        // The peer may hang up before all was sent.
        let _ = client.send(&garbage);
        client.read_to_end();
    }
    assert_all_right(&tier, &records, records.len() as u32);
    assert_serves(&peer, &records);
}

#[test]
fn client_that_says_nothing_or_half_of_it_is_hung_up_on_in_time() {
    let model = Model::bf16(Sizes::TINY);
    let peer = PeerProcess::start(&model.checkpoint, &["--handshake-timeout", "1"]);
    for half in [0, 1, 9, 30] {
        let mut bytes = vec![v1::MODE_V2];
        bytes.extend(frame(FrameKind::ClientHello, 0, &[0; 32]));
        let mut client = RawClient::connect(peer.addr);
        client.greeting();
        client.send(&bytes[..half]).expect("room");
        let start = Instant::now();
        client.read_to_end();
        assert!(start.elapsed() < SLACK);
    }
    assert_serves(&peer, &model.records());
}

#[test]
fn half_a_request_and_a_hang_up_cost_the_peer_nothing() {
    let model = Model::bf16(Sizes::TINY);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    for half in [1, 15, 16, 20, 39] {
        let (mut client, _) = RawClient::v2(peer.addr);
        let whole = frame(FrameKind::Read, 1, &[0; 24]);
        client.send(&whole[..half]).expect("room");
    }
    assert_serves(&peer, &model.records());
}

#[test]
fn requests_out_of_range_get_typed_errors_and_the_connection_lives_on() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let records = model.records();
    let (mut client, welcome) = RawClient::v2(peer.addr);
    let bytes = records[&BAD].len() as u64;
    let good = |w: &Welcome| ReadRequest {
        key: BAD,
        epoch: w.epoch,
        bytes: 4096,
        offset: 256,
    };
    let good = good(&welcome);
    let bad = [
        (
            ErrorCode::NoSuchLayer,
            ReadRequest {
                key: Key::new(3, 0),
                ..good
            },
        ),
        (
            ErrorCode::NoSuchLayer,
            ReadRequest {
                key: Key::new(u32::MAX, u32::MAX),
                ..good
            },
        ),
        (
            ErrorCode::NoSuchExpert,
            ReadRequest {
                key: Key::new(0, 8),
                ..good
            },
        ),
        (
            ErrorCode::NoSuchExpert,
            ReadRequest {
                key: Key::new(0, u32::MAX),
                ..good
            },
        ),
        (ErrorCode::BadRange, ReadRequest { bytes: 0, ..good }),
        (
            ErrorCode::BadRange,
            ReadRequest {
                bytes: u32::MAX,
                ..good
            },
        ),
        (
            ErrorCode::BadRange,
            ReadRequest {
                bytes: limits::READ_MAX_BYTES,
                ..good
            },
        ),
        (
            ErrorCode::BadRange,
            ReadRequest {
                offset: bytes,
                ..good
            },
        ),
        (
            ErrorCode::BadRange,
            ReadRequest {
                offset: bytes - 4095,
                ..good
            },
        ),
        (
            ErrorCode::BadRange,
            ReadRequest {
                offset: u64::MAX,
                ..good
            },
        ),
        (
            ErrorCode::StoreChanged,
            ReadRequest {
                epoch: good.epoch + 1,
                ..good
            },
        ),
        (ErrorCode::StoreChanged, ReadRequest { epoch: 0, ..good }),
    ];
    for (id, (code, request)) in (1..).zip(bad) {
        client.send_read(id, &request);
        let (header, payload) = client.frame().expect("an answer");
        assert_eq!(
            (header.kind, header.id),
            (FrameKind::Error, id),
            "{request:?}"
        );
        let error = ErrorFrame::decode(&payload).expect("an error frame");
        assert_eq!(error.code, code, "{request:?}");
        assert!(!error.message.is_empty());
        client.send_read(1000 + id, &good);
        let (header, payload) = client.frame().expect("an answer");
        assert_eq!((header.kind, header.id), (FrameKind::Data, 1000 + id));
        assert!(payload == records[&BAD][256..256 + 4096]);
    }
    let catalogue = CatalogueRequest {
        layer: 77,
        sections: 2,
    };
    client
        .send(&frame(FrameKind::Catalogue, 5, &catalogue.encode()))
        .expect("room");
    let (header, payload) = client.frame().expect("an answer");
    assert_eq!((header.kind, header.id), (FrameKind::Error, 5));
    let error = ErrorFrame::decode(&payload).expect("an error frame");
    assert_eq!(error.code, ErrorCode::NoSuchLayer);
}

#[test]
fn five_hundred_connections_at_once_do_not_keep_the_peer_from_serving() {
    expert_peer::raise_open_files_limit();
    let model = Model::bf16(Sizes::SMALL);
    let records = model.records();
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let tier = tier(&peer, &records);
    let crowd: Vec<TcpStream> = (0..500)
        .map(|_| TcpStream::connect(peer.addr).expect("a connection"))
        .collect();
    // Who is in goes on being served; who comes now may be told to come again.
    assert_all_right(&tier, &records, records.len() as u32);
    if let Err(error) = TierBuilder::new().describe(&peer.addr.to_string()) {
        assert!(error.is_retryable(), "{error}");
    }
    let mut turned_away = 0;
    for stream in &crowd {
        let mut client = RawClient {
            stream: stream.try_clone().expect("a descriptor"),
        };
        client
            .stream
            .set_read_timeout(Some(SLACK))
            .expect("a time-out");
        let refused = client.greeting().v2.and_then(|offer| offer.refused);
        turned_away += usize::from(refused.as_deref() == Some("busy"));
    }
    assert!(turned_away > 0);
    drop(crowd);
    wait_until("the crowd is forgotten", || {
        TierBuilder::new().describe(&peer.addr.to_string()).is_ok()
    });
    assert_serves(&peer, &records);
}

#[test]
fn port_in_use_ends_the_peer_with_an_error_that_names_it() {
    let model = Model::bf16(Sizes::TINY);
    let holder = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = holder.local_addr().expect("its address").to_string();
    let output = PeerProcess::start_on(&addr, &model.checkpoint, &[])
        .err()
        .expect("an end");
    let error = output.error(1);
    assert!(error.contains(&addr) && error.contains("in use"), "{error}");
}

#[test]
fn address_beyond_loopback_needs_a_word_of_consent() {
    let model = Model::bf16(Sizes::TINY);
    let output = PeerProcess::start_on("0.0.0.0:0", &model.checkpoint, &[])
        .err()
        .expect("an end");
    let error = output.error(2);
    assert!(error.contains("--allow-anonymous"), "{error}");
}

#[test]
fn sigterm_with_clients_connected_ends_the_peer_cleanly_in_time() {
    let model = Model::bf16(Sizes::LARGE);
    let records = model.records();
    for signal in [Signal::TERM, Signal::INT] {
        let peer = PeerProcess::start(&model.checkpoint, &["--shutdown-timeout", "2"]);
        let tier = tier(&peer, &records);
        assert_all_right(&tier, &records, records.len() as u32);
        let silent = RawClient::connect(peer.addr);
        // One asks for more than fits any buffer, and does not read.
        let (mut greedy, welcome) = RawClient::v2(peer.addr);
        for id in 1..100 {
            let request = ReadRequest {
                key: BAD,
                epoch: welcome.epoch,
                bytes: 1 << 20,
                offset: 0,
            };
            greedy.send_read(id, &request);
        }
        let start = Instant::now();
        peer.signal(signal);
        let output = peer.wait();
        assert_eq!(output.code, Some(0), "{output:?}");
        assert!(start.elapsed() < SLACK);
        assert!(!output.stderr.contains("panicked"), "{output:?}");
        wait_until("the client noticed", || !tier.healthy());
        drop((silent, greedy));
    }
}

#[test]
fn sighup_loads_the_store_again_and_clients_go_on() {
    let model = Model::bf16(Sizes::SMALL);
    let other = Model::bf16(Sizes::SMALL.seed(2));
    let (records, others) = (model.records(), other.records());
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let tier = tier(&peer, &records);
    assert_all_right(&tier, &records, records.len() as u32);
    peer.signal(Signal::HUP);
    assert_all_right(&tier, &records, records.len() as u32);
    for (file, others) in model.files().iter().zip(other.files()) {
        std::fs::rename(others, file).expect("replacing a file");
    }
    peer.signal(Signal::HUP);
    let keys: Vec<Key> = records.keys().copied().collect();
    wait_until("the new content is served", || {
        let Ok(fetched) = tier.fetch_many(&batch(&keys), 0) else {
            return false;
        };
        let mut new = 0;
        for record in fetched {
            match record {
                Ok(record) if record.bytes() == others[&record.key()] => new += 1,
                // The old file is open until the new store is taken up.
                Ok(record) => assert!(record.bytes() == records[&record.key()]),
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
        }
        new == keys.len()
    });
}

#[test]
fn peer_that_was_killed_is_served_from_again_once_it_is_back_on_its_port() {
    let model = Model::bf16(Sizes::SMALL);
    let records = model.records();
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let (addr, tier) = (peer.addr.to_string(), tier(&peer, &records));
    assert_all_right(&tier, &records, records.len() as u32);
    // Killed, so that no goodbye is said.
    drop(peer);
    wait_until("the client noticed", || !tier.healthy());
    let mut again = None;
    wait_until("the port is free again", || {
        again = PeerProcess::start_on(&addr, &model.checkpoint, &[]).ok();
        again.is_some()
    });
    assert_all_right(&tier, &records, records.len() as u32);
}

#[test]
fn variable_that_cannot_be_parsed_is_named_and_is_wrong_usage() {
    let good = "127.0.0.1:1";
    for (name, value) in [
        ("ATLAS_EXPERT_CONTENT_ID", "xyz"),
        ("ATLAS_EXPERT_CONTENT_ID", "0123"),
        ("ATLAS_EXPERT_PEER", "nowhere"),
        ("ATLAS_EXPERT_PEER", "host:99999"),
    ] {
        let variables = [("ATLAS_EXPERT_PEER", good), (name, value)];
        let output = fetch_with(&variables, &["--expert-backend", "rdma"]);
        let error = output.error(2);
        assert!(error.contains(name), "{name}={value:?}: {error}");
    }
    let model = Model::bf16(Sizes::TINY);
    let args: [&dyn AsRef<std::ffi::OsStr>; 4] =
        [&"--store", &model.checkpoint, &"--listen", &"127.0.0.1:0"];
    let mut command = binary::command("atlas-expert-peer", &args);
    let output = binary::run(command.env("ATLAS_LOG", "loud=very"));
    let error = output.error(2);
    assert!(error.contains("ATLAS_LOG"), "{error}");
}

#[test]
fn flags_win_over_variables() {
    let model = Model::bf16(Sizes::TINY);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let addr = peer.addr.to_string();
    let variables = [("ATLAS_EXPERT_PEER", addr.as_str())];
    fetch_with(&variables, &["--json"]).json();
    let variables = [("ATLAS_EXPERT_PEER", "127.0.0.1:1")];
    fetch_with(&variables, &["--expert-peer", &addr, "--json"]).json();
}

#[test]
fn fetch_over_the_network_gives_the_digest_that_plain_reads_give() {
    let model = Model::bf16(Sizes::SMALL);
    let expected = fetch_posix(&model.checkpoint, &[]).json();
    assert_eq!(expected["records"], 24);
    assert!(expected["payload_digest"].is_string());
    for store in [model.checkpoint.clone(), model.index(), model.pack()] {
        let peer = PeerProcess::start(&store, &[]);
        for flags in [
            &[][..],
            &["--batch", "1"],
            &["--batch", "100", "--streams", "4"],
            &["--window-kib", "1", "--read-kib", "256", "--depth", "5"],
            &["--verify", "first", "--repeat", "3"],
            &["--verify", "off", "--policy", "split"],
        ] {
            let got = fetch_rdma(&peer, flags).json();
            for same in ["payload_digest", "content_id"] {
                assert_eq!(got[same], expected[same], "{flags:?}");
            }
        }
    }
}

#[test]
fn fetch_prints_every_field_of_its_report() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let report = fetch_rdma(&peer, &["--repeat", "2"]).json();
    let bytes: usize = model.records().values().map(Vec::len).sum();
    assert_eq!(report["backend"], "rdma");
    assert_eq!(report["records"], 48);
    assert_eq!(report["bytes"], 2 * bytes);
    assert_eq!(report["verify_failures"], 0);
    assert_eq!(report["fallbacks"], 0);
    for number in [
        "seconds",
        "gb_per_s",
        "record_p50_us",
        "record_p99_us",
        "batch_p50_us",
        "batch_p99_us",
        "cpu_seconds_per_gib",
    ] {
        assert!(report[number].as_f64().is_some_and(|n| n > 0.0), "{number}");
    }
    for text in ["payload_digest", "content_id"] {
        assert_eq!(report[text].as_str().map(str::len), Some(32), "{text}");
    }
    let rail = &report["rails"][0];
    assert_eq!(rail["kind"], "tcp");
    assert_eq!(rail["name"], format!("tcp:{}", peer.addr));
    assert_eq!(rail["bytes"], 2 * bytes);
    for number in ["reads", "errors", "state_changes"] {
        assert!(rail[number].is_u64(), "{number}");
    }
    let text = fetch(&["--expert-peer", &peer.addr.to_string()])
        .succeeded()
        .stdout;
    let digest = report["payload_digest"].as_str().expect("a digest");
    let line = text.lines().find(|l| l.starts_with("payload-digest"));
    assert!(line.is_some_and(|l| l.ends_with(digest)), "{text}");
    let report = fetch_rdma(&peer, &["--no-digest"]).json();
    assert!(report["payload_digest"].is_null());
}

#[test]
fn fetch_of_a_part_takes_that_part_and_random_draws_follow_their_seed() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let digest = |flags: &[&str], records: u64| {
        let rdma = fetch_rdma(&peer, flags).json();
        let posix = fetch_posix(&model.checkpoint, flags).json();
        assert_eq!(rdma["records"], records, "{flags:?}");
        assert_eq!(rdma["payload_digest"], posix["payload_digest"], "{flags:?}");
        rdma["payload_digest"].to_string()
    };
    let part = digest(&["--layers", "1..3", "--experts", "0,2,5..7"], 8);
    assert_ne!(part, digest(&["--layers", "0..1"], 8));
    let seven = digest(&["--random", "50", "--seed", "7"], 50);
    assert_eq!(seven, digest(&["--random", "50", "--seed", "7"], 50));
    assert_ne!(seven, digest(&["--random", "50", "--seed", "8"], 50));
}

#[test]
fn fetch_with_a_bad_record_brings_the_others_and_exits_with_1() {
    let model = Model::bf16(Sizes::SMALL);
    let path = model.pack();
    let (file, offset) = place_of(&model::open(&path), BAD, 1000);
    flip_unnoticed(&file, offset);
    let peer = PeerProcess::start(&path, &["--restat-interval", "3600000"]);
    let output = fetch_rdma(&peer, &[]);
    let error = output.error(1);
    assert!(error.contains("layer 1 expert 3 chunk 0"), "{error}");
    let report: serde_json::Value = serde_json::from_str(&output.stdout).expect("a report");
    assert_eq!(
        (&report["records"], &report["failed"]),
        (&23.into(), &1.into())
    );
    assert_eq!(report["verify_failures"], 2);
    // A digest of some records would pass for one of all.
    assert!(report["payload_digest"].is_null());
}

#[test]
fn fetch_of_another_model_than_the_expected_exits_with_1() {
    let model = Model::bf16(Sizes::TINY);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let id = fetch_rdma(&peer, &[]).json()["content_id"]
        .as_str()
        .expect("an id")
        .to_owned();
    fetch_rdma(&peer, &["--expect-content-id", &id]).json();
    let other = "0123456789abcdef0123456789abcdef";
    let output = fetch_rdma(&peer, &["--expect-content-id", other]);
    let error = output.error(1);
    assert!(error.contains(&id) && error.contains(other), "{error}");
    let variables = [("ATLAS_EXPERT_CONTENT_ID", other)];
    let output = fetch_with(&variables, &["--expert-peer", &peer.addr.to_string()]);
    output.error(1);
    let output = fetch_posix(&model.checkpoint, &["--expect-content-id", other]);
    output.error(1);
}

#[test]
fn wrong_usage_of_fetch_exits_with_2_before_anything_is_fetched() {
    let model = Model::bf16(Sizes::TINY);
    let peer = PeerProcess::start(&model.checkpoint, &[]);
    let addr = peer.addr.to_string();
    let checkpoint = model.checkpoint.to_str().expect("a path in UTF-8");
    for flags in [
        &["--expert-backend", "rdma"][..],
        &["--expert-backend", "posix"],
        &["--expert-backend", "rdma-verbs"],
        &["--expert-backend", "uma"],
        &[
            "--expert-backend",
            "uma",
            "--store",
            checkpoint,
            "--expert-peer",
            &addr,
        ],
        &[
            "--expert-backend",
            "uma",
            "--store",
            checkpoint,
            "--io-depth",
            "0",
        ],
        &[
            "--expert-backend",
            "uma",
            "--store",
            checkpoint,
            "--io-depth",
            "129",
        ],
        &[
            "--expert-backend",
            "posix",
            "--store",
            checkpoint,
            "--io-depth",
            "8",
        ],
        &["--expert-peer", &addr, "--buffered"],
        &["--expert-peer", &addr, "--require-rdma"],
        &["--expert-peer", &addr, "--rail", "rxe0"],
        &[
            "--expert-backend",
            "rdma-verbs",
            "--expert-peer",
            &addr,
            "--rail",
            "a:b",
        ],
        &[
            "--expert-backend",
            "rdma-verbs",
            "--expert-peer",
            &addr,
            "--mtu",
            "1500",
        ],
        &["--expert-backend", "carrier-pigeon"],
        &["--expert-peer", "no-port"],
        &["--expert-peer", &addr, "--layers", "5..3"],
        &["--expert-peer", &addr, "--layers", "0..99"],
        &["--expert-peer", &addr, "--experts", "x"],
        &["--expert-peer", &addr, "--batch", "0"],
        &["--expert-peer", &addr, "--streams", "65"],
        &["--expert-peer", &addr, "--seed", "1"],
        &["--expert-peer", &addr, "--expect-content-id", "xyz"],
        &["--expert-peer", &addr, "--frobnicate"],
    ] {
        let output = fetch(flags);
        assert_eq!(output.code, Some(2), "{flags:?}: {output:?}");
        assert!(output.stderr.contains("error:"), "{flags:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{flags:?}: {output:?}");
    }
}

#[test]
fn fetch_from_what_is_no_peer_exits_with_1_and_one_clear_error() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("its address").to_string();
    let web_server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .expect("room");
        let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
        let _ = stream.read(&mut [0; 16]);
    });
    let output = fetch(&["--expert-peer", &addr]);
    let error = output.error(1);
    assert!(error.contains(&addr), "{error}");
    web_server.join().expect("a web server");
    // Nobody listens there any more.
    let output = fetch(&["--expert-peer", &addr]);
    let error = output.error(1);
    assert!(error.contains("connection refused"), "{error}");
}
