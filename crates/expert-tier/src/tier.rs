//! The tiers that callers use: [`RdmaTier`] over a peer, [`UmaTier`] and [`PosixTier`] over a store on this machine.

mod files;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ExpertArena, SlotId};
use expert_store::Layer;
use expert_store::info::{StoreInfo, hex128};
use expert_wire::Key;
use expert_wire::client::{Outcome, Protocol};

use crate::config::{Class, Deadline, EngineConfig, Verify};
use crate::control::Control;
use crate::core::{Core, Pending};
use crate::driver::Driver;
use crate::engine::later;
use crate::error::TierError;
use crate::notify::Notifier;
use crate::rail::{ContentTag, Rail};
use crate::rails::socket;
use crate::rails::tcp::{TcpConfig, TcpRail, v1_tag};
use crate::rails::uma::{IoReport, IoState};
use crate::rails::verbs::{
    OwnRail, V1Run, VerbsConfig, VerbsOptions, VerbsRail, find_rails, rails_of_peer,
};
use crate::record::Record;
use crate::stats::TierStats;
use crate::view::View;

/// What a tier reads from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    /// A peer, over TCP.
    Rdma,
    /// A peer, by one-sided READs.
    RdmaVerbs,
    /// Files, many reads at once.
    Uma,
    /// Files, plainly.
    Posix,
}

/// Brings expert records into an arena.
pub trait ExpertTier: Send + Sync {
    /// Fetches one record into a slot and returns when it is there, verified.
    ///
    /// *Shapes and units*: `stream` 0 means "done when the call returns"; other values are refused.
    /// The slot must be free, or hold a record that nobody leases.
    ///
    /// *Errors*: see [`TierError`]; the slot is then free again, or will be as soon as no rail can
    /// write to it any more. Nothing partial is ever readable.
    fn fetch(&self, key: Key, slot: SlotId, stream: u64) -> Result<Record, TierError>;

    /// Fetches several records side by side; results are in the order of the batch.
    ///
    /// *Errors*: the outer one where nothing was begun (a key that does not exist, a slot in use,
    /// back-pressure); single records fail alone.
    fn fetch_many(
        &self,
        batch: &[(Key, SlotId)],
        stream: u64,
    ) -> Result<Vec<Result<Record, TierError>>, TierError>;

    /// Begins a batch and returns at once; `time` replaces the default deadline.
    ///
    /// *Errors*: as [`ExpertTier::fetch_many`].
    fn submit(
        &self,
        batch: &[(Key, SlotId)],
        time: Option<Duration>,
    ) -> Result<Pending, TierError> {
        self.submit_as(batch, Class::Demand, time)
    }

    /// The same for another class than [`Class::Demand`].
    fn submit_as(
        &self,
        batch: &[(Key, SlotId)],
        class: Class,
        time: Option<Duration>,
    ) -> Result<Pending, TierError>;

    /// Layout and checksums of a record's layer, and the record's position there; `time` bounds
    /// the wait for a peer that has to be asked.
    ///
    /// *Errors*: there is no such record, or the peer did not answer.
    fn find(&self, key: Key, time: Duration) -> Result<(Arc<Layer>, usize), TierError>;

    /// Where records land.
    fn arena(&self) -> &Arc<ExpertArena>;

    /// What there is to fetch, as far as known at the last call.
    fn info(&self) -> StoreInfo;

    /// The numbers so far.
    fn stats(&self) -> TierStats;

    /// What it reads from.
    fn kind(&self) -> TierKind;

    /// Whether at least one path works now.
    fn healthy(&self) -> bool;
}

impl<T: ExpertTier + ?Sized> ExpertTier for Box<T> {
    fn fetch(&self, key: Key, slot: SlotId, stream: u64) -> Result<Record, TierError> {
        (**self).fetch(key, slot, stream)
    }

    fn fetch_many(
        &self,
        batch: &[(Key, SlotId)],
        stream: u64,
    ) -> Result<Vec<Result<Record, TierError>>, TierError> {
        (**self).fetch_many(batch, stream)
    }

