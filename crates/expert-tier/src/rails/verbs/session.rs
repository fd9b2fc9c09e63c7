//! The handshakes of a verbs rail, v2 and v1, up to queue pairs that can READ.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use atlas_rdma::attributes::{Gid, GidType, LinkLayer, Mtu};
use atlas_rdma::choose::{Endpoint, RailChoice, pair};
use atlas_rdma::{Path, RdmaError, ReadQueue, RemoteEndpoint, RemoteKey};
use expert_wire::client::{Outcome, Protocol};
use expert_wire::frame::FrameKind;
use expert_wire::message::Role;
use expert_wire::v1::{self, Manifest};
use expert_wire::v1_verbs::{
    self, READS_MAX as V1_READS_MAX, V1Endpoint, V1Rail, V1Region, V1ServerRails,
};
use expert_wire::verbs::{
    GID_INFINIBAND, GID_ROCE_V1, GID_ROCE_V2, LINK_INFINIBAND, OpenRail, QpEndpoint, RailInfo,
    RailOpened, decode_rails,
};

use xxhash_rust::xxh3::xxh3_64;

use super::attempt::Token;
use super::local::link_code;
use super::plan::RegionTable;
use super::{OwnRail, VerbsConfig};
use crate::control::{AskError, Connection, Control};
use crate::error::{Step, TierError};
use crate::rail::ContentTag;
use crate::rails::socket::{self, Clock};
use crate::rails::tcp::v1_tag;
use crate::sync::lock;

/// How long the first READ on a new pair of ports may take: a path that carries packets answers in
/// far less, and several retries of a lost one fit.
const PROBE_TIME: Duration = Duration::from_secs(1);

/// Fewest work requests of a queue that is worth having.
const WORK_REQUESTS_MIN: u32 = 64;

/// What the peer's memory is addressed by.
pub(super) enum Memory {
    /// v2: where the store's files lie.
    Regions(RegionTable),
    /// v1: one region per layer, records at a fixed distance.
    Layers {
        regions: Vec<V1Region>,
        manifest: Box<Manifest>,
    },
}

/// Queue pairs that work, and what they reach.
pub(super) struct Session {
    pub(super) control: ControlStream,
    pub(super) content: ContentTag,
    pub(super) memory: Memory,
    pub(super) queues: Vec<ReadQueue<Token>>,
    pub(super) peer_rail: String,
    /// v1: keeps the run's identity while it lives.
    pub(super) member: Option<V1Member>,
}

/// The connection that the peer's queue pairs live as long as.
pub(super) enum ControlStream {
    V2(Box<Connection>),
    V1(TcpStream),
}

impl ControlStream {
    pub(super) fn stream(&self) -> &TcpStream {
        match self {
            Self::V2(connection) => connection.stream(),
            Self::V1(stream) => stream,
        }
    }
}

/// Identity of what a v1 peer serves. v1 has none of its own, so it is a number of ours that holds
/// as long as one connection does: such a peer hangs up when it reloads or restarts.
pub(crate) struct V1Run(Mutex<V1RunState>);

struct V1RunState {
    number: u64,
    members: usize,
    /// What each rail was told of the peer's regions, as a hash.
    tables: HashMap<usize, u64>,
}

/// A connection that keeps the number alive.
pub(super) struct V1Member(Arc<V1Run>, u64);

impl V1Run {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(V1RunState {
            number: rand::random(),
            members: 0,
            tables: HashMap::new(),
        }))
    }

    /// *Errors*: another rail still reads from what the peer registered before.
    fn join(self: &Arc<Self>, tables: &[u64]) -> Result<V1Member, String> {
        let mut state = lock(&self.0);
        if state.members == 0 {
            state.number = rand::random();
            state.tables.clear();
        }
        for (rail, &table) in tables.iter().enumerate() {
            if *state.tables.entry(rail).or_insert(table) != table {
                return Err(
                    "the peer loaded another store; waiting for the other rails to end".into(),
                );
            }
        }
        state.members += 1;
        Ok(V1Member(self.clone(), state.number))
    }
}

impl Drop for V1Member {
    fn drop(&mut self) {
        lock(&self.0.0).members -= 1;
    }
}

