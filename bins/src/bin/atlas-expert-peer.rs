//! Serves an expert store to model servers; see `atlas-expert-peer --help`.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use atlas_expert::cli::args::{MovedArgs, SelectArgs, StackArgs};
use atlas_expert::cli::{self, bar, output, signals};
use atlas_rdma::choose::{ChooseError, RAILS_MAX, RailSpec, RailSpecError, Wanted};
use clap::Parser;
use expert_peer::populate::ProgressFn;
use expert_peer::{Peer, PeerConfig, PeerError, PopulateOptions, Source, Transfer, VerbsOptions};
use expert_store::info::{StoreKind, hex128};
use expert_store::token_file;
use expert_store::{OpenOptions, Store, StoreError};
use expert_wire::auth::Token;
use rustix::rand::GetRandomFlags;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{error, info, warn};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TransferArg {
    /// `copy` to clients on this machine, `sendfile` to others
    Auto,
    /// Straight from the page cache
    Sendfile,
    /// Through a buffer
    Copy,
}

impl From<TransferArg> for Transfer {
    fn from(arg: TransferArg) -> Self {
        match arg {
            TransferArg::Auto => Self::Auto,
            TransferArg::Sendfile => Self::Sendfile,
            TransferArg::Copy => Self::Copy,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RdmaArg {
    /// On every active RDMA port, where the machine has one and the store fits into memory; else a warning says why not
    Auto,
    /// TCP alone
    Off,
    /// As `auto`, but fail where that does not work
    Require,
}

/// Serves the expert weights of a Mixture-of-Experts model to model servers on the same network.
///
/// PATH is a store, a checkpoint folder with safetensors files, a GGUF file (of a split one: its first part), or a v1
/// store. Nothing is copied: records are sent from the files where they lie.
///
/// Clients verify what they get against checksums. A store carries them; for a bare checkpoint they are computed at the
/// start, which reads all of it once (`atlas-expert index` keeps them for the next time).
#[derive(Debug, Parser)]
#[command(name = "atlas-expert-peer", version, max_term_width = 110, after_help = AFTER_HELP)]
struct Args {
    /// Store or checkpoint to serve
    #[arg(long, value_name = "PATH")]
    store: PathBuf,
    /// Address to listen on; may be given several times; port 0 lets the system choose
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9909")]
    listen: Vec<String>,
    /// Listen beyond loopback without a token: whoever reaches the port can read the weights
    #[arg(long, conflicts_with = "auth_token_file")]
    allow_anonymous: bool,
    /// Serve only clients that know the token in this file, which must be readable by this user alone: at least 16
    /// bytes that nobody can guess. v1 clients cannot be served then
    #[arg(long, value_name = "FILE")]
    auth_token_file: Option<PathBuf>,
    /// Make that file where there is none, with 32 random bytes
    #[arg(long, requires = "auth_token_file")]
    create_auth_token: bool,
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    moved: MovedArgs,
    /// Do not compute checksums for a bare checkpoint: a quick start, but clients cannot verify anything
    #[arg(long)]
    no_checksums: bool,
    /// Read the store into memory before listening; this is the default, and skipped for a store above 80 % of
    /// the available memory
    #[arg(long, overrides_with = "no_populate")]
    populate: bool,
    /// Listen at once and read from disk what is asked for
    #[arg(long)]
    no_populate: bool,
    /// Threads that hash and read at the start; default: one (hashing) or two (reading) per CPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Connections at once; more are told to come back later
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_connections: u32,
    /// Connections at once from one address
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_connections_per_address: u32,
    /// Connections at once that have not said who they are; default: half of --max-connections
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_handshakes: Option<u32>,
    /// Bytes of answers under way to one client while another wants some, too, over all its connections, in KiB; one
    /// answer is always under way
    #[arg(long, value_name = "KIB", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    client_window_kib: u32,
    /// Time for a client to say what it is
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=3600))]
    handshake_timeout: u16,
    /// Time from the first byte of a request to its last
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    request_timeout: u16,
    /// Time between probes of a connection without traffic; three unanswered ones end it
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=3600))]
    keepalive: u16,
    /// Time without progress after which a client that does not read is hung up
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=3600))]
    send_timeout: u16,
    /// Time between looks at the store's files
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(10..=3_600_000))]
    restat_interval: u32,
    /// How bytes get from files into sockets
    #[arg(long, value_enum, default_value_t = TransferArg::Auto)]
    transfer: TransferArg,
    /// Whether model servers may read the store by one-sided RDMA READs, past this machine's CPU: the store is then
    /// registered, which pins all of it in memory; `require` where --rail or --rdma-dev is given [default: auto]
    #[arg(long, value_enum, value_name = "WHEN")]
    rdma: Option<RdmaArg>,
    /// RDMA port to use, and index of its GID (by default looked up by type and address at each connect); may be given
    /// several times, in the order of the rails
    #[arg(long, value_name = "DEV[:PORT[:GID]]")]
    rail: Vec<RailSpec>,
    /// The one RDMA device to use, as v1 tools spell it
    #[arg(long, value_name = "DEV", conflicts_with = "rail")]
    rdma_dev: Option<String>,
    /// Index of its GID; default: looked up by type and address at each connect
    #[arg(long, value_name = "INDEX", requires = "rdma_dev")]
    rdma_gid: Option<u32>,
    /// Where the kernel refuses to register read-only file mappings (before 6.2), map the files read-write instead of
    /// copying them: saves memory, but the kernel writes every page back to the disk and sets the files' times anew
    #[arg(long)]
    allow_rw_map: bool,
    /// Memory that registering may pin, counted once for all rails, in GB (10^9 bytes); default: no limit of its own
    #[arg(long, value_name = "GB", value_parser = parse_gb)]
    max_blade_gb: Option<u64>,
    /// Memory that must stay available after registering, in GB (10^9 bytes); default: the larger of 8 GB and 8 %, and
    /// for stores below 1 GiB at most a quarter of the memory
    #[arg(long, value_name = "GB", value_parser = parse_gb)]
    reserve_gb: Option<u64>,
    /// Queue pairs that one connection may have on one rail
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    qps_per_rail: u8,
    /// Queue pairs that one address may have, over all its connections and rails
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    qps_per_client: u32,
    /// READs under way at once on one queue pair, where the device can do more
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..))]
    read_depth: u8,
    /// Index in the RDMA ports' tables of partition keys
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    pkey_index: u16,
    /// Time for clients to leave the old store's memory when SIGHUP loads another
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 500, value_parser = clap::value_parser!(u32).range(0..=600_000))]
    reload_grace: u32,
    /// Time for answers on their way when the peer is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    shutdown_timeout: u16,
    /// Print one line of JSON when ready, for programs
    #[arg(long)]
    json: bool,
    /// No reports of progress
    #[arg(short, long)]
    quiet: bool,
}

