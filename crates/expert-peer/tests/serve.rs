//! Right bytes, typed refusals and deadlines, over loopback.

mod common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use expert_peer::{Peer, Refusal, Transfer};
use expert_wire::frame::{FrameHeader, FrameKind};
use expert_wire::message::{
    CatalogueRequest, ErrorCode, ReadRequest, SECTION_CHECKSUMS, SECTION_SEGMENTS,
};
use expert_wire::{Key, limits, v1};

fn all_keys() -> impl Iterator<Item = Key> {
    (0..LAYERS).flat_map(|layer| (0..EXPERTS).map(move |expert| Key::new(layer, expert)))
}

#[test]
fn reads_give_exact_bytes_across_piece_boundaries() {
    for transfer in [Transfer::Sendfile, Transfer::Copy] {
        let source = Arc::new(TempSource::pieced(1));
        let mut config = config(&source);
        config.transfer = transfer;
        let peer = Peer::start(config).unwrap();
        let (mut client, welcome) = Client::v2(peer.local_addr());
        let mut sent = 0;
        let mut requests = 0;
        for key in all_keys() {
            let image = source.image(key);
            let n = image.len() as u64;
            let mut ranges = vec![(0, n), (0, 1), (n - 1, 1), (n - 70_100, 70_100)];
            // Around each border between pieces, and over several of them.
            for at in [300_001, 300_032, 300_288, 370_432, 386_816, 387_072] {
                ranges.extend([(at - 1, 2), (at, 1), (at - 300, 601), (at - 5000, 20_000)]);
            }
            for (offset, bytes) in ranges {
                let want = &image[offset as usize..(offset + bytes) as usize];
                let got = client.fetch(request(key, welcome.epoch, offset, bytes));
                assert!(got.unwrap() == want, "{key} {offset}+{bytes} {transfer:?}");
                sent += bytes;
                requests += 1;
            }
        }
        until("all payload is counted", || {
            peer.stats().payload_bytes_sent == sent
        });
        let stats = peer.stats();
        assert_eq!(stats.requests, requests);
        assert_eq!(stats.errors, []);
        assert_eq!(stats.connections_active, 1);
    }
}

#[test]
fn sixty_four_pipelined_reads_are_answered_in_order() {
    let source = Arc::new(TempSource::pieced(2));
    let peer = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let mut bytes = Vec::new();
    let mut wanted = Vec::new();
    for id in 1..=64u64 {
        let key = Key::new(id as u32 % LAYERS, id as u32 % EXPERTS);
        let read = request(key, welcome.epoch, id * 1000, 50_000 + id);
        expert_wire::frame::push_frame(&mut bytes, FrameKind::Read, id, &read.encode());
        let at = read.offset as usize;
        wanted.push(source.image(key)[at..at + read.bytes as usize].to_vec());
    }
    client.stream.write_all(&bytes).unwrap();
    for (i, want) in wanted.iter().enumerate() {
        let (header, payload) = client.frame().unwrap();
        assert_eq!((header.kind, header.id), (FrameKind::Data, i as u64 + 1));
        assert!(payload == *want, "READ {}", i + 1);
    }
}

#[test]
fn requests_for_what_is_not_there_get_typed_errors_and_the_connection_stays() {
    let source = Arc::new(TempSource::pieced(3));
    let peer = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let epoch = welcome.epoch;
    let key = Key::new(0, 0);
    let n = source.image_bytes(key);
    let over = u64::from(limits::READ_MAX_BYTES) + 1;
    for (read, code) in [
        (
            request(Key::new(LAYERS, 0), epoch, 0, 1),
            ErrorCode::NoSuchLayer,
        ),
        (
            request(Key::new(u32::MAX, 0), epoch, 0, 1),
            ErrorCode::NoSuchLayer,
        ),
        (
            request(Key::new(0, EXPERTS), epoch, 0, 1),
            ErrorCode::IdentityExpert,
        ),
        (
            request(Key::new(0, u32::MAX), epoch, 0, 1),
            ErrorCode::NoSuchExpert,
        ),
        (request(key, epoch, 0, 0), ErrorCode::BadRange),
        (request(key, epoch, 0, n + 1), ErrorCode::BadRange),
        (request(key, epoch, n, 1), ErrorCode::BadRange),
        (request(key, epoch, u64::MAX, 2), ErrorCode::BadRange),
        (request(key, epoch, 0, over), ErrorCode::BadRange),
        (request(key, epoch + 1, 0, 1), ErrorCode::StoreChanged),
        (request(key, 0, 0, 1), ErrorCode::StoreChanged),
    ] {
        let error = client.fetch(read).unwrap_err();
        assert_eq!(error.code, code, "{read:?}: {}", error.message);
    }
    assert!(client.fetch(request(key, epoch, 0, 100)).is_ok());
    let errors: u64 = peer.stats().errors.iter().map(|e| e.1).sum();
    assert_eq!(errors, 11);
}

