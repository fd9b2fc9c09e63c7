//! Start, reload, shutdown, and files that change below a running peer.

mod common;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::*;
use expert_peer::{Peer, PeerConfig, PeerError, PopulateOptions};
use expert_wire::auth::Token;
use expert_wire::frame::FrameKind;
use expert_wire::message::{ChecksumReport, ErrorCode, Welcome};
use expert_wire::{Key, v1};

#[test]
fn port_in_use_is_an_error_that_names_the_address() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let mut config = config(&Arc::new(TempSource::pieced(1)));
    config.listen = vec![address.to_string()];
    assert!(expert_peer::check_listen(&config.listen, false).is_err());
    let error = Peer::start(config).unwrap_err();
    assert!(error.is_retryable());
    let text = error.to_string();
    assert!(
        text.contains(&address.to_string()) && text.contains("--listen"),
        "{text}"
    );
}

#[test]
fn address_beyond_loopback_needs_consent() {
    let source = Arc::new(TempSource::pieced(1));
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "[::ffff:192.0.2.1]:0"] {
        let mut config = config(&source);
        config.listen = vec!["127.0.0.1:0".into(), address.into()];
        let error = Peer::start(config).unwrap_err();
        assert!(matches!(error, PeerError::Anonymous { .. }), "{error}");
        assert!(error.to_string().contains("--allow-anonymous"));
        assert!(error.to_string().contains("--auth-token-file"));
    }
    let mut with_token = config(&source);
    with_token.listen = vec!["0.0.0.0:0".into()];
    with_token.auth_token = Some(Token::from_text(vec![b'x'; 32]).unwrap());
    Peer::start(with_token).unwrap();
    let mut config = config(&source);
    config.listen = vec!["0.0.0.0:0".into()];
    config.allow_anonymous = true;
    let peer = Peer::start(config).unwrap();
    Client::v2(([127, 0, 0, 1], peer.local_addr().port()).into());
}

#[test]
fn addresses_that_cannot_be_read_are_shown() {
    let source = Arc::new(TempSource::pieced(1));
    for listen in [
        vec![],
        vec!["127.0.0.1".to_owned()],
        vec!["x:y:z".to_owned()],
    ] {
        let mut config = config(&source);
        config.listen = listen;
        let error = Peer::start(config).unwrap_err();
        assert!(matches!(error, PeerError::Address { .. }), "{error}");
    }
}

#[test]
fn several_addresses_are_listened_on() {
    let mut config = config(&Arc::new(TempSource::pieced(1)));
    config.listen = vec!["127.0.0.1:0".into(), "127.0.0.2:0".into()];
    let peer = Peer::start(config).unwrap();
    assert_eq!(peer.local_addrs().len(), 2);
    for &address in peer.local_addrs() {
        Client::v2(address);
    }
}

#[test]
fn population_reads_all_records_and_skips_a_store_that_does_not_fit() {
    let source = Arc::new(TempSource::pieced(2));
    let progress = Arc::new(std::sync::Mutex::new((0, 0)));
    let seen = progress.clone();
    let mut options = PopulateOptions {
        threads: 3,
        progress: Some(Arc::new(move |done, total| {
            *seen.lock().unwrap() = (done, total);
        })),
        ..Default::default()
    };
    let report = expert_peer::populate::populate(&*source, &options).unwrap();
    assert_eq!(report.skipped, None);
    // The pieces of a file are neighbours (with gaps of three bytes).
    let bytes: usize = source.contents.iter().map(|c| c.len() - 3).sum();
    assert_eq!(report.bytes, bytes as u64 - 17 - 5);
    assert_eq!(*progress.lock().unwrap(), (report.bytes, report.bytes));
    options.limit_bytes = Some(report.bytes - 1);
    let report = expert_peer::populate::populate(&*source, &options).unwrap();
    assert_eq!(report.bytes, 0);
    assert!(report.skipped.is_some());
    options.limit_bytes = None;
    options.cancel.store(true, Ordering::SeqCst);
    let mut config = config(&source);
    config.populate = Some(options);
    let error = Peer::start(config).unwrap_err();
    assert!(matches!(error, PeerError::Interrupted), "{error}");
}

#[test]
fn connections_are_refused_until_the_store_is_in_memory() {
    let source = Arc::new(TempSource::pieced(2));
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let (tell, told) = std::sync::mpsc::channel();
    *source.before_read.lock().unwrap() = Some(Box::new(move || {
        tell.send(TcpStream::connect(address).map(drop)).unwrap();
    }));
    let mut config = config(&source);
    config.listen = vec![address.to_string()];
    config.populate = Some(PopulateOptions::default());
    let _peer = Peer::start(config).unwrap();
    let early = told.recv().unwrap().unwrap_err();
    assert_eq!(early.kind(), std::io::ErrorKind::ConnectionRefused);
    Client::v2(address);
}

