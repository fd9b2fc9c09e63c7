//! Checkpoints: finding the routed experts in the files that a model came in.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::catalogue::{Container, Layer, StackClass};
use crate::stamp::FileStamp;

/// A checkpoint whose headers were read and whose experts were recognised.
#[derive(Debug)]
pub struct Checkpoint {
    /// Folder that the names of `files` are relative to; absolute.
    pub root: PathBuf,
    /// Files that hold tensors, in bytewise order of name; `Layer`s refer to them by index.
    pub files: Vec<SourceFile>,
    /// File format.
    pub container: Container,
    /// Stacks of MoE layers: trunks first, then MTP; each group in order of name.
    pub stacks: Vec<Stack>,
    /// What is worth keeping of the container's metadata, e.g. `general.architecture`.
    pub metadata: BTreeMap<String, String>,
    /// What a person should know: disagreement of config and tensors, skipped files.
    pub warnings: Vec<String>,
}

/// One file of a checkpoint.
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// Name relative to the checkpoint's root.
    pub name: String,
    /// Size, identity and times when its header was read.
    pub stamp: FileStamp,
}

/// One stack of MoE layers.
#[derive(Debug, Clone)]
pub struct Stack {
    /// Name prefix, e.g. `model.layers`.
    pub prefix: String,
    /// Trunk or MTP.
    pub class: StackClass,
    /// In order of dense index; [`crate::catalogue::Records::InPlace`], without checksums and values.
    pub layers: Vec<Layer>,
}
