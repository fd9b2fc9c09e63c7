//! The tiers that callers use: [`RdmaTier`] over peers, [`UmaTier`] and [`PosixTier`] over a store on this machine.

mod files;

use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ExpertArena, SlotId};
use expert_store::Layer;
use expert_store::info::{StoreInfo, hex128};
use expert_wire::Key;
use expert_wire::auth::Token;
use expert_wire::client::Protocol;

use crate::config::{Class, Deadline, EngineConfig, Verify};
use crate::core::{Core, Pending};
use crate::engine::later;
use crate::error::TierError;
use crate::rails::uma::{IoReport, IoState};
use crate::rails::verbs::VerbsOptions;
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

    /// Whether [`ExpertTier::find`] asks nobody: the catalogue of what is served now is there.
    fn knows(&self, key: Key) -> bool;

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

    fn knows(&self, key: Key) -> bool {
        (**self).knows(key)
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
#[derive(Debug, Clone)]
pub struct TierBuilder {
    pub(crate) engine: EngineConfig,
    pub(crate) verify: Verify,
    pub(crate) deadline: Deadline,
    pub(crate) streams: u32,
    pub(crate) protocol: Protocol,
    pub(crate) expect_content_id: Option<u128>,
    pub(crate) connect_timeout: Duration,
    pub(crate) stall: Duration,
    pub(crate) allow_missing: bool,
    pub(crate) verbs: Option<VerbsOptions>,
    pub(crate) replan_changed: bool,
    pub(crate) uma_depth: u32,
    pub(crate) uma_direct: bool,
    pub(crate) uma_ring: bool,
    pub(crate) auth_token: Option<Token>,
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
            auth_token: None,
            connect_timeout: Duration::from_secs(5),
            // TCP repeats a lost segment after 200 ms at the earliest, and again after 400: only
            // a pause beyond both says that the path is dead. (A queue pair is judged at 200 ms.)
            stall: Duration::from_secs(1),
            allow_missing: false,
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

    /// Connect although no source has some of the records: asking for one of them fails, until a peer
    /// that has it joins. Default: refuse, and say which they are.
    pub fn allow_missing(mut self, allow: bool) -> Self {
        self.allow_missing = allow;
        self
    }

    /// The token that the peer was started with: every connection proves that it knows it, and
    /// refuses a peer that does not; default none. v1 peers cannot be used with one.
    pub fn auth_token(mut self, token: Option<Token>) -> Self {
        self.auth_token = token;
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

    pub(crate) fn check_streams(&self) -> Result<u32, TierError> {
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
}

pub(crate) fn check_content(view: &View, expect: Option<u128>) -> Result<(), TierError> {
    match expect {
        Some(want) if view.first_info().content_id != Some(hex128(want)) => {
            Err(TierError::OtherContent {
                addr: view.name(),
                got: view
                    .first_info()
                    .content_id
                    .clone()
                    .unwrap_or_else(|| "none (no checksums)".into()),
                want: hex128(want),
            })
        }
        _ => Ok(()),
    }
}

pub(crate) fn no_resources(e: std::io::Error) -> TierError {
    TierError::Config(format!("no thread or descriptor for the tier: {e}"))
}

/// Fetches from a peer, or from several. *Drop order*: rails, then the arena (see `core`).
pub struct RdmaTier {
    pub(crate) core: Core,
    pub(crate) kind: TierKind,
    /// Before the driver began: less preferred rails instead of others.
    pub(crate) takeovers: u64,
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
    /// `use_verbs` takes the rails that the environment names ([`crate::env::verbs`]), and the token
    /// comes from the file that it names, if any ([`crate::env::auth_token`]).
    ///
    /// *Errors*: as [`TierBuilder::connect`]; the arena's.
    pub fn connect(
        addr: &str,
        num_slabs: u32,
        slots_per_slab: u32,
        use_verbs: bool,
    ) -> Result<Self, TierError> {
        let mut builder = TierBuilder::new().auth_token(crate::env::auth_token()?);
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

            fn knows(&self, key: Key) -> bool {
                self.core.knows(key)
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
