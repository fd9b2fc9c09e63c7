//! A peer that wants a token: who gets in, who does not and what they are told, and what a listener on the network
//! hears.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::model::{self, Model, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::proxy::Proxy;
use atlas_expert_tests::net::raw::{RawClient, frame};
use atlas_expert_tests::net::rig::{arena_for, assert_all_right, patient, serve, serve_with};
use atlas_expert_tests::net::wait_until;
use expert_store::info::hex128;
use expert_store::token_file;
use expert_tier::TierError;
use expert_wire::auth::{CAPABILITY, MAC_BYTES, METHOD_TOKEN, NONCE_BYTES, Token};
use expert_wire::client::{HandshakeError, Protocol};
use expert_wire::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use expert_wire::limits;
use expert_wire::message::{ErrorCode, ErrorFrame, ServerHello};
use expert_wire::v1::{self, Greeting, V2Offer};
use rustix::process::Signal;

/// A folder with the peer's token, another one, and one that is too open.
struct Tokens {
    dir: tempfile::TempDir,
}

impl Tokens {
    fn new() -> Self {
        let tokens = Self {
            dir: tempfile::tempdir().expect("a folder"),
        };
        tokens.write("other", 0o600);
        tokens.write("open", 0o644);
        tokens
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, mode: u32) {
        let path = self.path(name);
        fs::write(&path, format!("{name} token of sufficient length\n")).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
    }
}

fn token(text: &str) -> Token {
    Token::from_text(text.as_bytes().to_vec()).expect("a token")
}

fn fetch(addr: &str, variables: &[(&str, &Path)], flags: &[&str]) -> Output {
    let empty = tempfile::tempdir().expect("an empty folder");
    let mut command = binary::command("atlas-expert", &[&"fetch", &"-q", &"--json"]);
    command
        .args(["--expert-peer", addr])
        .args(flags)
        .current_dir(empty.path())
        .env_remove("ATLAS_EXPERT_PEER")
        .env_remove("ATLAS_EXPERT_CONTENT_ID")
        .env_remove("ATLAS_EXPERT_TOKEN_FILE")
        .envs(variables.iter().copied());
    binary::run(&mut command)
}

fn is_in(whole: &[u8], part: &[u8]) -> bool {
    whole.windows(part.len()).any(|w| w == part)
}

/// The frames of a v2 session's one direction, after what comes before them.
fn frames(mut bytes: &[u8]) -> Vec<(FrameKind, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
        let header = FrameHeader::decode(header, limits::FRAME_MAX_BYTES).expect("a frame");
        let end = HEADER_BYTES + header.payload_bytes as usize;
        let Some(frame) = bytes.get(..end) else { break };
        frames.push((header.kind, frame[HEADER_BYTES..].to_vec()));
        bytes = &bytes[end..];
    }
    frames
}

#[test]
fn token_that_the_peer_makes_lets_its_clients_in_and_nobody_else() {
    let model = Model::bf16(Sizes::TINY);
    let tokens = Tokens::new();
    let [made, other, open] = ["made", "other", "open"].map(|name| tokens.path(name));
    let text = |path: &PathBuf| path.to_str().expect("a path in UTF-8").to_owned();
    let [made_flag, other_flag, open_flag] = [&made, &other, &open].map(text);
    let flags = ["--auth-token-file", &made_flag, "--create-auth-token"];
    let peer = PeerProcess::start(&model.checkpoint, &flags);
    let mode = fs::metadata(&made).expect("a file").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    assert_eq!(peer.ready["auth"], "token");
    let secret = fs::read_to_string(&made).expect("text");
    let secret = secret.trim();
    assert_eq!(secret.len(), 64);
    assert!(!peer.ready.to_string().contains(secret));
    let addr = peer.addr.to_string();

    let with_flag = fetch(&addr, &[], &["--auth-token-file", &made_flag]).json();
    let with_variable = fetch(&addr, &[("ATLAS_EXPERT_TOKEN_FILE", &made)], &[]).json();
    assert_eq!(with_flag["payload_digest"], with_variable["payload_digest"]);
    assert!(with_flag["payload_digest"].is_string(), "{with_flag}");

    let output = fetch(&addr, &[], &[]);
    let error = output.error(1);
    assert!(
        error.contains("wants a token") && error.contains("--auth-token-file"),
        "{error}"
    );
    let output = fetch(&addr, &[], &["--auth-token-file", &other_flag]);
    let error = output.error(1);
    assert!(
        error.contains("Unauthorized") && error.contains("token"),
        "{error}"
    );
    let output = fetch(&addr, &[], &["--auth-token-file", &open_flag]);
    let error = output.error(1);
    assert!(
        error.contains("0644") && error.contains("chmod 600"),
        "{error}"
    );

    peer.signal(Signal::TERM);
    let output = peer.wait();
    assert_eq!(output.code, Some(0));
    assert!(output.stderr.contains("unauthorized"), "{output:?}");
    assert!(!output.stderr.contains(secret) && !output.stdout.contains(secret));
    // The same command again uses the file that is there.
    let again = PeerProcess::start(&model.checkpoint, &flags);
    let addr = again.addr.to_string();
    fetch(&addr, &[], &["--auth-token-file", &made_flag]).succeeded();
    assert_eq!(fs::read_to_string(&made).expect("text").trim(), secret);
}