/// Opens a session on the best of the peer's rails that this one reaches. `socket` gets each
/// connection as soon as there is one, so that others can cut it.
pub(super) fn open(
    config: &VerbsConfig,
    limit: Instant,
    keep: &dyn Fn(&TcpStream) -> Result<(), String>,
) -> Result<Session, String> {
    let own = config.local().look()?;
    if let Some(run) = &config.v1 {
        return open_v1(config, &own, run, limit, keep);
    }
    let mut connection = Some(connect_v2(config, limit, keep)?);
    let first = connection.as_mut().expect("just made");
    let rails = ask_rails(first, limit).map_err(|e| e.to_string())?;
    let mut reasons = Vec::new();
    for index in candidates(config, &own, &rails)? {
        let left = limit.saturating_duration_since(Instant::now());
        if left.is_zero() {
            reasons.push("no time left to try others".into());
            break;
        }
        // A connection opens one rail.
        let connection = match connection.take() {
            Some(connection) => connection,
            None => connect_v2(config, limit, keep)?,
        };
        let remote = &rails[index];
        match open_pair(config, &own, connection, index, remote, limit) {
            Ok(session) => return Ok(session),
            Err(why) => reasons.push(format!("to the peer's {}: {why}", remote.name)),
        }
    }
    match rails.is_empty() {
        true => Err("the peer serves no verbs: start it with --rail, or see its log".into()),
        false => Err(reasons.join("; ")),
    }
}

/// A control connection: on the rail's own path where the peer has an address there, so that the
/// end of another link does not end this rail; else where the tier was told.
fn connect_v2(
    config: &VerbsConfig,
    limit: Instant,
    keep: &dyn Fn(&TcpStream) -> Result<(), String>,
) -> Result<Connection, String> {
    let now = Instant::now();
    let half = now + limit.saturating_duration_since(now) / 2;
    let own_path = config.addr_on_rail.as_ref().map(|addr| (addr, half));
    let mut trouble = String::new();
    for (addr, limit) in own_path.into_iter().chain([(&config.addr, limit)]) {
        match socket::connect(
            addr,
            config.client_id,
            Role::Control,
            Protocol::V2,
            config.token.as_ref(),
            limit,
        ) {
            Ok((stream, Outcome::V2(welcome))) => {
                keep(&stream)?;
                return Ok(Connection::of(stream, welcome));
            }
            Ok((_, Outcome::V1(_))) => {
                return Err("the peer speaks v1, and v2 was asked for".into());
            }
            Err(e) => trouble = e.to_string(),
        }
    }
    Err(trouble)
}

fn ask_rails(connection: &mut Connection, limit: Instant) -> Result<Vec<RailInfo>, AskError> {
    let reply = connection.ask(FrameKind::Rails, &[], FrameKind::RailsReply, limit)?;
    decode_rails(&reply).map_err(|e| AskError::Broken(e.to_string()))
}

/// Addresses of the peer's rails that are paired with ours, for TCP on the same path; `None` for a
/// rail without one.
pub(crate) fn rails_of_peer(
    control: &Control,
    locals: &[OwnRail],
    limit: Instant,
) -> Result<Vec<Option<IpAddr>>, TierError> {
    let (reply, _) = control.ask(FrameKind::Rails, &[], FrameKind::RailsReply, limit)?;
    let rails = decode_rails(&reply).map_err(|e| TierError::Catalogue {
        addr: control.addr().to_owned(),
        why: e.to_string(),
    })?;
    let remote: Vec<Endpoint> = rails.iter().map(endpoint).collect();
    let mut addresses = vec![None; locals.len()];
    let mut own = Vec::new();
    for (i, local) in locals.iter().enumerate() {
        if let Ok(choice) = local.look() {
            own.push((i, choice.endpoint()));
        }
    }
    let ends: Vec<Endpoint> = own.iter().map(|(_, e)| *e).collect();
    for (local, remote) in pair(&ends, &remote).paired {
        addresses[own[local].0] = rails[remote].ip;
    }
    Ok(addresses)
}

