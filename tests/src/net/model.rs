//! Made-up checkpoints, and what their records hold, read from their files in the plainest way.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions as FileOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use expert_store::synth::{SynthSpec, synth};
use expert_store::{
    BuildOptions, IndexOptions, Key, OpenOptions, Piece, Store, index, pack, pack_v1,
};
use safetensors::SafeTensors;
use tempfile::TempDir;

/// What each record must be.
pub type Records = BTreeMap<Key, Vec<u8>>;

/// Size of a model.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// MoE layers.
    pub layers: u32,
    /// Experts of each.
    pub experts: u32,
    /// Hidden size.
    pub hidden: u32,
    /// Expert intermediate size.
    pub inter: u32,
    /// Another seed gives other bytes.
    pub seed: u64,
}

impl Sizes {
    /// 24 records of 317,184 bytes: one whole chunk and a part of one, with padding after each leaf.
    pub const SMALL: Self = Self {
        layers: 3,
        experts: 8,
        hidden: 264,
        inter: 200,
        seed: 1,
    };
    /// 32 records of 12,288 bytes, for tests with a great many requests.
    pub const TINY: Self = Self {
        layers: 2,
        experts: 16,
        hidden: 64,
        inter: 32,
        seed: 1,
    };
    /// 8 records of 1,574,400 bytes: more than one READ each.
    pub const LARGE: Self = Self {
        layers: 2,
        experts: 4,
        hidden: 512,
        inter: 512,
        seed: 1,
    };
    /// 8 records for v1, each more than a chunk.
    pub const V1: Self = Self {
        layers: 2,
        experts: 4,
        hidden: 768,
        inter: 512,
        seed: 1,
    };

    /// The same shape with other bytes.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }
}

/// A checkpoint in a folder of its own, which goes with it.
#[derive(Debug)]
pub struct Model {
    /// The checkpoint.
    pub checkpoint: PathBuf,
    dir: TempDir,
}

impl Model {
    /// A Qwen3-MoE in BF16, in two files.
    pub fn bf16(sizes: Sizes) -> Self {
        Self::of_family("qwen3-moe", sizes)
    }

    /// The same in NVFP4, which v1 stores can be made from.
    pub fn nvfp4(sizes: Sizes) -> Self {
        Self::of_family("nvfp4-modelopt", sizes)
    }

    fn of_family(family: &str, sizes: Sizes) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let checkpoint = dir.path().join("checkpoint");
        let spec = SynthSpec {
            family: family.into(),
            layers: Some(sizes.layers),
            experts: Some(sizes.experts),
            hidden: Some(sizes.hidden),
            inter: Some(sizes.inter),
            shards: 2,
            seed: sizes.seed,
            ..SynthSpec::default()
        };
        synth(&spec, &checkpoint).expect("synth");
        Self { checkpoint, dir }
    }

    /// Tells the config that every layer has that many zero experts beside the others.
    pub fn with_zero_experts(self, count: u32) -> Self {
        let path = self.checkpoint.join("config.json");
        let text = fs::read(&path).expect("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        config["zero_expert_num"] = count.into();
        fs::write(&path, config.to_string()).expect("writing config.json");
        self
    }

    /// A place for something that belongs to the model.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The checkpoint, indexed in memory.
    pub fn open(&self) -> Arc<Store> {
        open(&self.checkpoint)
    }

    /// An in-place store of it.
    pub fn index(&self) -> PathBuf {
        let out = self.beside("in-place");
        index(&self.checkpoint, &out, &IndexOptions::default()).expect("index");
        out
    }

    /// A packed store of it.
    pub fn pack(&self) -> PathBuf {
        let out = self.beside("packed");
        pack(&self.open(), &out, &BuildOptions::default()).expect("pack");
        out
    }

    /// A v1 store of it.
    pub fn pack_v1(&self) -> PathBuf {
        let out = self.beside("v1");
        pack_v1(&self.open(), &out, &BuildOptions::default()).expect("pack --format v1");
        out
    }

    /// What the records of a BF16 model must be: gate, up and down, each from a multiple of 256, zeros between.
    pub fn records(&self) -> Records {
        let mut leaves: BTreeMap<(Key, usize), Vec<u8>> = BTreeMap::new();
        for path in self.files() {
            let bytes = fs::read(&path).expect("a file of the checkpoint");
            let file = SafeTensors::deserialize(&bytes).expect("a sound safetensors file");
            for (name, tensor) in file.tensors() {
                if let Some(leaf) = leaf_of(&name) {
                    leaves.insert(leaf, tensor.data().to_vec());
                }
            }
        }
        let mut records = Records::new();
        for ((key, _), bytes) in leaves {
            let record = records.entry(key).or_default();
            record.extend_from_slice(&bytes);
            record.resize(record.len().next_multiple_of(256), 0);
        }
        records
    }

    /// The checkpoint's files with tensors.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(&self.checkpoint)
            .expect("the checkpoint's folder")
            .map(|entry| entry.expect("an entry").path())
            .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
            .collect();
        files.sort();
        files
    }
}

/// Key and place in the canonical order, of `model.layers.L.mlp.experts.E.gate_proj.weight` and its like.
fn leaf_of(name: &str) -> Option<(Key, usize)> {
    let rest = name.strip_prefix("model.layers.")?;
    let (layer, rest) = rest.split_once(".mlp.experts.")?;
    let (expert, leaf) = rest.split_once('.')?;
    let place = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
        .iter()
        .position(|l| *l == leaf)?;
    let number = |text: &str| text.parse().ok();
    Some((Key::new(number(layer)?, number(expert)?), place))
}

/// Opens a store or a checkpoint.
pub fn open(path: &Path) -> Arc<Store> {
    Arc::new(Store::open(path, &OpenOptions::default()).expect("a sound store"))
}

/// The records of a v1 store, from its files by their stride.
pub fn v1_records(store: &Path) -> Records {
    let text = fs::read(store.join("manifest.json")).expect("manifest.json");
    let manifest: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let number = |key: &str| manifest[key].as_u64().expect("a number");
    let mut records = Records::new();
    for layer in 0..number("num_moe_layers") as u32 {
        let path = store.join(format!("experts_{layer:05}.xpr"));
        let mut file = File::open(path).expect("a layer's file");
        for expert in 0..number("num_experts") as u32 {
            let mut record = vec![0; number("record_stride") as usize];
            file.read_exact(&mut record).expect("a whole record");
            records.insert(Key::new(layer, expert), record);
        }
    }
    records
}

/// The file and the place in it of one byte of a record, which must not be padding.
pub fn place_of(store: &Store, key: Key, offset: u64) -> (PathBuf, u64) {
    let mut found = None;
    store
        .for_each_piece(key, offset, 1, &mut |piece| {
            if let Piece::File { file, offset, .. } = piece {
                found = Some((store.files()[file as usize].path.clone(), offset));
            }
        })
        .expect("a byte of a record");
    found.expect("a byte that is not padding")
}

/// Inverts one byte of a file, and leaves its size and times as they were.
pub fn flip_unnoticed(path: &Path, offset: u64) {
    let mut file = FileOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .expect("a file that can be written");
    let before = file
        .metadata()
        .expect("its state")
        .modified()
        .expect("mtime");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("that byte");
    file.seek(SeekFrom::Start(offset)).expect("seek");
    file.write_all(&[!byte[0]]).expect("write");
    file.set_modified(before).expect("restoring the time");
}
