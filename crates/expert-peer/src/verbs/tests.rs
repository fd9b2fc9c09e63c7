//! The peer's rails over fake devices: what clients are answered, and the order of ends.

#[path = "../../tests/common/mod.rs"]
mod common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use atlas_rdma::attributes::Mtu;
use expert_wire::frame::FrameKind;
use expert_wire::message::{ChecksumReport, ErrorCode, Welcome};
use expert_wire::v1_verbs::{V1Endpoint, V1ServerRails, encode_client_rails};
use expert_wire::verbs::{
    LINK_ETHERNET, LINK_INFINIBAND, OpenRail, QpEndpoint, RailInfo, RailOpened, decode_rails,
};
use expert_wire::{Key, v1};

use self::common::*;
use super::fake::{FakeRails, Knobs};
use super::{Verbs, VerbsOptions};
use crate::extents::{Extent, extents};
use crate::{Peer, PeerError};

const GRACE: Duration = Duration::from_millis(150);

fn options() -> VerbsOptions {
    VerbsOptions {
        required: true,
        reload_grace: GRACE,
        qps_per_rail_max: 4,
        // What a test registers is nothing.
        reserve_bytes: Some(0),
        ..VerbsOptions::default()
    }
}

fn try_start(
    source: &Arc<TempSource>,
    knobs: &Arc<Knobs>,
    options: VerbsOptions,
) -> Result<Peer, PeerError> {
    let mut config = config(source);
    config.verbs = Some(options);
    config.restat_interval = Duration::from_secs(3600);
    let knobs = knobs.clone();
    Peer::start_with(config, |options| {
        let fabric = Box::new(FakeRails { knobs, rails: 2 });
        Verbs::new(fabric, options.clone()).map(Some)
    })
}

fn start(source: &Arc<TempSource>) -> (Peer, Arc<Knobs>) {
    let knobs = Arc::default();
    let peer = try_start(source, &knobs, options()).unwrap();
    assert_eq!(knobs.take(), ["publish 1"]);
    (peer, knobs)
}

fn open(rail: u8, epoch: u32, qps: u32) -> OpenRail {
    OpenRail {
        rail,
        mtu_code: Mtu::B1024.code() as u8,
        reads_max: 16,
        link_layer: LINK_ETHERNET,
        gid_type: 2,
        lid: 0,
        epoch,
        service_level: 3,
        traffic_class: 106,
        gid: [9; 16],
        qps: (0..qps)
            .map(|i| QpEndpoint {
                qpn: 1000 + i,
                psn: 77 + i,
            })
            .collect(),
    }
}

impl Client {
    fn rails(&mut self) -> Vec<RailInfo> {
        self.send(FrameKind::Rails, 5, &[]);
        let (header, payload) = self.frame().unwrap();
        assert_eq!((header.kind, header.id), (FrameKind::RailsReply, 5));
        decode_rails(&payload).unwrap()
    }

    fn try_open(&mut self, request: &OpenRail) -> Result<RailOpened, ErrorCode> {
        self.send(FrameKind::OpenRail, 6, &request.encode());
        let (header, payload) = self.frame().unwrap();
        assert_eq!(header.id, 6);
        match header.kind {
            FrameKind::RailOpened => Ok(RailOpened::decode(&payload).unwrap()),
            FrameKind::Error => Err(expert_wire::message::ErrorFrame::decode(&payload)
                .unwrap()
                .code),
            other => panic!("{other:?}"),
        }
    }

    /// Chooses v1 verbs with so many rails.
    fn v1_verbs(address: std::net::SocketAddr, rails: u8) -> Self {
        let mut client = Self::connect(address);
        client.stream.write_all(&[v1::MODE_VERBS, rails]).unwrap();
        client
    }