/// A rail of the peer as pairing sees it.
pub(crate) fn endpoint(rail: &RailInfo) -> Endpoint {
    match rail.link_layer {
        LINK_INFINIBAND => Endpoint::infiniband(Gid(rail.gid), rail.lid),
        _ => Endpoint::ethernet(Gid(rail.gid), rail.prefix_len),
    }
}

/// Which of the peer's rails to try, best first. All rails of this tier are paired at once, so that
/// each of them comes to the same answer.
fn candidates(
    config: &VerbsConfig,
    own: &RailChoice,
    rails: &[RailInfo],
) -> Result<Vec<usize>, String> {
    let mut ends = Vec::new();
    let mut me = 0;
    for (i, local) in config.rails.iter().enumerate() {
        if i == config.index {
            me = ends.len();
            ends.push(own.endpoint());
        } else if let Ok(choice) = local.look() {
            // One that is down now takes part in no pairing.
            ends.push(choice.endpoint());
        }
    }
    let remote: Vec<Endpoint> = rails.iter().map(endpoint).collect();
    let pairing = pair(&ends, &remote);
    if let Some((_, remote)) = pairing.paired.iter().find(|(local, _)| *local == me) {
        return Ok(vec![*remote]);
    }
    let candidates = pairing
        .candidates
        .into_iter()
        .find(|(local, _)| *local == me);
    match candidates {
        Some((_, remote)) if !remote.is_empty() => Ok(remote),
        _ if rails.is_empty() => Ok(vec![]),
        _ => Err(format!(
            "none of the peer's {} rails can be reached from this one: another link layer or address family ({})",
            rails.len(),
            rails
                .iter()
                .map(|r| format!("{} {}", r.name, Gid(r.gid)))
                .collect::<Vec<_>>()
                .join(", ")
        )),
    }
}

fn queues(config: &VerbsConfig, count: u32) -> Result<Vec<ReadQueue<Token>>, String> {
    let local = config.local();
    let mut options = local.queue_options(&config.options);
    let mut queues = Vec::new();
    while queues.len() < count as usize {
        match ReadQueue::new(local.landing().clone(), options) {
            Ok(queue) => queues.push(queue),
            // A device's limits do not say how many requests it takes with so many parts each.
            Err(RdmaError::Create { .. }) if options.work_requests_max > WORK_REQUESTS_MIN => {
                options.work_requests_max /= 2;
                options.posts_max = options.posts_max.min(options.work_requests_max);
            }
            Err(e) => return Err(e.to_string()),
        }
    }
    Ok(queues)
}

fn gid_code(kind: GidType) -> u8 {
    match kind {
        GidType::InfiniBand => GID_INFINIBAND,
        GidType::RoceV1 => GID_ROCE_V1,
        GidType::RoceV2 => GID_ROCE_V2,
    }
}

