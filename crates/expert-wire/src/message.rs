//! The messages of protocol v2, as fixed little-endian layouts.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{Key, WireError, limits};

/// First four bytes of a client's hello: "AXP2".
pub const MAGIC: u32 = u32::from_le_bytes(*b"AXP2");
/// The protocol version that this crate speaks in v2 frames.
pub const VERSION: u16 = 2;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// Catalogue, pings and notices; one per client.
    Control = 0,
    /// READ requests; several per client.
    Stream = 1,
}

/// The client's first frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientHello {
    /// Lowest version it speaks.
    pub version_min: u16,
    /// Highest version it speaks.
    pub version_max: u16,
    /// Random; joins the connections of one client.
    pub client_id: u64,
    /// What this connection is for.
    pub role: Role,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawClientHello {
    magic: U32,
    version_min: U16,
    version_max: U16,
    client_id: U64,
    role: u8,
    reserved: [u8; 15],
}

/// The server's answer to [`ClientHello`]; says nothing about the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerHello {
    /// The version chosen, within the client's range.
    pub version: u16,
    /// 0: no authentication; [`crate::auth::METHOD_TOKEN`]; further values belong to later versions.
    pub auth: u8,
    /// Random number of this run of the peer.
    pub instance_id: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawServerHello {
    version: U16,
    auth: u8,
    reserved: [u8; 5],
    instance_id: U64,
}

/// The identity of what is served now; ends the handshake, and is sent again on a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Random number of this run of the peer.
    pub instance_id: u64,
    /// Grows each time this run of the peer takes up other content; goes into every READ.
    pub epoch: u32,
    /// Largest READ that is answered, bytes.
    pub read_max_bytes: u32,
    /// Generation of the store, as in its manifest.
    pub generation: u64,
    /// Content id; `None` where the store has no checksums.
    pub content_id: Option<u128>,
    /// Content id of the same catalogue without checksums.
    pub layout_id: u128,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawWelcome {
    instance_id: U64,
    epoch: U32,
    read_max_bytes: U32,
    generation: U64,
    has_content_id: u8,
    reserved: [u8; 7],
    content_id: [u8; 16],
    layout_id: [u8; 16],
}

/// Asks for one layer of the catalogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CatalogueRequest {
    /// Dense layer index.
    pub layer: u32,
    /// Sum of [`SECTION_SEGMENTS`], [`SECTION_CHECKSUMS`] and [`SECTION_REST`]: which columns to send
    /// beside the head.
    pub sections: u32,
}

/// Section bit: where each leaf lies on the peer (needed for one-sided READs only).
pub const SECTION_SEGMENTS: u32 = 1;
/// Section bit: chunk checksums.
pub const SECTION_CHECKSUMS: u32 = 2;
/// Identities of the layer's records that a part of a model does not hold. Asked only of a peer whose
/// description names a whole.
pub const SECTION_REST: u32 = 4;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawCatalogueRequest {
    layer: U32,
    sections: U32,
}

/// Asks for `bytes` bytes of a record image, from `offset` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest {
    /// The record.
    pub key: Key,
    /// Epoch of the [`Welcome`] that the client planned with.
    pub epoch: u32,
    /// Number of bytes, 1 to [`limits::READ_MAX_BYTES`].
    pub bytes: u32,
    /// First byte in the record image.
    pub offset: u64,
}

/// Bytes of a [`ReadRequest`] on the wire.
pub const READ_REQUEST_BYTES: usize = 24;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawReadRequest {
    layer: U32,
    expert: U32,
    epoch: U32,
    bytes: U32,
    offset: U64,
}

/// A client's report that a chunk arrived with another checksum than the catalogue's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChecksumReport {
    /// The record.
    pub key: Key,
    /// Index of the chunk in the record image.
    pub chunk: u32,
    /// Epoch that it was read under.
    pub epoch: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawChecksumReport {
    layer: U32,
    expert: U32,
    chunk: U32,
    epoch: U32,
}

const _: () = assert!(size_of::<RawClientHello>() == 32);
const _: () = assert!(size_of::<RawServerHello>() == 16);
const _: () = assert!(size_of::<RawWelcome>() == 64);
const _: () = assert!(size_of::<RawCatalogueRequest>() == 8);
const _: () = assert!(size_of::<RawReadRequest>() == READ_REQUEST_BYTES);
const _: () = assert!(size_of::<RawChecksumReport>() == 16);

