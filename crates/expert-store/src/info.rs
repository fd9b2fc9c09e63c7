//! The description of a store that a peer sends once: what there is, not where.

use serde::{Deserialize, Serialize};

use crate::catalogue::{Container, Layer, StackClass};
use crate::codec;

/// What kind of store records come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// Pointers into a checkpoint.
    InPlace,
    /// Record images.
    Packed,
    /// The layout of v1.
    V1,
}

/// Description of a store; JSON on the wire (answer to `StoreInfo`) and for `inspect --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreInfo {
    /// Kind on the peer; a client gets the same bytes from each (v1 apart).
    pub kind: StoreKind,
    /// Stack's name prefix.
    pub stack: String,
    /// Trunk or MTP.
    pub class: StackClass,
    /// Container of the checkpoint.
    pub container: Container,
    /// Generation from the manifest.
    pub generation: u64,
    /// Content id, 32 hexadecimal digits; `None` without checksums.
    pub content_id: Option<String>,
    /// Layout id, 32 hexadecimal digits.
    pub layout_id: String,
    /// The layers held.
    pub layers: Vec<LayerInfo>,
}

/// Description of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Dense index.
    pub layer: u32,
    /// Number in the checkpoint.
    pub model_layer: u32,
    /// Routed experts of the checkpoint's layer.
    pub num_experts: u32,
    /// Zero experts after them.
    #[serde(default)]
    pub identity_experts: u32,
    /// Experts held, as `[first, end)` ranges.
    pub experts: Vec<[u32; 2]>,
    /// Largest record image, bytes.
    pub image_bytes_max: u64,
    /// Layer id (with checksums, or of the layout where there are none), 32 hexadecimal digits.
    pub id: String,
}

impl LayerInfo {
    /// Describes a layer; computes its id, which reads all its checksums.
    pub fn of(layer: &Layer) -> Self {
        Self {
            layer: layer.layer,
            model_layer: layer.model_layer,
            num_experts: layer.num_experts,
            identity_experts: layer.identity_experts,
            experts: codec::to_ranges(&layer.experts),
            image_bytes_max: layer.image_bytes_max(),
            id: hex128(layer.id(layer.checksums.is_some())),
        }
    }
}

/// 32 hexadecimal digits, most significant first.
pub fn hex128(value: u128) -> String {
    format!("{value:032x}")
}

/// Reads 32 hexadecimal digits.
///
/// *Errors*: text for people that shows the value.
pub fn parse_hex128(text: &str) -> Result<u128, String> {
    if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(format!(
            "{text:?} is not a 128-bit id of 32 hexadecimal digits"
        ));
    }
    u128::from_str_radix(text, 16).map_err(|e| format!("{text:?}: {e}"))
}
