//! Serves an expert store to model servers; see `atlas-expert-peer --help`.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use atlas_expert::cli::peer_args::{PeerArgs, RdmaArg};
use atlas_expert::cli::{self, bar, output, signals};
use atlas_rdma::choose::{ChooseError, RAILS_MAX, RailSpec, RailSpecError, Wanted};
use clap::Parser;
use expert_metrics::http;
use expert_peer::populate::ProgressFn;
use expert_peer::{
    Peer, PeerConfig, PeerError, PopulateOptions, Source, StatusPages, VerbsOptions,
};
use expert_store::info::{StoreKind, hex128};
use expert_store::token_file;
use expert_store::{OpenOptions, Store, StoreError};
use expert_wire::auth::Token;
use rustix::rand::GetRandomFlags;
use sd_notify::NotifyState;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{error, info, warn};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

fn main() -> ExitCode {
    let args = match PeerArgs::try_parse() {
        Ok(args) => args,
        Err(e) => return cli::no_command("atlas-expert-peer", &e),
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

fn run(args: &PeerArgs) -> anyhow::Result<()> {
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
    let pages = StatusPages::new();
    let status = status_server(args, &pages)?;
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
    pages.watch(&peer);
    announce(args, &store, &peer, status.as_ref())?;
    tell_systemd(NotifyState::Ready);
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
    tell_systemd(NotifyState::Stopping);
    let stats = peer.stats();
    info!(
        "ending: {} connections, {} turned away ({} of them unauthorized), {} requests, {} sent",
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
fn token(args: &PeerArgs) -> anyhow::Result<Option<Token>> {
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

/// The pages of `--metrics`; they are there from before the store is opened.
fn status_server(
    args: &PeerArgs,
    pages: &Arc<StatusPages>,
) -> anyhow::Result<Option<http::Server>> {
    let Some(address) = &args.metrics else {
        return Ok(None);
    };
    let pages = pages.clone();
    match http::Server::start(address, Arc::new(move |path: &str| pages.get(path))) {
        Ok(server) => {
            let at = server.local_addr();
            info!("metrics on http://{at}/metrics");
            if !at.ip().to_canonical().is_loopback() {
                warn!("whoever reaches {at} can read the metrics: there is no authentication");
            }
            Ok(Some(server))
        }
        Err(e) if e.kind() == ErrorKind::InvalidInput => {
            let why = format!("--metrics {address}: {e}; write HOST:PORT, or a port alone");
            Err(cli::UsageError(why).into())
        }
        Err(e) => Err(e).with_context(|| format!("listening on {address} (--metrics)")),
    }
}

/// Tells the service manager, where one waits for it; else does nothing.
fn tell_systemd(state: NotifyState<'_>) {
    if let Err(e) = sd_notify::notify(&[state]) {
        warn!("telling systemd: {e}");
    }
}

fn is_interrupt(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(StoreError::Interrupted))
        || matches!(error.downcast_ref(), Some(PeerError::Interrupted))
}

fn open_options(args: &PeerArgs, cancel: &Arc<AtomicBool>) -> anyhow::Result<OpenOptions> {
    Ok(OpenOptions {
        checksums: !args.no_checksums,
        threads: args.threads.map_or(0, usize::from),
        progress: bar::progress(args.quiet),
        cancel: Some(cancel.clone()),
        checkpoint_override: args.moved.checkpoint.clone(),
        ..args.stack.open_options(&args.select)?
    })
}

fn open(args: &PeerArgs, options: &OpenOptions) -> anyhow::Result<Arc<Store>> {
    let store = Store::open(&args.store, options)?;
    for warning in store.warnings() {
        warn!("{warning}");
    }
    Ok(Arc::new(store))
}

fn reload(args: &PeerArgs, options: &OpenOptions, peer: &Peer) -> anyhow::Result<Arc<Store>> {
    let store = open(args, options).inspect_err(|_| peer.note_failed_reload())?;
    peer.reload(store.clone())?;
    Ok(store)
}

fn config(args: &PeerArgs, store: Arc<Store>, cancel: &Arc<AtomicBool>) -> PeerConfig {
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
    config.spin = Duration::from_micros(args.spin_us.into());
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
fn verbs(args: &PeerArgs, cancel: &Arc<AtomicBool>) -> anyhow::Result<Option<VerbsOptions>> {
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
fn announce(
    args: &PeerArgs,
    store: &Store,
    peer: &Peer,
    status: Option<&http::Server>,
) -> anyhow::Result<()> {
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
            "metrics": status.map(|s| s.local_addr().to_string()),
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
