//! What `config.json` (or a GGUF file's metadata) says about the experts.
//!
//! A cross-check only: names and shapes of tensors decide. Two things cannot be had from them: where
//! the trunk ends and MTP begins, and the number of experts where they are flattened (DBRX).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::gguf::{Metadata, Value as Kv};
use super::{Stack, read_bounded};
use crate::catalogue::StackClass;

/// Largest configuration that is read, bytes; real ones have a few thousand.
const CONFIG_MAX_BYTES: u64 = 16 << 20;

/// What a model's description says about one stack; everything may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Routed experts: one number, or a list (per layer or per modality).
    pub(crate) experts: Option<Experts>,
    /// Experts per token.
    pub(crate) top_k: Option<u64>,
    /// Layers of the trunk; later ones are MTP.
    pub(crate) layers: Option<u64>,
    /// MTP layers.
    pub(crate) mtp_layers: Option<u64>,
    /// Experts without tensors, behind the routed ones.
    pub(crate) zero_experts: u64,
}

/// A number of experts as configurations write it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Experts {
    /// The same in all layers.
    All(u64),
    /// Per layer (`None`: dense) or per modality.
    List(Vec<Option<u64>>),
}

/// A model's description.
#[derive(Debug, Default)]
pub(crate) struct Config {
    source: &'static str,
    json: Option<Value>,
    gguf: Option<Facts>,
    /// What is worth keeping of it.
    pub(crate) metadata: BTreeMap<String, String>,
}

impl Config {
    /// Reads `config.json` or, for Mistral's own files, `params.json`; absent is fine, unreadable a warning.
    pub(crate) fn read(root: &Path, warnings: &mut Vec<String>) -> Self {
        for source in ["config.json", "params.json"] {
            let path = root.join(source);
            if !path.is_file() {
                continue;
            }
            match read_bounded(&path, CONFIG_MAX_BYTES)
                .map_err(|e| e.to_string())
                .and_then(|text| serde_json::from_slice(&text).map_err(|e| e.to_string()))
            {
                Ok(json) => return Self::of_json(source, json),
                Err(why) => warnings.push(format!("{source} was not used: {why}")),
            }
        }
        Self::default()
    }

    pub(crate) fn of_json(source: &'static str, json: Value) -> Self {
        let mut metadata = BTreeMap::new();
        let mut keep = |key: &str, value: Option<&Value>| {
            if let Some(text) = value.and_then(Value::as_str).filter(|t| t.len() <= 256) {
                metadata.insert(key.to_owned(), text.to_owned());
            }
        };
        keep("model_type", json.get("model_type"));
        keep(
            "architecture",
            json.get("architectures").and_then(|a| a.get(0)),
        );
        keep(
            "quant_method",
            json.get("quantization_config")
                .and_then(|q| q.get("quant_method")),
        );
        Self {
            source,
            json: Some(json),
            gguf: None,
            metadata,
        }
    }

    pub(crate) fn of_gguf(kv: &Metadata) -> Self {
        let text = |key: &str| match kv.get(key) {
            Some(Kv::Text(t)) => Some(t.clone()),
            _ => None,
        };
        let arch = text("general.architecture").unwrap_or_default();
        let number = |key: &str| match kv.get(&format!("{arch}.{key}")) {
            Some(Kv::Number(n)) => Some(*n),
            _ => None,
        };
        let mtp_layers = number("nextn_predict_layers");
        let facts = Facts {
            experts: number("expert_count").map(Experts::All),
            top_k: number("expert_used_count"),
            layers: number("block_count").map(|n| n.saturating_sub(mtp_layers.unwrap_or(0))),
            mtp_layers,
            zero_experts: 0,
        };
        let mut metadata = BTreeMap::new();
        for key in [
            // Unpacking keeps it.
            "general.alignment",
            "general.architecture",
            "general.name",
            "general.type",
            "general.file_type",
        ] {
            match kv.get(key) {
                Some(Kv::Text(t)) if t.len() <= 256 => {
                    metadata.insert(key.to_owned(), t.clone());
                }
                Some(Kv::Number(n)) => {
                    metadata.insert(key.to_owned(), n.to_string());
                }
                _ => {}
            }
        }
        Self {
            source: "the GGUF metadata",
            json: None,
            gguf: Some(facts),
            metadata,
        }
    }