    fn submit_as(
        &self,
        batch: &[(Key, SlotId)],
        class: Class,
        time: Option<Duration>,
    ) -> Result<Pending, TierError> {
        (**self).submit_as(batch, class, time)
    }

    fn find(&self, key: Key, time: Duration) -> Result<(Arc<Layer>, usize), TierError> {
        (**self).find(key, time)
    }

    fn arena(&self) -> &Arc<ExpertArena> {
        (**self).arena()
    }

    fn info(&self) -> StoreInfo {
        (**self).info()
    }

    fn stats(&self) -> TierStats {
        (**self).stats()
    }

    fn kind(&self) -> TierKind {
        (**self).kind()
    }

    fn healthy(&self) -> bool {
        (**self).healthy()
    }
}

/// How a tier is made; each method replaces a default.
#[derive(Debug)]
pub struct TierBuilder {
    engine: EngineConfig,
    verify: Verify,
    deadline: Deadline,
    streams: u32,
    protocol: Protocol,
    expect_content_id: Option<u128>,
    replan_changed: bool,
    connect_timeout: Duration,
    stall: Duration,
    verbs: Option<VerbsOptions>,
    uma_depth: u32,
    uma_direct: bool,
    uma_ring: bool,
}

impl Default for TierBuilder {
    fn default() -> Self {
        Self {
            engine: EngineConfig::default(),
            verify: Verify::default(),
            deadline: Deadline::default(),
            // One receiving thread copies and hashes slower than most links carry; two are enough for
            // 25 Gbit/s on one core each (docs/performance.md).
            streams: 2,
            protocol: Protocol::Best,
            expect_content_id: None,
            replan_changed: false,
            connect_timeout: Duration::from_secs(5),
            // TCP repeats a lost segment after 200 ms at the earliest, and again after 400: only
            // a pause beyond both says that the path is dead. (A queue pair is judged at 200 ms.)
            stall: Duration::from_secs(1),
            verbs: None,
            // What a disk needs to be busy is 8 at most; the rest is on its way to the slots meanwhile.
            uma_depth: 16,
            uma_direct: true,
            uma_ring: true,
        }
    }
}

impl TierBuilder {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Settings of the engine.
    pub fn engine(mut self, engine: EngineConfig) -> Self {
        self.engine = engine;
        self
    }

    /// When checksums are compared.
    pub fn verify(mut self, verify: Verify) -> Self {
        self.verify = verify;
        self
    }