#[test]
fn control_requests_are_answered() {
    let mut source = TempSource::pieced(4);
    source.info_bytes = 3_000_000;
    let source = Arc::new(source);
    let peer = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    assert_eq!(welcome.content_id, Some(0x1234));
    assert_eq!(welcome.layout_id, 0x5678);
    assert_eq!(welcome.instance_id, peer.instance_id());
    client.send(FrameKind::StoreInfo, 3, &[]);
    client.send(FrameKind::Ping, 4, b"hello");
    let sections = SECTION_SEGMENTS | SECTION_CHECKSUMS;
    for (id, layer) in [(5, 2), (6, LAYERS)] {
        let request = CatalogueRequest { layer, sections };
        client.send(FrameKind::Catalogue, id, &request.encode());
    }
    let (header, payload) = client.frame().unwrap();
    assert_eq!((header.kind, header.id), (FrameKind::StoreInfoReply, 3));
    assert_eq!(payload, vec![b'i'; 3_000_000]);
    let (header, payload) = client.frame().unwrap();
    assert_eq!((header.kind, header.id), (FrameKind::Pong, 4));
    assert_eq!(payload, b"hello");
    let (header, payload) = client.frame().unwrap();
    assert_eq!((header.kind, header.id), (FrameKind::CatalogueReply, 5));
    assert_eq!(payload, b"blob 2 3");
    let (id, error) = client.error();
    assert_eq!((id, error.code), (6, ErrorCode::NoSuchLayer));
    client.send(FrameKind::Goodbye, 0, &[]);
    client.expect_end();
    until("the connection is forgotten", || {
        peer.stats().connections_active == 0
    });
}

#[test]
fn description_beyond_the_frame_limit_is_refused_and_not_sent() {
    let mut source = TempSource::pieced(4);
    source.info_bytes = limits::FRAME_MAX_BYTES as usize + 1;
    let peer = start(&Arc::new(source));
    let (mut client, _) = Client::v2(peer.local_addr());
    client.send(FrameKind::StoreInfo, 3, &[]);
    let (id, error) = client.error();
    assert_eq!((id, error.code), (3, ErrorCode::Internal));
}

#[test]
fn v1_client_gets_records_and_status_bytes() {
    let source = Arc::new(TempSource::contiguous(5, 40_960));
    let peer = start(&source);
    let mut client = Client::connect(peer.local_addr());
    let manifest = client.greeting.manifest.clone().unwrap();
    assert_eq!(manifest.record_stride, 40_960);
    assert!(client.greeting.v2.as_ref().unwrap().refused.is_none());
    let mut bytes = vec![v1::MODE_TCP];
    bytes.extend(v1::encode_request(Key::new(0, EXPERTS)));
    for key in all_keys() {
        bytes.extend(v1::encode_request(key));
    }
    bytes.extend(v1::encode_request(Key::new(9, 9)));
    bytes.extend(v1::encode_request(Key::new(v1::END, v1::END)));
    client.stream.write_all(&bytes).unwrap();
    let mut status = [7];
    client.stream.read_exact(&mut status).unwrap();
    assert_eq!(status, [v1::STATUS_ERROR]);
    for key in all_keys() {
        client.stream.read_exact(&mut status).unwrap();
        assert_eq!(status, [v1::STATUS_OK]);
        let mut record = vec![0; 40_960];
        client.stream.read_exact(&mut record).unwrap();
        assert!(record == source.image(key), "{key}");
    }
    let mut rest = Vec::new();
    client.stream.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, [v1::STATUS_ERROR]);
    assert_eq!(peer.stats().payload_bytes_sent, 12 * 40_960);
}

