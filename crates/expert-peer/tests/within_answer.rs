//! Files that change, or fail, while an answer is on its way.

mod common;

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::*;
use expert_peer::{Peer, PeerConfig, Transfer};
use expert_wire::message::ErrorCode;
use expert_wire::{Key, v1};

const RECORD_BYTES: u64 = 1 << 20;
const KEY: Key = Key::new(0, 1);

/// How a client is connected, and to what.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Case {
    V1,
    V2 { checksums: bool },
}

const CASES: [Case; 3] = [
    Case::V1,
    Case::V2 { checksums: true },
    Case::V2 { checksums: false },
];

/// The watcher never looks, so that it is the answer that notices.
fn quiet(source: &Arc<TempSource>, transfer: Transfer) -> PeerConfig {
    let mut config = config(source);
    config.restat_interval = Duration::from_secs(3600);
    config.transfer = transfer;
    config
}

fn source(case: Case, record_bytes: u64) -> Arc<TempSource> {
    let mut source = TempSource::contiguous(7, record_bytes);
    if case != (Case::V2 { checksums: true }) {
        source.content_id = None;
    }
    std::thread::sleep(Duration::from_millis(20)); // a coarse clock's tick
    Arc::new(source)
}

/// Asks for the record [`KEY`].
fn ask(case: Case, peer: &Peer, record_bytes: u64) -> Client {
    match case {
        Case::V1 => {
            let mut client = Client::connect(peer.local_addr());
            client.stream.write_all(&[v1::MODE_TCP]).unwrap();
            client.stream.write_all(&v1::encode_request(KEY)).unwrap();
            client
        }
        Case::V2 { .. } => {
            let (mut client, welcome) = Client::v2(peer.local_addr());
            client.read(5, request(KEY, welcome.epoch, 0, record_bytes));
            client
        }
    }
}

/// The bytes of the answer, without its status or header; fewer where it was broken off.
fn answer(case: Case, mut client: Client, record_bytes: u64) -> Vec<u8> {
    let head = match case {
        Case::V1 => 1,
        Case::V2 { .. } => expert_wire::frame::HEADER_BYTES,
    };
    let mut bytes = Vec::new();
    // A connection that is broken off may be reset: what came before stays.
    let _ = (&mut client.stream)
        .take(head as u64 + record_bytes)
        .read_to_end(&mut bytes);
    if case == Case::V1 {
        assert_eq!(bytes[0], v1::STATUS_OK);
    }
    bytes.split_off(head)
}

/// Replaces the second half of the record [`KEY`].
fn overwrite(path: &PathBuf, record_bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let at = record_bytes * u64::from(KEY.expert) + record_bytes / 2;
    let other = vec![0xee; record_bytes as usize / 2];
    file.write_all_at(&other, at).unwrap();
}

#[test]
fn file_overwritten_within_an_answer_never_gives_a_whole_one() {
    for transfer in [Transfer::Sendfile, Transfer::Copy] {
        for case in CASES {
            let source = source(case, RECORD_BYTES);
            let peer = Peer::start(quiet(&source, transfer)).unwrap();
            let path = source.paths[0].clone();
            *source.before_read.lock().unwrap() =
                Some(Box::new(move || overwrite(&path, RECORD_BYTES)));
            let client = ask(case, &peer, RECORD_BYTES);
            match (transfer, case) {
                // Pages went out before the last look.
                (Transfer::Sendfile, Case::V2 { checksums: true }) => {
                    let got = answer(case, client, RECORD_BYTES);
                    assert!(got.len() < RECORD_BYTES as usize, "a whole answer");
                    let broken_off = || peer.stats().replies_broken_off == 1;
                    until("the answer is counted", broken_off);
                }
                (Transfer::Copy, Case::V2 { checksums: true }) => {
                    let got = answer(case, client, RECORD_BYTES);
                    assert!(got.len() < RECORD_BYTES as usize, "a whole answer");
                }
                // Looked at before anything went out.
                (_, Case::V2 { checksums: false }) => {
                    let mut client = client;
                    let (id, error) = client.error();
                    assert_eq!((id, error.code), (5, ErrorCode::StoreUnreadable));
                }
                (_, Case::V1) => {
                    let mut client = client;
                    let mut status = [7];
                    client.stream.read_exact(&mut status).unwrap();
                    assert_eq!(status, [v1::STATUS_ERROR], "{transfer:?} {case:?}");
                }
                (Transfer::Auto, _) => unreachable!(),
            }
            assert_eq!(peer.stats().store_changes, 1, "{transfer:?} {case:?}");
        }
    }
}

#[test]
fn answer_without_checksums_has_no_byte_of_a_file_that_changed_meanwhile() {
    // More than the sockets hold: the answer is half-way when the file changes.
    let record_bytes = 16 << 20;
    for case in [Case::V1, Case::V2 { checksums: false }] {
        let source = source(case, record_bytes);
        let mut config = quiet(&source, Transfer::Sendfile);
        config.send_buffer_bytes = Some(1 << 20);
        let peer = Peer::start(config).unwrap();
        let client = ask(case, &peer, record_bytes);
        until("bytes are on their way", || {
            source.looks.load(Ordering::SeqCst) > 1
        });
        std::thread::sleep(Duration::from_millis(100));
        overwrite(&source.paths[0], record_bytes);
        let got = answer(case, client, record_bytes);
        assert!(
            got.len() < record_bytes as usize,
            "{case:?}: a whole answer"
        );
        let image = source.image(KEY);
        assert!(image.starts_with(&got), "{case:?}: other bytes");
    }
}