    /// How long a request may take where the call does not say.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = deadline;
        self
    }

    /// TCP connections (or reader threads) side by side, 1 to 64; default 2.
    pub fn streams(mut self, streams: u32) -> Self {
        self.streams = streams;
        self
    }

    /// Protocol version to insist on.
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// The model to insist on; also after the peer changed its store.
    pub fn expect_content_id(mut self, id: Option<u128>) -> Self {
        self.expect_content_id = id;
        self
    }

    /// Whether a record of [`ExpertTier::fetch`] and [`ExpertTier::fetch_many`] whose content
    /// changed while it was under way is fetched once more, from the new content, into the same slot and before the same deadline; default no: it fails with
    /// [`TierError::ContentChanged`].
    ///
    /// No record is ever mixed, but those of one batch may then come from two contents:
    /// [`Record::content`] tells which. What the new content does not have, and what is not the
    /// model insisted on, fails as without this.
    pub fn replan_changed(mut self, replan: bool) -> Self {
        self.replan_changed = replan;
        self
    }

    /// Time for a connection and its handshake.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Pause of a TCP rail with READs posted after which it is torn down and made anew.
    pub fn stall(mut self, stall: Duration) -> Self {
        self.stall = stall;
        self
    }

    /// Fetch by one-sided READs over these rails; TCP takes over while none of them works, unless
    /// [`VerbsOptions::require`] forbids that. Default: TCP alone.
    pub fn verbs(mut self, options: VerbsOptions) -> Self {
        self.verbs = Some(options);
        self
    }

    /// Reads of files under way at once, of all reader threads together ([`TierBuilder::open_uma`]), 1 to 128;
    /// default 16.
    pub fn uma_depth(mut self, depth: u32) -> Self {
        self.uma_depth = depth;
        self
    }

    /// Whether files are read past the page cache ([`TierBuilder::open_uma`]); default true. Through it is better
    /// where the store fits into memory beside everything else.
    pub fn uma_direct(mut self, direct: bool) -> Self {
        self.uma_direct = direct;
        self
    }

    /// Whether io_uring may be used ([`TierBuilder::open_uma`]); default true.
    pub fn uma_ring(mut self, ring: bool) -> Self {
        self.uma_ring = ring;
        self
    }

    /// Asks a peer what it serves, without an arena: for sizing one.
    pub fn describe(&self, addr: &str) -> Result<StoreInfo, TierError> {
        let limit = later(Instant::now(), self.connect_timeout);
        Ok(self.meet(addr, limit)?.view.info)
    }

    /// Connects to a peer, with records landing in `arena`.
    ///
    /// *Errors*: [`TierError::NoVerbs`] where verbs are required and cannot be had,
    /// [`TierError::Connect`], [`TierError::Handshake`], [`TierError::Catalogue`],
    /// [`TierError::OtherContent`], each within the connect time-out (and, where `addr` is a name,
    /// the time that the system's resolver takes).
    pub fn connect(self, addr: &str, arena: Arc<ExpertArena>) -> Result<RdmaTier, TierError> {
        let limit = later(Instant::now(), self.connect_timeout);
        self.check_streams()?;
        let Met { view, control, v1 } = self.meet(addr, limit)?;
        let notifier = Arc::new(Notifier::new().map_err(no_resources)?);
        let mut rails: Vec<Box<dyn Rail>> = Vec::new();
        let mut kind = TierKind::Rdma;
        let mut takeovers = 0;
        if let Some(options) = &self.verbs {
            match self.verbs_rails(addr, options, &control, v1, &arena, &notifier, limit) {
                Ok(mut verbs) => {
                    rails.append(&mut verbs);
                    kind = TierKind::RdmaVerbs;
                }
                Err(why) if options.require => {
                    return Err(TierError::NoVerbs { why });
                }
                Err(why) => {
                    takeovers = 1;
                    tracing::warn!("no verbs rail, records go over TCP: {why}");
                }
            }
        }
        let required = self.verbs.as_ref().is_some_and(|o| o.require);
        if !required {
            let rank = match rails.is_empty() {
                true => 0,
                false => 2,
            };
            rails.push(Box::new(self.tcp_rail(addr, rank, v1, &notifier)));
        }
        let driver = Driver::start("rdma-tier", self.engine.clone(), rails, notifier)
            .map_err(no_resources)?;
        driver.wait_healthy(limit).map_err(|why| match required {
            true => TierError::NoVerbs { why },
            false => TierError::Connect {
                addr: addr.to_owned(),
                why,
            },
        })?;
        if kind == TierKind::RdmaVerbs && !driver.is_preferred() {
            takeovers = 1;
            tracing::warn!(
                "no verbs rail came up, records go over TCP until one does: {}",
                driver.describe()
            );
        }
        let expect = self.expect_content_id;
        let refresh = move |content: ContentTag, limit| {
            let view = match v1 {
                true => match control.hello(Protocol::V1, limit)? {
                    Outcome::V1(manifest) => {
                        let run = content.instance.map_or(0, |(run, _)| run);
                        let tag = v1_tag(&manifest, run);
                        View::of_v1(manifest, tag)
                    }
                    Outcome::V2(_) => unreachable!("v1 was insisted on"),
                },
                false => View::of_peer(&control, limit)?,
            };
            check_content(&view, expect)?;
            Ok(view)
        };
        Ok(RdmaTier {
            core: Core::new(
                driver,
                view,
                Box::new(refresh),
                self.verify,
                self.deadline,
                arena,
            )
            .replan_changed(self.replan_changed),
            kind,
            takeovers,
        })
    }

    fn tcp_rail(&self, addr: &str, rank: u8, v1: bool, notifier: &Arc<Notifier>) -> TcpRail {
        TcpRail::new(
            TcpConfig {
                addr: addr.to_owned(),
                streams: self.streams,
                protocol: self.protocol,
                v1,
                client_id: rand::random(),
                connect_timeout: self.connect_timeout,
                stall: self.stall,
                rank,
                read_bytes: self
                    .engine
                    .posted_bytes(u64::from(expert_wire::limits::READ_MAX_BYTES)),
            },
            notifier.clone(),
        )
    }

    /// The verbs rails, and a TCP rail on the path of each where that may take over.
    #[allow(clippy::too_many_arguments)] // what `connect` has in its hands
    fn verbs_rails(
        &self,
        addr: &str,
        options: &VerbsOptions,
        control: &Arc<Control>,
        v1: bool,
        arena: &Arc<ExpertArena>,
        notifier: &Arc<Notifier>,
        limit: Instant,
    ) -> Result<Vec<Box<dyn Rail>>, String> {
        options.check()?;
        let mut locals = Vec::new();
        let mut trouble = Vec::new();
        for found in find_rails(options)? {
            match OwnRail::open(&found, arena, options) {
                Ok(local) => locals.push(local),
                Err(e) => trouble.push(e.to_string()),
            }
        }
        if locals.is_empty() {
            return Err(trouble.join("; "));
        }
        for why in trouble {
            tracing::warn!("a rail is left out: {why}");
        }
        let port = addr.rsplit_once(':').map_or("", |(_, port)| port);
        let addresses: Vec<Option<String>> = match v1 {
            true => vec![None; locals.len()],
            false => rails_of_peer(control, &locals, limit)
                .map_err(|e| e.to_string())?
                .into_iter()
                .map(|ip| {
                    let ip = ip?;
                    let on_rail = SocketAddr::new(ip, port.parse().ok()?).to_string();
                    (on_rail != addr).then_some(on_rail)
                })
                .collect(),
        };
        let locals = Arc::new(locals);
        let run = v1.then(|| Arc::new(V1Run::new()));
        let client_id = rand::random();
        let mut rails: Vec<Box<dyn Rail>> = Vec::new();
        for (index, on_rail) in addresses.iter().enumerate() {
            let config = VerbsConfig {
                addr: addr.to_owned(),
                addr_on_rail: on_rail.clone(),
                client_id,
                options: options.clone(),
                rails: locals.clone(),
                index,
                v1: run.clone(),
                connect_timeout: self.connect_timeout,
            };
            rails.push(Box::new(VerbsRail::new(config, notifier.clone())));
        }
        if !options.require {
            for on_rail in addresses.iter().flatten() {
                rails.push(Box::new(self.tcp_rail(on_rail, 1, false, notifier)));
            }
        }
        Ok(rails)
    }

    fn check_streams(&self) -> Result<u32, TierError> {
        match self.streams {
            0 => {}
            n if n > expert_wire::limits::STREAMS_MAX => {}
            n => return Ok(n),
        }
        Err(TierError::Config(format!(
            "{} streams, the limits are 1 and {}",
            self.streams,
            expert_wire::limits::STREAMS_MAX
        )))
    }

    fn meet(&self, addr: &str, limit: Instant) -> Result<Met, TierError> {
        socket::check_addr(addr)?;
        let control = Arc::new(Control::new(addr, rand::random(), self.connect_timeout));
        let (view, v1) = match control.hello(self.protocol, limit)? {
            Outcome::V1(manifest) => {
                let tag = v1_tag(&manifest, 0);
                (View::of_v1(manifest, tag), true)
            }
            Outcome::V2(_) => (View::of_peer(&control, limit)?, false),
        };
        check_content(&view, self.expect_content_id)?;
        if !view.has_checksums {
            tracing::warn!(
                %addr,
                "the peer has no checksums for this store: bytes are not verified (index the store to have them)"
            );
        }
        Ok(Met { view, control, v1 })
    }
}