    /// What it says about the stack with that prefix.
    pub(crate) fn facts(&self, prefix: &str) -> Facts {
        if let Some(facts) = &self.gguf {
            return facts.clone();
        }
        let Some(json) = &self.json else {
            return Facts::default();
        };
        let mut sections = sections(json, prefix);
        sections.retain(|s| s.is_object());
        let first = |keys: &[&str]| {
            sections
                .iter()
                .find_map(|s| keys.iter().find_map(|k| lookup(s, k)))
        };
        let number = |keys: &[&str]| {
            sections.iter().find_map(|s| {
                keys.iter()
                    .find_map(|k| lookup(s, k).and_then(Value::as_u64))
            })
        };
        let experts = first(&[
            "n_routed_experts",
            "num_local_experts",
            "num_experts",
            "moe_num_experts",
            "ffn_config.moe_num_experts",
            "num_routed_experts",
            "moe.num_experts",
        ])
        .and_then(|v| match v {
            Value::Array(list) => Some(Experts::List(list.iter().map(Value::as_u64).collect())),
            v => v.as_u64().map(Experts::All),
        });
        let listed = || {
            first(&["layers_block_type", "hybrid_override_pattern"]).and_then(|v| match v {
                Value::Array(list) => Some(list.len() as u64),
                Value::String(pattern) => Some(pattern.chars().count() as u64),
                _ => None,
            })
        };
        Facts {
            experts,
            top_k: number(&[
                "num_experts_per_tok",
                "num_experts_per_token",
                "experts_per_token",
                "moe_topk",
                "moe_top_k",
                "moe_k",
                "top_k_experts",
                "ffn_config.moe_top_k",
                "moe.num_experts_per_tok",
            ]),
            layers: number(&["num_hidden_layers", "num_layers", "n_layers"]).or_else(listed),
            mtp_layers: number(&[
                "num_nextn_predict_layers",
                "num_mtp_layers",
                "mtp_num_hidden_layers",
            ]),
            zero_experts: number(&["zero_expert_num"]).unwrap_or(0),
        }
    }

    /// Compares a stack with what is said about it and words the disagreement.
    ///
    /// Pruned models keep stale numbers, so none of this refuses a checkpoint.
    pub(crate) fn check(&self, stack: &Stack, warnings: &mut Vec<String>) {
        let facts = self.facts(&stack.prefix);
        let source = self.source;
        let mut differing: Option<(u32, u32, u64, usize)> = None;
        for layer in &stack.layers {
            let own = u64::from(layer.num_experts);
            let said = match &facts.experts {
                Some(Experts::All(n)) => Some(*n),
                Some(Experts::List(list)) => {
                    let sum: u64 = list.iter().flatten().fold(0, |a, &b| a.saturating_add(b));
                    match list.get(layer.model_layer as usize) {
                        Some(Some(n)) if sum != own => Some(*n),
                        _ => None,
                    }
                }
                None => None,
            };
            if let Some(said) =
                said.filter(|&n| n != own && n.saturating_add(facts.zero_experts) != own)
            {
                let count = differing.map_or(0, |d| d.3);
                differing = differing.or(Some((layer.model_layer, layer.num_experts, said, 0)));
                if let Some(d) = &mut differing {
                    d.3 = count + 1;
                }
            }
        }
        if let Some((layer, own, said, count)) = differing {
            let zero = if said == 0 {
                "; it describes a dense model"
            } else {
                ""
            };
            warnings.push(format!(
                "{} layers of {} do not have the experts that {source} says: layer {layer} has {own}, {source} says {said}{zero}",
                count, stack.prefix
            ));
        }
        if let (Some(k), Some(layer)) = (
            facts.top_k,
            facts.top_k.and_then(|k| {
                stack
                    .layers
                    .iter()
                    .find(|l| u64::from(l.num_experts) + u64::from(l.identity_experts) < k)
            }),
        ) {
            warnings.push(format!(
                "{source} says {k} experts per token, layer {} of {} has only {}",
                layer.model_layer, stack.prefix, layer.num_experts
            ));
        }
        let beyond = facts.layers.map_or(0, |n| {
            stack
                .layers
                .iter()
                .filter(|l| u64::from(l.model_layer) >= n)
                .count() as u64
        });
        if let Some(depth) = facts.mtp_layers {
            let named = stack.prefix.split('.').any(|s| s == "mtp");
            if stack.class == StackClass::Mtp && !named && beyond > depth {
                warnings.push(format!(
                    "{beyond} MoE layers of {} lie beyond the trunk, {source} says {depth} MTP layers",
                    stack.prefix
                ));
            }
        }
    }
}

/// Parts of a configuration that may describe the stack, the likeliest first.
fn sections<'a>(json: &'a Value, prefix: &str) -> Vec<&'a Value> {
    let names = |word: &str| prefix.split('.').any(|s| s.contains(word));
    let at = |path: &str| lookup(json, path);
    if names("talker") {
        return [
            at("talker_config.text_config"),
            at("talker_config"),
            at("text_config"),
        ]
        .into_iter()
        .flatten()
        .collect();
    }
    if names("vis") || names("vit") || names("audio") {
        // The text model's numbers would be wrong for a tower.
        return ["vision_config", "visual", "vision_encoder", "audio_config"]
            .into_iter()
            .filter_map(at)
            .collect();
    }
    [
        "text_config",
        "thinker_config.text_config",
        "thinker_config",
        "llm_config",
        "language_config",
    ]
    .into_iter()
    .filter_map(at)
    .chain(std::iter::once(json))
    .collect()
}

/// The value at a dotted path; null is absent.
fn lookup<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.')
        .try_fold(value, |v, key| v.get(key))
        .filter(|v| !v.is_null())
}

#[cfg(test)]
#[path = "tests/config.rs"]
mod tests;
