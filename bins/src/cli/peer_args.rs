//! The flags of `atlas-expert-peer`, here so that manual pages and completions can be made from them.

use std::path::PathBuf;

use atlas_rdma::choose::RailSpec;
use clap::Parser;
use expert_peer::Transfer;

use super::args::{MovedArgs, SelectArgs, StackArgs};

/// How bytes get from files into sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TransferArg {
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

/// Whether one-sided READs are offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RdmaArg {
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
pub struct PeerArgs {
    /// Store or checkpoint to serve
    #[arg(long, value_name = "PATH")]
    pub store: PathBuf,
    /// Address to listen on; may be given several times; port 0 lets the system choose
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9909")]
    pub listen: Vec<String>,
    /// Listen beyond loopback without a token: whoever reaches the port can read the weights
    #[arg(long, conflicts_with = "auth_token_file")]
    pub allow_anonymous: bool,
    /// Serve only clients that know the token in this file, which must be readable by this user alone: at least 16
    /// bytes that nobody can guess. v1 clients cannot be served then
    #[arg(long, value_name = "FILE")]
    pub auth_token_file: Option<PathBuf>,
    /// Make that file where there is none, with 32 random bytes
    #[arg(long, requires = "auth_token_file")]
    pub create_auth_token: bool,
    #[allow(missing_docs)] // text here would become the help of the whole
    #[command(flatten)]
    pub stack: StackArgs,
    #[allow(missing_docs)] // text here would become the help of the whole
    #[command(flatten)]
    pub select: SelectArgs,
    #[allow(missing_docs)] // text here would become the help of the whole
    #[command(flatten)]
    pub moved: MovedArgs,
    /// Do not compute checksums for a bare checkpoint: a quick start, but clients cannot verify anything
    #[arg(long)]
    pub no_checksums: bool,
    /// Read the store into memory before listening; this is the default, and skipped for a store above 80 % of
    /// the available memory
    #[arg(long, overrides_with = "no_populate")]
    pub populate: bool,
    /// Listen at once and read from disk what is asked for
    #[arg(long)]
    pub no_populate: bool,
    /// Threads that hash and read at the start; default: one (hashing) or two (reading) per CPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Connections at once; more are told to come back later
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_connections: u32,
    /// Connections at once from one address
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_connections_per_address: u32,
    /// Connections at once that have not said who they are; default: half of --max-connections
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_handshakes: Option<u32>,
    /// Bytes of answers under way to one client while another wants some, too, over all its connections, in KiB; one
    /// answer is always under way
    #[arg(long, value_name = "KIB", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    pub client_window_kib: u32,
    /// Time for a client to say what it is
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub handshake_timeout: u16,
    /// Time from the first byte of a request to its last
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub request_timeout: u16,
    /// Time between probes of a connection without traffic; three unanswered ones end it
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub keepalive: u16,
    /// Time without progress after which a client that does not read is hung up
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub send_timeout: u16,
    /// Time between looks at the store's files
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(10..=3_600_000))]
    pub restat_interval: u32,

    /// Look so long for the next request after an answer of 256 KiB or less before sleeping, microseconds;
    /// one connection at a time; 0 is never
    #[arg(long, value_name = "US", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub spin_us: u32,
    /// How bytes get from files into sockets
    #[arg(long, value_enum, default_value_t = TransferArg::Auto)]
    pub transfer: TransferArg,
    /// Whether model servers may read the store by one-sided RDMA READs, past this machine's CPU: the store is then
    /// registered, which pins all of it in memory; `require` where --rail or --rdma-dev is given [default: auto]
    #[arg(long, value_enum, value_name = "WHEN")]
    pub rdma: Option<RdmaArg>,
    /// RDMA port to use, and index of its GID (by default looked up by type and address at each connect); may be given
    /// several times, in the order of the rails
    #[arg(long, value_name = "DEV[:PORT[:GID]]")]
    pub rail: Vec<RailSpec>,
    /// The one RDMA device to use, as v1 tools spell it
    #[arg(long, value_name = "DEV", conflicts_with = "rail")]
    pub rdma_dev: Option<String>,
    /// Index of its GID; default: looked up by type and address at each connect
    #[arg(long, value_name = "INDEX", requires = "rdma_dev")]
    pub rdma_gid: Option<u32>,
    /// Where the kernel refuses to register read-only file mappings (before 6.2), map the files read-write instead of
    /// copying them: saves memory, but the kernel writes every page back to the disk and sets the files' times anew
    #[arg(long)]
    pub allow_rw_map: bool,
    /// Memory that registering may pin, counted once for all rails, in GB (10^9 bytes); default: no limit of its own
    #[arg(long, value_name = "GB", value_parser = parse_gb)]
    pub max_blade_gb: Option<u64>,
    /// Memory that must stay available after registering, in GB (10^9 bytes); default: the larger of 8 GB and 8 %, and
    /// for stores below 1 GiB at most a quarter of the memory
    #[arg(long, value_name = "GB", value_parser = parse_gb)]
    pub reserve_gb: Option<u64>,
    /// Queue pairs that one connection may have on one rail
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub qps_per_rail: u8,
    /// Queue pairs that one address may have, over all its connections and rails
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub qps_per_client: u32,
    /// READs under way at once on one queue pair, where the device can do more
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..))]
    pub read_depth: u8,
    /// Index in the RDMA ports' tables of partition keys
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    pub pkey_index: u16,
    /// Time for clients to leave the old store's memory when SIGHUP loads another
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 500, value_parser = clap::value_parser!(u32).range(0..=600_000))]
    pub reload_grace: u32,
    /// Time for answers on their way when the peer is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub shutdown_timeout: u16,
    /// Show Prometheus metrics, /healthz and /readyz over HTTP on this address; of a port alone, on 127.0.0.1. There is
    /// no authentication
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<String>,
    /// Print one line of JSON when ready, for programs
    #[arg(long)]
    pub json: bool,
    /// No reports of progress
    #[arg(short, long)]
    pub quiet: bool,
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
