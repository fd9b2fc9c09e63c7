//! Targets of stores: a layer's blob, a peer's description of its store, and a store's manifest.

use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};

use expert_store::catalogue::{Records, chunk_count};
use expert_store::codec::{self, Sections};
use expert_store::info::{LayerInfo, hex128, parse_hex128};
use expert_store::{BuildOptions, Layer, OpenOptions, Store, StoreError, StoreInfo};
use expert_wire::limits;
use tempfile::TempDir;

/// A layer's blob: what is accepted encodes to a blob of the same layer, and every record of it can
/// be located without a sum that overflows.
pub fn layer_blob(input: &[u8]) {
    if let Ok(layer) = codec::decode_layer(input) {
        check_layer(&layer);
    }
}

/// Holds a layer that was accepted against what `Layer` promises.
pub(super) fn check_layer(layer: &Layer) {
    let blob = codec::encode_layer(layer, Sections::ALL);
    let again = codec::decode_layer(&blob).expect("our own blob is accepted");
    assert_eq!(again, *layer);
    assert_eq!(codec::encode_layer(&again, Sections::ALL), blob);
    assert_eq!(again.id(true), layer.id(true));
    assert_eq!(again.whole_id(), layer.whole_id());

    let without = Sections {
        segments: false,
        checksums: false,
        rest: false,
    };
    let lean = codec::decode_layer(&codec::encode_layer(layer, without)).expect("a lean blob");
    assert_eq!((&lean.records, &lean.checksums), (&Records::Remote, &None));
    assert_eq!(lean.id(false), layer.id(false));

    let count = layer.experts.len();
    // The first and last of them: a layer may have tens of thousands.
    for position in (0..count).filter(|&p| p < 8 || p + 8 >= count) {
        check_record(layer, position);
    }
    assert_eq!(LayerInfo::of(layer).num_experts, layer.num_experts);
}

fn check_record(layer: &Layer, position: usize) {
    assert_eq!(layer.position(layer.experts[position]), Some(position));
    let class = layer.class(position);
    assert!(class.image_bytes <= layer.image_bytes_max());
    let mut at = 0;
    layer.for_each_segment(position, |s| {
        assert!(s.bytes > 0 && s.image_offset >= at, "{s:?} before {at}");
        at = s
            .image_offset
            .checked_add(s.bytes)
            .expect("an end in the image");
        assert!(s.file_offset.checked_add(s.bytes).is_some(), "{s:?}");
    });
    assert!(at <= class.image_bytes, "{at} of {}", class.image_bytes);
    if let Some(sums) = layer.record_checksums(position) {
        assert_eq!(sums.len() as u64, chunk_count(class.image_bytes));
    }
    for (i, leaf) in class.leaves.iter().enumerate() {
        if let Some(value) = layer.inline_value(position, i) {
            assert_eq!(value.len() as u64, leaf.bytes);
        }
    }
}

/// A peer's description of its store: survives the way out and in, and lists of experts are bounded
/// before they take memory.
pub fn info(input: &[u8]) {
    let Ok(info) = serde_json::from_slice::<StoreInfo>(input) else {
        return;
    };
    let text = serde_json::to_vec(&info).expect("plain data");
    assert_eq!(
        serde_json::from_slice::<StoreInfo>(&text).ok(),
        Some(info.clone())
    );
    // Whatever it says: an answer, and no more memory than it has itself.
    if info.check().is_ok() {
        assert!(!info.layers.is_empty());
    }
    for layer in &info.layers {
        if let Ok(experts) = codec::from_ranges(&layer.experts, limits::EXPERTS_MAX) {
            assert!(experts.windows(2).all(|w| w[0] < w[1]));
            assert!(experts.iter().all(|&e| e < limits::EXPERTS_MAX));
            let ranges = codec::to_ranges(&experts);
            assert!(ranges.len() <= layer.experts.len());
            assert_eq!(
                codec::from_ranges(&ranges, limits::EXPERTS_MAX),
                Ok(experts)
            );
        }
        if let Ok(id) = parse_hex128(&layer.id) {
            assert!(hex128(id).eq_ignore_ascii_case(&layer.id));
        }
    }
}

/// `manifest.json`, put into a packed store and into a v1 store whose other files are sound: what
/// opens refers to files of its own directory alone, and to bytes that they have.
pub fn manifest(input: &[u8]) {
    let v2 = input.windows(FORMAT.len()).any(|w| w == FORMAT);
    with_stores(|stores| {
        let dir = match v2 {
            true => stores.packed(),
            false => stores.v1(),
        };
        fs::write(dir.join("manifest.json"), input).expect("writing the manifest");
        let options = OpenOptions {
            threads: 1,
            ..OpenOptions::default()
        };
        match Store::open(&dir, &options) {
            Ok(store) => check_store(&store, &dir, input),
            Err(error) => drop(error.to_string()),
        }
    });
}

/// What marks the manifest of a v2 store.
const FORMAT: &[u8] = b"atlas-expert-store";

fn check_store(store: &Store, dir: &Path, manifest: &[u8]) {
    for file in store.files() {
        let path = file.path.canonicalize().expect("a file that was opened");
        assert!(path.starts_with(dir), "{} is outside", path.display());
    }
    let said: serde_json::Value = serde_json::from_slice(manifest).expect("it was read");
    if let Some(id) = said.get("content_id").and_then(|id| id.as_str()) {
        let id = parse_hex128(id).expect("it was read");
        assert_eq!(
            store.content_id(),
            Some(id),
            "opened under another content id"
        );
    }
    for layer in &store.catalogue().layers {
        check_layer(layer);
        for position in 0..layer.experts.len() {
            layer.for_each_segment(position, |s| {
                let file = &store.files()[s.file as usize];
                let end = s.file_offset.checked_add(s.bytes);
                assert!(end.is_some_and(|end| end <= file.stamp.bytes), "{s:?}");
            });
        }
    }
}

/// A packed store and a v1 store, made once for each thread and gone with it.
pub(super) struct Stores(TempDir);

impl Stores {
    /// Builds both from fixtures.
    pub(super) fn build() -> Result<Self, StoreError> {
        let dir = super::checkpoint::work_dir();
        let this = Self(dir);
        let source = OpenOptions {
            checksums: false,
            threads: 1,
            ..OpenOptions::default()
        };
        let options = BuildOptions {
            threads: 1,
            ..BuildOptions::default()
        };
        let store = Store::open(fixture("saved-qwen3moe"), &source)?;
        expert_store::pack(&store, &this.packed(), &options)?;
        let store = Store::open(fixture("nvfp4-modelopt"), &source)?;
        expert_store::pack_v1(&store, &this.v1(), &options)?;
        Ok(this)
    }

    pub(super) fn packed(&self) -> PathBuf {
        self.0.path().join("packed")
    }

    pub(super) fn v1(&self) -> PathBuf {
        self.0.path().join("v1")
    }
}

fn with_stores(f: impl FnOnce(&Stores)) {
    thread_local! {
        static STORES: OnceCell<Stores> = const { OnceCell::new() };
    }
    STORES.with(|cell| {
        f(cell.get_or_init(|| Stores::build().expect("building stores of the fixtures")));
    });
}

/// A checkpoint of the fixtures; the same from each package that includes this file.
pub(super) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/checkpoints")
        .join(name)
}