    /// Reads the server's rails, sends this side's and waits for the last byte.
    fn v1_exchange(&mut self, rails: u8) -> Vec<expert_wire::v1_verbs::V1Rail> {
        let mut reader = V1ServerRails::default();
        while reader.wants() > 0 {
            let mut bytes = vec![0; reader.wants()];
            self.stream.read_exact(&mut bytes).unwrap();
            reader.handle(&bytes, rails, LAYERS).unwrap();
        }
        let own: Vec<V1Endpoint> = (0..u32::from(rails))
            .map(|i| V1Endpoint {
                qpn: 2000 + i,
                psn: i,
                gid: [8; 16],
            })
            .collect();
        self.stream.write_all(&encode_client_rails(&own)).unwrap();
        let mut ready = [1];
        self.stream.read_exact(&mut ready).unwrap();
        assert_eq!(ready, [0]);
        reader.finish()
    }
}

fn qps(knobs: &Knobs) -> u32 {
    knobs.qps.load(Ordering::SeqCst)
}

#[test]
fn records_with_small_gaps_are_one_extent_and_a_v1_file_is_one_as_a_whole() {
    let source = TempSource::contiguous(1, 4096);
    let all = Extent {
        file: 0,
        offset: 0,
        bytes: 4096 * u64::from(LAYERS * EXPERTS),
    };
    assert_eq!(extents(&source, 0), [all]);

    let source = TempSource::pieced(1);
    let joined = extents(&source, 1 << 20);
    let ends: Vec<_> = joined.iter().map(|e| (e.file, e.offset)).collect();
    assert_eq!(ends, [(0, 17), (1, 5)]);
    for extent in &joined {
        let len = source.contents[extent.file as usize].len() as u64;
        // Three bytes follow the last piece.
        assert_eq!(extent.offset + extent.bytes, len - 3);
    }
    // Gaps are three bytes: nothing is joined below that, and no byte is in two extents.
    let apart = extents(&source, 2);
    assert_eq!(apart.len(), 5 * (LAYERS * EXPERTS) as usize);
    assert!(
        apart
            .windows(2)
            .all(|w| w[0].file < w[1].file || w[0].offset + w[0].bytes + 3 <= w[1].offset)
    );
    assert_eq!(extents(&source, 3), joined);
}

#[test]
fn peer_without_verbs_lists_no_rails_and_refuses_to_open_one() {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let peer = common::start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let v2 = client.greeting.v2.clone().unwrap();
    assert!(!v2.capabilities.contains(&"verbs".to_owned()));
    assert_eq!(client.rails(), []);
    assert_eq!(
        client.try_open(&open(0, welcome.epoch, 1)).unwrap_err(),
        ErrorCode::NoSuchRail
    );
    let key = Key::new(0, 0);
    let bytes = client.fetch(request(key, welcome.epoch, 0, 4096)).unwrap();
    assert_eq!(bytes, source.image(key));
    Client::v1_verbs(peer.local_addr(), 1).expect_end();
    assert_eq!(peer.stats().rails, []);
}