const AFTER_HELP: &str = "\
Signals: SIGTERM and SIGINT end the peer; SIGHUP loads the store again from the same path and tells the clients.
Environment: ATLAS_LOG (or RUST_LOG) chooses what is logged to standard error: `warn`, or `info,expert_peer=debug`.
Exit codes: 0 ended by a signal, 1 failed or bad data, 2 wrong usage.

Examples:
  atlas-expert-peer --store /models/Qwen3-30B-A3B --listen 192.168.100.2:9909 --auth-token-file peer.token --create-auth-token
  atlas-expert-peer --store /models/Qwen3-30B-A3B --listen 192.168.100.2:9909 --allow-anonymous --rail mlx5_0 --rail mlx5_1";

/// Gigabytes as bytes.
fn parse_gb(text: &str) -> Result<u64, String> {
    let gb: f64 = text
        .parse()
        .map_err(|_| "write a number, such as 120 or 0.5".to_owned())?;
    let bytes = gb * 1e9;
    match (0.0..=1e18).contains(&bytes) {
        true => Ok(bytes as u64),
        false => Err("write a number from 0 to 1000000000".into()),
    }
}

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(e) => {
            // Help that nobody reads (`| head`) is no failure.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    let outcome = log_to_stderr().and_then(|()| run(&args));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "error: {}", cli::one_line(&e));
            ExitCode::from(exit_code(&e))
        }
    }
}

