//! Two thousand hostile connections while a good client fetches: what it keeps, and what is left of the peer.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use atlas_expert_tests::net::model::{Model, Records, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::rig::{arena_for, assert_all_right, batch, patient};
use atlas_expert_tests::net::{Random, SLACK, wait_until};
use expert_store::Key;
use expert_tier::{EngineConfig, ExpertTier, RdmaTier};
use expert_wire::client::{Handshake, Outcome, Protocol};
use expert_wire::frame::{FrameKind, push_frame};
use expert_wire::message::{ReadRequest, Role};
use expert_wire::v1;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

const WAVES: usize = 10;
/// Of each wave: 200.
const SILENT: usize = 70;
const GARBAGE: usize = 60;
const SLOW: usize = 50;
const FLOODS: usize = 20;
/// How long the good client is watched with and without each wave.
const WATCHED: Duration = Duration::from_millis(700);
/// What a connection may take of the peer's memory at most, as `Limits` says, with room for its answers' copies.
const CONNECTION_MAX_BYTES: u64 = 512 << 10;
/// The peer's default.
const CONNECTIONS_MAX: u64 = 256;

/// A connection from an address that the good client does not have.
fn connect(addr: SocketAddr) -> Option<TcpStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket: OwnedFd =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    let own = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 66), 0);
    rustix::net::bind(&socket, &own).ok()?;
    rustix::net::connect(&socket, &addr).ok()?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(SLACK)).ok()?;
    stream.set_write_timeout(Some(SLACK)).ok()?;
    Some(stream)
}

/// Valid requests of one client, as many as fit, until told to stop; all answers are read.
fn flood(addr: SocketAddr, key: Key, bytes: u32, stop: &AtomicBool) -> Option<u64> {
    let mut stream = connect(addr)?;
    let mut handshake = Handshake::new(666, Role::Stream, Protocol::V2);
    let welcome = loop {
        stream.write_all(&handshake.take_transmit()).ok()?;
        let mut bytes = vec![0; handshake.wants()];
        stream.read_exact(&mut bytes).ok()?;
        match handshake.handle(&bytes).ok()? {
            Some(Outcome::V2(welcome)) => break welcome,
            Some(Outcome::V1(_)) => return None,
            None => {}
        }
    };
    let request = ReadRequest {
        key,
        epoch: welcome.epoch,
        bytes,
        offset: 0,
    };
    let mut requests = Vec::new();
    for id in 1..=64 {
        push_frame(&mut requests, FrameKind::Read, id, &request.encode());
    }
    let mut scrap = vec![0; 256 << 10];
    let mut total = 0;
    let answers = 64 * (u64::from(bytes) + 16);
    let mut due = 0;
    while !stop.load(Ordering::Relaxed) {
        if due < answers / 2 {
            stream.write_all(&requests).ok()?;
            due += answers;
        }
        let n = stream.read(&mut scrap).ok().filter(|n| *n > 0)? as u64;
        total += n;
        due = due.saturating_sub(n);
    }
    Some(total)
}

struct Wave {
    connected: AtomicU64,
    flooded: AtomicU64,
}

