//! What crosses the network between a model server and an expert peer, without any I/O.
//!
//! * [`Key`] names an expert record; [`limits`] bounds everything that a stranger can announce.
//! * [`v1`] is the frozen first protocol: the codec of its few messages and of its manifest.
//! * [`v1_verbs`] is its queue-pair exchange, [`verbs`] that of protocol v2.
//! * [`frame`] is the frame of protocol v2, [`message`] the messages in those frames.
//! * [`auth`] is the proof that both sides know one token.
//! * [`client`] and [`server`] are the session state machines: bytes in, bytes and events out.
//!   They open no socket and read no clock, so one simulated pair drives all protocol tests.
//!
//! Start with [`message`]. Every integer on the wire is little-endian. `docs/protocol.md` is the
//! description for people who write another implementation.
#![forbid(unsafe_code)]

pub mod auth;
pub mod client;
pub mod frame;
pub mod key;
pub mod limits;
pub mod message;
pub mod server;
pub mod v1;
pub mod v1_verbs;
pub mod verbs;

pub use frame::{FrameHeader, FrameKind};
pub use key::Key;

use thiserror::Error;

/// Why bytes from the other side, or values for it, are not acceptable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The peer sent fewer bytes than the message needs.
    #[error("{what} is {got} bytes long, needs {need}")]
    Short {
        /// The message that was read.
        what: &'static str,
        /// Bytes there.
        got: usize,
        /// Bytes needed.
        need: usize,
    },
    /// A length or a count exceeds its limit.
    #[error("{what} of {got} exceeds the limit of {limit}")]
    TooLarge {
        /// The quantity.
        what: &'static str,
        /// The announced value.
        got: u64,
        /// The largest value that is accepted.
        limit: u64,
    },
    /// A value that has no meaning here.
    #[error("{what} has the unexpected value {got:#x}")]
    Unexpected {
        /// The field.
        what: &'static str,
        /// Its value.
        got: u64,
    },
    /// JSON or text that cannot be read.
    #[error("{what} cannot be read: {why}")]
    Malformed {
        /// The message.
        what: &'static str,
        /// The parser's words.
        why: String,
    },
    /// No version is understood by both sides.
    #[error("peer speaks protocol versions {min} to {max}, this side speaks 2")]
    Version {
        /// Lowest version of the other side.
        min: u16,
        /// Highest version of the other side.
        max: u16,
    },
}
