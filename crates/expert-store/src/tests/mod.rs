//! Tests that need a whole store: made-up checkpoints through pack, index, verify and unpack.

#![allow(clippy::single_range_in_vec_init)] // lists of one range are what is meant

mod audits;
mod bench;
mod builds;
mod parts;
mod round_trips;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{OpenOptions, Store, StoreError, SynthSpec, synth};

/// A directory that goes away with the test.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn checkpoint(dir: &Path, family: &str, shards: u32) -> PathBuf {
    let out = dir.join(format!("{family}-{shards}"));
    let spec = SynthSpec {
        family: family.into(),
        layers: Some(2),
        experts: Some(5),
        shards,
        seed: 7,
        ..SynthSpec::default()
    };
    synth(&spec, &out).unwrap();
    out
}

fn open(path: &Path) -> Store {
    Store::open(path, &OpenOptions::default()).unwrap()
}

fn open_err(path: &Path) -> StoreError {
    Store::open(path, &OpenOptions::default()).unwrap_err()
}

fn unhashed() -> OpenOptions {
    OpenOptions {
        checksums: false,
        ..OpenOptions::default()
    }
}

/// Names of a directory, with what hides.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    names(dir)
        .into_iter()
        .map(|n| (n.clone(), fs::read(dir.join(n)).unwrap()))
        .collect()
}

/// Rewrites a manifest through `edit`.
fn edit_manifest(store: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    let path = store.join("manifest.json");
    let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
}

/// Flips one bit.
fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at as usize] ^= 1;
    fs::write(path, bytes).unwrap();
}
