//! The queue-pair exchange of the frozen protocol (mode byte 1).
//!
//! ```text
//! client: u8 n_rails ─► server: its rails ─► client: its rails ─► server: u8 0 ─► silence
//! ```
//!
//! Remote address of a record: `base[layer] + expert * record_stride`; one region per layer and
//! rail. Queue pairs use port 1, pkey index 0, each side's own active MTU, READ depth 16.

use crate::verbs::U24_MAX;
use crate::{WireError, limits};

/// Bytes of one client rail.
pub const CLIENT_RAIL_BYTES: usize = 24;
/// READ depth of v1 queue pairs, both ways.
pub const READS_MAX: u8 = 16;

/// A queue pair of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct V1Endpoint {
    /// Number, 24 bits.
    pub qpn: u32,
    /// First PSN, 24 bits.
    pub psn: u32,
    /// GID.
    pub gid: [u8; 16],
}

/// A layer's region on one rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct V1Region {
    /// Address of record 0.
    pub base: u64,
    /// Key for READs.
    pub rkey: u32,
}

/// A rail of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct V1Rail {
    /// Its queue pair for this client.
    pub endpoint: V1Endpoint,
    /// One per layer.
    pub layers: Vec<V1Region>,
}

impl V1Endpoint {
    fn push(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.qpn.to_le_bytes());
        out.extend_from_slice(&self.psn.to_le_bytes());
        out.extend_from_slice(&self.gid);
    }

    fn read(bytes: &[u8; CLIENT_RAIL_BYTES]) -> Result<Self, WireError> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (qpn, psn) = (word(0), word(4));
        for (what, got) in [("queue pair number", qpn), ("PSN", psn)] {
            if got > U24_MAX {
                return Err(WireError::TooLarge {
                    what,
                    got: got.into(),
                    limit: U24_MAX.into(),
                });
            }
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[8..]);
        Ok(Self { qpn, psn, gid })
    }
}

/// Step b: the server's rails.
pub fn encode_server_rails(rails: &[V1Rail]) -> Vec<u8> {
    let mut out = vec![u8::try_from(rails.len()).expect("at most 8 rails")];
    for rail in rails {
        rail.endpoint.push(&mut out);
        out.extend_from_slice(&(rail.layers.len() as u32).to_le_bytes());
        for layer in &rail.layers {
            out.extend_from_slice(&layer.base.to_le_bytes());
            out.extend_from_slice(&layer.rkey.to_le_bytes());
        }
    }
    out
}

/// Step c: the client's rails.
pub fn encode_client_rails(rails: &[V1Endpoint]) -> Vec<u8> {
    let mut out = vec![u8::try_from(rails.len()).expect("at most 8 rails")];
    for rail in rails {
        rail.push(&mut out);
    }
    out
}

/// Reads a count of rails. *Errors*: 0, or more than 8.
pub fn check_rail_count(count: u8) -> Result<u8, WireError> {
    match count {
        0 => Err(WireError::Unexpected {
            what: "v1 rail count",
            got: 0,
        }),
        n if n > limits::V1_RAILS_MAX => Err(WireError::TooLarge {
            what: "v1 rail count",
            got: n.into(),
            limit: limits::V1_RAILS_MAX.into(),
        }),
        n => Ok(n),
    }
}

/// Reads step c's rails, after their count. *Errors*: numbers beyond 24 bits.
pub fn decode_client_rails(bytes: &[u8]) -> Result<Vec<V1Endpoint>, WireError> {
    let rails = bytes.chunks_exact(CLIENT_RAIL_BYTES);
    if !rails.remainder().is_empty() {
        return Err(WireError::Short {
            what: "v1 rails",
            got: bytes.len(),
            need: bytes.len().next_multiple_of(CLIENT_RAIL_BYTES),
        });
    }
    rails
        .map(|rail| V1Endpoint::read(rail.try_into().expect("cut to its size")))
        .collect()
}

/// Reads step b on a client, which takes exactly [`V1ServerRails::wants`] bytes at a time.
#[derive(Debug, Default)]
pub struct V1ServerRails {
    left: Option<u8>,
    endpoint: Option<V1Endpoint>,
    layers: usize,
    rails: Vec<V1Rail>,
}