/// Why a request or a connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum ErrorCode {
    /// A frame that could not be read or was not expected now.
    BadFrame = 1,
    /// No common protocol version.
    UnsupportedVersion = 2,
    /// The store has no such layer.
    NoSuchLayer = 3,
    /// The layer has no such expert.
    NoSuchExpert = 4,
    /// A zero expert: its output is its input, there is no record.
    IdentityExpert = 5,
    /// Offset and length do not lie within the record image, or the length is 0 or too large.
    BadRange = 6,
    /// The store is another one than the READ was planned with.
    StoreChanged = 7,
    /// A limit on connections, handshakes or requests; come back later.
    Busy = 8,
    /// The peer is going down.
    ShuttingDown = 9,
    /// Authentication failed or is missing.
    Unauthorized = 10,
    /// The handshake or a frame took too long.
    Timeout = 11,
    /// The file below the record changed or cannot be read.
    StoreUnreadable = 12,
    /// A fault of the peer.
    Internal = 13,
    /// The peer has no such rail.
    NoSuchRail = 14,
    /// The rail cannot be opened now: no queue pairs, no memory registered, no link.
    RailUnavailable = 15,
}

impl ErrorCode {
    /// The code that a number on the wire stands for; unknown ones read as [`ErrorCode::Internal`].
    pub fn from_wire(code: u16) -> Self {
        use ErrorCode::*;
        match code {
            1 => BadFrame,
            2 => UnsupportedVersion,
            3 => NoSuchLayer,
            4 => NoSuchExpert,
            5 => IdentityExpert,
            6 => BadRange,
            7 => StoreChanged,
            8 => Busy,
            9 => ShuttingDown,
            10 => Unauthorized,
            11 => Timeout,
            12 => StoreUnreadable,
            14 => NoSuchRail,
            15 => RailUnavailable,
            _ => Internal,
        }
    }

    /// Whether the same request can succeed later without a change by the client.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            ErrorCode::Busy
                | ErrorCode::ShuttingDown
                | ErrorCode::Timeout
                | ErrorCode::StoreChanged
                | ErrorCode::RailUnavailable
        )
    }
}

/// A typed refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorFrame {
    /// What kind.
    pub code: ErrorCode,
    /// Whether the sender thinks that a retry can help.
    pub retryable: bool,
    /// For people; at most [`limits::ERROR_TEXT_MAX_BYTES`].
    pub message: String,
}

fn exact<T: FromBytes + Unaligned + KnownLayout + Immutable>(
    what: &'static str,
    bytes: &[u8],
) -> Result<T, WireError> {
    if bytes.len() > size_of::<T>() {
        return Err(WireError::TooLarge {
            what,
            got: bytes.len() as u64,
            limit: size_of::<T>() as u64,
        });
    }
    T::read_from_bytes(bytes).map_err(|_| WireError::Short {
        what,
        got: bytes.len(),
        need: size_of::<T>(),
    })
}

impl ClientHello {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        RawClientHello {
            magic: U32::new(MAGIC),
            version_min: U16::new(self.version_min),
            version_max: U16::new(self.version_max),
            client_id: U64::new(self.client_id),
            role: self.role as u8,
            reserved: [0; 15],
        }
        .as_bytes()
        .to_vec()
    }

    /// Reads it. *Errors*: wrong size, magic or role. The version is the caller's to check.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let raw: RawClientHello = exact("client hello", bytes)?;
        if raw.magic.get() != MAGIC {
            return Err(WireError::Unexpected {
                what: "hello magic",
                got: u64::from(raw.magic.get()),
            });
        }
        let role = match raw.role {
            0 => Role::Control,
            1 => Role::Stream,
            other => {
                return Err(WireError::Unexpected {
                    what: "connection role",
                    got: u64::from(other),
                });
            }
        };
        Ok(Self {
            version_min: raw.version_min.get(),
            version_max: raw.version_max.get(),
            client_id: raw.client_id.get(),
            role,
        })
    }
}

impl ServerHello {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        RawServerHello {
            version: U16::new(self.version),
            auth: self.auth,
            reserved: [0; 5],
            instance_id: U64::new(self.instance_id),
        }
        .as_bytes()
        .to_vec()
    }

    /// Reads it. *Errors*: wrong size, or a version that this side does not speak.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let raw: RawServerHello = exact("server hello", bytes)?;
        let version = raw.version.get();
        if version != VERSION {
            return Err(WireError::Version {
                min: version,
                max: version,
            });
        }
        Ok(Self {
            version,
            auth: raw.auth,
            instance_id: raw.instance_id.get(),
        })
    }
}

impl Welcome {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        RawWelcome {
            instance_id: U64::new(self.instance_id),
            epoch: U32::new(self.epoch),
            read_max_bytes: U32::new(self.read_max_bytes),
            generation: U64::new(self.generation),
            has_content_id: u8::from(self.content_id.is_some()),
            reserved: [0; 7],
            content_id: self.content_id.unwrap_or(0).to_le_bytes(),
            layout_id: self.layout_id.to_le_bytes(),
        }
        .as_bytes()
        .to_vec()
    }

    /// Reads it. *Errors*: wrong size, a flag other than 0 or 1, a READ limit of 0.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let raw: RawWelcome = exact("welcome", bytes)?;
        let content_id = match raw.has_content_id {
            0 => None,
            1 => Some(u128::from_le_bytes(raw.content_id)),
            other => {
                return Err(WireError::Unexpected {
                    what: "content id flag",
                    got: u64::from(other),
                });
            }
        };
        if raw.read_max_bytes.get() == 0 {
            return Err(WireError::Unexpected {
                what: "largest READ",
                got: 0,
            });
        }
        Ok(Self {
            instance_id: raw.instance_id.get(),
            epoch: raw.epoch.get(),
            read_max_bytes: raw.read_max_bytes.get().min(limits::READ_MAX_BYTES),
            generation: raw.generation.get(),
            content_id,
            layout_id: u128::from_le_bytes(raw.layout_id),
        })
    }
}

