//! A model in parts, replicas and other builds, for tests with several peers.

use std::path::PathBuf;
use std::sync::Arc;

use expert_store::{
    BuildOptions, IndexOptions, NameWhole, OpenOptions, Selection, Store, index, pack,
};

use super::model::{self, Model, Records, Sizes};

/// See the module.
pub struct Parts {
    /// The model.
    pub model: Model,
    /// What each record must be.
    pub records: Records,
    /// All of it, in place.
    pub whole: Arc<Store>,
}

impl Parts {
    /// A model of that size.
    pub fn new(sizes: Sizes) -> Self {
        let model = Model::bf16(sizes);
        Self {
            records: model.records(),
            whole: model::open(&model.index()),
            model,
        }
    }

    /// All of it, packed.
    pub fn packed(&self) -> Arc<Store> {
        model::open(&self.model.pack())
    }

    /// Shard `i` of `n`, packed from a store that knows the whole.
    pub fn packed_shard(&self, i: u32, n: u32) -> Arc<Store> {
        let out = self.model.beside(&format!("packed-{i}-{n}"));
        if !out.exists() {
            let options = OpenOptions {
                selection: Some(shard(i, n)),
                checksums: false,
                ..OpenOptions::default()
            };
            let source = Store::open(self.whole.path(), &options).expect("a part");
            pack(&source, &out, &BuildOptions::default()).expect("pack");
        }
        model::open(&out)
    }

    /// Where shard `i` of `n` is, indexed from the checkpoint.
    pub fn indexed_shard_path(&self, i: u32, n: u32) -> PathBuf {
        let out = self.model.beside(&format!("in-place-{i}-{n}"));
        if !out.exists() {
            let options = IndexOptions {
                selection: Some(shard(i, n)),
                name_whole: NameWhole::Always,
                ..IndexOptions::default()
            };
            index(&self.model.checkpoint, &out, &options).expect("index");
        }
        out
    }

    /// Shard `i` of `n`, indexed from the checkpoint.
    pub fn indexed_shard(&self, i: u32, n: u32) -> Arc<Store> {
        model::open(&self.indexed_shard_path(i, n))
    }

    /// Bytes of all records.
    pub fn bytes(&self) -> u64 {
        self.records.values().map(|r| r.len() as u64).sum()
    }
}

fn shard(i: u32, n: u32) -> Selection {
    Selection {
        shard: Some((i, n)),
        ..Selection::default()
    }
}
