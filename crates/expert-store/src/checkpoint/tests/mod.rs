//! Whole checkpoints through `open`: helpers that write small ones, folders, and the 500,000-tensor timing.

mod families;

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;
use crate::catalogue::{LeafSource, Records, Role, Stacking};

/// A tensor for a test file: name, element type, shape.
pub(super) type T<'a> = (&'a str, &'a str, &'a [u64]);

/// A safetensors file with those tensors in order; the data is zeros.
pub(super) fn safetensors_file(tensors: &[T<'_>]) -> Vec<u8> {
    let mut header = String::from("{");
    let mut at = 0;
    for (i, (name, dtype, shape)) in tensors.iter().enumerate() {
        let bytes = crate::Dtype::from_name(dtype)
            .unwrap()
            .tensor_bytes(shape)
            .unwrap();
        let comma = if i > 0 { "," } else { "" };
        write!(
            header,
            "{comma}{}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{}]}}",
            serde_json::to_string(name).unwrap(),
            at + bytes
        )
        .unwrap();
        at += bytes;
    }
    header.push('}');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + at as usize, 0);
    file
}

/// Role, leaf, stacking, shape and source dimension 0.
pub(super) type LeafRow = (Role, String, Stacking, Vec<u64>, u64);

/// A folder that is deleted with the value.
pub(super) struct Folder(TempDir);

impl Folder {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn with(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        self
    }

