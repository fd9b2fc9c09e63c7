//! The fixtures (`tests/fixtures/README.md`) and the answers of the oracle.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::tensors::Tensor;

/// What the oracle says about one checkpoint.
#[derive(Debug, Clone, Deserialize)]
pub struct Expected {
    /// Name of the fixture.
    pub fixture: String,
    /// Folder of the checkpoint below `checkpoints`.
    pub path: String,
    /// `safetensors` or `gguf`.
    pub container: String,
    /// Stacks of MoE layers; none in a dense model.
    pub stacks: Vec<Stack>,
    /// Tensors of experts by name.
    pub experts: BTreeMap<String, Tensor>,
    /// Names of all other tensors.
    pub other_tensors: Vec<String>,
}

/// One stack.
#[derive(Debug, Clone, Deserialize)]
pub struct Stack {
    /// Name prefix.
    pub prefix: String,
    /// `trunk` or `mtp`.
    pub class: String,
    /// Number of records.
    pub records: u64,
    /// 32 hexadecimal digits.
    pub payload_digest: String,
    /// 32 hexadecimal digits.
    pub content_id: String,
    /// 32 hexadecimal digits.
    pub layout_id: String,
    /// In order of dense index.
    pub layers: Vec<Layer>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Layer {
    /// Dense index.
    pub layer: u32,
    /// Number in the checkpoint.
    pub model_layer: u32,
    /// Experts with records.
    pub num_experts: u32,
    /// Zero experts after them.
    pub identity_experts: u32,
    /// 32 hexadecimal digits.
    pub layer_id: String,
    /// In order of the first expert of each.
    pub classes: Vec<Class>,
    /// In order of expert.
    pub records: Vec<Record>,
}

/// One shape class.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Class {
    /// 32 hexadecimal digits.
    pub class_id: String,
    /// Bytes of the record image.
    pub image_bytes: u64,
    /// `role name stacking dtype shape source-name` in canonical order.
    pub leaves: Vec<String>,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Record {
    /// Expert.
    pub expert: u32,
    /// Index into the layer's classes.
    pub class: u32,
    /// 32 hexadecimal digits.
    pub record_id: String,
}

impl Expected {
    /// Folder of the checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        root().join("checkpoints").join(&self.path)
    }

    /// Folder of the fixture, above the checkpoint of a hub cache.
    pub fn folder(&self) -> PathBuf {
        root().join("checkpoints").join(&self.fixture)
    }
}

/// `tests/fixtures`.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Folder of a checkpoint by the name of its fixture.
pub fn checkpoint(name: &str) -> PathBuf {
    let path = root().join("checkpoints").join(name);
    assert!(path.is_dir(), "no fixture {}", path.display());
    path
}

/// A JSON file below `tests/fixtures`.
pub fn json<T: DeserializeOwned>(name: &str) -> T {
    let path = root().join(name);
    let text = fs::read(&path).unwrap_or_else(|e| panic!("reading {}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All checkpoints that have an answer of the oracle, in order of name.
pub fn all() -> Vec<Expected> {
    let mut names: Vec<String> = fs::read_dir(root().join("expected"))
        .expect("tests/fixtures/expected")
        .map(|e| {
            e.expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        })
        .filter(|n| n.ends_with(".json") && !n.starts_with("v1-"))
        .collect();
    names.sort();
    names
        .iter()
        .map(|n| json(&format!("expected/{n}")))
        .collect()
}
