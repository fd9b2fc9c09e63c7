use proptest::prelude::*;

use super::*;
use crate::client::{Handshake, HandshakeError, Outcome, Protocol};
use crate::frame::{FrameHeader, FrameKind, HEADER_BYTES, push_frame};
use crate::limits;
use crate::message::{ClientHello, ErrorCode, ErrorFrame, Role, ServerHello, Welcome};
use crate::server::{CloseReason, Event, ServerSession};
use crate::v1::{self, Greeting, V2Offer};

const TEXT: &[u8] = b"0123456789abcdef0123456789abcdef";

fn token(text: &[u8]) -> Token {
    Token::from_text(text.to_vec()).unwrap()
}

fn welcome() -> Welcome {
    Welcome {
        instance_id: 7,
        epoch: 1,
        read_max_bytes: 1 << 20,
        generation: 3,
        content_id: Some(77),
        layout_id: 78,
    }
}

fn client(token: Option<&Token>, nonce: u8) -> Handshake {
    let handshake = Handshake::new(9, Role::Stream, Protocol::Best);
    match token {
        Some(token) => handshake.with_token(token, [nonce; NONCE_BYTES]),
        None => handshake,
    }
}

fn server(token: &Token, nonce: u8) -> ServerSession {
    ServerSession::with_token(7, token, [nonce; NONCE_BYTES])
}

/// What a session said and did.
#[derive(Debug)]
struct Met {
    client: Result<Option<Outcome>, HandshakeError>,
    server: Vec<Event>,
    /// What the client sent, and what the server sent.
    sent: [Vec<u8>; 2],
}

/// Lets both talk until neither has anything to say; `tamper` may change what passes.
fn meet(
    client: &mut Handshake,
    server: &mut ServerSession,
    mut tamper: impl FnMut(&mut Vec<u8>, bool),
) -> Met {
    let mut events = Vec::new();
    let mut to_client = Vec::new();
    let mut sent = [Vec::new(), Vec::new()];
    loop {
        let mut up = client.take_transmit();
        tamper(&mut up, true);
        sent[0].extend_from_slice(&up);
        assert_eq!(
            server.feed(&up),
            if server.is_closed() { 0 } else { up.len() }
        );
        while let Some(event) = server.poll_event() {
            if matches!(event, Event::Hello(_)) {
                server.accept(&welcome());
            }
            events.push(event);
        }
        let mut down = std::mem::take(server.output());
        tamper(&mut down, false);
        sent[1].extend_from_slice(&down);
        to_client.extend(down);
        let mut moved = false;
        let mut outcome = Ok(None);
        while client.wants() > 0 && client.wants() <= to_client.len() {
            let rest = to_client.split_off(client.wants());
            let now = std::mem::replace(&mut to_client, rest);
            moved = true;
            outcome = client.handle(&now);
            if !matches!(outcome, Ok(None)) {
                break;
            }
        }
        if !matches!(outcome, Ok(None)) || !moved {
            return Met {
                client: outcome,
                server: events,
                sent,
            };
        }
    }
}

fn is_in(whole: &[u8], part: &[u8]) -> bool {
    whole.windows(part.len()).any(|w| w == part)
}

#[test]
fn both_sides_that_know_the_token_meet() {
    let token = token(TEXT);
    let met = meet(
        &mut client(Some(&token), 1),
        &mut server(&token, 2),
        |_, _| {},
    );
    assert_eq!(met.client, Ok(Some(Outcome::V2(welcome()))));
    assert!(matches!(met.server[..], [Event::Hello(_)]));
    for sent in &met.sent {
        assert!(!is_in(sent, TEXT), "the token is never sent");
        assert!(!is_in(sent, &token.0[..]), "nor is its key");
    }
}

#[test]
fn token_file_may_end_with_a_new_line_and_is_never_shown() {
    let padded = token(&[b" ", TEXT, b"\r\n"].concat());
    let met = meet(
        &mut client(Some(&padded), 1),
        &mut server(&token(TEXT), 2),
        |_, _| {},
    );
    assert!(matches!(met.client, Ok(Some(_))));
    assert_eq!(format!("{padded:?}"), "Token(not shown)");
    for (text, bytes) in [(vec![b'x'; 15], 15), (vec![b' '; 99], 0)] {
        let error = Token::from_text(text).unwrap_err();
        assert_eq!(error, TokenError::Short { bytes });
    }
    assert_eq!(
        Token::from_text(vec![b'x'; 4097]).unwrap_err(),
        TokenError::Long { bytes: 4097 }
    );
}