struct Met {
    view: View,
    control: Arc<Control>,
    v1: bool,
}

fn check_content(view: &View, expect: Option<u128>) -> Result<(), TierError> {
    match expect {
        Some(want) if view.info.content_id != Some(hex128(want)) => Err(TierError::OtherContent {
            got: view
                .info
                .content_id
                .clone()
                .unwrap_or_else(|| "none (no checksums)".into()),
            want: hex128(want),
        }),
        _ => Ok(()),
    }
}

fn no_resources(e: std::io::Error) -> TierError {
    TierError::Config(format!("no thread or descriptor for the tier: {e}"))
}

/// Fetches from a peer. *Drop order*: rails, then the arena (see `core`).
pub struct RdmaTier {
    core: Core,
    kind: TierKind,
    /// Before the driver began: TCP instead of verbs.
    takeovers: u64,
}

/// Reads a store on this machine past the page cache, many reads at once.
pub struct UmaTier {
    core: Core,
    kind: TierKind,
    takeovers: u64,
    io: Arc<IoState>,
}

impl UmaTier {
    /// How files are read now: direct reads and io_uring are done without where they are refused.
    pub fn io(&self) -> IoReport {
        self.io.report()
    }
}

/// Reads a store on this machine with plain reads: the oracle.
pub struct PosixTier {
    core: Core,
    kind: TierKind,
    takeovers: u64,
}