#[test]
fn opened_rail_has_the_smaller_limits_of_both_sides_and_all_regions() {
    let source = Arc::new(TempSource::pieced(1));
    let (peer, knobs) = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let v2 = client.greeting.v2.clone().unwrap();
    assert!(v2.capabilities.contains(&"verbs".to_owned()));
    let rails = client.rails();
    assert_eq!(rails.len(), 2);
    assert_eq!((rails[1].name.as_str(), rails[1].qps_max), ("fake1", 4));

    let opened = client.try_open(&open(1, welcome.epoch, 3)).unwrap();
    assert_eq!(opened.epoch, welcome.epoch);
    assert_eq!(opened.mtu_code, 3);
    assert_eq!(opened.reads_max, 16);
    assert_eq!(opened.gid, rails[1].gid);
    assert_eq!(opened.qps.len(), 3);
    let files: Vec<u32> = opened.regions.iter().map(|r| r.file).collect();
    assert_eq!(files, [0, 1]);
    assert!(opened.regions.iter().all(|r| r.rkey == 101));
    let paths = knobs.paths.lock().unwrap();
    assert_eq!(paths.len(), 3);
    for (i, path) in (0..).zip(paths.iter()) {
        assert_eq!((path.remote.qpn, path.remote.psn), (1000 + i, 77 + i));
        assert_eq!(path.remote.gid.0, [9; 16]);
        assert_eq!((path.mtu, path.reads_in), (Mtu::B1024, 16));
        assert_eq!((path.service_level, path.traffic_class), (3, 106));
        assert_eq!(path.gid_index, 3);
    }
    let stats = peer.stats();
    assert_eq!((stats.rails[1].qps_open, stats.rails[1].opens), (3, 1));
    assert_eq!((stats.rails[0].qps_open, stats.rails[0].regions), (0, 2));
    assert!(stats.rails[0].registered_bytes > 0);
    assert_eq!(stats.mapping.as_deref(), Some("nothing is mapped"));
}

#[test]
fn refused_rail_is_a_typed_error_leaves_nothing_and_the_connection_stays() {
    let source = Arc::new(TempSource::pieced(1));
    let (peer, knobs) = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let epoch = welcome.epoch;
    let mut infiniband = open(0, epoch, 1);
    infiniband.link_layer = LINK_INFINIBAND;
    for (request, code) in [
        (open(2, epoch, 1), ErrorCode::NoSuchRail),
        (open(0, epoch + 1, 1), ErrorCode::StoreChanged),
        (open(0, epoch, 5), ErrorCode::BadFrame),
        (infiniband, ErrorCode::RailUnavailable),
    ] {
        assert_eq!(client.try_open(&request).unwrap_err(), code);
    }
    assert_eq!(knobs.take(), [""; 0]);
    // The third of four queue pairs does not connect: all that exist go again.
    knobs.failing_qpn.store(3, Ordering::SeqCst);
    let code = client.try_open(&open(0, epoch, 4)).unwrap_err();
    assert_eq!(code, ErrorCode::RailUnavailable);
    assert!(code.is_retryable());
    assert_eq!(qps(&knobs), 0);
    knobs.is_down.store(true, Ordering::SeqCst);
    assert_eq!(client.rails().len(), 2, "indexes stay while a link is away");
    let code = client.try_open(&open(0, epoch, 1)).unwrap_err();
    assert_eq!(code, ErrorCode::RailUnavailable);
    knobs.is_down.store(false, Ordering::SeqCst);

    client.try_open(&open(0, epoch, 4)).unwrap();
    assert_eq!(qps(&knobs), 4);
    let code = client.try_open(&open(1, epoch, 1)).unwrap_err();
    assert_eq!(code, ErrorCode::BadFrame, "one rail per connection");
    assert_eq!(qps(&knobs), 4);
    let key = Key::new(1, 2);
    let bytes = source.image_bytes(key).min(1000);
    assert!(client.fetch(request(key, epoch, 0, bytes)).is_ok());
}

#[test]
fn queue_pairs_die_with_their_connection_and_the_memory_stays() {
    let source = Arc::new(TempSource::pieced(1));
    let (peer, knobs) = start(&source);
    for _ in 0..3 {
        let (mut client, welcome) = Client::v2(peer.local_addr());
        client.try_open(&open(0, welcome.epoch, 2)).unwrap();
        assert_eq!(qps(&knobs), 2);
        drop(client);
        until("queue pairs are destroyed", || qps(&knobs) == 0);
    }
    // Garbage ends a connection as well.
    let (mut client, welcome) = Client::v2(peer.local_addr());
    client.try_open(&open(0, welcome.epoch, 2)).unwrap();
    client.stream.write_all(&[0xff; 64]).unwrap();
    client.expect_end();
    until("queue pairs are destroyed", || qps(&knobs) == 0);
    assert!(knobs.take().iter().all(|e| e.starts_with("destroy")));
    assert_eq!(peer.stats().rails[0].opens, 4);
    assert_eq!(peer.stats().rails[0].qps_open, 0);
}

