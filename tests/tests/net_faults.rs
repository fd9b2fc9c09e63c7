//! Peers that misbehave: the client ends in time with one clear error, or gets over it, and never shows a byte that
//! was not proven.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use atlas_expert_tests::net::fake::{FakePeer, OnLayer, Reply, Script};
use atlas_expert_tests::net::model::{Model, Records, Sizes};
use atlas_expert_tests::net::raw::frame;
use atlas_expert_tests::net::rig::{
    arena_for, assert_all_right, assert_right, batch, patient, slot, unsettled,
};
use atlas_expert_tests::net::{Random, SLACK, wait_until};
use expert_store::codec::{Sections, decode_layer, encode_layer};
use expert_store::{Key, Store};
use expert_tier::error::Step;
use expert_tier::{EngineConfig, ExpertTier, RdmaTier, TierBuilder, TierError, Verify};
use expert_wire::WireError;
use expert_wire::client::HandshakeError;
use expert_wire::frame::FrameKind;
use expert_wire::message::{ErrorCode, ReadRequest, Welcome};
use expert_wire::v1::{Greeting, V2Offer};

const BAD: Key = Key::new(1, 3);

/// A store in memory and what its records must be.
struct Small {
    store: Arc<Store>,
    records: Records,
    _model: Model,
}

impl Small {
    fn new(sizes: Sizes) -> Self {
        let model = Model::bf16(sizes);
        Self {
            store: model.open(),
            records: model.records(),
            _model: model,
        }
    }

    fn peer(
        &self,
        on_read: impl Fn(u64, &ReadRequest) -> Reply + Send + Sync + 'static,
    ) -> FakePeer {
        FakePeer::serving(Script::new(self.store.clone(), on_read))
    }

    /// A peer that answers READs of one record so, and all others rightly.
    fn peer_with_bad(&self, reply: Reply) -> FakePeer {
        self.peer(move |_, request| match request.key == BAD {
            true => reply.clone(),
            false => Reply::Right,
        })
    }

    fn tier(&self, peer: &FakePeer, builder: TierBuilder) -> RdmaTier {
        let arena = arena_for(&self.records, self.records.len() as u32);
        builder.connect(&peer.addr(), arena).expect("a tier")
    }

    fn batch(&self) -> Vec<(Key, expert_arena::SlotId)> {
        let keys: Vec<Key> = self.records.keys().copied().collect();
        batch(&keys)
    }

    /// Fetches all at once: what is bad fails as `check` says, its slot empty; all else is right.
    fn fetch_around_bad(&self, tier: &RdmaTier, check: impl Fn(&TierError) -> bool) {
        let batch = self.batch();
        let fetched = tier.fetch_many(&batch, 0).expect("a batch");
        let mut failed = 0;
        for (record, (key, place)) in fetched.into_iter().zip(batch) {
            match record {
                Ok(record) => {
                    assert_ne!(key, BAD);
                    assert_right(&record, &self.records);
                }
                Err(error) => {
                    assert_eq!(key, BAD, "{error}");
                    assert!(check(&error), "{error:?}");
                    failed += 1;
                    wait_until("the slot is free", || {
                        tier.arena().slot_state(place) == Some(expert_arena::SlotState::Free)
                    });
                }
            }
        }
        assert_eq!(failed, 1);
    }
}

fn connect_error(peer: &FakePeer) -> TierError {
    let start = Instant::now();
    let builder = TierBuilder::new().connect_timeout(Duration::from_millis(400));
    let error = builder.describe(&peer.addr()).expect_err("no peer");
    assert!(start.elapsed() < SLACK);
    assert!(error.to_string().contains(&peer.addr()), "{error}");
    error
}

fn greeting() -> Vec<u8> {
    let offer = V2Offer {
        versions: vec![2],
        instance_id: 1,
        capabilities: vec![],
        refused: None,
    };
    Greeting {
        manifest: None,
        v2: Some(offer),
    }
    .encode()
}