impl V1ServerRails {
    /// Bytes wanted next; 0 when all is there.
    pub fn wants(&self) -> usize {
        match (self.left, self.endpoint) {
            (None, _) => 1,
            (Some(0), None) => 0,
            (_, None) => CLIENT_RAIL_BYTES + 4,
            (_, Some(_)) => 12 * self.layers,
        }
    }

    /// Takes them. *Errors*: a rail count other than `rails`, a layer count other than `layers`
    /// (the manifest's), numbers beyond 24 bits.
    pub fn handle(&mut self, bytes: &[u8], rails: u8, layers: u32) -> Result<(), WireError> {
        if bytes.len() != self.wants() {
            return Err(WireError::Short {
                what: "v1 rails",
                got: bytes.len(),
                need: self.wants(),
            });
        }
        match (self.left, self.endpoint) {
            (None, _) => {
                let count = check_rail_count(bytes[0])?;
                if count != rails {
                    return Err(WireError::Unexpected {
                        what: "v1 rail count",
                        got: count.into(),
                    });
                }
                self.left = Some(count);
            }
            (Some(left), Some(endpoint)) => {
                let layers = bytes
                    .chunks_exact(12)
                    .map(|b| V1Region {
                        base: u64::from_le_bytes(b[..8].try_into().expect("8 of 12 bytes")),
                        rkey: u32::from_le_bytes(b[8..].try_into().expect("4 of 12 bytes")),
                    })
                    .collect();
                self.rails.push(V1Rail { endpoint, layers });
                self.endpoint = None;
                self.left = Some(left - 1);
            }
            (Some(_), None) => {
                let endpoint = bytes[..CLIENT_RAIL_BYTES].try_into().expect("cut above");
                let count = &bytes[CLIENT_RAIL_BYTES..];
                let count = u32::from_le_bytes(count.try_into().expect("4 bytes are left"));
                if count != layers || count == 0 || count > limits::LAYERS_MAX {
                    return Err(WireError::Unexpected {
                        what: "v1 layer count",
                        got: count.into(),
                    });
                }
                self.endpoint = Some(V1Endpoint::read(endpoint)?);
                self.layers = count as usize;
            }
        }
        Ok(())
    }

    /// The rails, when [`V1ServerRails::wants`] is 0.
    pub fn finish(self) -> Vec<V1Rail> {
        self.rails
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rails() -> Vec<V1Rail> {
        (0..2u8)
            .map(|i| V1Rail {
                endpoint: V1Endpoint {
                    qpn: 17 + u32::from(i),
                    psn: U24_MAX,
                    gid: [i; 16],
                },
                layers: (0..3)
                    .map(|l| V1Region {
                        base: l << 32,
                        rkey: 7,
                    })
                    .collect(),
            })
            .collect()
    }

    fn read(bytes: &[u8], count: u8, layers: u32) -> Result<Vec<V1Rail>, WireError> {
        let mut reader = V1ServerRails::default();
        let mut at = 0;
        while reader.wants() > 0 {
            let part = &bytes[at..at + reader.wants()];
            at += part.len();
            reader.handle(part, count, layers)?;
        }
        assert_eq!(at, bytes.len());
        Ok(reader.finish())
    }

    #[test]
    fn server_rails_come_back_as_they_were_sent() {
        let bytes = encode_server_rails(&rails());
        assert_eq!(bytes.len(), 1 + 2 * (24 + 4 + 3 * 12));
        assert_eq!(read(&bytes, 2, 3), Ok(rails()));
    }

    #[test]
    fn other_counts_than_asked_for_are_refused() {
        let bytes = encode_server_rails(&rails());
        assert!(read(&bytes, 1, 3).is_err());
        assert!(read(&bytes, 2, 4).is_err());
        assert!(check_rail_count(0).is_err());
        assert!(check_rail_count(9).is_err());
    }

    #[test]
    fn client_rails_come_back_and_halves_and_large_numbers_are_refused() {
        let ends: Vec<V1Endpoint> = rails().iter().map(|r| r.endpoint).collect();
        let bytes = encode_client_rails(&ends);
        assert_eq!(decode_client_rails(&bytes[1..]), Ok(ends));
        assert!(decode_client_rails(&bytes[1..30]).is_err());
        let mut large = bytes[1..].to_vec();
        large[3] = 1; // beyond 24 bits
        assert!(decode_client_rails(&large).is_err());
    }
}