fn open_pair(
    config: &VerbsConfig,
    own: &RailChoice,
    mut connection: Connection,
    index: usize,
    remote: &RailInfo,
    limit: Instant,
) -> Result<Session, String> {
    let options = &config.options;
    let local = config.local();
    let count = options.qps_per_rail.min(u32::from(remote.qps_max));
    let queues = queues(config, count)?;
    let device = local.context().attributes();
    let own_mtu = own_mtu(config, own);
    let reads = device
        .max_qp_init_rd_atom
        .clamp(1, u32::from(options.read_depth)) as u8;
    let welcome = *connection.welcome();
    let request = OpenRail {
        rail: index as u8,
        mtu_code: own_mtu.code() as u8,
        reads_max: reads,
        link_layer: link_code(own.attributes.link_layer),
        gid_type: gid_code(own.gid.entry.kind),
        lid: own.attributes.lid,
        epoch: welcome.epoch,
        service_level: options.service_level,
        traffic_class: options.traffic_class,
        gid: own.gid.entry.gid.0,
        qps: queues
            .iter()
            .map(|q| QpEndpoint {
                qpn: q.local().qpn,
                psn: q.local().psn,
            })
            .collect(),
    };
    let reply = connection
        .ask(
            FrameKind::OpenRail,
            &request.encode(),
            FrameKind::RailOpened,
            limit,
        )
        .map_err(|e| e.to_string())?;
    let opened = RailOpened::decode(&reply).map_err(|e| e.to_string())?;
    if opened.qps.len() != queues.len() || opened.epoch != welcome.epoch {
        return Err("the peer opened another rail than was asked for".into());
    }
    if *connection.welcome() != welcome {
        return Err("the peer's store changed while the rail was opened".into());
    }
    let mtu = Mtu::from_code(opened.mtu_code.into()).map_or(own_mtu, |mtu| mtu.min(own_mtu));
    let reads_out = reads.min(opened.reads_max);
    tracing::debug!(
        rail = %local.name(), peer = %remote.name, mtu = mtu.bytes(), reads_out,
        regions = opened.regions.len(), "queue pairs are connected"
    );
    for (queue, remote) in queues.iter().zip(&opened.qps) {
        let remote = RemoteEndpoint {
            qpn: remote.qpn,
            psn: remote.psn,
            gid: Gid(opened.gid),
            lid: opened.lid,
        };
        let path = path(config, own, mtu, remote, reads_out);
        queue.connect(&path).map_err(|e| e.to_string())?;
    }
    let table = RegionTable::new(opened.regions);
    if let Some(region) = table.first() {
        probe(&queues, region.addr, region.rkey, limit).map_err(|why| {
            format!(
                "{why} (from GID {} at index {}, {}, to GID {})",
                own.gid.entry.gid,
                own.gid.entry.index,
                own.gid.entry.kind,
                Gid(opened.gid)
            )
        })?;
    }
    Ok(Session {
        content: ContentTag::of(&welcome),
        control: ControlStream::V2(Box::new(connection)),
        memory: Memory::Regions(table),
        queues,
        peer_rail: remote.name.clone(),
        member: None,
    })
}

fn own_mtu(config: &VerbsConfig, own: &RailChoice) -> Mtu {
    let active = own.attributes.active_mtu;
    config.options.mtu.map_or(active, |mtu| mtu.min(active))
}

fn path(
    config: &VerbsConfig,
    own: &RailChoice,
    mtu: Mtu,
    remote: RemoteEndpoint,
    reads_out: u8,
) -> Path {
    let mut path = Path::new(own.port, own.attributes.link_layer, mtu, remote);
    path.gid_index = own.gid.entry.index;
    path.pkey_index = config.options.pkey_index;
    path.service_level = config.options.service_level;
    path.traffic_class = config.options.traffic_class;
    path.reads_out = reads_out;
    // Nobody reads from this side; a device may demand one.
    path.reads_in = 1;
    path
}

/// One READ on each queue pair: a path that connects may still carry nothing.
fn probe(queues: &[ReadQueue<Token>], addr: u64, rkey: u32, limit: Instant) -> Result<(), String> {
    for queue in queues {
        let left = limit.saturating_duration_since(Instant::now());
        queue
            .probe(addr, RemoteKey(rkey), left.min(PROBE_TIME))
            .map_err(|e| format!("the first READ failed: {e}"))?;
    }
    Ok(())
}