fn with_length(text: &[u8]) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(text);
    bytes
}

#[test]
fn peer_that_says_nothing_is_given_up_at_the_connect_timeout() {
    let error = connect_error(&FakePeer::silent());
    assert!(is_late(&error, Step::Handshake), "{error}");
    assert!(error.is_retryable());
    assert!(error.to_string().contains("another service"), "{error}");
}

/// Whether that was waited for until the time-out of [`connect_error`], and told without the system's words.
fn is_late(error: &TierError, want: Step) -> bool {
    let text = error.to_string();
    let is_told = text.contains("timed out after") && !text.contains("unavailable");
    matches!(error, TierError::TimedOut { step, waited_ms, .. } if *step == want && *waited_ms >= 400)
        && is_told
}

#[test]
fn peer_that_shakes_hands_and_answers_nothing_is_given_up_at_the_connect_timeout() {
    let small = Small::new(Sizes::TINY);
    let mut script = Script::new(small.store.clone(), |_, _| Reply::Right);
    let (until_the_end, wait) = std::sync::mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    script.on_info = Box::new(move |info| {
        let _ = wait.lock().expect("a lock").recv();
        info
    });
    let peer = FakePeer::serving(script);
    let error = connect_error(&peer);
    drop(until_the_end);
    assert!(is_late(&error, Step::Answer), "{error}");
    assert!(error.is_retryable());
}

#[test]
fn address_where_nobody_listens_is_an_error_that_says_what_to_do() {
    let addr = FakePeer::silent().addr();
    let error = TierBuilder::new().describe(&addr).expect_err("nobody");
    assert!(matches!(error, TierError::Connect { .. }), "{error}");
    assert!(
        error.to_string().contains("start atlas-expert-peer"),
        "{error}"
    );
}

#[test]
fn garbage_is_recognised_as_no_peer() {
    for bytes in [
        Random(7).bytes(1 << 16),
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n".to_vec(),
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n".to_vec(),
        with_length(b""),
        with_length(b"{}"),
        with_length(b"[1, 2"),
        with_length(&[0xff; 300]),
        with_length(br#"{"atlas": 5}"#),
        [greeting(), vec![0xee; 64]].concat(),
    ] {
        let peer = FakePeer::saying(bytes);
        let error = connect_error(&peer);
        let TierError::Handshake { source, .. } = &error else {
            panic!("{error}");
        };
        assert!(matches!(source, HandshakeError::Garbage(_)), "{error}");
        assert!(!error.is_retryable());
    }
}

#[test]
fn manifest_of_four_gigabytes_is_refused_unread() {
    for length in [u32::MAX, (16 << 20) + 1] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.resize(1 << 16, b' ');
        let error = connect_error(&FakePeer::saying(bytes));
        let TierError::Handshake { source, .. } = &error else {
            panic!("{error}");
        };
        let too_large = HandshakeError::Garbage(WireError::TooLarge {
            what: "manifest bytes",
            got: length.into(),
            limit: 16 << 20,
        });
        assert_eq!(*source, too_large);
    }
}

#[test]
fn manifest_that_is_announced_and_never_sent_is_given_up_at_the_connect_timeout() {
    let error = connect_error(&FakePeer::saying((16u32 << 20).to_le_bytes().to_vec()));
    assert!(is_late(&error, Step::Handshake), "{error}");
}

#[test]
fn peer_that_hangs_up_during_the_handshake_is_an_error_at_once() {
    for cut in [0, 3, 4, 10, greeting().len()] {
        let peer = FakePeer::start(move |stream| {
            stream.write_all(&greeting()[..cut])?;
            // What the client sends is read, so that it gets an orderly end and no reset.
            if cut == greeting().len() {
                stream.read_exact(&mut [0; 8])?;
            }
            Ok(())
        });
        let error = connect_error(&peer);
        assert!(matches!(error, TierError::Connect { .. }), "{cut}: {error}");
        assert!(error.is_retryable());
    }
}

