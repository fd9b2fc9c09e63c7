//! Targets of the wire: frames, messages, the first message, and both sides' sessions.

use std::fmt::Debug;

use expert_wire::auth::{AuthChallenge, AuthProof, AuthResponse, Token};
use expert_wire::client::{Handshake, Outcome, Protocol};
use expert_wire::frame::{self, FrameHeader, FrameKind, HEADER_BYTES};
use expert_wire::message::{
    CatalogueRequest, ChecksumReport, ClientHello, ErrorCode, ErrorFrame, ReadRequest, Role,
    ServerHello, Welcome,
};
use expert_wire::server::{Event, INPUT_MAX_BYTES, ServerSession};
use expert_wire::v1::{self, Greeting, V2Offer};
use expert_wire::v1_verbs::{
    V1Endpoint, V1Rail, V1Region, V1ServerRails, decode_client_rails, encode_client_rails,
    encode_server_rails,
};
use expert_wire::verbs::{OpenRail, RailInfo, RailOpened, decode_rails, encode_rails};
use expert_wire::{WireError, limits};

use super::{NONCES, TOKEN};

/// Frames one after the other: what decodes encodes to the same bytes, and no payload is announced
/// beyond its limit.
pub fn frames(input: &[u8]) {
    let mut rest = input;
    while let Some(header) = rest.first_chunk::<HEADER_BYTES>() {
        let strict = FrameHeader::decode(header, limits::REQUEST_MAX_BYTES);
        let wide = FrameHeader::decode(header, limits::FRAME_MAX_BYTES);
        if strict.is_ok() {
            assert_eq!(strict, wide, "a wider limit refuses or changes a frame");
            within(&strict, limits::REQUEST_MAX_BYTES);
        }
        within(&wide, limits::FRAME_MAX_BYTES);
        let Ok(decoded) = wide else { return };
        assert_eq!(decoded.encode(), *header);
        let frame_bytes = HEADER_BYTES + decoded.payload_bytes as usize;
        let Some(whole) = rest.get(..frame_bytes) else {
            return;
        };
        let mut out = Vec::new();
        frame::push_frame(&mut out, decoded.kind, decoded.id, &whole[HEADER_BYTES..]);
        assert_eq!(out, whole);
        rest = &rest[frame_bytes..];
    }
}

fn within(header: &Result<FrameHeader, WireError>, limit: u32) {
    let Ok(header) = header else { return };
    let limit = match header.kind {
        FrameKind::Data => limits::READ_MAX_BYTES,
        _ => limit,
    };
    assert!(header.payload_bytes <= limit, "{header:?} beyond {limit}");
}

/// Every message of both protocols: what decodes has one meaning, also after it was encoded again.
pub fn messages(input: &[u8]) {
    fixed(input, ClientHello::decode, ClientHello::encode);
    fixed(input, ServerHello::decode, ServerHello::encode);
    fixed(input, Welcome::decode, Welcome::encode);
    fixed(input, CatalogueRequest::decode, CatalogueRequest::encode);
    fixed(input, ReadRequest::decode, ReadRequest::encode);
    fixed(input, AuthChallenge::decode, AuthChallenge::encode);
    fixed(input, AuthResponse::decode, AuthResponse::encode);
    fixed(input, AuthProof::decode, AuthProof::encode);
    fixed(input, ChecksumReport::decode, ChecksumReport::encode);
    if let Ok(welcome) = Welcome::decode(input) {
        assert!((1..=limits::READ_MAX_BYTES).contains(&welcome.read_max_bytes));
    }
    error_frame(input);
    verbs(input);
    if let Some(request) = input.first_chunk::<{ v1::REQUEST_BYTES }>() {
        match v1::decode_request(*request) {
            Some(key) => assert_eq!(v1::encode_request(key), *request),
            None => assert_eq!(*request, [0xFF; v1::REQUEST_BYTES]),
        }
    }
    if let Some(len) = input.first_chunk::<4>() {
        let len = u32::from_le_bytes(*len);
        let fits = (1..=limits::MANIFEST_MAX_BYTES).contains(&len);
        assert_eq!(
            v1::check_manifest_bytes(len).ok(),
            fits.then_some(len as usize)
        );
    }
}

/// A message whose size follows from its head: reserved bytes may be anything, but neither a cut one
/// nor a longer one is taken for it.
fn fixed<T: Debug + PartialEq, B: AsRef<[u8]>>(
    input: &[u8],
    decode: impl Fn(&[u8]) -> Result<T, WireError>,
    encode: impl Fn(&T) -> B,
) {
    let Ok(message) = decode(input) else { return };
    let encoded = encode(&message);
    assert_eq!(encoded.as_ref().len(), input.len());
    assert_eq!(decode(encoded.as_ref()).as_ref(), Ok(&message));
    assert!(
        decode(&input[..input.len() - 1]).is_err(),
        "{message:?} cut by a byte"
    );
    let mut longer = input.to_vec();
    longer.push(0);
    assert!(decode(&longer).is_err(), "{message:?} and one more byte");
}