#[test]
fn v2_store_tells_strangers_nothing_and_hangs_up_on_v1_clients() {
    let peer = start(&Arc::new(TempSource::pieced(6)));
    for mode in [v1::MODE_TCP, v1::MODE_VERBS, 3, 255] {
        let mut client = Client::connect(peer.local_addr());
        assert_eq!(client.greeting.manifest, None);
        client.stream.write_all(&[mode]).unwrap();
        assert!(client.expect_end() < Duration::from_secs(2));
    }
}

#[test]
fn garbage_after_the_handshake_gets_the_reason_and_an_end() {
    let peer = start(&Arc::new(TempSource::pieced(7)));
    let unknown_kind = [0, 0, 0, 0, 99, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    let too_long = FrameHeader {
        payload_bytes: limits::REQUEST_MAX_BYTES + 1,
        kind: FrameKind::Read,
        id: 1,
    };
    let short_read = FrameHeader {
        payload_bytes: 2,
        kind: FrameKind::Read,
        id: 1,
    };
    for bytes in [
        unknown_kind.to_vec(),
        vec![0xff; 50_000],
        too_long.encode().to_vec(),
        [&short_read.encode()[..], &[1, 2]].concat(),
    ] {
        let (mut client, _) = Client::v2(peer.local_addr());
        client.stream.write_all(&bytes).unwrap();
        let (id, error) = client.error();
        assert_eq!((id, error.code), (0, ErrorCode::BadFrame));
        assert!(client.expect_end() < Duration::from_secs(2));
    }
    assert_eq!(peer.stats().errors, [(ErrorCode::BadFrame, 4)]);
}

#[test]
fn silence_and_slow_bytes_before_the_handshake_end_at_the_deadline() {
    let source = Arc::new(TempSource::contiguous(8, 4096));
    let peer = start(&source);
    let deadline = Duration::from_millis(400);
    let start = Instant::now();
    let mut silent = Client::connect(peer.local_addr());
    let mut half = Client::connect(peer.local_addr());
    half.stream.write_all(&[v1::MODE_V2, 32, 0, 0]).unwrap();
    let slow = Client::connect(peer.local_addr());
    let mut writer = slow.stream.try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        let mut bytes = vec![v1::MODE_V2];
        expert_wire::frame::push_frame(&mut bytes, FrameKind::ClientHello, 1, &hello().encode());
        for byte in bytes.chunks(1) {
            if writer.write_all(byte).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let mut slow = slow;
    silent.expect_end();
    let (id, error) = half.error();
    assert_eq!((id, error.code), (0, ErrorCode::Timeout));
    half.expect_end();
    slow.expect_end();
    let took = start.elapsed();
    assert!(
        took >= deadline && took < Duration::from_secs(3),
        "{took:?}"
    );
    dripping.join().unwrap();
    until("they are counted", || {
        peer.stats().connections_timed_out == 3
    });
}

#[test]
fn half_a_request_ends_at_the_deadline_and_an_idle_client_stays() {
    let source = Arc::new(TempSource::contiguous(9, 4096));
    let peer = start(&source);
    let (mut idle, welcome) = Client::v2(peer.local_addr());
    let (mut half, _) = Client::v2(peer.local_addr());
    let mut v1_half = Client::connect(peer.local_addr());
    let frame = FrameHeader {
        payload_bytes: 24,
        kind: FrameKind::Read,
        id: 1,
    };
    half.stream.write_all(&frame.encode()).unwrap();
    v1_half.stream.write_all(&[v1::MODE_TCP, 0, 0, 0]).unwrap();
    let (id, error) = half.error();
    assert_eq!((id, error.code), (0, ErrorCode::Timeout));
    half.expect_end();
    v1_half.expect_end();
    std::thread::sleep(Duration::from_millis(600));
    assert!(
        idle.fetch(request(Key::new(0, 0), welcome.epoch, 0, 9))
            .is_ok()
    );
}

#[test]
fn pings_in_two_pieces_leave_the_client_all_the_time_it_wants() {
    let source = Arc::new(TempSource::contiguous(9, 4096));
    let peer = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let mut ping = Vec::new();
    expert_wire::frame::push_frame(&mut ping, FrameKind::Ping, 5, b"hello");
    let (first, rest) = ping.split_at(7);
    let pause = Duration::from_millis(100);
    let pong = |client: &mut Client| {
        let (header, payload) = client.frame().expect("a pong");
        assert_eq!(
            (header.kind, &payload[..]),
            (FrameKind::Pong, &b"hello"[..])
        );
    };
    // Idle after one.
    client.stream.write_all(first).unwrap();
    std::thread::sleep(pause);
    client.stream.write_all(rest).unwrap();
    pong(&mut client);
    std::thread::sleep(Duration::from_millis(600));
    // Never without half of the next one, for longer than the time-out of a frame.
    client.stream.write_all(first).unwrap();
    for _ in 0..7 {
        std::thread::sleep(pause);
        client.stream.write_all(&[rest, first].concat()).unwrap();
        pong(&mut client);
    }
    client.stream.write_all(rest).unwrap();
    pong(&mut client);
    let read = request(Key::new(0, 0), welcome.epoch, 0, 9);
    assert!(client.fetch(read).is_ok());
}

#[test]
fn reader_that_stops_reading_is_cut_after_the_send_timeout() {
    let source = Arc::new(TempSource::contiguous(10, 8 << 20));
    let peer = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    for id in 1..=32 {
        let read = request(Key::new(1, 1), welcome.epoch, 0, 8 << 20);
        client.read(id, read);
    }
    until("the connection is gone", || {
        peer.stats().connections_active == 0
    });
    assert_eq!(peer.stats().connections_timed_out, 1);
}

#[test]
fn five_hundred_connections_leave_the_peer_whole() {
    let source = Arc::new(TempSource::pieced(11));
    let mut config = config(&source);
    config.limits.handshake_timeout = Duration::from_secs(2);
    let peer = Peer::start(config).unwrap();
    let (mut served, welcome) = Client::v2(peer.local_addr());
    let address = peer.local_addr();
    let threads: Vec<_> = (0..10)
        .map(|_| {
            std::thread::spawn(move || {
                let clients: Vec<_> = (0..50).map(|_| Client::connect(address)).collect();
                let busy = |c: &&Client| {
                    c.greeting.v2.as_ref().unwrap().refused.as_deref() == Some("busy")
                };
                let refused = clients.iter().filter(busy).count();
                (clients, refused)
            })
        })
        .collect();
    let mut refused = 0;
    let mut clients = Vec::new();
    for thread in threads {
        let (some, n) = thread.join().unwrap();
        clients.extend(some);
        refused += n;
    }
    let stats = peer.stats();
    let by_limits: u64 = [
        Refusal::LimitTotal,
        Refusal::LimitAddress,
        Refusal::LimitHandshakes,
    ]
    .map(|why| stats.refused(why))
    .iter()
    .sum();
    assert_eq!(by_limits, refused as u64);
    assert!((500 - 127..500).contains(&refused), "{refused} refused");
    assert!(stats.connections_active <= 128);
    let key = Key::new(1, 1);
    assert!(
        served.fetch(request(key, welcome.epoch, 0, 1000)).unwrap() == source.image(key)[..1000]
    );
    for client in &mut clients {
        client.expect_end();
    }
    until("they are gone", || peer.stats().connections_active == 1);
    let (mut late, welcome) = Client::v2(address);
    assert!(late.fetch(request(key, welcome.epoch, 0, 1000)).is_ok());
}

#[test]
fn read_with_a_reserved_id_is_refused() {
    let peer = start(&Arc::new(TempSource::pieced(12)));
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let read = ReadRequest {
        key: Key::new(0, 0),
        epoch: welcome.epoch,
        bytes: 1,
        offset: 0,
    };
    client.read(0, read);
    assert_eq!(client.error().1.code, ErrorCode::BadFrame);
    client.expect_end();
}