#[test]
fn peer_that_is_busy_refuses_for_now() {
    let peer = FakePeer::start(|stream| stream.write_all(&expert_wire::server::refusal(1, "busy")));
    let error = connect_error(&peer);
    assert!(error.is_retryable());
    assert!(error.to_string().contains("busy"), "{error}");
}

/// Answers that end a connection: to the first READ, and to every one.
fn breaking_replies() -> Vec<Reply> {
    let welcome = FrameKind::Welcome;
    vec![
        Reply::CloseAfter(0),
        Reply::CloseAfter(7),
        Reply::CloseAfter(16),
        Reply::CloseAfter(100_000),
        Reply::CloseAfter(usize::MAX),
        Reply::Short,
        Reply::OtherId,
        Reply::Bytes(frame(FrameKind::Data, 0, b"")),
        Reply::Bytes(frame(FrameKind::Data, 999, &[1; 4096])),
        Reply::Bytes(frame(welcome, 1, &[0; 64])),
        Reply::Bytes(frame(FrameKind::Ping, 1, &[0; 65])),
        Reply::Bytes(frame(FrameKind::StoreChanged, 0, &[0; 3])),
        Reply::Bytes(frame(FrameKind::Goodbye, 0, b"")),
        Reply::Bytes(frame(FrameKind::Error, 1, b"")),
        Reply::Bytes(Random(3).bytes(4096)),
        Reply::Error(ErrorCode::ShuttingDown),
        Reply::Error(ErrorCode::BadFrame),
    ]
}

#[test]
fn broken_answer_takes_the_rail_down_once_and_the_batch_still_completes() {
    let small = Small::new(Sizes::SMALL);
    for reply in breaking_replies() {
        let what = format!("{reply:?}").chars().take(60).collect::<String>();
        let peer = small.peer(move |n, _| match n {
            2 => reply.clone(),
            _ => Reply::Right,
        });
        let tier = small.tier(&peer, patient());
        assert_all_right(&tier, &small.records, small.records.len() as u32);
        let rail = &tier.stats().rails[0];
        assert_eq!(rail.errors_by_cause.downs, 1, "{what}");
        assert!(tier.healthy());
        // One for questions, one for READs, and one after the fault.
        assert_eq!(peer.connections(), 3, "{what}");
    }
}

#[test]
fn peer_whose_answers_are_always_broken_ends_in_the_deadlines_error_and_leaves_no_bytes() {
    let small = Small::new(Sizes::SMALL);
    for reply in [Reply::CloseAfter(100_000), Reply::Short, Reply::OtherId] {
        let peer = small.peer(move |_, _| reply.clone());
        let tier = small.tier(&peer, patient());
        // Knows the catalogue before time is short.
        drop(tier.submit(&small.batch(), None).expect("a batch"));
        wait_until("no READ is out", || unsettled(tier.arena()) == 0);
        let start = Instant::now();
        let time = Duration::from_millis(400);
        let pending = tier.submit(&small.batch(), Some(time)).expect("a batch");
        let (records, _) = pending.wait().expect("an end");
        assert!(start.elapsed() < SLACK);
        for record in records {
            let error = record.expect_err("no whole record ever came");
            assert!(matches!(error, TierError::Deadline { .. }), "{error}");
        }
        wait_until("no READ is out", || unsettled(tier.arena()) == 0);
        assert_eq!(tier.arena().stats().committed, 0);
        assert_eq!(tier.stats().records, 0);
    }
}

#[test]
fn frames_that_may_come_at_any_time_do_no_harm() {
    let small = Small::new(Sizes::SMALL);
    let mut script = Script::new(small.store.clone(), |_, _| Reply::Right);
    let welcome = script.welcome;
    script.on_read = Box::new(move |n, _| {
        let changed = Welcome {
            epoch: 2 + n as u32,
            ..welcome
        };
        Reply::RightAfter(match n % 3 {
            0 => frame(FrameKind::Ping, n, b"are you there"),
            1 => frame(FrameKind::Pong, n, b""),
            // The same content again: as after a reload of the same store.
            _ => frame(FrameKind::StoreChanged, 0, &changed.encode()),
        })
    });
    let peer = FakePeer::serving(script);
    let tier = small.tier(&peer, patient());
    assert_all_right(&tier, &small.records, small.records.len() as u32);
    assert_eq!(tier.stats().rails[0].errors, 0);
}