#[test]
fn listener_hears_neither_the_token_nor_anything_about_the_store_before_both_have_proven() {
    let secret = "a secret that nobody hears, 0123456789";
    let model = Model::bf16(Sizes::SMALL);
    let store = model::open(&model.index());
    let info = store.info().clone();
    let peer = serve_with(store, |config| config.auth_token = Some(token(secret)));
    let proxy = Proxy::start(peer.local_addr());
    proxy.record();
    let records = model.records();
    let tier = patient()
        .auth_token(Some(token(secret)))
        .connect(&proxy.addr(), arena_for(&records, records.len() as u32))
        .expect("a tier");
    assert_all_right(&tier, &records, records.len() as u32);
    let content_id = store_id(&info.content_id);
    let layout_id = u128::from_str_radix(&info.layout_id, 16).expect("hexadecimal digits");
    let recorded = proxy.recorded();
    assert!(recorded.len() >= 2, "a control connection and a stream");
    let mut told = 0;
    for [client, server] in recorded {
        for side in [&client, &server] {
            assert!(!is_in(side, secret.as_bytes()));
            assert!(!is_in(side, &secret.as_bytes()[..16]));
        }
        let kinds: Vec<_> = frames(&client[1..]).into_iter().map(|f| f.0).collect();
        assert_eq!(
            kinds[..2],
            [FrameKind::ClientHello, FrameKind::AuthResponse]
        );
        let greeting_bytes =
            4 + u32::from_le_bytes(*server.first_chunk().expect("a length")) as usize;
        let greeting = Greeting::decode(&server[4..greeting_bytes]).expect("a greeting");
        let offer = V2Offer {
            versions: vec![2],
            instance_id: peer.instance_id(),
            capabilities: vec!["tcp".into(), CAPABILITY.into()],
            refused: None,
        };
        assert_eq!(
            greeting,
            Greeting {
                manifest: None,
                v2: Some(offer)
            }
        );
        let said = frames(&server[greeting_bytes..]);
        let kinds: Vec<_> = said.iter().map(|f| f.0).collect();
        let handshake = [
            FrameKind::ServerHello,
            FrameKind::AuthChallenge,
            FrameKind::AuthProof,
        ];
        assert_eq!(kinds[..3], handshake);
        assert_eq!(kinds[3], FrameKind::Welcome);
        let before = server.len()
            - said[3..]
                .iter()
                .map(|f| f.1.len() + HEADER_BYTES)
                .sum::<usize>();
        let before = &server[..before.min(greeting_bytes + 4 * HEADER_BYTES + 16 + 32 + 32)];
        for id in [content_id, layout_id] {
            assert!(!is_in(before, &id.to_le_bytes()) && !is_in(before, hex128(id).as_bytes()));
            told += usize::from(is_in(&server, &id.to_le_bytes()));
        }
        for word in [info.stack.as_str(), "layer", "expert_"] {
            assert!(!is_in(before, word.as_bytes()), "{word}");
        }
    }
    assert!(told > 0, "what is looked for is said later");
}

fn store_id(id: &Option<String>) -> u128 {
    let id = id.as_deref().expect("a content id");
    u128::from_str_radix(id, 16).expect("hexadecimal digits")
}

#[test]
fn recorded_session_and_every_client_without_the_token_are_refused_counted_and_told_why() {
    let model = Model::bf16(Sizes::TINY);
    let secret = "the token of this very peer";
    let peer = serve_with(model::open(&model.index()), |config| {
        config.auth_token = Some(token(secret));
    });
    let proxy = Proxy::start(peer.local_addr());
    proxy.record();
    let addr = proxy.addr();
    let good = patient().auth_token(Some(token(secret)));
    good.describe(&addr).expect("a description");
    let mut refused = 0;
    assert_eq!(peer.stats().auth_refused, refused);

    // What the client said, byte for byte.
    let [client, _] = proxy.recorded().swap_remove(0);
    let mut replay = RawClient::connect(peer.local_addr());
    replay.greeting();
    let _ = replay.send(&client);
    assert_unauthorized(&mut replay);
    refused += 1;

    let error = patient().describe(&addr).expect_err("no token");
    assert!(matches!(handshake(error), HandshakeError::TokenNeeded));
    refused += 1;
    wait_until("a client that goes is counted", || {
        peer.stats().auth_refused == refused
    });

    let wrong = patient().auth_token(Some(token("the token of another peer")));
    let HandshakeError::Error(told) = handshake(wrong.describe(&addr).expect_err("a wrong token"))
    else {
        panic!("a typed refusal");
    };
    assert_eq!(
        (told.code, told.retryable),
        (ErrorCode::Unauthorized, false)
    );
    refused += 1;
    wait_until("a wrong token is counted", || {
        peer.stats().auth_refused == refused
    });

    for mode in [v1::MODE_TCP, v1::MODE_VERBS] {
        let mut old = RawClient::connect(peer.local_addr());
        assert_eq!(old.greeting().manifest, None);
        old.send(&[mode]).expect("room");
        assert!(old.read_to_end().is_empty());
        refused += 1;
        wait_until("a v1 client is counted", || {
            peer.stats().auth_refused == refused
        });
    }
    let old = patient().protocol(Protocol::V1);
    let error = handshake(old.describe(&addr).expect_err("v1"));
    assert!(matches!(error, HandshakeError::TokenNeeded));

    // Who asks before it has proven anything.
    let mut hasty = RawClient::connect(peer.local_addr());
    hasty.greeting();
    let hello = &client[..1 + HEADER_BYTES + 32];
    let asks = [hello, &frame(FrameKind::StoreInfo, 1, &[])].concat();
    hasty.send(&asks).expect("room");
    assert_unauthorized(&mut hasty);
    wait_until("a hasty client is counted", || {
        peer.stats().auth_refused > refused
    });

    let stats = peer.stats();
    let told = stats
        .errors
        .iter()
        .find(|(code, _)| *code == ErrorCode::Unauthorized);
    assert_eq!(told.map(|(_, n)| *n), Some(3), "{stats:?}");
    good.describe(&addr).expect("the peer is whole");
}