#[test]
fn file_truncated_while_it_is_sent_never_gives_a_wrong_length() {
    let source = Arc::new(TempSource::contiguous(3, 8 << 20));
    let peer = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let key = Key::new(2, 3);
    let image = source.image(key);
    for id in 1..=40 {
        client.read(id, request(key, welcome.epoch, 0, 8 << 20));
    }
    let (_, first) = client.frame().unwrap();
    assert!(first == image);
    let file = OpenOptions::new()
        .write(true)
        .open(&source.paths[0])
        .unwrap();
    file.set_len(100).unwrap();
    // What was in the socket before may still come; every answer is whole and right, a typed
    // error, or the end of the connection.
    let mut last = 1;
    while let Some((header, payload)) = client.frame() {
        last = header.id;
        match header.kind {
            FrameKind::Data => {
                assert!(payload == image, "other bytes");
            }
            FrameKind::Error => {
                let error = expert_wire::message::ErrorFrame::decode(&payload).unwrap();
                assert_eq!(error.code, ErrorCode::StoreUnreadable);
            }
            other => panic!("{other:?}"),
        }
        if header.id == 40 {
            break;
        }
    }
    let stats = peer.stats();
    assert!(stats.store_changes == 1, "{stats:?}");
    assert!(stats.replies_broken_off == 1 || last == 40, "{stats:?}");
}

#[test]
fn file_shorter_than_its_records_gets_a_typed_error() {
    let source = Arc::new(TempSource::pieced(4));
    let peer = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let file = OpenOptions::new()
        .write(true)
        .open(&source.paths[1])
        .unwrap();
    file.set_len(100).unwrap();
    let epoch = welcome.epoch;
    let key = Key::new(1, 0);
    let error = client.fetch(request(key, epoch, 0, 400_000)).unwrap_err();
    assert_eq!(error.code, ErrorCode::StoreUnreadable);
    // Ranges that lie in the other file alone are still served.
    let got = client.fetch(request(key, epoch, 5, 300_000)).unwrap();
    assert!(got == source.image(key)[5..300_005]);
}

#[test]
fn overwritten_file_is_refused_from_the_next_answer_on() {
    let source = Arc::new(TempSource::contiguous(5, 65_536));
    let mut config = config(&source);
    config.restat_interval = Duration::from_secs(3600);
    let peer = Peer::start(config).unwrap();
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let read = request(Key::new(0, 1), welcome.epoch, 0, 65_536);
    assert!(client.fetch(read).is_ok());
    std::thread::sleep(Duration::from_millis(20)); // a coarse clock's tick
    let file = OpenOptions::new()
        .write(true)
        .open(&source.paths[0])
        .unwrap();
    file.write_all_at(b"other", 70_000).unwrap();
    for _ in 0..3 {
        let error = client.fetch(read).unwrap_err();
        assert_eq!(error.code, ErrorCode::StoreUnreadable);
        assert!(!error.retryable);
    }
    let mut old = Client::connect(peer.local_addr());
    old.stream.write_all(&[v1::MODE_TCP]).unwrap();
    old.stream
        .write_all(&v1::encode_request(Key::new(0, 1)))
        .unwrap();
    let mut status = [7];
    std::io::Read::read_exact(&mut old.stream, &mut status).unwrap();
    assert_eq!(status, [v1::STATUS_ERROR]);
    assert_eq!(peer.stats().store_changes, 1);
}

#[test]
fn checksum_report_makes_the_peer_look_at_once() {
    let source = Arc::new(TempSource::contiguous(6, 65_536));
    let mut config = config(&source);
    config.restat_interval = Duration::from_secs(3600);
    let peer = Peer::start(config).unwrap();
    let (mut client, welcome) = Client::v2(peer.local_addr());
    // As where the file was replaced: what is open still looks the same.
    source.blind.store(true, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(200));
    fs::write(&source.paths[0], b"gone").unwrap();
    let report = ChecksumReport {
        key: Key::new(0, 1),
        chunk: 0,
        epoch: welcome.epoch,
    };
    for _ in 0..1000 {
        client.send(FrameKind::ChecksumReport, 0, &report.encode());
    }
    until("the file is revoked", || peer.stats().store_changes == 1);
    let error = client
        .fetch(request(Key::new(0, 1), welcome.epoch, 0, 4))
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::StoreUnreadable);
    assert_eq!(peer.stats().checksum_reports, 1000);
}

#[test]
fn watcher_notices_a_change_without_any_client() {
    let source = Arc::new(TempSource::pieced(7));
    let mut config = config(&source);
    config.restat_interval = Duration::from_millis(30);
    let peer = Peer::start(config).unwrap();
    fs::remove_file(&source.paths[0]).unwrap();
    until("the change is counted", || peer.stats().store_changes == 1);
}

