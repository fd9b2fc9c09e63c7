//! The frozen first protocol: its manifest and the few fixed messages of its TCP mode.
//!
//! Not here: the verbs mode's queue-pair exchange, see [`crate::v1_verbs`].

use serde::{Deserialize, Serialize};

use crate::{Key, WireError, limits};

/// Mode byte: records over this TCP connection.
pub const MODE_TCP: u8 = 0;
/// Mode byte: one-sided READs.
pub const MODE_VERBS: u8 = 1;
/// Mode byte: continue with v2 frames on this connection.
pub const MODE_V2: u8 = 2;
/// Status byte: the record follows.
pub const STATUS_OK: u8 = 0;
/// Status byte: there is no such record; nothing follows.
pub const STATUS_ERROR: u8 = 1;
/// Layer and expert of the request that ends a session.
pub const END: u32 = u32::MAX;
/// Bytes of a request.
pub const REQUEST_BYTES: usize = 8;
/// Bytes of a record's header.
pub const RECORD_HEADER_BYTES: usize = 256;
/// First word of a record's header.
pub const RECORD_MAGIC: u32 = 0x5850_5254;

/// The twelve keys of a v1 manifest, as sent to a client and as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always 1.
    pub version: u32,
    /// Number of MoE layers.
    pub num_moe_layers: u32,
    /// Experts of each layer.
    pub num_experts: u32,
    /// Expert intermediate size (N of gate and up).
    pub inter: u32,
    /// Hidden size (K of gate and up).
    pub hidden: u32,
    /// Elements that share a scale.
    pub group_size: u32,
    /// Alignment of each part of a record, bytes.
    pub sub_align: u32,
    /// Alignment of records, bytes.
    pub fs_block_size: u32,
    /// Bytes from one record to the next.
    pub record_stride: u64,
    /// Bytes of a record before padding to the stride.
    pub record_raw_bytes: u64,
    /// File name of a layer, e.g. `experts_{:05}.xpr`.
    pub file_template: String,
    /// Checkpoint layer number of each MoE layer.
    pub moe_layer_to_model_layer: Vec<u32>,
}

/// Encodes a request for a record.
pub fn encode_request(key: Key) -> [u8; REQUEST_BYTES] {
    let mut out = [0; REQUEST_BYTES];
    out[..4].copy_from_slice(&key.layer.to_le_bytes());
    out[4..].copy_from_slice(&key.expert.to_le_bytes());
    out
}

/// Decodes a request; `None` is the end of the session.
pub fn decode_request(bytes: [u8; REQUEST_BYTES]) -> Option<Key> {
    let [a, b, c, d, e, f, g, h] = bytes;
    let key = Key::new(
        u32::from_le_bytes([a, b, c, d]),
        u32::from_le_bytes([e, f, g, h]),
    );
    (key != Key::new(END, END)).then_some(key)
}

/// Checks the length that precedes the first message.
///
/// *Errors*: [`WireError::TooLarge`] for more than 16 MiB, [`WireError::Unexpected`] for 0.
pub fn check_manifest_bytes(len: u32) -> Result<usize, WireError> {
    match len {
        0 => Err(WireError::Unexpected {
            what: "manifest bytes",
            got: 0,
        }),
        n if n > limits::MANIFEST_MAX_BYTES => Err(WireError::TooLarge {
            what: "manifest bytes",
            got: u64::from(n),
            limit: u64::from(limits::MANIFEST_MAX_BYTES),
        }),
        n => Ok(n as usize),
    }
}

/// What the server's first message says.
#[derive(Debug, Clone, PartialEq)]
pub struct Greeting {
    /// The v1 manifest, where v1 clients are served.
    pub manifest: Option<Manifest>,
    /// Whether mode byte 2 is understood (the key `atlas`).
    pub v2: Option<V2Offer>,
}

/// The key `atlas` of the first message: what a v2 client needs to know before it chooses a mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct V2Offer {
    /// Protocol versions, e.g. `[2]`.
    pub versions: Vec<u16>,
    /// Random number of this run of the peer.
    pub instance_id: u64,
    /// Names of optional abilities, e.g. `tcp`.
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// Set when the peer refuses this connection and will close it: `busy`, `shutting-down`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl Greeting {
    /// The whole first message: `u32` length and JSON.
    pub fn encode(&self) -> Vec<u8> {
        let mut json = match &self.manifest {
            Some(manifest) => serde_json::to_value(manifest).expect("a manifest is plain data"),
            None => serde_json::json!({}),
        };
        if let Some(offer) = &self.v2 {
            json["atlas"] = serde_json::to_value(offer).expect("an offer is plain data");
        }
        let text = json.to_string();
        let mut out = Vec::with_capacity(4 + text.len());
        out.extend_from_slice(
            &u32::try_from(text.len())
                .expect("bounded by the layer limit")
                .to_le_bytes(),
        );
        out.extend_from_slice(text.as_bytes());
        out
    }

    /// Reads the JSON of a first message.
    ///
    /// *Errors*: [`WireError::Malformed`] for JSON that holds neither the twelve keys nor an offer
    /// of v2, [`WireError::TooLarge`] for geometry beyond [`limits`].
    pub fn decode(json: &[u8]) -> Result<Self, WireError> {
        let malformed = |why: String| WireError::Malformed {
            what: "first message of the peer",
            why,
        };
        let value: serde_json::Value =
            serde_json::from_slice(json).map_err(|e| malformed(e.to_string()))?;
        let v2 = match value.get("atlas") {
            Some(offer) => Some(V2Offer::deserialize(offer).map_err(|e| malformed(e.to_string()))?),
            None => None,
        };
        let manifest = match Manifest::deserialize(&value) {
            Ok(manifest) => {
                manifest.check()?;
                Some(manifest)
            }
            Err(_) if v2.is_some() => None,
            Err(e) => return Err(malformed(e.to_string())),
        };
        Ok(Self { manifest, v2 })
    }
}

impl Manifest {
    /// Checks the geometry of a manifest from outside against the limits and against itself.
    pub fn check(&self) -> Result<(), WireError> {
        let bounded = |what, got: u64, limit: u64| {
            if got > limit {
                Err(WireError::TooLarge { what, got, limit })
            } else if got == 0 {
                Err(WireError::Unexpected { what, got })
            } else {
                Ok(())
            }
        };
        bounded(
            "MoE layer count",
            u64::from(self.num_moe_layers),
            u64::from(limits::LAYERS_MAX),
        )?;
        bounded(
            "expert count",
            u64::from(self.num_experts),
            u64::from(limits::EXPERTS_MAX),
        )?;
        bounded("record stride", self.record_stride, 1 << 34)?;
        bounded("record bytes", self.record_raw_bytes, self.record_stride)?;
        if self.moe_layer_to_model_layer.len() != self.num_moe_layers as usize {
            return Err(WireError::Unexpected {
                what: "length of moe_layer_to_model_layer",
                got: self.moe_layer_to_model_layer.len() as u64,
            });
        }
        Ok(())
    }
}