#[test]
fn bytes_that_wait_in_the_socket_do_not_change_with_the_file_where_there_are_no_checksums() {
    let record_bytes = 64 << 10;
    for case in [Case::V1, Case::V2 { checksums: false }] {
        let source = source(case, record_bytes);
        let peer = Peer::start(quiet(&source, Transfer::Sendfile)).unwrap();
        let client = ask(case, &peer, record_bytes);
        until("all is in the socket", || {
            peer.stats().payload_bytes_sent == record_bytes
        });
        overwrite(&source.paths[0], record_bytes);
        let got = answer(case, client, record_bytes);
        assert!(got == source.image(KEY), "{case:?}: other bytes");
    }
}

#[test]
fn small_answer_whose_file_changed_meanwhile_is_a_typed_error() {
    let source = source(Case::V2 { checksums: true }, RECORD_BYTES);
    let peer = Peer::start(quiet(&source, Transfer::Sendfile)).unwrap();
    let path = source.paths[0].clone();
    *source.before_read.lock().unwrap() = Some(Box::new(move || overwrite(&path, RECORD_BYTES)));
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let read = request(KEY, welcome.epoch, RECORD_BYTES - 1000, 1000);
    // The pong is in the same packet, before the answer that is not sent.
    client.send(expert_wire::frame::FrameKind::Ping, 1, b"one");
    let error = client_error_after_pong(&mut client, read);
    assert_eq!(error.code, ErrorCode::StoreUnreadable);
    client.send(expert_wire::frame::FrameKind::Ping, 2, b"two");
    assert_eq!(client.frame().expect("a pong").1, b"two");
    assert_eq!(peer.stats().replies_broken_off, 0);
}

fn client_error_after_pong(
    client: &mut Client,
    read: expert_wire::message::ReadRequest,
) -> expert_wire::message::ErrorFrame {
    client.read(77, read);
    assert_eq!(client.frame().expect("a pong").1, b"one");
    let (id, error) = client.error();
    assert_eq!(id, 77);
    error
}

#[test]
fn answer_to_a_client_with_checksums_looks_at_each_file_twice() {
    for transfer in [Transfer::Sendfile, Transfer::Copy] {
        let source = Arc::new(TempSource::pieced(3));
        let peer = Peer::start(quiet(&source, transfer)).unwrap();
        let (mut client, welcome) = Client::v2(peer.local_addr());
        let bytes = source.image_bytes(KEY);
        for _ in 0..5 {
            let got = client.fetch(request(KEY, welcome.epoch, 0, bytes)).unwrap();
            assert!(got == source.image(KEY));
        }
        // Two files, in five pieces that alternate.
        assert_eq!(source.looks.load(Ordering::SeqCst), 5 * 2 * 2);
    }
}

#[test]
fn range_that_cannot_be_read_is_refused_by_itself_from_its_second_answer_on() {
    let source = Arc::new(TempSource::failing(4, RECORD_BYTES, 8192));
    let peer = Peer::start(quiet(&source, Transfer::Sendfile)).unwrap();
    let bad = |epoch| request(KEY, epoch, 0, RECORD_BYTES);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let epoch = welcome.epoch;
    // Most of it is on its way when the disk fails.
    client.read(1, bad(epoch));
    client.expect_end();
    let (mut client, _) = Client::v2(peer.local_addr());
    for _ in 0..3 {
        let error = client.fetch(bad(epoch)).unwrap_err();
        assert_eq!(error.code, ErrorCode::StoreUnreadable);
        // What lies before it and other records of the same file come, on the same connection.
        let before = request(KEY, epoch, 0, RECORD_BYTES - 8192);
        let image = source.image(Key::new(1, 1));
        assert!(client.fetch(before).is_ok());
        let other = request(Key::new(1, 1), epoch, 0, RECORD_BYTES);
        assert!(client.fetch(other).unwrap() == image);
    }
    let stats = peer.stats();
    assert_eq!((stats.replies_broken_off, stats.store_changes), (1, 0));
    // Another state of the store is tried again.
    let next = Arc::new(TempSource::contiguous(5, RECORD_BYTES));
    let epoch = peer.reload(next.clone()).unwrap();
    client.frame().expect("the notice");
    assert!(client.fetch(bad(epoch)).unwrap() == next.image(KEY));
}

#[test]
fn range_that_fails_before_any_byte_went_out_is_a_typed_error_at_once() {
    let source = Arc::new(TempSource::failing(6, RECORD_BYTES, 8192));
    let peer = Peer::start(quiet(&source, Transfer::Sendfile)).unwrap();
    let (mut client, welcome) = Client::v2(peer.local_addr());
    for _ in 0..2 {
        let read = request(KEY, welcome.epoch, RECORD_BYTES - 9000, 9000);
        let error = client.fetch(read).unwrap_err();
        assert_eq!(error.code, ErrorCode::StoreUnreadable);
    }
    let whole = request(Key::new(2, 1), welcome.epoch, 0, RECORD_BYTES);
    assert!(client.fetch(whole).is_ok());
}