impl RdmaTier {
    /// Connects with defaults and an arena of its own: `num_slabs` slabs of `slots_per_slab` slots,
    /// each with room for the largest record of the peer.
    ///
    /// `use_verbs` takes the rails that the environment names ([`crate::env::verbs`]).
    ///
    /// *Errors*: as [`TierBuilder::connect`]; the arena's.
    pub fn connect(
        addr: &str,
        num_slabs: u32,
        slots_per_slab: u32,
        use_verbs: bool,
    ) -> Result<Self, TierError> {
        let mut builder = TierBuilder::new();
        if use_verbs {
            builder = builder.verbs(crate::env::verbs()?);
        }
        let info = builder.describe(addr)?;
        let stride = largest_image_bytes(&info);
        let mut arena = ArenaBuilder::new();
        for _ in 0..num_slabs {
            arena = arena.slab(slots_per_slab, stride as usize);
        }
        builder.connect(addr, Arc::new(arena.build()?))
    }
}

/// Bytes that a slot needs to hold any record of a store.
pub fn largest_image_bytes(info: &StoreInfo) -> u64 {
    info.layers
        .iter()
        .map(|l| l.image_bytes_max)
        .max()
        .unwrap_or(0)
}

macro_rules! tier {
    ($name:ident) => {
        impl ExpertTier for $name {
            fn fetch(&self, key: Key, slot: SlotId, stream: u64) -> Result<Record, TierError> {
                let mut records = self.fetch_many(&[(key, slot)], stream)?;
                records.pop().expect("one record was asked for")
            }

            fn fetch_many(
                &self,
                batch: &[(Key, SlotId)],
                stream: u64,
            ) -> Result<Vec<Result<Record, TierError>>, TierError> {
                if stream != 0 {
                    return Err(TierError::UnsupportedStream { stream });
                }
                Ok(self.core.fetch(batch)?.0)
            }

            fn submit_as(
                &self,
                batch: &[(Key, SlotId)],
                class: Class,
                time: Option<Duration>,
            ) -> Result<Pending, TierError> {
                self.core.submit(batch, class, time)
            }

            fn find(&self, key: Key, time: Duration) -> Result<(Arc<Layer>, usize), TierError> {
                self.core.find(key, later(Instant::now(), time))
            }

            fn arena(&self) -> &Arc<ExpertArena> {
                self.core.arena()
            }

            fn info(&self) -> StoreInfo {
                self.core.info()
            }

            fn stats(&self) -> TierStats {
                let mut stats = self.core.stats();
                stats.takeovers += self.takeovers;
                stats
            }

            fn kind(&self) -> TierKind {
                self.kind
            }

            fn healthy(&self) -> bool {
                self.core.is_healthy()
            }
        }
    };
}

tier!(RdmaTier);
tier!(UmaTier);
tier!(PosixTier);