#[test]
fn file_that_changed_is_deregistered_at_once_and_missing_for_the_next_client() {
    let source = Arc::new(TempSource::pieced(1));
    let (peer, knobs) = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    std::fs::write(&source.paths[1], b"other").unwrap();
    let report = ChecksumReport {
        key: Key::new(0, 0),
        chunk: 0,
        epoch: welcome.epoch,
    };
    client.send(FrameKind::ChecksumReport, 0, &report.encode());
    until("the file is revoked", || {
        knobs.log.lock().unwrap().contains(&"revoke 1 of 1".into())
    });
    let opened = client.try_open(&open(0, welcome.epoch, 1)).unwrap();
    let files: Vec<u32> = opened.regions.iter().map(|r| r.file).collect();
    assert_eq!(files, [0]);
    assert_eq!(peer.stats().rails[0].regions, 1);
}

#[test]
fn reload_registers_the_new_store_before_clients_are_told_and_deregisters_the_old_one_before_its_queue_pairs()
 {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let (peer, knobs) = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    client.try_open(&open(0, welcome.epoch, 2)).unwrap();
    let mut v1 = Client::v1_verbs(peer.local_addr(), 1);
    v1.v1_exchange(1);
    assert_eq!(qps(&knobs), 3);

    let next = Arc::new(TempSource::contiguous(2, 4096));
    let watcher = std::thread::spawn(move || {
        let (header, payload) = client.frame().unwrap();
        assert_eq!(header.kind, FrameKind::StoreChanged);
        (Welcome::decode(&payload).unwrap(), Instant::now(), client)
    });
    let begun = Instant::now();
    let epoch = peer.reload(next).unwrap();
    assert!(begun.elapsed() >= GRACE, "clients have time to finish");
    let (told, at, mut client) = watcher.join().unwrap();
    assert_eq!(told.epoch, epoch);
    assert!(at < begun + GRACE, "they are told before it ends");
    v1.expect_end();
    let log = knobs.take();
    let mut ends = log[2..5].to_vec();
    ends.sort();
    assert_eq!(log[..2], ["publish 2", "deregister 1"], "{log:?}");
    assert_eq!(ends, ["destroy 1 on 0", "destroy 2 on 0", "destroy 3 on 0"]);
    assert_eq!(log[5..], ["unmap 1"]);

    // Not on this connection again, but on a new one.
    let code = client.try_open(&open(0, epoch, 1)).unwrap_err();
    assert_eq!(code, ErrorCode::BadFrame);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let opened = client.try_open(&open(0, welcome.epoch, 1)).unwrap();
    assert_eq!((opened.epoch, opened.regions[0].rkey), (epoch, 200));
    let mut v1 = Client::v1_verbs(peer.local_addr(), 2);
    assert_eq!(v1.v1_exchange(2)[1].layers[0].rkey, 201);
}

#[test]
fn store_that_cannot_be_registered_leaves_the_old_one_served() {
    let source = Arc::new(TempSource::pieced(1));
    let (peer, knobs) = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    client.try_open(&open(0, welcome.epoch, 1)).unwrap();
    knobs.failing_publications.store(1, Ordering::SeqCst);
    let error = peer.reload(Arc::new(TempSource::pieced(2))).unwrap_err();
    assert!(matches!(error, PeerError::Rdma(_)), "{error}");
    assert_eq!(peer.epoch(), welcome.epoch);
    assert_eq!(knobs.take(), ["publish fails"]);
    assert_eq!(qps(&knobs), 1);
    let (mut client, _) = Client::v2(peer.local_addr());
    client.try_open(&open(0, welcome.epoch, 1)).unwrap();
}