#[test]
fn wrong_token_is_refused_with_a_typed_error_and_learns_nothing() {
    let met = meet(
        &mut client(Some(&token(b"another token, wrong")), 1),
        &mut server(&token(TEXT), 2),
        |_, _| {},
    );
    let Err(HandshakeError::Error(frame)) = met.client else {
        panic!("{met:?}");
    };
    assert_eq!(frame.code, ErrorCode::Unauthorized);
    assert!(!frame.retryable);
    assert!(frame.message.contains("--auth-token-file"), "{frame:?}");
    assert!(matches!(
        met.server[..],
        [Event::Closed(CloseReason::WrongToken)]
    ));
    assert!(!is_in(&met.sent[1], &welcome().encode()));
}

#[test]
fn client_without_a_token_is_told_which_flag_is_missing() {
    let mut server = server(&token(TEXT), 2);
    let met = meet(&mut client(None, 1), &mut server, |_, _| {});
    assert_eq!(met.client, Err(HandshakeError::TokenNeeded));
    let text = HandshakeError::TokenNeeded.to_string();
    assert!(text.contains("--auth-token-file"), "{text}");
    assert!(met.server.is_empty());
    assert!(server.awaits_proof() && !server.handshake_done());
}

#[test]
fn question_instead_of_a_proof_is_unauthorized() {
    for kind in [FrameKind::StoreInfo, FrameKind::Rails, FrameKind::Goodbye] {
        let mut server = server(&token(TEXT), 2);
        let met = meet(&mut client(None, 1), &mut server, |_, _| {});
        assert!(met.server.is_empty());
        let mut bytes = Vec::new();
        push_frame(&mut bytes, kind, 5, &[]);
        server.feed(&bytes);
        assert_eq!(
            server.poll_event(),
            Some(Event::Closed(CloseReason::NoProof(kind)))
        );
        let output = server.output();
        let error = ErrorFrame::decode(&output[HEADER_BYTES..]).unwrap();
        assert_eq!(error.code, ErrorCode::Unauthorized);
    }
}

#[test]
fn v1_client_is_hung_up_on_by_a_peer_that_wants_a_token() {
    for mode in [v1::MODE_TCP, v1::MODE_VERBS] {
        let mut server = server(&token(TEXT), 2);
        server.serve_v1_verbs();
        let first = std::mem::take(server.output());
        let greeting = Greeting::decode(&first[4..]).unwrap();
        assert_eq!(greeting.manifest, None);
        let offer = greeting.v2.unwrap();
        assert_eq!(offer.capabilities, ["tcp", CAPABILITY]);
        server.feed(&[mode]);
        assert_eq!(
            server.poll_event(),
            Some(Event::Closed(CloseReason::V1NeedsNoToken))
        );
        assert!(server.output().is_empty(), "v1 has no error frames");
    }
}

#[test]
fn recorded_session_does_not_fit_another_connection() {
    let token = token(TEXT);
    let recorded = meet(
        &mut client(Some(&token), 1),
        &mut server(&token, 2),
        |_, _| {},
    );
    // The client's side once more: the server has another nonce.
    let mut again = server(&token, 3);
    again.feed(&recorded.sent[0]);
    let mut events = Vec::new();
    while let Some(event) = again.poll_event() {
        events.push(event);
    }
    assert_eq!(events, [Event::Closed(CloseReason::WrongToken)]);
    // The server's side once more: the client has another nonce.
    let mut again = client(Some(&token), 4);
    let mut rest = &recorded.sent[1][..];
    let outcome = loop {
        let (now, later) = rest.split_at(again.wants());
        rest = later;
        match again.handle(now) {
            Ok(None) => {}
            other => break other,
        }
    };
    assert_eq!(outcome, Err(HandshakeError::NotThePeer));
}

#[test]
fn own_proof_sent_back_convinces_neither_side() {
    let token = token(TEXT);
    // A server that knows no token sends the client's own proof back.
    let mut victim = client(Some(&token), 1);
    let mut server = server(&token, 2);
    let mut own_mac = [0; MAC_BYTES];
    let met = meet(&mut victim, &mut server, |bytes, up| {
        let response = HEADER_BYTES + NONCE_BYTES + MAC_BYTES;
        if up && bytes.len() == response {
            own_mac.copy_from_slice(&bytes[response - MAC_BYTES..]);
        }
        if !up && is_kind(bytes, FrameKind::AuthProof) {
            bytes[HEADER_BYTES..HEADER_BYTES + MAC_BYTES].copy_from_slice(&own_mac);
        }
    });
    assert_ne!(own_mac, [0; MAC_BYTES]);
    assert_eq!(met.client, Err(HandshakeError::NotThePeer));
    // A client that knows no token answers with the server's proof of a session with equal nonces.
    let transcript = Transcript {
        server_nonce: [2; NONCE_BYTES],
        client_nonce: [1; NONCE_BYTES],
        client_hello: [3; 32],
        server_hello: [4; 16],
    };
    let proof = transcript.prove(&token, Side::Server);
    assert!(!transcript.is_proven(&token, Side::Client, &proof));
    assert!(transcript.is_proven(&token, Side::Server, &proof));
}