/// 2 where the caller has to write something else, 1 where the world has to change.
fn exit_code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref() {
        Some(PeerError::Address { .. } | PeerError::Anonymous { .. }) => 2,
        Some(PeerError::Rails(
            ChooseError::UnknownDevice { .. }
            | ChooseError::UnknownPort { .. }
            | ChooseError::SamePort { .. },
        )) => 2,
        _ => cli::exit_code(error),
    }
}

fn log_to_stderr() -> anyhow::Result<()> {
    let mut filter = Targets::new().with_default(tracing::Level::INFO);
    if let Some((name, text)) = ["ATLAS_LOG", "RUST_LOG"]
        .iter()
        .find_map(|name| Some((name, std::env::var(name).ok()?)))
    {
        filter = text
            .parse()
            .map_err(|e| cli::UsageError(format!("{name}={text:?}: {e}")))?;
    }
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    tracing_subscriber::registry()
        .with(layer)
        .with(filter)
        .init();
    Ok(())
}

fn run(args: &Args) -> anyhow::Result<()> {
    // Before anything that takes time, so that no signal is lost.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("installing signal handlers")?;
    let cancel = signals::cancel_flag().context("installing signal handlers")?;
    let options = open_options(args, &cancel)?;
    let verbs = verbs(args, &cancel)?;
    expert_peer::raise_open_files_limit();
    // Before anything is made on the disk.
    let may_be_open = args.allow_anonymous || args.auth_token_file.is_some();
    expert_peer::check_listen(&args.listen, may_be_open)?;
    let token = token(args)?;
    let started = open(args, &options).and_then(|store| {
        let mut config = config(args, store.clone(), &cancel);
        config.verbs = verbs;
        config.auth_token = token;
        let peer = Peer::start(config)?;
        Ok((store, peer))
    });
    let (mut store, peer) = match started {
        // An end that was asked for is no failure, early as it is.
        Err(e) if cancel.load(Ordering::SeqCst) && is_interrupt(&e) => return Ok(()),
        other => other?,
    };
    announce(args, &store, &peer)?;
    for signal in signals.forever() {
        if signal != SIGHUP {
            break;
        }
        info!("SIGHUP: loading {} again", args.store.display());
        match reload(args, &options, &peer) {
            Ok(next) => {
                let ids = [&store, &next].map(|s| id_text(s));
                info!("was {}, is {}", ids[0], ids[1]);
                store = next;
            }
            Err(e) => error!("{}; serving what was there before", cli::one_line(&e)),
        }
    }
    let stats = peer.stats();
    info!(
        "ending: {} connections, {} turned away, {} unauthorized, {} requests, {} sent",
        stats.connections_accepted,
        stats.connections_refused,
        stats.auth_refused,
        stats.requests,
        output::human_bytes(stats.payload_bytes_sent)
    );
    if let Err(e) = peer.shutdown(Duration::from_secs(args.shutdown_timeout.into())) {
        warn!("{e}");
    }
    Ok(())
}

/// What clients have to know, made first where that was asked for.
fn token(args: &Args) -> anyhow::Result<Option<Token>> {
    let Some(path) = &args.auth_token_file else {
        return Ok(None);
    };
    if args.create_auth_token {
        let mut random = [0; 32];
        let bytes = rustix::rand::getrandom(&mut random[..], GetRandomFlags::empty())
            .context("no random numbers from the system")?;
        anyhow::ensure!(bytes == random.len(), "no random numbers from the system");
        if token_file::create(path, &random)? {
            info!("made {}; clients need a copy of it", path.display());
        }
    }
    Ok(Some(token_file::read(path)?))
}

fn is_interrupt(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(StoreError::Interrupted))
        || matches!(error.downcast_ref(), Some(PeerError::Interrupted))
}