#[test]
fn store_without_room_beside_the_old_one_takes_its_place_or_gives_it_back() {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let bytes = 4096 * u64::from(LAYERS * EXPERTS);
    let mut options = options();
    options.max_blade_bytes = Some(bytes + 4096);
    let knobs = Arc::default();
    let peer = try_start(&source, &knobs, options).unwrap();
    let (mut client, welcome) = Client::v2(peer.local_addr());
    client.try_open(&open(0, welcome.epoch, 1)).unwrap();
    knobs.take();
    peer.reload(Arc::new(TempSource::contiguous(2, 4096)))
        .unwrap();
    let first = ["deregister 1", "destroy 1 on 0", "unmap 1", "publish 2"];
    assert_eq!(knobs.take(), first);

    knobs.failing_publications.store(1, Ordering::SeqCst);
    peer.reload(Arc::new(TempSource::contiguous(3, 4096)))
        .unwrap_err();
    let back = ["deregister 2", "unmap 2", "publish fails", "publish 3"];
    assert_eq!(knobs.take(), back);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    assert_eq!(
        client.try_open(&open(0, welcome.epoch, 1)).unwrap().epoch,
        2
    );
    knobs.take();

    // One that never fits changes nothing.
    let error = peer
        .reload(Arc::new(TempSource::contiguous(4, 8192)))
        .unwrap_err();
    assert!(matches!(error, PeerError::BladeTooLarge { .. }), "{error}");
    assert_eq!(knobs.take(), [""; 0]);
    assert_eq!(peer.epoch(), 2);
}

#[test]
fn shutdown_deregisters_before_it_destroys_queue_pairs_and_unmaps_last() {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let (peer, knobs) = start(&source);
    let (mut client, welcome) = Client::v2(peer.local_addr());
    client.try_open(&open(1, welcome.epoch, 1)).unwrap();
    let mut v1 = Client::v1_verbs(peer.local_addr(), 1);
    v1.v1_exchange(1);
    peer.shutdown(Duration::from_secs(5)).unwrap();
    let (_, error) = client.error();
    assert_eq!(error.code, ErrorCode::ShuttingDown);
    v1.expect_end();
    let log = knobs.take();
    assert_eq!(log[0], "deregister 1", "{log:?}");
    let mut ends = log[1..3].to_vec();
    ends.sort();
    assert_eq!(ends, ["destroy 1 on 1", "destroy 2 on 0"]);
    assert_eq!(log[3..], ["unmap 1"]);
}

#[test]
fn v1_client_gets_an_address_for_each_layer_and_its_queue_pairs_the_frozen_constants() {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let (peer, knobs) = start(&source);
    // A second client shares the registration, and a third comes after they went.
    for _ in 0..2 {
        let mut clients: Vec<Client> = (0..2)
            .map(|_| {
                let mut client = Client::v1_verbs(peer.local_addr(), 2);
                let rails = client.v1_exchange(2);
                for (rail, key) in rails.iter().zip([100, 101]) {
                    assert_eq!(rail.layers.len(), LAYERS as usize);
                    for (layer, region) in (0..).zip(&rail.layers) {
                        let at = layer * u64::from(EXPERTS) * 4096;
                        assert_eq!((region.base, region.rkey), ((1 << 32) + at, key));
                    }
                }
                client
            })
            .collect();
        // Silence is normal, and longer than any time-out of the handshake.
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(qps(&knobs), 4);
        let _ = clients
            .pop()
            .unwrap()
            .stream
            .shutdown(std::net::Shutdown::Both);
        until("its queue pairs go", || qps(&knobs) == 2);
        drop(clients);
        until("all queue pairs go", || qps(&knobs) == 0);
    }
    let paths = knobs.paths.lock().unwrap();
    for path in paths.iter() {
        assert_eq!((path.port, path.pkey_index), (1, 0));
        assert_eq!(path.mtu, Mtu::B4096, "its own");
        assert_eq!((path.reads_in, path.reads_out), (16, 16));
        assert_eq!((path.retry_count, path.rnr_retry), (7, 7));
        assert_eq!(path.min_rnr_timer, Duration::from_micros(640), "code 12");
        assert_eq!(path.timeout.as_micros(), 67_108, "code 14");
        assert_eq!(path.hop_limit, 64);
        assert!(path.has_grh());
    }
    assert!(knobs.take().iter().all(|e| e.starts_with("destroy")));
}