fn is_kind(bytes: &[u8], kind: FrameKind) -> bool {
    let header = bytes.first_chunk();
    let header = header.and_then(|h| FrameHeader::decode(h, limits::FRAME_MAX_BYTES).ok());
    header.is_some_and(|h| h.kind == kind)
}

#[test]
fn peer_that_takes_any_proof_and_has_none_is_refused() {
    let mut victim = client(Some(&token(TEXT)), 1);
    let offer = V2Offer {
        versions: vec![2],
        instance_id: 7,
        capabilities: vec!["tcp".into(), CAPABILITY.into()],
        refused: None,
    };
    let greeting = Greeting {
        manifest: None,
        v2: Some(offer),
    };
    let hello = ServerHello {
        version: 2,
        auth: METHOD_TOKEN,
        instance_id: 7,
    };
    let mut bytes = greeting.encode();
    push_frame(&mut bytes, FrameKind::ServerHello, 0, &hello.encode());
    push_frame(&mut bytes, FrameKind::AuthChallenge, 0, &[5; NONCE_BYTES]);
    push_frame(&mut bytes, FrameKind::AuthProof, 0, &[6; MAC_BYTES]);
    push_frame(&mut bytes, FrameKind::Welcome, 0, &welcome().encode());
    let mut rest = &bytes[..];
    let outcome = loop {
        let (now, later) = rest.split_at(victim.wants());
        rest = later;
        match victim.handle(now) {
            Ok(None) => {}
            other => break other,
        }
    };
    assert_eq!(outcome, Err(HandshakeError::NotThePeer));
    assert_eq!(victim.wants(), 0, "it reads no Welcome");
}

#[test]
fn client_with_a_token_refuses_a_peer_that_asks_for_none() {
    let token = token(TEXT);
    // v2 without authentication.
    let open = Greeting {
        manifest: None,
        v2: Some(V2Offer {
            versions: vec![2],
            instance_id: 7,
            capabilities: vec![],
            refused: None,
        }),
    };
    let met = meet(
        &mut client(Some(&token), 1),
        &mut ServerSession::new(&open),
        |_, _| {},
    );
    assert_eq!(met.client, Err(HandshakeError::ServerDoesNotAuthenticate));
    // Authentication taken out of the hello on the way.
    let met = meet(
        &mut client(Some(&token), 1),
        &mut server(&token, 2),
        |bytes, up| {
            if !up && is_kind(bytes, FrameKind::ServerHello) {
                bytes[HEADER_BYTES + 2] = 0;
            }
        },
    );
    assert_eq!(met.client, Err(HandshakeError::ServerDoesNotAuthenticate));
    // v1 alone.
    let mut old = Handshake::new(9, Role::Stream, Protocol::V1).with_token(&token, [1; 32]);
    let met = meet(&mut old, &mut server(&token, 2), |_, _| {});
    assert_eq!(met.client, Err(HandshakeError::V1HasNoToken));
    assert!(met.sent[0].is_empty(), "not even a mode byte");
}

#[test]
fn control_connection_cannot_be_taken_for_a_stream() {
    let token = token(TEXT);
    let role_at = 1 + HEADER_BYTES + 16;
    let met = meet(
        &mut client(Some(&token), 1),
        &mut server(&token, 2),
        |bytes, up| {
            if up && bytes.first() == Some(&v1::MODE_V2) {
                assert_eq!(bytes[role_at], Role::Stream as u8);
                bytes[role_at] = Role::Control as u8;
            }
        },
    );
    assert!(matches!(met.client, Err(HandshakeError::Error(_))));
    assert_eq!(met.server, [Event::Closed(CloseReason::WrongToken)]);
}

