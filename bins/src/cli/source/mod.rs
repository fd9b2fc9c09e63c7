//! Where records come from: the flags that `fetch`, `gate` and `doctor` share, and the tier that they describe.

mod uma;
mod verbs;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use expert_arena::{ArenaBuilder, ExpertArena};
use expert_store::info::{StoreInfo, parse_hex128};
use expert_store::select::Selection;
use expert_store::{OpenOptions, Store};
use expert_tier::{
    Deadline, EngineConfig, ExpertTier, OnFailure, Policy, Sources, TierBuilder, TierError, Verify,
    env,
};

use super::args::TokenArgs;
use super::{UsageError, bar, output, signals};
use uma::UmaArgs;
use verbs::VerbsArgs;

/// A backend and its settings.
#[derive(Debug, clap::Args)]
pub struct SourceArgs {
    /// Where records come from
    #[arg(long, value_enum, default_value_t = Backend::Rdma)]
    expert_backend: Backend,
    /// Peer to fetch from, or several: parts of a model add up, replicas share the load; default: ATLAS_EXPERT_PEER
    #[arg(long, value_name = "HOST:PORT[,…]")]
    expert_peer: Option<String>,
    #[command(flatten)]
    token: TokenArgs,
    /// Store or checkpoint on this machine with the same content or a part of it: it takes over where the peers lack
    /// records or none of them works (rdma, rdma-verbs)
    #[arg(long, value_name = "PATH")]
    local_store: Option<PathBuf>,
    /// Have the local store carry a share all the time
    #[arg(long, requires = "local_store")]
    add_local: bool,
    /// Connect although no source has some of the records
    #[arg(long)]
    allow_missing: bool,
    /// Keep trying for so long where no peer listens yet, or the peers that do lack records, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=86_400))]
    wait: u32,
    /// Store or checkpoint to read (posix, uma)
    #[arg(long, value_name = "PATH")]
    store: Option<PathBuf>,
    /// The stack to take, by its name prefix (posix and uma, where a checkpoint has several)
    #[arg(long, value_name = "PREFIX")]
    stack: Option<String>,
    /// TCP connections (rdma) or reader threads (posix, uma)
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    streams: u32,
    /// When checksums are compared
    #[arg(long, value_enum, default_value_t = VerifyArg::Always)]
    verify: VerifyArg,
    /// Refuse any other content than this
    #[arg(long, value_name = "32 HEX DIGITS")]
    expect_content_id: Option<String>,
    /// Bytes in flight per connection, KiB
    #[arg(long, value_name = "KIB", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    window_kib: u64,
    /// Bytes of one READ, KiB; rounded down to multiples of 256
    #[arg(long, value_name = "KIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(256..=16_384))]
    read_kib: u64,
    /// How READs are spread over rails
    #[arg(long, value_enum, default_value_t = PolicyArg::HomeSteal)]
    policy: PolicyArg,
    /// Fail a request at the first failure of a rail instead of waiting for it to come back
    #[arg(long)]
    fail_fast: bool,
    /// Memory that the arena leaves to others, GB; default: the larger of 8 GB and 8 %, less on small machines
    #[arg(long, value_name = "GB")]
    reserve_gb: Option<f64>,
    #[command(flatten)]
    uma: UmaArgs,
    #[command(flatten)]
    verbs: VerbsArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// Plain reads of a store on this machine
    Posix,
    /// A peer, over TCP
    Rdma,
    /// A peer, by one-sided READs; over TCP while no rail works
    RdmaVerbs,
    /// This machine's disk, by direct reads, many at once
    Uma,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Posix => "posix",
            Self::Rdma => "rdma",
            Self::RdmaVerbs => "rdma-verbs",
            Self::Uma => "uma",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum VerifyArg {
    /// At each fetch
    Always,
    /// At the first fetch of each record
    First,
    /// Never
    Off,
}

impl VerifyArg {
    fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::First => "first",
            Self::Off => "off",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyArg {
    /// Rail `expert % rails`; idle rails help
    HomeSteal,
    /// Rail `expert % rails` alone
    ExpertMod,
    /// All rails share each record
    Split,
}

/// What a command settles itself.
#[derive(Debug, Default)]
pub struct How {
    /// The part that is wanted.
    pub selection: Selection,
    /// Longest time for one request, where the default will not do.
    pub deadline: Option<Duration>,
    /// No progress bar.
    pub quiet: bool,
}

/// Makes an arena for what there is to fetch.
pub type MakeArena<'a> = &'a mut dyn FnMut(&StoreInfo) -> anyhow::Result<Arc<ExpertArena>>;

impl SourceArgs {
    /// The backend's name.
    pub fn backend_name(&self) -> &'static str {
        self.expert_backend.name()
    }