#[test]
fn wrong_bytes_fail_their_record_alone_with_a_checksum_error_and_are_reported() {
    let small = Small::new(Sizes::SMALL);
    // A READ of one whole record: the middle lies in its first chunk.
    let builder = patient().engine(EngineConfig::default());
    let peer = small.peer_with_bad(Reply::Corrupt);
    let tier = small.tier(&peer, builder);
    small.fetch_around_bad(
        &tier,
        |e| matches!(e, TierError::Checksum { key, bad } if *key == BAD && bad.chunk == 0),
    );
    let stats = tier.stats();
    assert_eq!((stats.verify_failures, stats.failed), (2, 1));
    // The connection is sound: the file may not be.
    assert_eq!(stats.rails[0].errors_by_cause.downs, 0);
    wait_until("both attempts were reported", || peer.reports().len() == 2);
    for report in peer.reports() {
        assert_eq!((report.key, report.chunk, report.epoch), (BAD, 0, 1));
    }
}

#[test]
fn bytes_that_are_wrong_once_are_read_again() {
    let small = Small::new(Sizes::SMALL);
    let peer = small.peer(|n, _| match n {
        5 => Reply::Corrupt,
        _ => Reply::Right,
    });
    let tier = small.tier(&peer, patient());
    assert_all_right(&tier, &small.records, small.records.len() as u32);
    let stats = tier.stats();
    assert_eq!((stats.verify_failures, stats.failed), (1, 0));
}

#[test]
fn rail_that_went_down_does_not_use_up_the_repetition_of_a_checksum_failure() {
    let small = Small::new(Sizes::LARGE);
    // One READ for the whole record: broken off, then wrong, then right.
    let builder = patient().engine(EngineConfig {
        read_bytes: 4 << 20,
        ..EngineConfig::default()
    });
    let peer = small.peer(|n, _| match n {
        0 => Reply::CloseAfter(1000),
        1 => Reply::Corrupt,
        _ => Reply::Right,
    });
    let tier = small.tier(&peer, builder);
    let record = tier
        .fetch(BAD, slot(0), 0)
        .expect("the third answer is right");
    assert_right(&record, &small.records);
}

#[test]
fn unverified_fetch_says_so_on_every_record() {
    let small = Small::new(Sizes::TINY);
    let peer = small.peer_with_bad(Reply::Corrupt);
    let tier = small.tier(&peer, patient().verify(Verify::Off));
    let record = tier.fetch(BAD, slot(0), 0).expect("nobody looks");
    assert!(record.bytes() != small.records[&BAD]);
    assert!(!record.is_verified());
    assert_eq!(tier.stats().unverified, 1);
}

#[test]
fn error_frames_become_typed_errors_of_their_record() {
    let small = Small::new(Sizes::SMALL);
    for (code, may_pass) in [
        (ErrorCode::Busy, true),
        (ErrorCode::StoreUnreadable, true),
        (ErrorCode::Internal, true),
        (ErrorCode::NoSuchLayer, false),
        (ErrorCode::NoSuchExpert, false),
        (ErrorCode::BadRange, false),
    ] {
        let peer = small.peer_with_bad(Reply::Error(code));
        let tier = small.tier(&peer, patient());
        small.fetch_around_bad(&tier, |e| {
            let fits = match e {
                TierError::Unavailable { key, why } => may_pass && *key == BAD && is_ours(why),
                TierError::Refused { key, why } => !may_pass && *key == BAD && is_ours(why),
                _ => false,
            };
            fits && e.is_retryable() == may_pass
        });
        assert_eq!(tier.stats().rails[0].errors_by_cause.downs, 0);
    }
}