/// Two hundred connections until `stop`.
fn wave(addr: SocketAddr, seed: u64, key: Key, bytes: u32, stop: &AtomicBool, wave: &Wave) {
    thread::scope(|scope| {
        for _ in 0..FLOODS {
            scope.spawn(|| {
                wave.connected.fetch_add(1, Ordering::Relaxed);
                if let Some(total) = flood(addr, key, bytes, stop) {
                    wave.flooded.fetch_add(total, Ordering::Relaxed);
                }
            });
        }
        let mut random = Random(seed);
        let mut held = Vec::new();
        let mut slow = Vec::new();
        for i in 0..SILENT + GARBAGE + SLOW {
            let Some(mut stream) = connect(addr) else {
                continue;
            };
            wave.connected.fetch_add(1, Ordering::Relaxed);
            // Those that the peer hangs up on are hostile connections, too.
            match i % (SILENT + GARBAGE + SLOW) {
                i if i < SILENT => {
                    if i % 2 == 0 {
                        let _ = stream.shutdown(Shutdown::Write);
                    }
                    held.push(stream);
                }
                i if i < SILENT + GARBAGE => {
                    let count = 1 + random.below(4096);
                    let _ = stream.write_all(&random.bytes(count));
                    held.push(stream);
                }
                _ => slow.push(stream),
            }
        }
        let mut hello = vec![v1::MODE_V2];
        push_frame(&mut hello, FrameKind::ClientHello, 0, &[0; 32]);
        for byte in hello.iter().cycle() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            for stream in &mut slow {
                let _ = stream.write_all(&[*byte]);
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
}

/// Fetches all records again and again; bytes per second.
fn rate(tier: &dyn ExpertTier, keys: &[Key], records: &Records) -> f64 {
    let start = Instant::now();
    let mut bytes = 0;
    while start.elapsed() < WATCHED {
        for record in tier.fetch_many(&batch(keys), 0).expect("a batch") {
            let record = record.expect("a record");
            assert_eq!(record.bytes().len(), records[&record.key()].len());
            bytes += record.bytes().len();
        }
    }
    bytes as f64 / start.elapsed().as_secs_f64()
}

fn descriptors(pid: u32) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process");
    fds.count()
}

/// A line of `/proc/PID/status`, in bytes.
fn memory(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|l| l.strip_prefix(name));
    let kib = line.and_then(|l| l.trim_start_matches(':').split_whitespace().next());
    kib.and_then(|n| n.parse::<u64>().ok()).expect("a number") << 10
}

#[test]
fn two_thousand_hostile_connections_leave_a_good_client_its_share_and_the_peer_whole() {
    expert_peer::raise_open_files_limit();
    let model = Model::bf16(Sizes::LARGE);
    let records = model.records();
    let flags = ["--handshake-timeout", "1", "--rdma", "off"];
    let peer = PeerProcess::start(&model.checkpoint, &flags);
    let keys: Vec<Key> = records.keys().copied().collect();
    let bytes = u32::try_from(records[&keys[0]].len())
        .expect("few")
        .min(1 << 20);
    let idle = descriptors(peer.pid());
    let tier = connect_tier(&peer, &records);
    assert_all_right(&tier, &records, keys.len() as u32);
    let resident = memory(peer.pid(), "VmRSS");

    let counts = Wave {
        connected: AtomicU64::new(0),
        flooded: AtomicU64::new(0),
    };
    let mut ratios = Vec::new();
    for n in 0..WAVES {
        let undisturbed = rate(&tier, &keys, &records);
        let stop = AtomicBool::new(false);
        let disturbed = thread::scope(|scope| {
            let hostile = scope.spawn(|| {
                wave(peer.addr, n as u64, keys[0], bytes, &stop, &counts);
            });
            // Until it is in full swing.
            thread::sleep(Duration::from_millis(200));
            let disturbed = rate(&tier, &keys, &records);
            stop.store(true, Ordering::Relaxed);
            hostile.join().expect("a wave");
            disturbed
        });
        ratios.push(disturbed / undisturbed);
    }
    ratios.sort_by(f64::total_cmp);
    let median = ratios[WAVES / 2];
    let most = memory(peer.pid(), "VmHWM");
    println!(
        "{} hostile connections: the good client keeps {:.2} of its rate (median; {:.2} to {:.2}); {} MB of answers to floods; peer at {} MB, {} MB more than before",
        counts.connected.load(Ordering::Relaxed),
        median,
        ratios[0],
        ratios[WAVES - 1],
        counts.flooded.load(Ordering::Relaxed) / 1_000_000,
        most / 1_000_000,
        most.saturating_sub(resident) / 1_000_000,
    );
    assert_eq!(
        counts.connected.load(Ordering::Relaxed) as usize,
        WAVES * (SILENT + GARBAGE + SLOW + FLOODS)
    );
    assert!(
        counts.flooded.load(Ordering::Relaxed) > 0,
        "the floods got in"
    );
    assert!(median >= 0.25, "{ratios:?}");
    assert!(most - resident.min(most) <= CONNECTIONS_MAX * CONNECTION_MAX_BYTES);
    assert_all_right(&tier, &records, keys.len() as u32);
    drop(tier);
    wait_until("every descriptor is given back", || {
        descriptors(peer.pid()) == idle
    });
    assert_all_right(&connect_tier(&peer, &records), &records, keys.len() as u32);
}

fn connect_tier(peer: &PeerProcess, records: &Records) -> RdmaTier {
    let arena = arena_for(records, records.len() as u32);
    let builder = patient().streams(2).engine(EngineConfig::default());
    let tier = builder.connect(&peer.addr.to_string(), arena);
    tier.expect("a tier")
}