#[test]
fn reload_tells_v2_clients_refuses_old_reads_and_hangs_up_v1_clients() {
    let old = Arc::new(TempSource::contiguous(8, 65_536));
    let peer = start(&old);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let mut v1_client = Client::connect(peer.local_addr());
    v1_client.stream.write_all(&[v1::MODE_TCP]).unwrap();
    let mut undecided = Client::connect(peer.local_addr());
    let mut late = Client::connect(peer.local_addr());
    until("the v1 client is in its loop", || {
        peer.stats().connections_active == 4
    });
    std::thread::sleep(Duration::from_millis(50));
    let mut next = TempSource::contiguous(9, 131_072);
    next.generation = 2;
    let next = Arc::new(next);
    assert_eq!(peer.reload(next.clone()).unwrap(), 2);

    // Idle: the notice comes by itself.
    let (header, payload) = client.frame().unwrap();
    assert_eq!((header.kind, header.id), (FrameKind::StoreChanged, 0));
    let notice = Welcome::decode(&payload).unwrap();
    assert_eq!((notice.epoch, notice.generation), (2, 2));
    assert_eq!(notice.instance_id, welcome.instance_id);
    let key = Key::new(1, 2);
    let error = client
        .fetch(request(key, welcome.epoch, 0, 10))
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::StoreChanged);
    assert!(error.retryable);
    let got = client.fetch(request(key, 2, 0, 131_072)).unwrap();
    assert!(got == next.image(key));

    v1_client.expect_end();
    // Its greeting was the old manifest.
    undecided.stream.write_all(&[v1::MODE_TCP]).unwrap();
    let start = Instant::now();
    undecided.expect_end();
    assert!(start.elapsed() < Duration::from_millis(300));
    late.stream.write_all(&[v1::MODE_V2]).unwrap();
    late.send(FrameKind::ClientHello, 1, &hello().encode());
    late.frame().unwrap();
    let (header, payload) = late.frame().unwrap();
    assert_eq!(header.kind, FrameKind::Welcome);
    assert_eq!(Welcome::decode(&payload).unwrap().epoch, 2);
    assert_eq!(peer.stats().reloads, 1);
}

#[test]
fn reload_in_the_middle_of_pipelined_reads_never_mixes_stores() {
    let stores = [
        Arc::new(TempSource::contiguous(10, 1 << 20)),
        Arc::new(TempSource::contiguous(11, 1 << 20)),
    ];
    let peer = start(&stores[0]);
    let key = Key::new(2, 2);
    let images = [stores[0].image(key), stores[1].image(key)];
    let (mut client, mut welcome) = Client::v2(peer.local_addr());
    for round in 0..4u32 {
        for id in 1..=20 {
            client.read(id, request(key, welcome.epoch, 0, 1 << 20));
        }
        let next = stores[(round as usize + 1) % 2].clone();
        let reloading = std::thread::scope(|scope| {
            let reload = scope.spawn(|| peer.reload(next).unwrap());
            let mut answers = 0;
            let mut notice = None;
            while answers < 20 || notice.is_none() {
                let (header, payload) = client.frame().unwrap();
                match header.kind {
                    FrameKind::Data => {
                        assert!(
                            payload == images[round as usize % 2],
                            "another store's bytes"
                        );
                        assert!(
                            notice.is_none(),
                            "the old epoch was served after the notice"
                        );
                        answers += 1;
                    }
                    FrameKind::Error => {
                        let error = expert_wire::message::ErrorFrame::decode(&payload).unwrap();
                        assert_eq!(error.code, ErrorCode::StoreChanged);
                        answers += 1;
                    }
                    FrameKind::StoreChanged => {
                        notice = Some(Welcome::decode(&payload).unwrap());
                    }
                    other => panic!("{other:?}"),
                }
            }
            welcome = notice.unwrap();
            reload.join().unwrap()
        });
        assert_eq!(welcome.epoch, reloading);
    }
}

#[test]
fn shutdown_tells_idle_clients_and_is_fast() {
    let peer = start(&Arc::new(TempSource::pieced(12)));
    let address = peer.local_addr();
    let mut undecided = Client::connect(address);
    let (mut client, _) = Client::v2(address);
    let told = std::thread::spawn(move || {
        let (id, error) = client.error();
        client.expect_end();
        (id, error.code)
    });
    let start = Instant::now();
    peer.shutdown(PATIENCE).unwrap();
    assert!(start.elapsed() < Duration::from_secs(2));
    assert_eq!(told.join().unwrap(), (0, ErrorCode::ShuttingDown));
    undecided.expect_end();
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn shutdown_in_the_middle_of_transfers_keeps_its_deadline() {
    let source = Arc::new(TempSource::contiguous(13, 8 << 20));
    let mut config = config(&source);
    config.limits.send_timeout = Duration::from_secs(60);
    let peer = Peer::start(config).unwrap();
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (mut client, welcome) = Client::v2(peer.local_addr());
            for id in 1..=16 {
                client.read(id, request(Key::new(0, 0), welcome.epoch, 0, 8 << 20));
            }
            client
        })
        .collect();
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    peer.shutdown(Duration::from_secs(1)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(2));
    for mut client in clients {
        client.expect_end();
    }
}

#[test]
fn dropped_peer_frees_its_port_and_its_store() {
    let source = Arc::new(TempSource::pieced(14));
    let peer = start(&source);
    let address = peer.local_addr();
    let (_client, _) = Client::v2(address);
    drop(peer);
    // A thread that has been waited for still has to return.
    until("no thread holds the store", || {
        Arc::strong_count(&source) == 1
    });
    let mut again = PeerConfig::new(source);
    again.listen = vec![address.to_string()];
    Peer::start(again).unwrap();
}