    /// The first flag that names a place, for commands that may do without one.
    pub fn place_given(&self) -> Option<&'static str> {
        match (&self.expert_peer, &self.store) {
            (Some(_), _) => Some("--expert-peer"),
            (None, Some(_)) => Some("--store"),
            (None, None) => None,
        }
    }

    /// The name of what `--verify` says.
    pub fn verify_name(&self) -> &'static str {
        self.verify.name()
    }

    /// Builds an arena that leaves to others what `--reserve-gb` says.
    ///
    /// *Errors*: as [`ArenaBuilder::build`].
    pub fn build_arena(&self, mut builder: ArenaBuilder) -> anyhow::Result<Arc<ExpertArena>> {
        if let Some(bytes) = self.reserve_bytes() {
            builder = builder.reserve_bytes(Some(bytes));
        }
        Ok(Arc::new(builder.build()?))
    }

    /// Opens the backend, with records landing in the arena that `make_arena` makes.
    ///
    /// *Errors*: flags that do not fit together, a store or a peer that cannot be had, those of `make_arena`.
    pub fn open(
        &self,
        how: &How,
        cancel: &AtomicBool,
        make_arena: MakeArena<'_>,
    ) -> anyhow::Result<Box<dyn ExpertTier>> {
        let expect = self.expect()?;
        let builder = self.builder(how, expect)?;
        let for_others = [
            (Backend::RdmaVerbs, self.verbs.given()),
            (Backend::Uma, self.uma.given()),
        ];
        for (backend, flag) in for_others {
            if let Some(flag) = flag.filter(|_| self.expert_backend != backend) {
                return Err(UsageError(format!(
                    "{flag} is for --expert-backend {}, this is {}",
                    backend.name(),
                    self.expert_backend.name()
                ))
                .into());
            }
        }
        Ok(match self.expert_backend {
            Backend::Posix | Backend::Uma => {
                let name = self.expert_backend.name();
                if self.local_store.is_some() {
                    return Err(UsageError(format!(
                        "--local-store is for --expert-backend rdma; {name} reads --store"
                    ))
                    .into());
                }
                let to_peer = [
                    (self.expert_peer.is_some(), "--expert-peer"),
                    (self.token.is_given(), "--auth-token-file"),
                ];
                if let Some((_, flag)) = to_peer.iter().find(|(given, _)| *given) {
                    return Err(UsageError(format!(
                        "{flag} is for --expert-backend rdma; {name} reads --store"
                    ))
                    .into());
                }
                let path = self.store.as_ref().ok_or_else(|| {
                    UsageError(format!("--expert-backend {name} needs --store PATH"))
                })?;
                let checksums = self.verify != VerifyArg::Off;
                let store = Arc::new(self.open_store(path, how, expect.is_some(), checksums)?);
                let arena = make_arena(store.info())?;
                match self.expert_backend {
                    Backend::Posix => Box::new(builder.open_posix(store, arena)?),
                    _ => Box::new(self.uma.apply(builder).open_uma(store, arena)?),
                }
            }
            Backend::Rdma | Backend::RdmaVerbs => {
                if self.store.is_some() || self.stack.is_some() {
                    return Err(UsageError(
                        "--store and --stack are for --expert-backend posix and uma; a peer was given its own"
                            .into(),
                    )
                    .into());
                }
                let addr = match &self.expert_peer {
                    Some(addr) => addr.clone(),
                    None => env::peer()?.ok_or_else(|| {
                        UsageError(format!(
                            "--expert-backend {} needs --expert-peer HOST:PORT, or ATLAS_EXPERT_PEER",
                            self.expert_backend.name()
                        ))
                    })?,
                };
                let builder = builder.auth_token(self.token.token()?);
                let builder = match self.expert_backend {
                    Backend::RdmaVerbs => builder.verbs(self.verbs.options()?),
                    _ => builder,
                };
                let mut sources = Sources::of_peers(&addr)?;
                sources.add_local = self.add_local;
                if let Some(path) = &self.local_store {
                    sources.local = Some(Arc::new(self.open_store(path, how, true, true)?));
                }
                let info = self.describe(&builder, &sources, cancel)?;
                let arena = make_arena(&info)?;
                Box::new(builder.connect_sources(&sources, arena)?)
            }
        })
    }

    /// The content to insist on: the flag over the environment.
    fn expect(&self) -> anyhow::Result<Option<u128>> {
        Ok(match &self.expect_content_id {
            Some(text) => Some(
                parse_hex128(text)
                    .map_err(UsageError)
                    .context("--expect-content-id")?,
            ),
            None => env::content_id()?,
        })
    }

    /// How a tier is made, whatever the backend.
    fn builder(&self, how: &How, expect: Option<u128>) -> anyhow::Result<TierBuilder> {
        let defaults = EngineConfig::default();
        Ok(TierBuilder::new()
            .engine(EngineConfig {
                spin: env::spin()?.unwrap_or(defaults.spin),
                window_bytes: self.window_kib << 10,
                read_bytes: self.read_kib << 10,
                // The arena bounds what is under way: its slots are all that is ever asked for.
                inflight_max_bytes: u64::MAX,
                policy: match self.policy {
                    PolicyArg::HomeSteal => Policy::HomeSteal,
                    PolicyArg::ExpertMod => Policy::ExpertMod,
                    PolicyArg::Split => Policy::Split,
                },
                on_failure: match self.fail_fast {
                    true => OnFailure::FailFast,
                    false => OnFailure::Failover,
                },
                ..defaults
            })
            .verify(match self.verify {
                VerifyArg::Always => Verify::Always,
                VerifyArg::First => Verify::First,
                VerifyArg::Off => Verify::Off,
            })
            .deadline(match how.deadline {
                Some(base) => Deadline {
                    base,
                    floor_bytes_per_s: 0,
                },
                None => Deadline::default(),
            })
            .streams(self.streams)
            .allow_missing(self.allow_missing)
            .expect_content_id(expect))
    }

    /// The same settings for an examination, which opens no backend.
    ///
    /// *Errors*: flags or variables that cannot be read.
    pub fn examination(&self) -> anyhow::Result<expert_doctor::Options> {
        let expect = self.expect()?;
        let peers = match &self.expert_peer {
            Some(list) => Some(list.clone()),
            None => env::peer()?,
        };
        Ok(expert_doctor::Options {
            verbs_required: self.expert_backend == Backend::RdmaVerbs || self.verbs.wanted(),
            verbs: self.verbs.options()?,
            reserve_bytes: self.reserve_bytes(),
            store: self.store.clone().or_else(|| self.local_store.clone()),
            stack: self.stack.clone(),
            peers: match peers {
                Some(list) => Sources::of_peers(&list)?.peers,
                None => Vec::new(),
            },
            tier: self
                .builder(&How::default(), expect)?
                .auth_token(self.token.token()?),
            expect_content_id: expect,
            ..expert_doctor::Options::default()
        })
    }

    fn reserve_bytes(&self) -> Option<u64> {
        self.reserve_gb.map(|gb| (gb.max(0.0) * 1e9) as u64)
    }

    /// Asks the peers what they serve; with `--wait`, again until one answers.
    fn describe(
        &self,
        builder: &TierBuilder,
        sources: &Sources,
        cancel: &AtomicBool,
    ) -> anyhow::Result<StoreInfo> {
        let limit = Instant::now() + Duration::from_secs(self.wait.into());
        loop {
            match builder.describe_sources(sources) {
                Err(
                    TierError::Connect { .. }
                    | TierError::TimedOut { .. }
                    | TierError::NameTimedOut { .. }
                    | TierError::Missing { .. },
                ) if Instant::now() < limit => {
                    anyhow::ensure!(!cancel.load(Ordering::Relaxed), "interrupted");
                    std::thread::sleep(Duration::from_millis(200));
                }
                other => return Ok(other?),
            }
        }
    }

    /// Opens a store on this machine. Of a bare checkpoint only what is selected is hashed, unless
    /// the content id of the whole is asked for.
    fn open_store(
        &self,
        path: &Path,
        how: &How,
        whole: bool,
        checksums: bool,
    ) -> anyhow::Result<Store> {
        let selection = (!whole && !how.selection.is_all()).then(|| how.selection.clone());
        let store = Store::open(
            path,
            &OpenOptions {
                stack: self.stack.clone(),
                selection,
                checksums,
                progress: bar::progress(how.quiet),
                cancel: Some(signals::cancel_flag()?),
                ..OpenOptions::default()
            },
        )?;
        output::print_warnings(store.warnings());
        Ok(store)
    }
}
