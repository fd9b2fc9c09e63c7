//! Why a server's session ends.

use thiserror::Error;

use crate::WireError;
use crate::frame::FrameKind;
use crate::message::{ErrorCode, VERSION};

/// Why the server ends a session.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// Mode byte 1.
    #[error(
        "the client asked for v1 verbs (mode byte 1), which this peer does not serve from this store"
    )]
    VerbsUnsupported,
    /// Mode byte 0 where there is no v1 manifest.
    #[error("the client asked for the v1 TCP mode, which this store cannot serve")]
    V1Unavailable,
    /// Another mode byte.
    #[error("unknown mode byte {0}")]
    UnknownMode(u8),
    /// No common version.
    #[error("the client speaks versions {min} to {max}, this peer speaks {VERSION}")]
    Version {
        /// Lowest version of the client.
        min: u16,
        /// Highest version of the client.
        max: u16,
    },
    /// A frame that cannot be read.
    #[error(transparent)]
    BadFrame(#[from] WireError),
    /// A frame that a client does not send, or not now.
    #[error("a frame of kind {0:?} is not expected now")]
    UnexpectedFrame(FrameKind),
    /// A request whose id is that of notices.
    #[error("request id 0 is reserved")]
    ZeroId,
    /// A v1 client where a token is wanted.
    #[error("the client asked for v1, which has no authentication, and this peer wants a token")]
    V1NeedsNoToken,
    /// A proof that does not fit: another token, or bytes from another session.
    #[error(
        "the client's proof is wrong: its token is another one than this peer's; give it the peer's token file (--auth-token-file)"
    )]
    WrongToken,
    /// Something else where a proof was due.
    #[error("a proof of the token is due before a frame of kind {0:?} (--auth-token-file)")]
    NoProof(FrameKind),
}

impl CloseReason {
    /// What a v2 client is told.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Version { .. } => ErrorCode::UnsupportedVersion,
            Self::WrongToken | Self::NoProof(_) | Self::V1NeedsNoToken => ErrorCode::Unauthorized,
            _ => ErrorCode::BadFrame,
        }
    }
}