fn open_options(args: &Args, cancel: &Arc<AtomicBool>) -> anyhow::Result<OpenOptions> {
    Ok(OpenOptions {
        checksums: !args.no_checksums,
        threads: args.threads.map_or(0, usize::from),
        progress: bar::progress(args.quiet),
        cancel: Some(cancel.clone()),
        checkpoint_override: args.moved.checkpoint.clone(),
        ..args.stack.open_options(&args.select)?
    })
}

fn open(args: &Args, options: &OpenOptions) -> anyhow::Result<Arc<Store>> {
    let store = Store::open(&args.store, options)?;
    for warning in store.warnings() {
        warn!("{warning}");
    }
    Ok(Arc::new(store))
}

fn reload(args: &Args, options: &OpenOptions, peer: &Peer) -> anyhow::Result<Arc<Store>> {
    let store = open(args, options)?;
    peer.reload(store.clone())?;
    Ok(store)
}

fn config(args: &Args, store: Arc<Store>, cancel: &Arc<AtomicBool>) -> PeerConfig {
    let mut config = PeerConfig::new(store);
    config.listen.clone_from(&args.listen);
    config.allow_anonymous = args.allow_anonymous;
    config.limits.connections_max = args.max_connections as usize;
    config.limits.connections_per_address_max = args.max_connections_per_address as usize;
    config.limits.handshakes_max = args
        .max_handshakes
        .unwrap_or(args.max_connections.div_ceil(2)) as usize;
    config.limits.client_bytes_max = u64::from(args.client_window_kib) << 10;
    config.limits.frame_timeout = Duration::from_secs(args.request_timeout.into());
    config.limits.keepalive_interval = Duration::from_secs(args.keepalive.into());
    config.limits.handshake_timeout = Duration::from_secs(args.handshake_timeout.into());
    config.limits.send_timeout = Duration::from_secs(args.send_timeout.into());
    config.transfer = args.transfer.into();
    config.restat_interval = Duration::from_millis(args.restat_interval.into());
    config.populate = (!args.no_populate).then(|| PopulateOptions {
        threads: args.threads.map_or(0, usize::from),
        cancel: cancel.clone(),
        progress: (!args.quiet).then(|| Arc::new(log_progress) as Arc<ProgressFn>),
        ..PopulateOptions::default()
    });
    config
}

/// What the flags say about RDMA; `None` for TCP alone.
fn verbs(args: &Args, cancel: &Arc<AtomicBool>) -> anyhow::Result<Option<VerbsOptions>> {
    let mut rails = args.rail.clone();
    if let Some(device) = &args.rdma_dev {
        // Read as any other rail, but a colon belongs to no name.
        let usage = |e: RailSpecError| cli::UsageError(format!("--rdma-dev: {e}"));
        let mut spec: RailSpec = device.parse().map_err(usage)?;
        if spec.port.is_some() || spec.gid_index.is_some() {
            let why = format!("--rdma-dev {device}: only a name; use --rail {device}");
            return Err(cli::UsageError(why).into());
        }
        spec.gid_index = args.rdma_gid;
        rails.push(spec);
    }
    if rails.len() > RAILS_MAX {
        let why = format!("{} times --rail, the limit is {RAILS_MAX}", rails.len());
        return Err(cli::UsageError(why).into());
    }
    let required = match (args.rdma, rails.is_empty()) {
        (Some(RdmaArg::Off), true) => return Ok(None),
        (Some(RdmaArg::Off), false) => {
            let why = "--rdma off contradicts --rail and --rdma-dev; leave one out";
            return Err(cli::UsageError(why.into()).into());
        }
        (Some(RdmaArg::Require), _) | (None, false) => true,
        (Some(RdmaArg::Auto), _) | (None, true) => false,
    };
    let mut options = VerbsOptions::default();
    options.rails = (!rails.is_empty()).then_some(Wanted::Explicit(rails));
    options.required = required;
    options.allow_rw_map = args.allow_rw_map;
    options.max_blade_bytes = args.max_blade_gb;
    options.reserve_bytes = args.reserve_gb;
    options.qps_per_rail_max = args.qps_per_rail;
    options.qps_per_client_max = args.qps_per_client;
    options.reads_per_qp_max = args.read_depth;
    options.reload_grace = Duration::from_millis(args.reload_grace.into());
    options.pkey_index = args.pkey_index;
    options.threads = args.threads.map_or(0, usize::from);
    options.cancel = cancel.clone();
    Ok(Some(options))
}