proptest! {
    /// Every bit of what either side says before its proof is in the proofs.
    #[test]
    fn any_bit_flipped_on_the_way_refuses(
        client_nonce: [u8; 32],
        server_nonce: [u8; 32],
        client_id: u64,
        up: bool,
        at in 0usize..200,
        bit in 0u8..8,
    ) {
        let token = token(TEXT);
        let mut victim = Handshake::new(client_id, Role::Control, Protocol::V2)
            .with_token(&token, client_nonce);
        let mut server = ServerSession::with_token(7, &token, server_nonce);
        let first = server.output().len();
        let (mut passed, mut flipped) = (0, None);
        let met = meet(&mut victim, &mut server, |bytes, is_up| {
            if is_up != up {
                return;
            }
            // The first message is JSON that no proof is about: what it says is said again.
            let skip = if is_up { 0 } else { first };
            let here = (at + skip).checked_sub(passed).filter(|i| *i < bytes.len());
            if let Some(i) = here {
                bytes[i] ^= 1 << bit;
                flipped = Some(passed + i - skip);
            }
            passed += bytes.len();
        });
        let Some(flipped) = flipped else {
            prop_assert!(met.client.is_ok());
            return Ok(());
        };
        // Ids of frames name questions; the handshake asks none. What comes after both proofs
        // (the Welcome) is not authenticated: see docs/security.md.
        let is_free = match up {
            true => (1 + 8..1 + 16).contains(&flipped) || (1 + 48 + 8..1 + 48 + 16).contains(&flipped),
            false => [0, 32, 80].iter().any(|frame| (frame + 8..frame + 16).contains(&flipped)) || flipped >= 128,
        };
        prop_assert!(is_free || !matches!(met.client, Ok(Some(_))), "byte {flipped}: {met:?}");
        if up && !is_free {
            prop_assert!(!server.handshake_done());
        }
    }

    #[test]
    fn transcripts_that_differ_have_other_proofs(
        a: [u8; 32], b: [u8; 32], c: [u8; 32], d: [u8; 16],
        field in 0usize..4, at in 0usize..16, bit in 0u8..8,
    ) {
        let token = token(TEXT);
        let one = Transcript { server_nonce: a, client_nonce: b, client_hello: c, server_hello: d };
        let mut other = one.clone();
        let byte = match field {
            0 => &mut other.server_nonce[at],
            1 => &mut other.client_nonce[at],
            2 => &mut other.client_hello[at],
            _ => &mut other.server_hello[at],
        };
        *byte ^= 1 << bit;
        for side in [Side::Client, Side::Server] {
            let mac = one.prove(&token, side);
            prop_assert!(one.is_proven(&token, side, &mac));
            prop_assert!(!other.is_proven(&token, side, &mac));
        }
    }

    #[test]
    fn messages_are_read_as_they_were_written(nonce: [u8; 32], mac: [u8; 32], len in 0usize..80) {
        let response = AuthResponse { nonce, mac };
        prop_assert_eq!(AuthResponse::decode(&response.encode()), Ok(response));
        prop_assert_eq!(AuthChallenge::decode(&nonce), Ok(AuthChallenge { nonce }));
        prop_assert_eq!(AuthProof::decode(&mac), Ok(AuthProof { mac }));
        let other = vec![0; len];
        prop_assert_eq!(AuthResponse::decode(&other).is_ok(), len == 64);
        prop_assert_eq!(AuthProof::decode(&other).is_ok(), len == 32);
    }
}

#[test]
fn another_implementation_gets_these_bytes() {
    // Made with Python's hmac and hashlib from the words of docs/protocol.md.
    let client = ClientHello {
        version_min: 2,
        version_max: 2,
        client_id: 9,
        role: Role::Stream,
    };
    let server = ServerHello {
        version: 2,
        auth: 1,
        instance_id: 7,
    };
    let transcript = Transcript {
        server_nonce: [2; 32],
        client_nonce: [1; 32],
        client_hello: exact("hello", &client.encode()).unwrap(),
        server_hello: exact("hello", &server.encode()).unwrap(),
    };
    let hex = |mac: [u8; 32]| mac.map(|b| format!("{b:02x}")).concat();
    let token = token(TEXT);
    assert_eq!(hex(transcript.prove(&token, Side::Client)), CLIENT_PROOF);
    assert_eq!(hex(transcript.prove(&token, Side::Server)), SERVER_PROOF);
}

const CLIENT_PROOF: &str = "966f2fe315b67a29e4897a1d7047b944fab919cfb65a7a88eaee6c9bca2ad436";
const SERVER_PROOF: &str = "4a3d925b7a94bc55ca8fdd2460b668e42d961793ae5c4a454eaea420acc1c021";