/// Panics unless the peer says so and nothing else, and hangs up.
fn assert_unauthorized(client: &mut RawClient) {
    let said = frames(&client.read_to_end());
    let kinds: Vec<_> = said.iter().map(|f| f.0).collect();
    let wanted = [
        FrameKind::ServerHello,
        FrameKind::AuthChallenge,
        FrameKind::Error,
    ];
    assert_eq!(kinds, wanted);
    let error = ErrorFrame::decode(&said[2].1).expect("an error frame");
    assert_eq!(error.code, ErrorCode::Unauthorized);
    assert!(error.message.contains("--auth-token-file"), "{error:?}");
}

fn handshake(error: TierError) -> HandshakeError {
    match error {
        TierError::Handshake { source, .. } => source,
        other => panic!("{other}"),
    }
}

#[test]
fn client_with_a_token_fetches_nothing_from_a_peer_that_does_not_know_it() {
    let model = Model::bf16(Sizes::TINY);
    let careful = patient().auth_token(Some(token("what the peer should know")));
    let open = serve(model::open(&model.index()));
    let error = careful
        .describe(&open.local_addr().to_string())
        .expect_err("an open peer");
    assert!(!error.is_retryable(), "{error}");
    assert!(matches!(
        handshake(error),
        HandshakeError::ServerDoesNotAuthenticate
    ));
    let v1 = serve(model::open(&Model::nvfp4(Sizes::V1).pack_v1()));
    let error = careful
        .describe(&v1.local_addr().to_string())
        .expect_err("an open peer");
    assert!(matches!(
        handshake(error),
        HandshakeError::ServerDoesNotAuthenticate
    ));

    // One that says yes to everybody.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("its address").to_string();
    let impostor = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let offer = V2Offer {
            versions: vec![2],
            instance_id: 7,
            capabilities: vec![CAPABILITY.into()],
            refused: None,
        };
        let hello = ServerHello {
            version: 2,
            auth: METHOD_TOKEN,
            instance_id: 7,
        };
        let mut bytes = Greeting {
            manifest: None,
            v2: Some(offer),
        }
        .encode();
        bytes.extend(frame(FrameKind::ServerHello, 0, &hello.encode()));
        bytes.extend(frame(FrameKind::AuthChallenge, 0, &[1; NONCE_BYTES]));
        stream.write_all(&bytes).expect("room");
        let mut said = [0; 1 + HEADER_BYTES + 32 + HEADER_BYTES + NONCE_BYTES + MAC_BYTES];
        stream.read_exact(&mut said).expect("a proof");
        // The client's own, which is the best that it has.
        let mac = &said[said.len() - MAC_BYTES..];
        stream
            .write_all(&frame(FrameKind::AuthProof, 0, mac))
            .expect("room");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        rest
    });
    let error = careful.describe(&addr).expect_err("an impostor");
    assert!(matches!(handshake(error), HandshakeError::NotThePeer));
    let asked = impostor.join().expect("no panic");
    assert!(asked.is_empty(), "nothing is asked of it");
}

#[test]
fn peer_refuses_token_files_that_others_can_read_before_it_listens() {
    let model = Model::bf16(Sizes::TINY);
    let tokens = Tokens::new();
    let open = tokens.path("open");
    let flags = ["--auth-token-file", open.to_str().expect("UTF-8")];
    let output = PeerProcess::start_on("127.0.0.1:0", &model.checkpoint, &flags)
        .err()
        .expect("an end");
    let error = output.error(1);
    assert!(
        error.contains("0644") && error.contains("chmod 600"),
        "{error}"
    );
    let missing = tokens.path("missing");
    let flags = ["--auth-token-file", missing.to_str().expect("UTF-8")];
    let output = PeerProcess::start_on("127.0.0.1:0", &model.checkpoint, &flags)
        .err()
        .expect("an end");
    assert!(output.error(1).contains("missing"), "{output:?}");
    assert!(token_file::read(&tokens.path("other")).is_ok());
}
