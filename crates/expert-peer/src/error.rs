//! What keeps a peer from serving.

use std::io;
use std::net::SocketAddr;

use atlas_rdma::RdmaError;
use atlas_rdma::choose::{ChooseError, GidRefusal};
use atlas_rdma::publish::PublishError;
use thiserror::Error;

/// An error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The caller gave no address to listen on, or one that cannot be read.
    #[error("listen address {address:?}: {why}; write HOST:PORT, e.g. 127.0.0.1:9909")]
    Address {
        /// As given.
        address: String,
        /// What is wrong.
        why: String,
    },
    /// An address that strangers can reach, without authentication.
    #[error(
        "refusing to listen on {address}: whoever reaches it can read the weights, as there is no \
         authentication; pass --auth-token-file FILE (--create-auth-token makes one), listen on \
         127.0.0.1, or pass --allow-anonymous on a network that you trust"
    )]
    Anonymous {
        /// The address.
        address: SocketAddr,
    },
    /// The system does not let the peer listen.
    #[error("listening on {address} failed ({hint}): {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's words.
        #[source]
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// Threads or file descriptors that a peer needs.
    #[error("{what}: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The system's words.
        #[source]
        source: io::Error,
    },
    /// The store cannot be served.
    #[error("the store cannot be served: {0}")]
    Store(String),
    /// A device, port or queue pair does not do what it should.
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    /// The rails that were asked for are not there.
    #[error(transparent)]
    Rails(#[from] ChooseError),
    /// A rail has no GID to use now.
    #[error("rail {rail}: {source}")]
    Gid {
        /// Its name.
        rail: String,
        /// What its port has.
        #[source]
        source: GidRefusal,
    },
    /// A rail without a link.
    #[error(
        "rail {rail}: its port is {state}, not active; connect the link or bring its interface up"
    )]
    LinkDown {
        /// Its name.
        rail: String,
        /// What the device says.
        state: String,
    },
    /// The store's memory was not registered.
    #[error("the store cannot be registered for READs: {0}")]
    Publish(#[from] PublishError),
    /// More than the caller lets a store pin.
    #[error(
        "registering the store pins {need_bytes} bytes{}, the limit is {limit_bytes}; raise \
         --max-blade-gb, or serve TCP alone with --rdma off", beside(*beside_bytes)
    )]
    BladeTooLarge {
        /// Bytes of the store, counted once for all rails.
        need_bytes: u64,
        /// Bytes of the store before it, which stay meanwhile.
        beside_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Less memory than it takes.
    #[error(
        "registering the store pins {need_bytes} bytes, and {available_bytes} bytes of memory are \
         available of which {reserve_bytes} must stay free; serve fewer layers, lower the reserve \
         (--reserve-gb), or serve TCP alone with --rdma off"
    )]
    MemoryShort {
        /// Bytes that would be pinned.
        need_bytes: u64,
        /// Bytes that can be had.
        available_bytes: u64,
        /// Bytes that stay free.
        reserve_bytes: u64,
    },
    /// A store in more pieces than an answer can list.
    #[error(
        "the store lies in {regions} pieces, the limit is {}; pack it with 'atlas-expert pack'",
        expert_wire::limits::REGIONS_MAX
    )]
    TooManyRegions {
        /// Pieces of one rail.
        regions: usize,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Connections did not end in time.
    #[error(
        "{threads} threads did not end within {deadline_ms} ms; they hold their connections until the process ends"
    )]
    ShutdownTimeout {
        /// Threads that still run.
        threads: usize,
        /// The deadline.
        deadline_ms: u128,
    },
}

impl PeerError {
    /// Whether the same call can succeed later without a change by the caller.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Listen { source, .. } => source.kind() == io::ErrorKind::AddrInUse,
            Self::System { .. } | Self::MemoryShort { .. } | Self::LinkDown { .. } => true,
            Self::Rdma(e) => e.is_retryable(),
            _ => false,
        }
    }
}

fn beside(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        n => format!(" beside the {n} of the store that is served now"),
    }
}
