//! The description of a store that a peer sends once: what there is, not where.

use serde::{Deserialize, Serialize};

use crate::catalogue::{Container, IMAGE_MAX_BYTES, Layer, StackClass, stack_id};
use crate::codec;
use expert_wire::limits;

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
    /// What the store is a part of, where it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Whole>,
}

/// The content that a store is a part of. Its layers' ids make its content id, so that nobody can
/// name layers that are not in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whole {
    /// Content id, 32 hexadecimal digits.
    pub content_id: String,
    /// Layout id, 32 hexadecimal digits.
    pub layout_id: String,
    /// All of its layers; `id` is that of the layer with all of `experts`.
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

impl StoreInfo {
    /// Checks a description from outside: bounded, ascending, its ids make the content id, and so do
    /// those of the whole that it names, which has all that the store says it holds.
    ///
    /// *Errors*: text for people.
    pub fn check(&self) -> Result<(), String> {
        let id = checked_id(&self.stack, &self.layers)?;
        let want = self.content_id.as_ref().unwrap_or(&self.layout_id);
        // A v1 store's description follows the same rule: its layers are hashed alike.
        if id != *want {
            return Err(format!("its layers make content id {id}, it says {want}"));
        }
        let Some(whole) = &self.whole else {
            return Ok(());
        };
        if self.content_id.is_none() {
            return Err("it names a whole and has no checksums".into());
        }
        let id = checked_id(&self.stack, &whole.layers)?;
        parse_hex128(&whole.layout_id)?;
        if id != whole.content_id {
            return Err(format!(
                "the layers of its whole make content id {id}, it says {}",
                whole.content_id
            ));
        }
        for own in &self.layers {
            let found = whole.layers.binary_search_by_key(&own.layer, |l| l.layer);
            let fits = found.is_ok_and(|i| {
                let of_whole = &whole.layers[i];
                own.is_part_of(of_whole)
                    && (own.experts != of_whole.experts || own.id == of_whole.id)
            });
            if !fits {
                return Err(format!(
                    "its layer {} is not in content {}, which it says it is a part of",
                    own.layer, whole.content_id
                ));
            }
        }
        Ok(())
    }
}

/// Id that the layers of a stack make.
fn checked_id(stack: &str, layers: &[LayerInfo]) -> Result<String, String> {
    if layers.is_empty() || layers.len() > limits::LAYERS_MAX as usize {
        return Err(format!(
            "{} layers, the limits are 1 and {}",
            layers.len(),
            limits::LAYERS_MAX
        ));
    }
    if !layers.windows(2).all(|w| w[0].layer < w[1].layer) {
        return Err("layers do not ascend".into());
    }
    let mut ids = Vec::with_capacity(layers.len());
    for layer in layers {
        codec::from_ranges(&layer.experts, limits::EXPERTS_MAX)?;
        if layer.layer >= limits::LAYERS_MAX {
            return Err(format!(
                "layer {}, the limit is {}",
                layer.layer,
                limits::LAYERS_MAX
            ));
        }
        if layer.image_bytes_max > IMAGE_MAX_BYTES {
            return Err(format!("a record image of {} bytes", layer.image_bytes_max));
        }
        ids.push((layer.layer, parse_hex128(&layer.id)?));
    }
    Ok(hex128(stack_id(stack, ids.into_iter())))
}

impl LayerInfo {
    /// Describes a layer; computes its id, which reads all its checksums.
    pub fn of(layer: &Layer) -> Self {
        Self {
            id: hex128(layer.id(layer.checksums.is_some())),
            ..Self::of_shape(layer)
        }
    }

    fn of_shape(layer: &Layer) -> Self {
        Self {
            layer: layer.layer,
            model_layer: layer.model_layer,
            num_experts: layer.num_experts,
            identity_experts: layer.identity_experts,
            experts: codec::to_ranges(&layer.experts),
            image_bytes_max: layer.image_bytes_max(),
            id: String::new(),
        }
    }
}

impl LayerInfo {
    /// Describes the layer that this one is, or is a part of; `None` without checksums.
    pub(crate) fn of_whole(layer: &Layer) -> Option<Self> {
        let mut info = Self {
            id: hex128(layer.whole_id()?),
            ..Self::of_shape(layer)
        };
        if let Some(rest) = layer.rest() {
            let mut experts = [&layer.experts[..], &rest.experts[..]].concat();
            experts.sort_unstable();
            info.experts = codec::to_ranges(&experts);
            info.image_bytes_max = info.image_bytes_max.max(rest.image_bytes_max);
        }
        Some(info)
    }

    fn is_part_of(&self, whole: &Self) -> bool {
        let is_within = |[first, end]: [u32; 2]| {
            let mut ranges = whole.experts.iter();
            ranges.any(|r| r[0] <= first && end <= r[1])
        };
        self.model_layer == whole.model_layer
            && self.num_experts == whole.num_experts
            && self.identity_experts == whole.identity_experts
            && self.image_bytes_max <= whole.image_bytes_max
            && self.experts.iter().all(|&range| is_within(range))
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
