use super::*;
use crate::frame::push_frame;
use crate::message::Role;
use proptest::prelude::*;

fn greeting(v1: bool) -> Greeting {
    Greeting {
        manifest: v1.then(|| v1::Manifest {
            version: 1,
            num_moe_layers: 2,
            num_experts: 4,
            inter: 16,
            hidden: 32,
            group_size: 16,
            sub_align: 256,
            fs_block_size: 4096,
            record_stride: 4096,
            record_raw_bytes: 2048,
            file_template: "experts_{:05}.xpr".into(),
            moe_layer_to_model_layer: vec![3, 4],
        }),
        v2: Some(V2Offer {
            versions: vec![2],
            instance_id: 7,
            capabilities: vec!["tcp".into()],
            refused: None,
        }),
    }
}

fn welcome() -> Welcome {
    Welcome {
        instance_id: 7,
        epoch: 1,
        read_max_bytes: limits::READ_MAX_BYTES,
        generation: 1,
        content_id: None,
        layout_id: 5,
    }
}

fn hello() -> ClientHello {
    ClientHello {
        version_min: 2,
        version_max: 2,
        client_id: 9,
        role: Role::Control,
    }
}

fn read(bytes: u32) -> ReadRequest {
    ReadRequest {
        key: Key::new(1, 2),
        epoch: 1,
        bytes,
        offset: 3,
    }
}

/// Drives a session with the pieces of `bytes` and gives back all its events and output.
fn run(bytes: &[u8], cuts: &[usize]) -> (Vec<Event>, Vec<u8>) {
    let mut session = ServerSession::new(&greeting(true));
    let mut events = Vec::new();
    let mut rest = bytes;
    let mut cuts = cuts.iter().cycle();
    while !rest.is_empty() {
        let n = (*cuts.next().unwrap_or(&usize::MAX)).clamp(1, rest.len());
        let (mut piece, tail) = rest.split_at(n);
        rest = tail;
        while !piece.is_empty() {
            let taken = session.feed(piece);
            assert!(
                taken > 0 || session.is_closed(),
                "no room for the client's bytes"
            );
            piece = &piece[taken..];
            while let Some(event) = session.poll_event() {
                if matches!(event, Event::Hello(_)) {
                    session.accept(&welcome());
                }
                events.push(event);
            }
            assert!(session.input_capacity_bytes() <= INPUT_MAX_BYTES);
            assert!(session.partial_bytes() <= INPUT_MAX_BYTES);
            if session.is_closed() {
                return (events, std::mem::take(session.output()));
            }
        }
    }
    (events, std::mem::take(session.output()))
}

fn v2_prefix() -> Vec<u8> {
    let mut bytes = vec![v1::MODE_V2];
    push_frame(&mut bytes, FrameKind::ClientHello, 1, &hello().encode());
    bytes
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let framed = |kind: FrameKind, id: u64, payload: Vec<u8>| {
        let mut out = Vec::new();
        push_frame(&mut out, kind, id, &payload);
        out
    };
    prop_oneof![
        8 => (1u64..99, 0u32..9).prop_map(move |(id, n)| framed(FrameKind::Read, id, read(n).encode().to_vec())),
        2 => (1u64..99).prop_map(move |id| framed(FrameKind::StoreInfo, id, vec![])),
        2 => (0u64..99, 0u32..9).prop_map(move |(id, sections)| framed(
            FrameKind::Catalogue, id, CatalogueRequest { layer: 0, sections }.encode())),
        2 => (0u64..99, 0usize..70).prop_map(move |(id, n)| framed(FrameKind::Ping, id, vec![5; n])),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
        1 => (0u16..20, 0u32..70_000).prop_map(|(kind, n)| {
            let mut out = n.to_le_bytes().to_vec();
            out.extend_from_slice(&kind.to_le_bytes());
            out.extend_from_slice(&[0; 10]);
            out.resize(16 + n as usize, 1);
            out
        }),
    ]
}

proptest! {
    #[test]
    fn any_bytes_in_any_pieces_never_panic_and_stay_within_the_cap(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        cuts in proptest::collection::vec(1usize..40, 1..8),
    ) {
        let whole = run(&bytes, &[usize::MAX]);
        prop_assert_eq!(run(&bytes, &cuts), whole);
    }

    #[test]
    fn events_and_answers_do_not_depend_on_how_the_bytes_were_cut(
        frames in proptest::collection::vec(any_frame(), 0..40),
        cuts in proptest::collection::vec(1usize..9000, 1..8),
    ) {
        let mut bytes = v2_prefix();
        bytes.extend(frames.concat());
        let whole = run(&bytes, &[usize::MAX]);
        prop_assert_eq!(run(&bytes, &cuts), whole);
    }
}

#[test]
fn v1_session_yields_its_reads_and_its_end() {
    let mut bytes = vec![v1::MODE_TCP];
    bytes.extend(v1::encode_request(Key::new(1, 3)));
    bytes.extend([0xff; 8]);
    bytes.extend([1, 2, 3]);
    let (events, _) = run(&bytes, &[1]);
    assert_eq!(
        events,
        [Event::V1Start, Event::V1Read(Key::new(1, 3)), Event::V1End]
    );
}

#[test]
fn verbs_and_unknown_modes_are_refused_without_a_frame() {
    let first = greeting(true).encode();
    for (mode, reason) in [
        (v1::MODE_VERBS, CloseReason::VerbsUnsupported),
        (77, CloseReason::UnknownMode(77)),
    ] {
        let (events, output) = run(&[mode], &[1]);
        assert_eq!(events, [Event::Closed(reason)]);
        assert_eq!(output, first, "the client does not speak v2");
    }
    let mut session = ServerSession::new(&greeting(false));
    session.feed(&[v1::MODE_TCP]);
    assert_eq!(
        session.poll_event(),
        Some(Event::Closed(CloseReason::V1Unavailable))
    );
}