fn error_frame(input: &[u8]) {
    let Ok(error) = ErrorFrame::decode(input) else {
        return;
    };
    assert!(!error.message.chars().any(char::is_control), "{error:?}");
    // A byte that is not UTF-8 becomes a character of three.
    assert!(error.message.len() <= 3 * limits::ERROR_TEXT_MAX_BYTES);
    if error.message.len() <= limits::ERROR_TEXT_MAX_BYTES {
        assert_eq!(ErrorFrame::decode(&error.encode()), Ok(error.clone()));
    }
    let cut = ErrorFrame::new(error.code, error.message);
    assert!(cut.message.len() <= limits::ERROR_TEXT_MAX_BYTES);
    assert_eq!(ErrorFrame::decode(&cut.encode()), Ok(cut));
}

/// Rails and queue pairs, of both protocols.
fn verbs(input: &[u8]) {
    fixed(input, OpenRail::decode, OpenRail::encode);
    fixed(input, RailOpened::decode, RailOpened::encode);
    if let Ok(opened) = RailOpened::decode(input) {
        assert!(opened.qps.len() <= usize::from(limits::QPS_PER_RAIL_MAX));
        let end = |r: &expert_wire::verbs::Region| (r.file, r.file_offset + r.bytes);
        for pair in opened.regions.windows(2) {
            assert!(end(&pair[0]) <= (pair[1].file, pair[1].file_offset));
        }
    }
    // Names are for people: where one is not UTF-8, what is shown is longer than what can be sent.
    let unnamed = |bytes: &[u8]| {
        let strip = |rail| RailInfo {
            name: String::new(),
            ..rail
        };
        decode_rails(bytes).map(|rails| rails.into_iter().map(strip).collect::<Vec<_>>())
    };
    fixed(input, unnamed, |rails| encode_rails(rails));
    if let Ok(rails) = decode_rails(input) {
        assert!(rails.len() <= usize::from(limits::RAILS_MAX));
        let controls = |rail: &RailInfo| rail.name.contains(char::is_control);
        assert!(!rails.iter().any(controls), "{rails:?}");
    }
    if let Ok(rails) = decode_client_rails(input) {
        if rails.len() <= usize::from(limits::V1_RAILS_MAX) {
            assert_eq!(encode_client_rails(&rails)[1..], *input);
        }
    }
}

/// The JSON of a peer's first message: what is accepted is within the limits and survives the way
/// out and in again.
pub fn greeting(input: &[u8]) {
    let Ok(greeting) = Greeting::decode(input) else {
        return;
    };
    if let Some(manifest) = &greeting.manifest {
        assert_eq!(manifest.check(), Ok(()));
        assert!(manifest.num_experts <= limits::EXPERTS_MAX);
        assert_eq!(
            manifest.moe_layer_to_model_layer.len(),
            manifest.num_moe_layers as usize
        );
    }
    assert!(greeting.manifest.is_some() || greeting.v2.is_some());
    let encoded = greeting.encode();
    let (len, json) = encoded.split_first_chunk::<4>().expect("a length");
    assert_eq!(u32::from_le_bytes(*len) as usize, json.len());
    assert_eq!(Greeting::decode(json), Ok(greeting));
}

