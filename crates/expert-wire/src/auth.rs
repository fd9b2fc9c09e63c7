//! Both sides prove that they know one token, without sending it.
//!
//! ```text
//! client                                            server
//! ClientHello ───────────────────────────────────►
//!             ◄─────────────────────────────────── ServerHello (auth 1), AuthChallenge: nonce
//! AuthResponse: nonce, HMAC("client" + all of it) ►
//!             ◄─────────────────────────────────── AuthProof: HMAC("server" + all of it), Welcome
//! ```
//!
//! The client proves itself first, so that a stranger learns nothing. Both nonces are in both MACs,
//! so that no recorded one fits again; the labels differ, so that none can be sent back to its
//! maker; both hellos are in them, so that role, client, run of the peer and method cannot be
//! exchanged on the way. What follows the handshake is neither encrypted nor authenticated:
//! `docs/security.md`.
//!
//! Nonces are arguments here; the driver takes them from the system's random numbers, anew for
//! every connection.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use thiserror::Error;
use zeroize::{Zeroize, Zeroizing};

use crate::WireError;

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;
/// Bytes of a proof.
pub const MAC_BYTES: usize = 32;
/// Value of [`crate::message::ServerHello::auth`] for this method.
pub const METHOD_TOKEN: u8 = 1;
/// Capability of peers that want a token, in their first message.
pub const CAPABILITY: &str = "auth";
/// Fewest bytes of a token: what hexadecimal digits need for 64 bits.
pub const TOKEN_MIN_BYTES: usize = 16;
/// Most bytes of a token.
pub const TOKEN_MAX_BYTES: usize = 4096;

const KEY_LABEL: &[u8] = b"atlas-expert v2 token\0";
const CLIENT_LABEL: &[u8] = b"atlas-expert v2 client\0";
const SERVER_LABEL: &[u8] = b"atlas-expert v2 server\0";

/// A secret that both sides know. It is shown nowhere, and overwritten when the last copy goes.
#[derive(Clone)]
pub struct Token(Arc<Zeroizing<[u8; 32]>>);

/// Why a text is no token. It never contains the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TokenError {
    /// Too short to be a secret.
    #[error(
        "the token has {bytes} bytes, the fewest are {TOKEN_MIN_BYTES}; use random ones, e.g. of `openssl rand -hex 32`"
    )]
    Short {
        /// Its length without white space around it.
        bytes: usize,
    },
    /// Longer than any secret.
    #[error("the token has {bytes} bytes, the most are {TOKEN_MAX_BYTES}")]
    Long {
        /// Its length without white space around it.
        bytes: usize,
    },
}

impl Token {
    /// The token of a text, white space around it not counted. The text is overwritten.
    ///
    /// Whoever hears a client's handshake can try texts on it at home: only a text that nobody can
    /// guess is a secret, 32 random bytes or as many random letters.
    ///
    /// *Errors*: fewer than [`TOKEN_MIN_BYTES`] or more than [`TOKEN_MAX_BYTES`] bytes.
    pub fn from_text(mut text: Vec<u8>) -> Result<Self, TokenError> {
        let trimmed = text.trim_ascii();
        let bytes = trimmed.len();
        let token = match bytes {
            0..TOKEN_MIN_BYTES => Err(TokenError::Short { bytes }),
            TOKEN_MIN_BYTES..=TOKEN_MAX_BYTES => {
                let mut hash = Sha256::new();
                hash.update(KEY_LABEL);
                hash.update(trimmed);
                Ok(Self(Arc::new(Zeroizing::new(hash.finalize().into()))))
            }
            _ => Err(TokenError::Long { bytes }),
        };
        text.zeroize();
        token
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(not shown)")
    }
}

/// Who proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

/// All that both sides have said, of fixed lengths, as it went over the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transcript {
    pub(crate) server_nonce: [u8; NONCE_BYTES],
    pub(crate) client_nonce: [u8; NONCE_BYTES],
    pub(crate) client_hello: [u8; 32],
    pub(crate) server_hello: [u8; 16],
}

impl Transcript {
    pub(crate) fn prove(&self, token: &Token, side: Side) -> [u8; MAC_BYTES] {
        self.mac(token, side).finalize().into_bytes().into()
    }

    /// Whether `mac` is the side's proof; takes as long for a wrong one as for the right one.
    pub(crate) fn is_proven(&self, token: &Token, side: Side, mac: &[u8; MAC_BYTES]) -> bool {
        self.mac(token, side).verify_slice(mac).is_ok()
    }

    fn mac(&self, token: &Token, side: Side) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&token.0[..]).expect("HMAC takes any key");
        mac.update(match side {
            Side::Client => CLIENT_LABEL,
            Side::Server => SERVER_LABEL,
        });
        mac.update(&self.server_nonce);
        mac.update(&self.client_nonce);
        mac.update(&self.client_hello);
        mac.update(&self.server_hello);
        mac
    }
}

/// The server's question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthChallenge {
    /// Random, never used before.
    pub nonce: [u8; NONCE_BYTES],
}

/// The client's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthResponse {
    /// Random, never used before.
    pub nonce: [u8; NONCE_BYTES],
    /// The client's proof.
    pub mac: [u8; MAC_BYTES],
}

/// The server's answer to that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthProof {
    /// The server's proof.
    pub mac: [u8; MAC_BYTES],
}

impl AuthChallenge {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        self.nonce.to_vec()
    }

    /// Reads it. *Errors*: wrong size.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let nonce = exact("authentication challenge", bytes)?;
        Ok(Self { nonce })
    }
}

impl AuthResponse {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        [self.nonce, self.mac].concat()
    }

    /// Reads it. *Errors*: wrong size.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let both: [u8; NONCE_BYTES + MAC_BYTES] = exact("authentication response", bytes)?;
        let (mut nonce, mut mac) = ([0; NONCE_BYTES], [0; MAC_BYTES]);
        nonce.copy_from_slice(&both[..NONCE_BYTES]);
        mac.copy_from_slice(&both[NONCE_BYTES..]);
        Ok(Self { nonce, mac })
    }
}

impl AuthProof {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        self.mac.to_vec()
    }

    /// Reads it. *Errors*: wrong size.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mac = exact("authentication proof", bytes)?;
        Ok(Self { mac })
    }
}

pub(crate) fn exact<const N: usize>(
    what: &'static str,
    bytes: &[u8],
) -> Result<[u8; N], WireError> {
    bytes.try_into().map_err(|_| match bytes.len() > N {
        true => WireError::TooLarge {
            what,
            got: bytes.len() as u64,
            limit: N as u64,
        },
        false => WireError::Short {
            what,
            got: bytes.len(),
            need: N,
        },
    })
}

#[cfg(test)]
mod tests;