#[test]
fn data_frame_from_a_client_is_refused_before_its_payload() {
    let mut bytes = v2_prefix();
    bytes.extend(
        FrameHeader {
            payload_bytes: limits::READ_MAX_BYTES,
            kind: FrameKind::Data,
            id: 1,
        }
        .encode(),
    );
    let (events, output) = run(&bytes, &[usize::MAX]);
    assert_eq!(
        events.last(),
        Some(&Event::Closed(CloseReason::UnexpectedFrame(
            FrameKind::Data
        )))
    );
    let tail = &output[output.len() - 4..];
    assert_eq!(tail, b" now", "the reason is the last frame");
}

#[test]
fn client_of_another_version_gets_the_typed_error() {
    let mut bytes = vec![v1::MODE_V2];
    let old = ClientHello {
        version_min: 3,
        version_max: 9,
        ..hello()
    };
    push_frame(&mut bytes, FrameKind::ClientHello, 1, &old.encode());
    let (events, output) = run(&bytes, &[5]);
    assert_eq!(
        events,
        [Event::Closed(CloseReason::Version { min: 3, max: 9 })]
    );
    let frame = &output[greeting(true).encode().len()..];
    let header =
        FrameHeader::decode(frame.first_chunk().unwrap(), limits::FRAME_MAX_BYTES).unwrap();
    assert_eq!((header.kind, header.id), (FrameKind::Error, 0));
    let error = ErrorFrame::decode(&frame[HEADER_BYTES..]).unwrap();
    assert_eq!(error.code, ErrorCode::UnsupportedVersion);
}

#[test]
fn largest_request_frame_grows_the_buffer_to_the_cap_and_no_further() {
    let mut bytes = v2_prefix();
    bytes.extend(
        FrameHeader {
            payload_bytes: limits::REQUEST_MAX_BYTES,
            kind: FrameKind::Read,
            id: 1,
        }
        .encode(),
    );
    bytes.resize(bytes.len() + limits::REQUEST_MAX_BYTES as usize, 0);
    let (events, _) = run(&bytes, &[777]);
    assert!(matches!(
        events.last(),
        Some(Event::Closed(CloseReason::BadFrame(
            WireError::TooLarge { .. }
        )))
    ));
}

#[test]
fn refusal_has_the_reason_and_none_of_the_v1_keys() {
    let bytes = refusal(3, "busy");
    let greeting = Greeting::decode(&bytes[4..]).unwrap();
    assert_eq!(greeting.manifest, None);
    assert_eq!(greeting.v2.unwrap().refused.as_deref(), Some("busy"));
}

#[test]
fn v1_verbs_session_goes_from_count_to_silence_in_any_pieces() {
    let endpoint = |n: u32| V1Endpoint {
        qpn: 16 + n,
        psn: 5,
        gid: [n as u8; 16],
    };
    let client: Vec<V1Endpoint> = (0..2).map(endpoint).collect();
    let offer: Vec<V1Rail> = (2..4)
        .map(|n| V1Rail {
            endpoint: endpoint(n),
            layers: vec![v1_verbs::V1Region { base: 1, rkey: 2 }; 2],
        })
        .collect();
    let mut bytes = vec![v1::MODE_VERBS, 2];
    bytes.extend(v1_verbs::encode_client_rails(&client));
    for piece in [1, 3, 49, 200] {
        let mut session = ServerSession::new(&greeting(true));
        session.serve_v1_verbs();
        session.output().clear();
        let mut events = Vec::new();
        for part in bytes.chunks(piece) {
            assert_eq!(session.feed(part), part.len());
            while let Some(event) = session.poll_event() {
                match &event {
                    Event::V1Verbs { rails: 2 } => session.offer_v1_rails(&offer),
                    Event::V1Connect(_) => session.v1_rails_ready(),
                    _ => {}
                }
                events.push(event);
            }
        }
        assert_eq!(
            events,
            [
                Event::V1Verbs { rails: 2 },
                Event::V1Connect(client.clone())
            ]
        );
        let mut expected = v1_verbs::encode_server_rails(&offer);
        expected.push(0);
        assert_eq!(*session.output(), expected);
        assert!(session.handshake_done());
        session.feed(&[0]);
        assert!(matches!(session.poll_event(), Some(Event::Closed(_))));
    }
}

#[test]
fn v1_verbs_counts_that_are_0_too_large_or_differ_end_the_session() {
    for bytes in [
        vec![v1::MODE_VERBS, 0],
        vec![v1::MODE_VERBS, 9],
        [vec![v1::MODE_VERBS, 1, 2], vec![0u8; 48]].concat(),
    ] {
        let mut session = ServerSession::new(&greeting(true));
        session.serve_v1_verbs();
        session.feed(&bytes);
        let mut last = None;
        while let Some(event) = session.poll_event() {
            if event == (Event::V1Verbs { rails: 1 }) {
                session.offer_v1_rails(&[V1Rail {
                    endpoint: V1Endpoint {
                        qpn: 1,
                        psn: 1,
                        gid: [0; 16],
                    },
                    layers: vec![],
                }]);
            }
            last = Some(event);
        }
        assert!(
            matches!(last, Some(Event::Closed(_))),
            "{bytes:?}: {last:?}"
        );
    }
}
