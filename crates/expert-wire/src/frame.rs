//! The frame of protocol v2: a fixed header, then the payload.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{WireError, limits};

/// Bytes of a frame header on the wire.
pub const HEADER_BYTES: usize = 16;

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum FrameKind {
    /// Client's first frame: [`crate::message::ClientHello`].
    ClientHello = 1,
    /// Server's answer: [`crate::message::ServerHello`].
    ServerHello = 2,
    /// Server's last handshake frame: [`crate::message::Welcome`].
    Welcome = 3,
    /// Client asks for the store's description; empty payload.
    StoreInfo = 4,
    /// Answer to `StoreInfo`: JSON, see `expert_store::info`.
    StoreInfoReply = 5,
    /// Client asks for one layer of the catalogue: [`crate::message::CatalogueRequest`].
    Catalogue = 6,
    /// Answer to `Catalogue`: the layer's blob, see `docs/store.md`.
    CatalogueReply = 7,
    /// Client asks for bytes of a record image: [`crate::message::ReadRequest`].
    Read = 8,
    /// Answer to `Read`: exactly the bytes asked for.
    Data = 9,
    /// Any request's other answer, or (id 0) the reason of a hang-up: [`crate::message::ErrorFrame`].
    Error = 10,
    /// Keep-alive question; either side; any payload of at most 64 bytes.
    Ping = 11,
    /// Its answer with the same payload.
    Pong = 12,
    /// Orderly end; empty payload.
    Goodbye = 13,
    /// Server tells that its store changed: [`crate::message::Welcome`] with the new identity.
    StoreChanged = 14,
    /// Client reports a chunk whose checksum did not fit: [`crate::message::ChecksumReport`].
    ChecksumReport = 15,
    /// Client asks which rails the peer has; empty payload.
    Rails = 16,
    /// Answer to `Rails`: [`crate::verbs::RailInfo`]s.
    RailsReply = 17,
    /// Client opens a rail: [`crate::verbs::OpenRail`].
    OpenRail = 18,
    /// Answer to `OpenRail`: [`crate::verbs::RailOpened`].
    RailOpened = 19,
    /// Server asks the client to prove that it knows the token: [`crate::auth::AuthChallenge`].
    AuthChallenge = 20,
    /// Client's proof: [`crate::auth::AuthResponse`].
    AuthResponse = 21,
    /// Server's own proof: [`crate::auth::AuthProof`].
    AuthProof = 22,
}

impl FrameKind {
    fn from_code(code: u16) -> Option<Self> {
        use FrameKind::*;
        Some(match code {
            1 => ClientHello,
            2 => ServerHello,
            3 => Welcome,
            4 => StoreInfo,
            5 => StoreInfoReply,
            6 => Catalogue,
            7 => CatalogueReply,
            8 => Read,
            9 => Data,
            10 => Error,
            11 => Ping,
            12 => Pong,
            13 => Goodbye,
            14 => StoreChanged,
            15 => ChecksumReport,
            16 => Rails,
            17 => RailsReply,
            18 => OpenRail,
            19 => RailOpened,
            20 => AuthChallenge,
            21 => AuthResponse,
            22 => AuthProof,
            _ => return None,
        })
    }
}

/// A frame's header in host form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes after the header.
    pub payload_bytes: u32,
    /// What they are.
    pub kind: FrameKind,
    /// Chosen by the asking side, repeated in the answer; 0 where nothing was asked.
    pub id: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHeader {
    payload_bytes: U32,
    kind: U16,
    reserved: U16,
    id: U64,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);

impl FrameHeader {
    /// The header as it goes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let raw = RawHeader {
            payload_bytes: U32::new(self.payload_bytes),
            kind: U16::new(self.kind as u16),
            reserved: U16::ZERO,
            id: U64::new(self.id),
        };
        let mut out = [0; HEADER_BYTES];
        out.copy_from_slice(raw.as_bytes());
        out
    }

    /// Reads a header and checks kind, reserved field and `payload_bytes <= max_bytes`.
    ///
    /// DATA has a limit of its own, [`limits::READ_MAX_BYTES`], whatever `max_bytes` is: its payload
    /// goes to memory that is there already. A side that expects no DATA refuses the kind.
    ///
    /// *Errors*: [`WireError::Unexpected`] for a kind that is unknown or a reserved field that is
    /// not zero, [`WireError::TooLarge`]; the connection has no frame boundary any more after
    /// either, so hang up.
    pub fn decode(bytes: &[u8; HEADER_BYTES], max_bytes: u32) -> Result<Self, WireError> {
        let raw = RawHeader::read_from_bytes(bytes).expect("the length is in the type");
        let kind = FrameKind::from_code(raw.kind.get()).ok_or(WireError::Unexpected {
            what: "frame kind",
            got: u64::from(raw.kind.get()),
        })?;
        if raw.reserved != U16::ZERO {
            return Err(WireError::Unexpected {
                what: "reserved header field",
                got: u64::from(raw.reserved.get()),
            });
        }
        let payload_bytes = raw.payload_bytes.get();
        let max_bytes = match kind {
            FrameKind::Data => limits::READ_MAX_BYTES,
            _ => max_bytes,
        };
        if payload_bytes > max_bytes {
            return Err(WireError::TooLarge {
                what: "frame payload bytes",
                got: u64::from(payload_bytes),
                limit: u64::from(max_bytes),
            });
        }
        Ok(Self {
            payload_bytes,
            kind,
            id: raw.id.get(),
        })
    }
}

/// Appends a whole frame to `out`.
pub fn push_frame(out: &mut Vec<u8>, kind: FrameKind, id: u64, payload: &[u8]) {
    let payload_bytes =
        u32::try_from(payload.len()).expect("frames are bounded by FRAME_MAX_BYTES");
    out.extend_from_slice(
        &FrameHeader {
            payload_bytes,
            kind,
            id,
        }
        .encode(),
    );
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_sixteen_bytes_decode_or_fail_and_reencode_equal(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = FrameHeader::decode(&bytes, limits::FRAME_MAX_BYTES) {
                prop_assert_eq!(header.encode(), bytes);
                prop_assert!(header.payload_bytes <= limits::FRAME_MAX_BYTES);
            }
        }
    }

    #[test]
    fn header_over_its_limit_is_refused() {
        let bytes = FrameHeader {
            payload_bytes: 65,
            kind: FrameKind::Ping,
            id: 7,
        }
        .encode();
        assert!(FrameHeader::decode(&bytes, 65).is_ok());
        assert!(matches!(
            FrameHeader::decode(&bytes, 64),
            Err(WireError::TooLarge {
                got: 65,
                limit: 64,
                ..
            })
        ));
    }
}
