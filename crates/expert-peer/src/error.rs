//! What keeps a peer from serving.

use std::io;
use std::net::SocketAddr;

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
         authentication; listen on 127.0.0.1, or pass --allow-anonymous on a network that you trust"
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
            Self::System { .. } => true,
            _ => false,
        }
    }
}