fn is_ours(why: &str) -> bool {
    why.contains("as the test wants it")
}

#[test]
fn error_frame_that_passes_is_gotten_over() {
    let small = Small::new(Sizes::SMALL);
    let peer = small.peer(|n, _| match n {
        3 => Reply::Error(ErrorCode::Busy),
        _ => Reply::Right,
    });
    let tier = small.tier(&peer, patient());
    assert_all_right(&tier, &small.records, small.records.len() as u32);
}

#[test]
fn catalogue_that_does_not_fit_the_content_id_is_refused_before_any_record() {
    let small = Small::new(Sizes::SMALL);
    let other = small.store.layer_blob(2, checksums()).expect("a layer");
    let lies: [OnLayer; 5] = [
        // A flipped byte in a record, and its matching checksum.
        Box::new(|blob| {
            let mut layer = decode_layer(&blob).expect("a sound blob");
            layer.checksums.as_mut().expect("checksums")[3] ^= 1;
            encode_layer(&layer, checksums())
        }),
        Box::new(|blob| blob[..blob.len() - 1].to_vec()),
        Box::new(|_| vec![0xff; 4096]),
        Box::new(|_| Vec::new()),
        Box::new(move |_| other.clone()),
    ];
    for (i, lie) in lies.into_iter().enumerate() {
        let mut script = Script::new(small.store.clone(), |_, _| Reply::Right);
        script.on_layer = lie;
        let peer = FakePeer::serving(script);
        let tier = small.tier(&peer, patient());
        let error = tier.fetch(BAD, slot(0), 0).expect_err("a lie");
        assert!(matches!(error, TierError::Catalogue { .. }), "{i}: {error}");
        assert_eq!(peer.reads(), 0);
        assert_eq!(tier.arena().stats().free, small.records.len() as u64);
    }
}

fn checksums() -> Sections {
    Sections {
        segments: false,
        checksums: true,
        rest: false,
    }
}

#[test]
fn greeting_and_description_of_different_content_are_refused() {
    let small = Small::new(Sizes::TINY);
    let mut script = Script::new(small.store.clone(), |_, _| Reply::Right);
    script.welcome.content_id = Some(5);
    let error = connect_error(&FakePeer::serving(script));
    assert!(matches!(error, TierError::Catalogue { .. }), "{error}");
}