    pub(super) fn st(self, name: &str, tensors: &[T<'_>]) -> Self {
        self.with(name, safetensors_file(tensors))
    }

    pub(super) fn open(&self) -> Result<Checkpoint, StoreError> {
        open(self.path())
    }

    /// The text of the error that opening gives.
    pub(super) fn refusal(&self) -> String {
        match self.open() {
            Err(e) => e.to_string(),
            Ok(c) => panic!("opened: {c:?}"),
        }
    }
}

/// A folder with one file of those tensors and, if not empty, a `config.json`.
pub(super) fn one_file(tensors: &[T<'_>], config: &str) -> Folder {
    let folder = Folder::new().st("model.safetensors", tensors);
    match config {
        "" => folder,
        text => folder.with("config.json", text),
    }
}

/// The same with owned names.
pub(super) fn one_file_of(tensors: &[(String, &str, Vec<u64>)], config: &str) -> Folder {
    let borrowed: Vec<T<'_>> = tensors
        .iter()
        .map(|(n, d, s)| (n.as_str(), *d, s.as_slice()))
        .collect();
    one_file(&borrowed, config)
}

/// Per-expert tensors of one layer: gate and up `[4, 8]`, down `[8, 4]`.
pub(super) fn experts(prefix: &str, count: u32) -> Vec<(String, &'static str, Vec<u64>)> {
    (0..count)
        .flat_map(|e| {
            [
                ("gate_proj", [4, 8]),
                ("up_proj", [4, 8]),
                ("down_proj", [8, 4]),
            ]
            .map(|(p, s)| {
                (
                    format!("{prefix}.experts.{e}.{p}.weight"),
                    "BF16",
                    s.to_vec(),
                )
            })
        })
        .collect()
}

/// Role, leaf, stacking, shape and source dimension 0 of the leaves of one class.
pub(super) fn leaves(layer: &Layer, class: usize) -> Vec<LeafRow> {
    layer.classes[class]
        .leaves
        .iter()
        .map(|l| {
            (
                l.role,
                l.leaf.clone(),
                l.stacking,
                l.shape.clone(),
                l.source_dim0,
            )
        })
        .collect()
}

/// Opens one file of those tensors and returns its only layer.
pub(super) fn only_layer(tensors: &[T<'_>], config: &str) -> Layer {
    let c = one_file(tensors, config).open().unwrap();
    assert_eq!((c.stacks.len(), c.stacks[0].layers.len()), (1, 1));
    c.stacks[0].layers[0].clone()
}

/// Opens one file of those tensors, which must fail with a text that contains `want`.
pub(super) fn refusal(tensors: &[T<'_>], config: &str, want: &str) {
    let why = one_file(tensors, config).refusal();
    assert!(why.contains(want), "{why}");
}

/// A row as [`leaves`] gives them.
pub(super) fn leaf(
    role: Role,
    leaf: &str,
    stacking: Stacking,
    shape: &[u64],
    dim0: u64,
) -> LeafRow {
    (role, leaf.into(), stacking, shape.to_vec(), dim0)
}

/// The sources of the leaves of one class.
pub(super) fn sources(layer: &Layer, class: usize) -> &[LeafSource] {
    match &layer.records {
        Records::InPlace { sources } => &sources[class],
        other => panic!("{other:?}"),
    }
}

#[test]
fn sharded_checkpoint_is_read_by_its_index_and_experts_may_straddle() {
    let all = experts("model.layers.3.mlp", 3);
    let all: Vec<T<'_>> = all
        .iter()
        .map(|(n, d, s)| (n.as_str(), *d, s.as_slice()))
        .collect();
    let (first, second) = all.split_at(4);
    let map: Vec<String> = all
        .iter()
        .enumerate()
        .map(|(i, t)| {
            format!(
                "{:?}:\"m-0000{}-of-00002.safetensors\"",
                t.0,
                if i < 4 { 1 } else { 2 }
            )
        })
        .collect();
    let folder = Folder::new()
        .st("m-00001-of-00002.safetensors", first)
        .st("m-00002-of-00002.safetensors", second)
        .st("consolidated.safetensors", &all)
        .st("original/model.safetensors", &all)
        .with(
            "model.safetensors.index.json",
            format!("{{\"weight_map\":{{{}}}}}", map.join(",")),
        );
    let c = folder.open().unwrap();
    assert_eq!(c.files.len(), 2);
    assert_eq!((c.stacks.len(), c.stacks[0].layers.len()), (1, 1));
    assert!(c.warnings[0].contains("e.g. consolidated.safetensors"));
    let layer = &c.stacks[0].layers[0];
    assert_eq!(
        (layer.layer, layer.model_layer, layer.num_experts),
        (0, 3, 3)
    );
    assert_eq!(
        layer.classes[0].leaves[1].name,
        "model.layers.3.mlp.experts.{}.up_proj.weight"
    );
    // Canonical order is gate, up, down; the second expert has its gate in the first file.
    let columns: Vec<&Vec<u32>> = sources(layer, 0)
        .iter()
        .map(|s| match s {
            LeafSource::Column { files, .. } => files,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(columns, [&[0, 0, 1], &[0, 1, 1], &[0, 1, 1]]);
    // The same bytes at any number of threads.
    let again = open_with(folder.path(), &OpenOptions { threads: 7 }).unwrap();
    assert_eq!(again.stacks[0].layers, c.stacks[0].layers);
    assert!(is_checkpoint(folder.path()));
    let by_index = open(&folder.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(by_index.files.len(), 2);
}

#[test]
fn offsets_point_at_the_tensors_in_an_unpadded_file() {
    let tensors: [T<'_>; 4] = [
        ("x", "U8", &[3]),
        (
            "model.layers.0.mlp.experts.0.up_proj.weight",
            "BF16",
            &[2, 2],
        ),
        (
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "BF16",
            &[2, 2],
        ),
        (
            "model.layers.0.mlp.experts.0.down_proj.weight",
            "BF16",
            &[2, 2],
        ),
    ];
    let bytes = safetensors_file(&tensors);
    let data = bytes.len() as u64 - 27;
    let folder = Folder::new().with("model.safetensors", &bytes);
    let c = open(&folder.path().join("model.safetensors")).unwrap();
    let offsets: Vec<u64> = sources(&c.stacks[0].layers[0], 0)
        .iter()
        .map(|s| match s {
            LeafSource::Column { offsets, .. } => offsets[0],
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(offsets, [data + 11, data + 3, data + 19]);
    assert_eq!(c.root, fs::canonicalize(folder.path()).unwrap());
    assert_eq!(c.files[0].stamp.bytes, bytes.len() as u64);
}

#[test]
fn hub_cache_with_links_is_followed() {
    let all = experts("model.layers.0.mlp", 2);
    let borrowed: Vec<T<'_>> = all
        .iter()
        .map(|(n, d, s)| (n.as_str(), *d, s.as_slice()))
        .collect();
    let folder = Folder::new()
        .st("blobs/abc123", &borrowed)
        .with("refs/main", "f00d\n")
        .with("snapshots/other/x", "");
    let snapshot = folder.path().join("snapshots/f00d");
    fs::create_dir_all(&snapshot).unwrap();
    symlink("../../blobs/abc123", snapshot.join("model.safetensors")).unwrap();
    for path in [
        folder.path().to_path_buf(),
        snapshot.clone(),
        snapshot.join("model.safetensors"),
    ] {
        assert!(is_checkpoint(&path), "{path:?}");
        let c = open(&path).unwrap();
        assert_eq!(c.files[0].name, "model.safetensors");
        assert_eq!(c.root, fs::canonicalize(&snapshot).unwrap());
    }
    // A link whose blob is gone is a file that is missing.
    fs::remove_file(folder.path().join("blobs/abc123")).unwrap();
    assert!(matches!(open(&snapshot), Err(StoreError::Io { .. })));
}

#[test]
fn what_is_no_checkpoint_says_what_to_do() {
    let f = Folder::new()
        .with("pytorch_model.bin", "x")
        .with("pytorch_model.bin.index.json", "{}");
    assert!(f.refusal().contains("convert the model to safetensors"));
    let err = open(&f.path().join("pytorch_model.bin"))
        .unwrap_err()
        .to_string();
    assert!(err.contains("convert the model to safetensors"), "{err}");
    assert!(!is_checkpoint(f.path()));
    assert!(
        Folder::new()
            .with("README.md", "x")
            .refusal()
            .contains("no .safetensors or .gguf")
    );
    let err = open(&f.path().join("pytorch_model.bin.index.json"))
        .unwrap_err()
        .to_string();
    assert!(err.contains("neither a folder"), "{err}");
    assert!(matches!(
        open(Path::new("/nonexistent/x")),
        Err(StoreError::Io { .. })
    ));
    let lora: [T<'_>; 1] = [(
        "base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight",
        "F32",
        &[2, 2],
    )];
    let f = Folder::new()
        .st("adapter_model.safetensors", &lora)
        .with("adapter_config.json", "{}");
    assert!(f.refusal().contains("base model"));
    let err = open(&f.path().join("adapter_model.safetensors"))
        .unwrap_err()
        .to_string();
    assert!(err.contains("adapter (LoRA)"), "{err}");
    let f = Folder::new().with(
        "model.safetensors",
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 4976698672\n",
    );
    assert!(f.refusal().contains("git lfs pull"));
    let dense: [T<'_>; 1] = [("model.layers.0.mlp.gate_proj.weight", "BF16", &[2, 2])];
    let f = one_file(&dense, "{}");
    assert!(
        matches!(f.open(), Err(StoreError::NoExperts { .. })),
        "{}",
        f.refusal()
    );
    assert!(f.refusal().contains("dense"));
}

#[test]
fn damaged_files_are_refused_by_name() {
    let tensors: [T<'_>; 1] = [(
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "BF16",
        &[4, 4],
    )];
    let good = safetensors_file(&tensors);
    let refusal = |bytes: &[u8]| {
        let text = Folder::new().with("model.safetensors", bytes).refusal();
        assert!(text.contains("model.safetensors"), "{text}");
        text
    };
    for n in 0..good.len() {
        refusal(&good[..n]);
    }
    assert!(refusal(&good[..4]).contains("too few"));
    assert!(refusal(&good[..20]).contains("cut off"));
    assert!(refusal(&good[..good.len() - 1]).contains("cut off"));
    assert!(refusal(&[&good[..], b"x"].concat()).contains("damaged"));
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&100_000_001u64.to_le_bytes());
    assert!(refusal(&huge).contains("the limit is 100000000"));
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(refusal(&huge).contains("the limit is 100000000"));
}

#[test]
fn index_and_files_must_agree() {
    let all = experts("model.layers.0.mlp", 1);
    let all: Vec<T<'_>> = all
        .iter()
        .map(|(n, d, s)| (n.as_str(), *d, s.as_slice()))
        .collect();
    let index = |entries: &[(&str, &str)]| {
        let map: Vec<String> = entries
            .iter()
            .map(|(n, f)| format!("{n:?}:{f:?}"))
            .collect();
        format!("{{\"weight_map\":{{{}}}}}", map.join(","))
    };
    let name = "model.safetensors.index.json";
    let f = Folder::new().st("a.safetensors", &all).with(
        name,
        index(&[(all[0].0, "a.safetensors"), (all[1].0, "b.safetensors")]),
    );
    assert!(
        f.refusal()
            .contains("1 of 2 files that the index lists are missing, the first is b.safetensors")
    );
    let f = f.st("b.safetensors", &[("other", "U8", &[1])]);
    assert!(
        f.refusal()
            .contains(&format!("lists tensor {:?} in b.safetensors", all[1].0))
    );
    let f = f.st("b.safetensors", &all[1..2]);
    assert!(
        f.refusal()
            .contains("is in a.safetensors and in b.safetensors"),
        "{}",
        f.refusal()
    );
    let f = Folder::new()
        .st("a.safetensors", &all)
        .with(name, index(&[(all[0].0, "../a.safetensors")]));
    assert!(f.refusal().contains("not inside"));
}

#[test]
fn folders_without_an_index_are_read_whole_and_repeats_refused() {
    let a = experts("model.layers.0.mlp", 2);
    let all: Vec<T<'_>> = a
        .iter()
        .map(|(n, d, s)| (n.as_str(), *d, s.as_slice()))
        .collect();
    let f = Folder::new()
        .st("a.safetensors", &all[..3])
        .st("b.safetensors", &all[3..])
        .st(
            "adapter_model.safetensors",
            &[("x.lora_A.weight", "U8", &[1])],
        )
        .st("consolidated.00.safetensors", &all);
    let c = f.open().unwrap();
    assert_eq!(
        c.files.iter().map(|f| &*f.name).collect::<Vec<_>>(),
        ["a.safetensors", "b.safetensors"]
    );
    assert_eq!(c.warnings.len(), 2, "{:?}", c.warnings);
    // Pre-sharded for tensor parallelism: the same names in each file.
    let f = Folder::new()
        .st("m-TP-000.safetensors", &all)
        .st("m-TP-001.safetensors", &all);
    assert!(f.refusal().contains("tensor parallelism"));
    let f = Folder::new().st("m-00001-of-00003.safetensors", &all);
    assert!(
        f.refusal()
            .contains("2 of 3 parts are missing, the first is m-00002-of-00003"),
        "{}",
        f.refusal()
    );
    let alone = open(&f.path().join("m-00001-of-00003.safetensors")).unwrap();
    assert!(alone.warnings[0].contains("part 1 of 3"));
}

#[test]
fn two_stacks_and_mtp_are_kept_apart() {
    let mut t = experts("thinker.model.layers.0.mlp", 2);
    t.extend(experts("talker.model.layers.0.mlp", 3));
    let c = one_file_of(&t, "").open().unwrap();
    let names: Vec<&str> = c.stacks.iter().map(|s| &*s.prefix).collect();
    assert_eq!(names, ["talker.model.layers", "thinker.model.layers"]);
    assert_eq!(c.stacks[0].layers[0].num_experts, 3);

    // Holes in the numbers, an MTP layer behind the trunk, one under its own name.
    let mut t = experts("model.layers.10.mlp", 2);
    t.extend(experts("model.layers.3.mlp", 2));
    t.extend(experts("model.layers.61.mlp", 2));
    t.extend(experts("mtp.layers.0.mlp", 2));
    let c = one_file_of(
        &t,
        r#"{"num_hidden_layers":61,"num_nextn_predict_layers":1,"n_routed_experts":2}"#,
    )
    .open()
    .unwrap();
    let seen: Vec<_> = c
        .stacks
        .iter()
        .map(|s| {
            (
                &*s.prefix,
                s.class,
                s.layers.iter().map(|l| (l.layer, l.model_layer)).collect(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("model.layers", StackClass::Trunk, vec![(0, 3), (1, 10)]),
            ("model.layers", StackClass::Mtp, vec![(0, 61)]),
            ("mtp.layers", StackClass::Mtp, vec![(0, 0)]),
        ]
    );
    assert!(c.warnings.is_empty(), "{:?}", c.warnings);
}

#[test]
#[ignore = "a timing of half a million tensors; run it in release: cargo test --release -p expert-store half_a_million -- --ignored --nocapture"]
fn half_a_million_tensors_are_read_quickly() {
    let (layers, experts, shards) = (93usize, 896usize, 96usize);
    let mut tensors: Vec<String> = Vec::new();
    for layer in 1..layers {
        for expert in 0..experts {
            for p in ["w1", "w2", "w3"] {
                for leaf in ["weight_packed", "weight_scale"] {
                    tensors.push(format!(
                        "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{p}.{leaf}"
                    ));
                }
            }
        }
    }
    let mut folder = Folder::new();
    let mut map = String::from("{\"metadata\":{},\"weight_map\":{");
    for (i, part) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let name = format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
        for t in part {
            write!(map, "{t:?}:{name:?},").unwrap();
        }
        let of: Vec<T<'_>> = part
            .iter()
            .map(|t| (t.as_str(), "U8", &[2u64, 1][..]))
            .collect();
        folder = folder.st(&name, &of);
    }
    map.pop();
    map.push_str("}}");
    let folder = folder.with("model.safetensors.index.json", &map);
    let resident = || {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        status
            .lines()
            .find_map(|l| l.strip_prefix("VmHWM:"))
            .map(|l| l.trim().to_owned())
            .unwrap_or_default()
    };
    drop(map);
    // Processor time beside wall time, because other work on the machine stretches the latter.
    let cpu_ms = || {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let ticks = stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .split_whitespace()
            .skip(11);
        10 * ticks
            .take(2)
            .filter_map(|t| t.parse::<u64>().ok())
            .sum::<u64>()
    };
    for _ in 0..5 {
        let (before, cpu) = (resident(), cpu_ms());
        let start = std::time::Instant::now();
        let c = open_with(folder.path(), &OpenOptions { threads: 2 }).unwrap();
        let opened = start.elapsed();
        assert_eq!(c.stacks[0].layers.len(), layers - 1);
        println!(
            "{} tensors: {opened:?} on two threads, {} ms of processor; peak resident {before} before, {} after",
            tensors.len(),
            cpu_ms() - cpu,
            resident()
        );
    }
}