fn open_v1(
    config: &VerbsConfig,
    own: &RailChoice,
    run: &Arc<V1Run>,
    limit: Instant,
    keep: &dyn Fn(&TcpStream) -> Result<(), String>,
) -> Result<Session, String> {
    if own.attributes.link_layer != LinkLayer::Ethernet {
        return Err("v1 addresses by GID alone, which InfiniBand does not; use v2 or RoCE".into());
    }
    // v1 numbers rails from the first: for the third, two others are named and not used.
    let rails = u8::try_from(config.index + 1)
        .ok()
        .filter(|n| *n <= expert_wire::limits::V1_RAILS_MAX)
        .ok_or("v1 has 8 rails at most")?;
    let (mut stream, outcome) = socket::connect(
        &config.addr,
        config.client_id,
        Role::Control,
        Protocol::V1Verbs,
        config.token.as_ref(),
        limit,
    )
    .map_err(|e| e.to_string())?;
    keep(&stream)?;
    let Outcome::V1(manifest) = outcome else {
        return Err("the peer speaks v2, and v1 was asked for".into());
    };
    let queues = queues(config, 1)?;
    let queue = &queues[0];
    let mut io = Deadlined {
        stream: &mut stream,
        clock: Clock::until(&config.addr, limit),
    };
    io.write(&[rails])?;
    let mut reader = V1ServerRails::default();
    while reader.wants() > 0 {
        let bytes = io.read(reader.wants())?;
        reader
            .handle(&bytes, rails, manifest.num_moe_layers)
            .map_err(|e| e.to_string())?;
    }
    let mut rails = reader.finish();
    let tables: Vec<u64> = rails.iter().map(table_hash).collect();
    let V1Rail { endpoint, layers } = rails.pop().ok_or("no rail came")?;
    let ends: Vec<V1Endpoint> = (0..config.index)
        .map(|i| V1Endpoint {
            qpn: queue.local().qpn,
            psn: queue.local().psn,
            gid: config.rails[i]
                .look()
                .map_or(own.gid.entry.gid.0, |c| c.gid.entry.gid.0),
        })
        .chain([V1Endpoint {
            qpn: queue.local().qpn,
            psn: queue.local().psn,
            gid: own.gid.entry.gid.0,
        }])
        .collect();
    let remote = RemoteEndpoint {
        qpn: endpoint.qpn,
        psn: endpoint.psn,
        gid: Gid(endpoint.gid),
        lid: 0,
    };
    let device = local_reads(config);
    let path = path(
        config,
        own,
        own_mtu(config, own),
        remote,
        device.min(V1_READS_MAX),
    );
    // Each side may begin to READ when it likes: the server's pair is ready with its last byte.
    io.write(&v1_verbs::encode_client_rails(&ends))?;
    let ready = io.read(1)?;
    if ready != [0] {
        return Err(format!("the peer answered with {} instead of 0", ready[0]));
    }
    queue.connect(&path).map_err(|e| e.to_string())?;
    let first = layers.first().ok_or("no layer came")?;
    probe(&queues, first.base, first.rkey, limit)?;
    let member = run.join(&tables)?;
    Ok(Session {
        content: v1_tag(&manifest, member.1),
        control: ControlStream::V1(stream),
        memory: Memory::Layers {
            regions: layers,
            manifest,
        },
        queues,
        peer_rail: format!("rail {}", config.index),
        member: Some(member),
    })
}

/// What a rail's regions are, in one number.
fn table_hash(rail: &V1Rail) -> u64 {
    let bytes: Vec<u8> = rail
        .layers
        .iter()
        .flat_map(|l| [l.base.to_le_bytes(), u64::from(l.rkey).to_le_bytes()])
        .flatten()
        .collect();
    xxh3_64(&bytes)
}

fn local_reads(config: &VerbsConfig) -> u8 {
    let device = config.local().context().attributes();
    device
        .max_qp_init_rd_atom
        .clamp(1, u32::from(config.options.read_depth)) as u8
}

/// A stream whose every step ends by a moment.
struct Deadlined<'a> {
    stream: &'a mut TcpStream,
    clock: Clock<'a>,
}

impl Deadlined<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let left = self
            .clock
            .left(Step::Handshake)
            .map_err(|e| e.to_string())?;
        self.stream
            .set_write_timeout(Some(left))
            .and_then(|()| self.stream.write_all(bytes))
            .map_err(|e| self.clock.error(Step::Handshake, &e).to_string())
    }

    fn read(&mut self, bytes: usize) -> Result<Vec<u8>, String> {
        // Bounded by the reader of what comes: 12 bytes for each layer of the manifest.
        let mut buffer = vec![0; bytes];
        let mut at = 0;
        while at < bytes {
            let left = self
                .clock
                .left(Step::Handshake)
                .map_err(|e| e.to_string())?;
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(&mut buffer[at..]));
            match read {
                Ok(0) => return Err("the peer hung up during the handshake".into()),
                Ok(n) => at += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.clock.error(Step::Handshake, &e).to_string()),
            }
        }
        Ok(buffer)
    }
}

/// Checks that a v1 record is the one that was asked for.
pub(super) use crate::rails::tcp::check_v1_header;

const _: () = assert!(v1::MODE_VERBS == 1);
