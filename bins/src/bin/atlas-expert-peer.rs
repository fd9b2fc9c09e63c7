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
use clap::Parser;
use expert_peer::populate::ProgressFn;
use expert_peer::{Peer, PeerConfig, PeerError, PopulateOptions, Source, Transfer};
use expert_store::info::{StoreKind, hex128};
use expert_store::{OpenOptions, Store, StoreError};
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
    /// Listen beyond loopback although there is no authentication: whoever reaches the port can read the weights
    #[arg(long)]
    allow_anonymous: bool,
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
    /// Time for a client to say what it is
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=3600))]
    handshake_timeout: u16,
    /// Time without progress after which a client that does not read is hung up
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=3600))]
    send_timeout: u16,
    /// Time between looks at the store's files
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(10..=3_600_000))]
    restat_interval: u32,
    /// How bytes get from files into sockets
    #[arg(long, value_enum, default_value_t = TransferArg::Auto)]
    transfer: TransferArg,
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

Example:
  atlas-expert-peer --store /models/Qwen3-30B-A3B --listen 192.168.100.2:9909 --allow-anonymous";

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
    expert_peer::raise_open_files_limit();
    expert_peer::check_listen(&args.listen, args.allow_anonymous)?;
    let started = open(args, &options).and_then(|store| {
        let config = config(args, store.clone(), &cancel);
        let peer = Peer::start(config)?;
        Ok((store, peer))
    });
    let (mut store, peer) = match started {
        // An end that was asked for is no failure, early as it is.
        Err(e) if cancel.load(Ordering::SeqCst) && is_interrupt(&e) => return Ok(()),
        other => other?,
    };
    announce(args, &store, peer.local_addrs())?;
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
        "ending: {} connections, {} requests, {} sent",
        stats.connections_accepted,
        stats.requests,
        output::human_bytes(stats.payload_bytes_sent)
    );
    if let Err(e) = peer.shutdown(Duration::from_secs(args.shutdown_timeout.into())) {
        warn!("{e}");
    }
    Ok(())
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
    config.limits.handshakes_max = (args.max_connections as usize).div_ceil(2);
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

fn log_progress(done: u64, total: u64) {
    info!(
        "read {} of {} into memory",
        output::human_bytes(done),
        output::human_bytes(total)
    );
}

/// Tells on standard output that the peer is ready, and what a client needs.
fn announce(args: &Args, store: &Store, addresses: &[SocketAddr]) -> anyhow::Result<()> {
    let (mut records, mut bytes) = (0u64, 0u64);
    store.for_each_record(&mut |_, image_bytes| {
        records += 1;
        bytes += image_bytes;
    });
    let reachable: Vec<String> = addresses.iter().map(|a| reachable(*a)).collect();
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
        });
        return output::print(&format!("{line}\n"));
    }
    let kind = match info.kind {
        StoreKind::InPlace => "in place",
        StoreKind::Packed => "packed",
        StoreKind::V1 => "v1",
    };
    let mut text = format!(
        "serving {} records, {}, {} layers of {} ({kind}) from {}\n{}\n\nready; on the model server:\n",
        output::grouped(records),
        output::human_bytes(bytes),
        info.layers.len(),
        info.stack,
        args.store.display(),
        id_text(store),
    );
    for address in reachable {
        text.push_str(&format!(
            "  atlas-expert fetch --expert-backend rdma --expert-peer {address}\n"
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
