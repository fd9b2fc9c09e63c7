//! Connections that are turned away, each counted once, by its reason.

mod common;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use expert_peer::{Limits, Peer, Refusal, Token};
use expert_wire::frame::FrameKind;
use expert_wire::v1;

fn peer_with(change: impl FnOnce(&mut Limits)) -> Peer {
    let mut config = config(&Arc::new(TempSource::contiguous(1, 4096)));
    config.limits.handshake_timeout = PATIENCE;
    change(&mut config.limits);
    Peer::start(config).unwrap()
}

/// Waits until so many connections were turned away, and sees that it was for that reason alone.
fn counted(peer: &Peer, why: Refusal, count: u64) {
    until("it is counted", || peer.stats().refused(why) == count);
    let stats = peer.stats();
    assert_eq!(stats.refusals, [(why, count)]);
    assert_eq!(stats.connections_refused, count);
}

fn turned_away(peer: &Peer) {
    let mut client = Client::connect(peer.local_addr());
    let offer = client.greeting.v2.as_ref().expect("v2");
    assert_eq!(offer.refused.as_deref(), Some("busy"));
    client.expect_end();
}

#[test]
fn each_limit_on_connections_has_its_reason() {
    type Change = fn(&mut Limits);
    let cases: [(Change, Refusal); 3] = [
        (|l| l.connections_max = 1, Refusal::LimitTotal),
        (|l| l.connections_per_address_max = 1, Refusal::LimitAddress),
        (|l| l.handshakes_max = 1, Refusal::LimitHandshakes),
    ];
    for (change, why) in cases {
        let peer = peer_with(change);
        let _first = Client::connect(peer.local_addr());
        for count in 1..=3 {
            turned_away(&peer);
            counted(&peer, why, count);
        }
    }
}

#[test]
fn handshake_that_takes_too_long_and_one_that_is_none_have_theirs() {
    let peer = peer_with(|l| l.handshake_timeout = Duration::from_millis(100));
    Client::connect(peer.local_addr()).expect_end();
    counted(&peer, Refusal::HandshakeTimeout, 1);
    assert_eq!(peer.stats().connections_timed_out, 1);

    let peer = peer_with(|_| ());
    for (count, said) in [(1, &b"GET / HTTP/1.1\r\n"[..]), (2, &[9])] {
        let mut client = Client::connect(peer.local_addr());
        client.stream.write_all(said).unwrap();
        client.expect_end();
        counted(&peer, Refusal::Protocol, count);
    }
}

#[test]
fn client_without_the_token_has_its_reason_whatever_it_says() {
    let mut config = config(&Arc::new(TempSource::contiguous(1, 4096)));
    let token = b"a token of sufficient length".to_vec();
    config.auth_token = Some(Token::from_text(token).unwrap());
    let peer = Peer::start(config).unwrap();
    let mut old = Client::connect(peer.local_addr());
    old.stream.write_all(&[v1::MODE_TCP]).unwrap();
    old.expect_end();
    counted(&peer, Refusal::Auth, 1);
    let mut leaves = Client::connect(peer.local_addr());
    leaves.stream.write_all(&[v1::MODE_V2]).unwrap();
    leaves.send(FrameKind::ClientHello, 9, &hello().encode());
    leaves.frame().expect("it is asked for a proof");
    drop(leaves);
    counted(&peer, Refusal::Auth, 2);
    assert_eq!(peer.stats().auth_refused, 2);
}

#[test]
fn clients_that_leave_and_faults_after_the_handshake_are_no_refusals() {
    let peer = peer_with(|l| l.frame_timeout = Duration::from_millis(100));
    drop(Client::connect(peer.local_addr()));
    drop(Client::v2(peer.local_addr()));
    // Half a request, and a frame that no client sends.
    let (mut slow, _) = Client::v2(peer.local_addr());
    slow.stream.write_all(&[1]).unwrap();
    slow.expect_end();
    let (mut wrong, _) = Client::v2(peer.local_addr());
    wrong.send(FrameKind::Welcome, 1, &[]);
    wrong.expect_end();
    until("all are gone", || peer.stats().connections_active == 0);
    let stats = peer.stats();
    assert_eq!((stats.refusals, stats.connections_refused), (vec![], 0));
    assert_eq!(stats.connections_timed_out, 1);
}