impl CatalogueRequest {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        RawCatalogueRequest {
            layer: U32::new(self.layer),
            sections: U32::new(self.sections),
        }
        .as_bytes()
        .to_vec()
    }

    /// Reads it. *Errors*: wrong size or an unknown section bit.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let raw: RawCatalogueRequest = exact("catalogue request", bytes)?;
        if raw.sections.get() & !(SECTION_SEGMENTS | SECTION_CHECKSUMS | SECTION_REST) != 0 {
            return Err(WireError::Unexpected {
                what: "catalogue sections",
                got: u64::from(raw.sections.get()),
            });
        }
        Ok(Self {
            layer: raw.layer.get(),
            sections: raw.sections.get(),
        })
    }
}

impl ReadRequest {
    /// The payload of its frame.
    pub fn encode(&self) -> [u8; READ_REQUEST_BYTES] {
        let raw = RawReadRequest {
            layer: U32::new(self.key.layer),
            expert: U32::new(self.key.expert),
            epoch: U32::new(self.epoch),
            bytes: U32::new(self.bytes),
            offset: U64::new(self.offset),
        };
        let mut out = [0; READ_REQUEST_BYTES];
        out.copy_from_slice(raw.as_bytes());
        out
    }

    /// Reads it. *Errors*: wrong size. Range and key are checked against the store by the server.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let raw: RawReadRequest = exact("read request", bytes)?;
        Ok(Self {
            key: Key::new(raw.layer.get(), raw.expert.get()),
            epoch: raw.epoch.get(),
            bytes: raw.bytes.get(),
            offset: raw.offset.get(),
        })
    }
}

impl ChecksumReport {
    /// The payload of its frame.
    pub fn encode(&self) -> Vec<u8> {
        RawChecksumReport {
            layer: U32::new(self.key.layer),
            expert: U32::new(self.key.expert),
            chunk: U32::new(self.chunk),
            epoch: U32::new(self.epoch),
        }
        .as_bytes()
        .to_vec()
    }

    /// Reads it. *Errors*: wrong size.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let raw: RawChecksumReport = exact("checksum report", bytes)?;
        Ok(Self {
            key: Key::new(raw.layer.get(), raw.expert.get()),
            chunk: raw.chunk.get(),
            epoch: raw.epoch.get(),
        })
    }
}

impl ErrorFrame {
    /// An error frame whose text is cut to the limit.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let mut message = message.into();
        let mut end = message.len().min(limits::ERROR_TEXT_MAX_BYTES);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        Self {
            code,
            retryable: code.is_retryable(),
            message,
        }
    }

    /// The payload of its frame: `u16 code, u8 retryable, u8 0`, then UTF-8 text.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4 + self.message.len());
        out.extend_from_slice(&(self.code as u16).to_le_bytes());
        out.extend_from_slice(&[u8::from(self.retryable), 0]);
        out.extend_from_slice(self.message.as_bytes());
        out
    }

    /// Reads it; text that is not UTF-8 is shown with replacement characters, control characters
    /// as `?`. *Errors*: too short or too long.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.len() < 4 {
            return Err(WireError::Short {
                what: "error frame",
                got: bytes.len(),
                need: 4,
            });
        }
        let text = &bytes[4..];
        if text.len() > limits::ERROR_TEXT_MAX_BYTES {
            return Err(WireError::TooLarge {
                what: "error text bytes",
                got: text.len() as u64,
                limit: limits::ERROR_TEXT_MAX_BYTES as u64,
            });
        }
        let message: String = String::from_utf8_lossy(text)
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        // Cut again: a byte that is no text takes three as a replacement character.
        let code = ErrorCode::from_wire(u16::from_le_bytes([bytes[0], bytes[1]]));
        Ok(Self {
            retryable: bytes[2] != 0,
            ..Self::new(code, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_that_is_no_utf8_stays_within_its_limit() {
        let mut bytes = vec![8, 0, 1, 0];
        bytes.resize(4 + limits::ERROR_TEXT_MAX_BYTES, 0xff);
        let frame = ErrorFrame::decode(&bytes).unwrap();
        assert_eq!((frame.code, frame.retryable), (ErrorCode::Busy, true));
        assert!(frame.message.len() <= limits::ERROR_TEXT_MAX_BYTES);
        assert_eq!(ErrorFrame::decode(&frame.encode()), Ok(frame));
    }
}