#[test]
fn v1_client_that_asks_for_more_rails_or_for_layers_in_pieces_is_hung_up() {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let (peer, knobs) = start(&source);
    for rails in [0, 3, 9] {
        Client::v1_verbs(peer.local_addr(), rails).expect_end();
    }
    assert_eq!(qps(&knobs), 0);

    // A layer has four records; here a region ends within one.
    let knobs: Arc<Knobs> = Arc::default();
    knobs.region_bytes_max.store(3 * 4096, Ordering::SeqCst);
    let peer = try_start(&source, &knobs, options()).unwrap();
    Client::v1_verbs(peer.local_addr(), 1).expect_end();
    // Such a store has no rails for v1 clients: asking for them is not its protocol.
    until("it is counted", || {
        peer.stats().refusals == [(crate::Refusal::Protocol, 1)]
    });
    let (mut client, welcome) = Client::v2(peer.local_addr());
    assert_eq!(
        client
            .try_open(&open(0, welcome.epoch, 1))
            .unwrap()
            .regions
            .len(),
        4
    );
}

#[test]
fn store_above_the_limit_or_without_memory_is_refused_where_verbs_are_required() {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let bytes = 4096 * u64::from(LAYERS * EXPERTS);
    let knobs = Arc::default();
    let mut limited = options();
    limited.max_blade_bytes = Some(bytes - 1);
    let error = try_start(&source, &knobs, limited.clone()).unwrap_err();
    let text = error.to_string();
    for value in [
        bytes.to_string(),
        (bytes - 1).to_string(),
        "--max-blade-gb".into(),
    ] {
        assert!(text.contains(&value), "{value} is missing in: {text}");
    }
    let mut greedy = options();
    greedy.reserve_bytes = Some(u64::MAX);
    let refused = try_start(&source, &knobs, greedy);
    // A temporary folder in memory needs no more of it.
    assert!(
        matches!(refused, Ok(_) | Err(PeerError::MemoryShort { .. })),
        "{refused:?}"
    );
    knobs.take();

    limited.required = false;
    let peer = try_start(&source, &knobs, limited).unwrap();
    let (mut client, _) = Client::v2(peer.local_addr());
    assert_eq!(client.rails(), []);
    assert_eq!(knobs.take(), [""; 0]);

    let mut auto = options();
    auto.required = false;
    knobs.failing_publications.store(1, Ordering::SeqCst);
    let peer = try_start(&source, &knobs, auto).unwrap();
    assert_eq!(peer.stats().rails, []);
    knobs.failing_publications.store(1, Ordering::SeqCst);
    try_start(&source, &knobs, options()).unwrap_err();
}

