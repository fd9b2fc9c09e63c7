//! The server that makes the records of an expert store readable over TCP and one-sided READs.
//!
//! * [`Peer::start`] listens and serves until [`Peer::shutdown`]; [`PeerConfig`] says what and how.
//! * [`Source`] is what a peer needs of a store; `expert_store::Store` is one.
//! * [`populate`] reads a store into the page cache.
//! * [`StatusPages`] shows metrics, health and readiness over HTTP.
//! * [`VerbsOptions`] makes the store's memory readable by RDMA, on all rails of the machine.
//!
//! Not here: the protocol (`expert_wire::server`), the store's formats (`expert_store`), the client.
//!
//! *Threads*: one acceptor, one watcher of the store's files, and one per connection, all bounded
//! by [`Limits`]. Connections send in turns, by clients and bytes (`shares`). Each wait ends at a deadline or at a wake-up, so that [`Peer::shutdown`] is
//! bounded from any state; dropping a [`Peer`] shuts it down. One-sided READs need no thread.
//!
//! *Invariant*: an answer has exactly the bytes of the store that the client planned with, or the
//! connection ends before the answer is whole. A file is looked at before each answer, and again
//! before its last bytes go out; one that is not the file that was opened is never read again.
//! What the looks cannot see, a file's change while its pages wait in a socket, is left only to
//! clients with checksums; the others get copies.
//!
//! The process must ignore `SIGPIPE` (Rust programs do): `sendfile` has no flag against it.
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate self as expert_peer;

mod accept;
mod config;
mod connection;
mod epoch;
mod error;
mod extents;
mod look;
mod metrics;
mod net;
mod peer;
pub mod populate;
mod refusal;
mod reload;
mod send;
mod shares;
mod source;
mod stats;
mod status;
mod store;
mod unreadable;
mod verbs;
mod watch;

pub use config::{Limits, PeerConfig, Transfer};
pub use error::PeerError;
pub use expert_wire::auth::Token;
pub use net::{check_listen, raise_open_files_limit};
pub use peer::Peer;
pub use populate::{PopulateOptions, PopulateReport};
pub use refusal::Refusal;
pub use source::{FilePiece, Source, SourceError};
pub use stats::{PeerStats, RailStats};
pub use status::{Monitor, StatusPages};
pub use verbs::VerbsOptions;