fn log_progress(done: u64, total: u64) {
    info!(
        "read {} of {} into memory",
        output::human_bytes(done),
        output::human_bytes(total)
    );
}

/// Tells on standard output that the peer is ready, and what a client needs.
fn announce(args: &Args, store: &Store, peer: &Peer) -> anyhow::Result<()> {
    let (mut records, mut bytes) = (0u64, 0u64);
    store.for_each_record(&mut |_, image_bytes| {
        records += 1;
        bytes += image_bytes;
    });
    let reachable: Vec<String> = peer.local_addrs().iter().map(|a| reachable(*a)).collect();
    let stats = peer.stats();
    let info = store.info();
    if args.json {
        let line = json!({
            "listening": reachable.first(),
            "addresses": reachable,
            "pid": std::process::id(),
            "store": args.store,
            "kind": info.kind,
            "stack": info.stack,
            "layers": info.layers.len(),
            "records": records,
            "bytes": bytes,
            "generation": info.generation,
            "content_id": info.content_id,
            "layout_id": info.layout_id,
            "checksums": info.content_id.is_some(),
            "rails": stats.rails.iter().map(|rail| json!({
                "name": rail.name,
                "registered_bytes": rail.registered_bytes,
                "regions": rail.regions,
            })).collect::<Vec<_>>(),
            "mapping": stats.mapping,
            "auth": if args.auth_token_file.is_some() { "token" } else { "none" },
        });
        return output::print(&format!("{line}\n"));
    }
    let kind = match info.kind {
        StoreKind::InPlace => "in place",
        StoreKind::Packed => "packed",
        StoreKind::V1 => "v1",
    };
    let rails: String = stats
        .rails
        .iter()
        .map(|rail| {
            let bytes = output::human_bytes(rail.registered_bytes);
            format!("rail {}: {bytes} readable by RDMA\n", rail.name)
        })
        .collect();
    let mut text = format!(
        "serving {} records, {}, {} layers of {} ({kind}) from {}\n{}\n{rails}\nready; on the model server:\n",
        output::grouped(records),
        output::human_bytes(bytes),
        info.layers.len(),
        info.stack,
        args.store.display(),
        id_text(store),
    );
    let backend = match stats.rails.is_empty() {
        true => "rdma",
        false => "rdma-verbs",
    };
    let token = match &args.auth_token_file {
        Some(path) => {
            let name = path.file_name().unwrap_or(path.as_os_str());
            text.push_str(&format!(
                "  (after copying {} there, with mode 600)\n",
                path.display()
            ));
            format!(" --auth-token-file {}", name.to_string_lossy())
        }
        None => String::new(),
    };
    for address in reachable {
        text.push_str(&format!(
            "  atlas-expert fetch --expert-backend {backend} --expert-peer {address}{token}\n"
        ));
    }
    output::print(&text)
}

fn id_text(store: &Store) -> String {
    match store.content_id() {
        Some(id) => format!("content id {}", hex128(id)),
        None => format!(
            "no checksums: clients cannot verify what they get (layout id {})",
            hex128(store.layout_id())
        ),
    }
}

/// What a client on another machine writes: the host's name where all addresses are listened on.
fn reachable(address: SocketAddr) -> String {
    let name = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = address.ip().is_unspecified().then(name).flatten();
    match name.as_deref().map(str::trim).filter(|n| !n.is_empty()) {
        Some(name) => format!("{name}:{}", address.port()),
        None => address.to_string(),
    }
}