#[test]
fn queue_pairs_and_read_depth_of_one_client_are_bounded_over_its_connections() {
    let source = Arc::new(TempSource::pieced(1));
    let knobs = Arc::default();
    let limited = VerbsOptions {
        qps_per_client_max: 6,
        reads_per_qp_max: 5,
        ..options()
    };
    let peer = try_start(&source, &knobs, limited).unwrap();
    let (mut first, welcome) = Client::v2(peer.local_addr());
    let epoch = welcome.epoch;
    assert!(first.rails().iter().all(|rail| rail.reads_max == 5));
    let opened = first.try_open(&open(0, epoch, 4)).unwrap();
    assert_eq!(opened.reads_max, 5);
    let depth = |path: &atlas_rdma::Path| path.reads_in == 5;
    assert!(knobs.paths.lock().unwrap().iter().all(depth));
    let (mut second, _) = Client::v2(peer.local_addr());
    let code = second.try_open(&open(1, epoch, 3)).unwrap_err();
    assert_eq!(code, ErrorCode::RailUnavailable);
    assert_eq!((qps(&knobs), peer.stats().qps_refused), (4, 1));
    second.try_open(&open(1, epoch, 2)).unwrap();
    drop(first);
    until("the first client's queue pairs are gone", || {
        qps(&knobs) == 2
    });
    let (mut third, _) = Client::v2(peer.local_addr());
    until("they may be had by another", || {
        third.try_open(&open(0, epoch, 4)).is_ok()
    });
    assert_eq!(qps(&knobs), 6);
}

#[test]
fn pages_tell_a_start_a_reload_and_the_end() {
    let pages = crate::StatusPages::new();
    let status = |path: &str| pages.get(path).map(|reply| reply.status);
    assert_eq!(status("/readyz"), Some(503));
    assert_eq!(status("/healthz"), Some(200));
    assert_eq!(status("/other"), None);
    let (peer, _knobs) = start(&Arc::new(TempSource::contiguous(1, 4096)));
    pages.watch(&peer);
    assert_eq!(status("/readyz"), Some(200));
    assert_eq!(status("/healthz"), Some(200));
    let reload = peer.shared.lock_reload();
    let reply = pages.get("/readyz").unwrap();
    assert_eq!(reply.status, 503);
    assert!(reply.body.starts_with("reloading"), "{}", reply.body);
    assert_eq!(status("/healthz"), Some(200));
    drop(reload);
    assert_eq!(status("/readyz"), Some(200));
    let registered = "atlas_expert_peer_rail_registered_bytes{rail=\"fake0\"} ";
    let body = pages.get("/metrics").unwrap().body;
    assert!(body.contains("atlas_expert_peer_ready 1\n"), "{body}");
    assert!(body.contains(registered), "{body}");
    peer.shared.stopping.store(true, Ordering::SeqCst);
    let reply = pages.get("/readyz").unwrap();
    assert!(reply.status == 503 && reply.body.starts_with("draining"));
    drop(peer);
    // A thread that looks at the peer just now keeps it for as long.
    let limit = Instant::now() + Duration::from_secs(10);
    while status("/healthz") != Some(503) && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status("/readyz"), Some(503));
    assert_eq!(status("/healthz"), Some(503));
    let body = pages.get("/metrics").unwrap().body;
    assert!(body.contains("atlas_expert_peer_ready 0\n"), "{body}");
}

#[test]
fn failed_reload_is_counted_and_the_page_shows_it() {
    let source = Arc::new(TempSource::contiguous(1, 4096));
    let knobs: Arc<Knobs> = Arc::default();
    let limited = VerbsOptions {
        max_blade_bytes: Some(source.contents.iter().map(|c| c.len() as u64).sum()),
        ..options()
    };
    let peer = try_start(&source, &knobs, limited).unwrap();
    peer.reload(Arc::new(TempSource::contiguous(4, 8192)))
        .unwrap_err();
    peer.note_failed_reload();
    let stats = peer.stats();
    assert_eq!(
        (stats.reloads, stats.reloads_failed, stats.epoch),
        (0, 2, 1)
    );
    let pages = crate::StatusPages::new();
    pages.watch(&peer);
    let page = |path| pages.get(path).unwrap();
    let failed = "atlas_expert_peer_last_reload_ok 0\n";
    assert!(page("/metrics").body.contains(failed));
    let ready = page("/readyz");
    assert!(ready.status == 200 && ready.body.contains("reload failed"));
    peer.reload(source).unwrap();
    assert!(!page("/metrics").body.contains(failed));
    assert_eq!(page("/readyz").body, "ready\n");
}