/// A client's side: whatever a peer sends, the handshake ends, asks for no more than its limits,
/// keeps to the protocol that was insisted on, and says only what a server understands. With a token
/// it never does without the peer's proof.
///
/// Input: a byte of choices, then the peer's bytes.
pub fn client(input: &[u8]) {
    let Some((&choices, mut rest)) = input.split_first() else {
        return;
    };
    let protocol = match choices & 3 {
        0 => Protocol::V1,
        1 => Protocol::V2,
        2 => Protocol::Best,
        _ => Protocol::V1Verbs,
    };
    let role = match choices & 4 {
        0 => Role::Control,
        _ => Role::Stream,
    };
    let mut handshake = Handshake::new(7, role, protocol);
    let has_token = choices & 64 != 0;
    if has_token {
        handshake = handshake.with_token(&token(), NONCES[0]);
    }
    let mut has_proof = false;
    let mut sent = Vec::new();
    // Length, greeting, and header and payload of four frames.
    for _ in 0..10 {
        let wants = handshake.wants();
        assert!(wants <= limits::MANIFEST_MAX_BYTES as usize);
        let Some((now, later)) = rest.split_at_checked(wants) else {
            break;
        };
        rest = later;
        has_proof |= has_token && now.len() == 32 && now == our_proof(role);
        let step = handshake.handle(now);
        sent.extend(handshake.take_transmit());
        match step {
            Ok(None) => continue,
            Ok(Some(Outcome::V1(manifest))) => {
                assert!(!has_token, "v1 has no proofs");
                assert_ne!(protocol, Protocol::V2);
                assert_eq!(manifest.check(), Ok(()));
                if protocol == Protocol::V1Verbs {
                    assert_eq!(sent, [v1::MODE_VERBS]);
                    v1_rails(choices >> 3 & 7, manifest.num_moe_layers, rest);
                    return;
                }
                assert_eq!(sent, [v1::MODE_TCP]);
            }
            Ok(Some(Outcome::V2(welcome))) => {
                assert!(has_proof || !has_token, "no proof, or a forged one");
                assert!(matches!(protocol, Protocol::V2 | Protocol::Best));
                assert!((1..=limits::READ_MAX_BYTES).contains(&welcome.read_max_bytes));
                assert_eq!(sent[0], v1::MODE_V2);
            }
            Err(error) => drop(error.to_string()),
        }
        assert_eq!(handshake.wants(), 0, "it is over and wants more");
        break;
    }
    assert!(
        sent.len() <= 1 + HEADER_BYTES + 32 + usize::from(has_token) * (HEADER_BYTES + 64),
        "{} bytes sent",
        sent.len()
    );
    if sent.is_empty() {
        return;
    }
    let mut server = ServerSession::new(&our_greeting(true));
    let hello_bytes = sent.len().min(1 + HEADER_BYTES + 32);
    assert_eq!(server.feed(&sent[..hello_bytes]), hello_bytes);
    match server.poll_event() {
        Some(Event::V1Start) => assert_ne!(protocol, Protocol::V2),
        Some(Event::Hello(hello)) => assert_eq!((hello.client_id, hello.role), (7, role)),
        other => panic!("our server understands {other:?} from our client"),
    }
}

fn token() -> Token {
    Token::from_text(TOKEN.to_vec()).expect("a token")
}

/// What our server proves to our client, in the only session that there is with these nonces.
fn our_proof(role: Role) -> Vec<u8> {
    let mut client = Handshake::new(7, role, Protocol::V2).with_token(&token(), NONCES[0]);
    let mut server = ServerSession::with_token(7, &token(), NONCES[1]);
    let mut said = Vec::new();
    let mut has_challenge = false;
    loop {
        server.feed(&client.take_transmit());
        while server.poll_event().is_some() {}
        said.append(server.output());
        let wants = client.wants();
        if said.len() < wants {
            return Vec::new();
        }
        let rest = said.split_off(wants);
        let now = std::mem::replace(&mut said, rest);
        client.handle(&now).expect("both know the token");
        // The challenge, then the proof; nothing else is that long.
        if now.len() == 32 {
            if has_challenge {
                return now;
            }
            has_challenge = true;
        }
    }
}

/// The server's queue pairs in a v1 verbs session: bounded by what was asked for, and the same bytes
/// when they are written again.
fn v1_rails(count: u8, layers: u32, input: &[u8]) {
    let count = count + 1;
    let mut reader = V1ServerRails::default();
    let mut rest = input;
    while reader.wants() > 0 {
        assert!(reader.wants() <= 12 * limits::LAYERS_MAX as usize);
        let Some((now, later)) = rest.split_at_checked(reader.wants()) else {
            return;
        };
        rest = later;
        if reader.handle(now, count, layers).is_err() {
            return;
        }
    }
    let rails = reader.finish();
    assert_eq!(rails.len(), usize::from(count));
    assert!(rails.iter().all(|r| r.layers.len() == layers as usize));
    assert_eq!(
        encode_server_rails(&rails),
        input[..input.len() - rest.len()]
    );
}

/// A server's side: events and answers do not depend on how the client's bytes were cut, and no
/// more than one largest frame is buffered. One that wants a token says nothing of the store, and
/// has nothing to do, before it has the client's proof.
///
/// Input: a byte of choices, a byte that counts cuts, the cuts, then the client's bytes.
pub fn server(input: &[u8]) {
    let [choices, count, rest @ ..] = input else {
        return;
    };
    let (cuts, bytes) = rest.split_at(usize::from(count % 16).min(rest.len()));
    let choices = Choices {
        serves_v1: choices & 1 != 0,
        accepts: choices & 2 == 0,
        serves_verbs: choices & 4 != 0,
        wants_token: choices & 8 != 0,
    };
    let whole = serve(choices, bytes, &[]);
    if choices.wants_token {
        let first = whole.events.first();
        assert!(matches!(
            first,
            None | Some(Event::Hello(_) | Event::Closed(_))
        ));
        let is_proven = matches!(first, Some(Event::Hello(_)));
        assert!(is_proven || !is_in(&whole.output, &WELCOME.encode()));
    }
    let cut = serve(choices, bytes, cuts);
    assert_eq!(whole, cut, "events depend on the cuts {cuts:?}");
    let single = serve(choices, bytes, &[0]);
    assert_eq!(whole, single, "events depend on single bytes");
}