#[test]
fn thousand_requests_that_end_early_cost_no_connection_and_no_slot() {
    let small = Small::new(Sizes::TINY);
    let peer = small.peer(|_, _| Reply::Right);
    let tier = small.tier(&peer, patient());
    let all = small.records.len() as u32;
    assert_all_right(&tier, &small.records, all);
    let keys: Vec<Key> = small.records.keys().copied().collect();
    for n in 0..1000u32 {
        let place = slot(n % all);
        wait_until("the slot's last READ came back", || {
            tier.arena().slot_state(place) != Some(expert_arena::SlotState::Quarantined)
        });
        let key = keys[n as usize % keys.len()];
        let time = match n % 2 {
            0 => Duration::ZERO,
            _ => SLACK,
        };
        let pending = tier
            .submit(&[(key, place)], Some(time))
            .expect("a free slot");
        if n % 2 == 1 {
            pending.cancel();
        }
        match pending.wait().expect("an end").0.remove(0) {
            Ok(record) => assert_right(&record, &small.records),
            Err(TierError::Cancelled { .. } | TierError::Deadline { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
    wait_until("no READ is out", || unsettled(tier.arena()) == 0);
    assert_all_right(&tier, &small.records, all);
    assert_eq!(tier.stats().rails[0].errors_by_cause.downs, 0);
    assert_eq!(peer.connections(), 2);
}

#[test]
fn tier_dropped_with_a_thousand_requests_on_a_dead_peer_ends_within_seconds() {
    let small = Small::new(Sizes::TINY);
    let keys: Vec<Key> = small.records.keys().copied().collect();
    let thousand: Vec<Key> = keys.iter().copied().cycle().take(998).collect();
    for dies in [false, true] {
        // Stands still after the catalogue, or is gone altogether.
        let peer = small.peer(|_, _| Reply::StallAfter(10));
        let arena = arena_for(&small.records, 1000);
        let memory = Arc::downgrade(&arena);
        let tier = patient().connect(&peer.addr(), arena).expect("a tier");
        let layers = [Key::new(0, 0), Key::new(1, 0)];
        let known = tier
            .submit(&batch(&layers), Some(SLACK))
            .expect("a catalogue");
        wait_until("READs of the first are out", || peer.reads() > 0);
        let peer = match dies {
            true => {
                drop(peer);
                None
            }
            false => Some(peer),
        };
        let mut pending = Vec::new();
        for (&key, place) in thousand.iter().zip(2..) {
            pending.push(
                tier.submit(&[(key, slot(place))], Some(SLACK))
                    .expect("a slot"),
            );
        }
        assert_eq!(tier.arena().stats().landing, 1000);
        let start = Instant::now();
        drop((known, pending));
        drop(tier);
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            start.elapsed()
        );
        wait_until("the arena is freed", || memory.strong_count() == 0);
        drop(peer);
    }
}

#[test]
fn request_beyond_the_budget_gets_back_pressure_and_is_admitted_later() {
    let small = Small::new(Sizes::SMALL);
    let bytes = small.records[&BAD].len() as u64;
    let peer = small.peer_with_bad(Reply::StallAfter(0));
    let builder = patient().engine(EngineConfig {
        inflight_max_bytes: bytes + 1,
        ..EngineConfig::default()
    });
    let tier = small.tier(&peer, builder);
    let good = Key::new(0, 0);
    let first = tier.fetch(good, slot(0), 0).expect("a record");
    assert_right(&first, &small.records);
    let stuck = tier
        .submit(&[(BAD, slot(1))], Some(SLACK))
        .expect("within the budget");
    let error = tier.fetch(good, slot(2), 0).expect_err("over the budget");
    assert!(error.is_backpressure() && error.is_retryable(), "{error}");
    let TierError::Backpressure {
        asked, inflight, ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((asked, inflight), (bytes, bytes));
    drop(stuck);
    wait_until("the budget is free again", || {
        let again = tier.submit(&[(good, slot(2))], Some(Duration::from_millis(1)));
        match again.map(|p| p.wait()) {
            Ok(Err(TierError::Backpressure { .. })) => false,
            Ok(Ok(_)) => true,
            Ok(Err(other)) | Err(other) => panic!("{other}"),
        }
    });
}

#[test]
fn stalled_answer_ends_by_its_deadline_whatever_the_stall_time() {
    let small = Small::new(Sizes::SMALL);
    let peer = small.peer_with_bad(Reply::StallAfter(1000));
    let tier = small.tier(&peer, patient().stall(Duration::from_secs(600)));
    // Knows the catalogue before time is short.
    assert!(tier.fetch(Key::new(1, 0), slot(1), 0).is_ok());
    let start = Instant::now();
    let time = Duration::from_millis(300);
    let pending = tier.submit(&[(BAD, slot(0))], Some(time)).expect("a slot");
    let error = pending
        .wait()
        .expect("an end")
        .0
        .remove(0)
        .expect_err("no answer");
    let TierError::Deadline { waited, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*waited, time);
    assert!(start.elapsed() >= time && start.elapsed() < SLACK);
}

#[test]
fn fake_peer_serves_rightly_where_it_is_told_nothing_else() {
    let small = Small::new(Sizes::SMALL);
    let peer = small.peer(|_, _| Reply::Right);
    let tier = small.tier(&peer, patient());
    assert_all_right(&tier, &small.records, 4);
    assert!(peer.reports().is_empty());
}