#[derive(Clone, Copy)]
struct Choices {
    serves_v1: bool,
    accepts: bool,
    serves_verbs: bool,
    wants_token: bool,
}

/// What a session made of its input.
#[derive(Debug, PartialEq)]
struct Served {
    events: Vec<Event>,
    output: Vec<u8>,
    messages: u64,
    closed: bool,
}

/// Feeds a session pieces as long as the cuts say, plus one; without cuts all at once.
fn serve(choices: Choices, bytes: &[u8], cuts: &[u8]) -> Served {
    let mut session = match choices.wants_token {
        true => ServerSession::with_token(7, &token(), NONCES[1]),
        false => ServerSession::new(&our_greeting(choices.serves_v1)),
    };
    if choices.serves_verbs {
        session.serve_v1_verbs();
    }
    let start_bytes = session.output().len() + OFFER_MAX_BYTES;
    let mut events = Vec::new();
    let mut cuts = cuts.iter().cycle();
    let mut rest = bytes;
    while !rest.is_empty() && !session.is_closed() {
        let n = cuts.next().map_or(rest.len(), |&cut| usize::from(cut) + 1);
        let (mut piece, later) = rest.split_at(n.min(rest.len()));
        rest = later;
        while !piece.is_empty() && !session.is_closed() {
            let taken = session.feed(piece);
            assert!(taken > 0, "no room for the client's bytes");
            piece = &piece[taken..];
            while let Some(event) = session.poll_event() {
                answer(&mut session, &event, choices.accepts);
                events.push(event);
            }
            assert!(session.input_capacity_bytes() <= INPUT_MAX_BYTES);
            assert!(session.partial_bytes() < INPUT_MAX_BYTES);
        }
    }
    if session.is_closed() {
        assert_eq!(session.feed(&[0]), 0);
        assert_eq!(session.poll_event(), None);
    }
    // The dearest byte is that of a record request, which has eight: no answer here is that long
    // but those to frames of sixteen bytes and more.
    let output = std::mem::take(session.output());
    assert!(output.len() <= start_bytes + 4 * bytes.len() + limits::ERROR_TEXT_MAX_BYTES);
    Served {
        events,
        output,
        messages: session.messages(),
        closed: session.is_closed(),
    }
}

fn answer(session: &mut ServerSession, event: &Event, accepts: bool) {
    match event {
        Event::Hello(_) if accepts => session.accept(&WELCOME),
        Event::Hello(_) => session.refuse(ErrorCode::Busy, "no"),
        Event::V1Verbs { rails } if accepts => {
            session.offer_v1_rails(&vec![our_rail(); usize::from(*rails)]);
        }
        Event::V1Connect(_) if accepts => session.v1_rails_ready(),
        Event::V1Verbs { .. } | Event::V1Connect(_) => session.refuse(ErrorCode::Busy, "no"),
        Event::StoreInfo { id }
        | Event::Catalogue { id, .. }
        | Event::Rails { id }
        | Event::OpenRail { id, .. }
        | Event::Read { id, .. } => {
            session.reply_error(*id, ErrorCode::NoSuchLayer, "no");
        }
        _ => {}
    }
}

const WELCOME: Welcome = Welcome {
    instance_id: 7,
    epoch: 1,
    read_max_bytes: limits::READ_MAX_BYTES,
    generation: 1,
    content_id: None,
    layout_id: 5,
};

fn is_in(whole: &[u8], part: &[u8]) -> bool {
    whole.windows(part.len()).any(|w| w == part)
}

/// Bytes of eight of `our_rail`, with their count.
const OFFER_MAX_BYTES: usize = 1 + 8 * (24 + 4 + 12);

fn our_rail() -> V1Rail {
    V1Rail {
        endpoint: V1Endpoint {
            qpn: 17,
            psn: 5,
            gid: [9; 16],
        },
        layers: vec![V1Region {
            base: 1 << 32,
            rkey: 3,
        }],
    }
}

/// The greeting of a server with one small v1 store.
fn our_greeting(serves_v1: bool) -> Greeting {
    Greeting {
        manifest: serves_v1.then(|| v1::Manifest {
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
