//! GGUF files through `open`, whole and damaged.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::catalogue::{LeafSource, Role, StackClass, Stacking};
use crate::checkpoint::tests::{Folder, leaves, sources};
use crate::checkpoint::{Checkpoint, open};

/// Writes GGUF headers; the data is zeros.
#[derive(Clone)]
struct Writer {
    version: u32,
    kv: Vec<(String, u32, Vec<u8>)>,
    /// Name, dimensions fastest first, type, offset (`None`: as it should be).
    tensors: Vec<(String, Vec<u64>, u32, Option<u64>)>,
    alignment: u64,
}

impl Writer {
    fn new() -> Self {
        Self {
            version: 3,
            kv: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
        }
    }

    fn text(mut self, key: &str, value: &str) -> Self {
        let mut raw = (value.len() as u64).to_le_bytes().to_vec();
        raw.extend_from_slice(value.as_bytes());
        self.kv.push((key.into(), 8, raw));
        self
    }

    fn u32(mut self, key: &str, value: u32) -> Self {
        self.kv.push((key.into(), 4, value.to_le_bytes().to_vec()));
        self
    }

    fn u16(mut self, key: &str, value: u16) -> Self {
        self.kv.push((key.into(), 2, value.to_le_bytes().to_vec()));
        self
    }

    fn raw(mut self, key: &str, kind: u32, raw: &[u8]) -> Self {
        self.kv.push((key.into(), kind, raw.to_vec()));
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], id: u32) -> Self {
        self.tensors.push((name.into(), dims.to_vec(), id, None));
        self
    }

    fn moe(self, layer: u32) -> Self {
        self.tensor(
            &format!("blk.{layer}.ffn_gate_exps.weight"),
            &[64, 4, 3],
            39,
        )
        .tensor(&format!("blk.{layer}.ffn_down_exps.weight"), &[32, 8, 3], 8)
        .tensor(&format!("blk.{layer}.ffn_up_exps.weight"), &[64, 4, 3], 39)
    }

    fn arch(self) -> Self {
        self.text("general.architecture", "qwen3moe")
            .u32("qwen3moe.block_count", 2)
            .u32("qwen3moe.expert_count", 3)
            .u32("qwen3moe.expert_used_count", 2)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&(self.kv.len() as u64).to_le_bytes());
        let text = |out: &mut Vec<u8>, s: &str| {
            out.extend_from_slice(&(s.len() as u64).to_le_bytes());
            out.extend_from_slice(s.as_bytes());
        };
        for (key, kind, raw) in &self.kv {
            text(&mut out, key);
            out.extend_from_slice(&kind.to_le_bytes());
            out.extend_from_slice(raw);
        }
        let mut at = 0u64;
        for (name, dims, id, offset) in &self.tensors {
            text(&mut out, name);
            out.extend_from_slice(&(dims.len() as u32).to_le_bytes());
            for d in dims {
                out.extend_from_slice(&d.to_le_bytes());
            }
            out.extend_from_slice(&id.to_le_bytes());
            out.extend_from_slice(&offset.unwrap_or(at).to_le_bytes());
            let shape: Vec<u64> = dims.iter().rev().copied().collect();
            let bytes = Dtype::from_gguf_id(*id)
                .and_then(|d| d.tensor_bytes(&shape))
                .unwrap_or(0);
            at = (at + bytes).next_multiple_of(self.alignment);
        }
        if !self.tensors.is_empty() {
            out.resize(
                out.len().next_multiple_of(self.alignment as usize) + at as usize,
                0,
            );
        }
        out
    }

    fn open(&self) -> Result<Checkpoint, String> {
        let folder = Folder::new().with("m.gguf", self.bytes());
        open(&folder.path().join("m.gguf")).map_err(|e| e.to_string())
    }
}

#[test]
fn experts_are_slices_of_stacked_tensors_in_versions_2_and_3() {
    for version in [2, 3] {
        let mut w = Writer::new()
            .arch()
            .moe(1)
            .tensor("blk.1.ffn_gate_exps.scale", &[3], 0);
        w.version = version;
        let c = w.open().unwrap();
        assert!(c.warnings.is_empty(), "{:?}", c.warnings);
        assert_eq!(c.metadata["general.architecture"], "qwen3moe");
        let layer = &c.stacks[0].layers[0];
        assert_eq!(
            (&*c.stacks[0].prefix, layer.model_layer, layer.num_experts),
            ("blk", 1, 3)
        );
        assert_eq!(
            leaves(layer, 0),
            [
                (Role::Gate, "scale".into(), Stacking::Stacked, vec![], 3),
                (
                    Role::Gate,
                    "weight".into(),
                    Stacking::Stacked,
                    vec![4, 64],
                    3
                ),
                (Role::Up, "weight".into(), Stacking::Stacked, vec![4, 64], 3),
                (
                    Role::Down,
                    "weight".into(),
                    Stacking::Stacked,
                    vec![8, 32],
                    3
                ),
            ]
        );
        // 17-byte blocks: slices need not be aligned.
        assert!(matches!(
            sources(layer, 0)[1],
            LeafSource::Strided { step: 136, .. }
        ));
    }
}

#[test]
fn biases_alignment_fused_gate_and_old_names_are_read() {
    let mut w = Writer::new()
        .text("general.architecture", "gpt-oss")
        .u32("general.alignment", 64)
        .tensor("blk.0.ffn_gate_up_exps.weight", &[32, 8, 2], 8)
        .tensor("blk.0.ffn_gate_up_exps.bias", &[8, 2], 0)
        .tensor("blk.0.ffn_down_exps.weight", &[32, 8, 2], 8)
        .tensor("blk.0.ffn_down_exps.bias", &[8, 2], 0);
    w.alignment = 64;
    let c = w.open().unwrap();
    let layer = &c.stacks[0].layers[0];
    assert_eq!(
        leaves(layer, 0)[0],
        (Role::GateUp, "bias".into(), Stacking::Stacked, vec![8], 2)
    );
    for s in sources(layer, 0) {
        assert!(matches!(s, LeafSource::Strided { base, .. } if base % 64 == 0));
    }
    let c = Writer::new()
        .text("general.architecture", "llama")
        .tensor("blk.0.ffn_gate.0.weight", &[32, 4], 8)
        .tensor("blk.0.ffn_gate.1.weight", &[32, 4], 8)
        .tensor("blk.0.ffn_gate.weight", &[32, 4], 8)
        .open()
        .unwrap();
    assert_eq!(
        c.stacks[0].layers[0].classes[0].leaves[0].name,
        "blk.0.ffn_gate.{}.weight"
    );
}

#[test]
fn only_expert_may_have_lost_its_dimension() {
    let w = Writer::new()
        .text("general.architecture", "x")
        .u32("x.expert_count", 1)
        .tensor("blk.0.ffn_gate_exps.weight", &[32, 4], 8);
    let layer = &w.open().unwrap().stacks[0].layers[0];
    assert_eq!(layer.num_experts, 1);
    assert_eq!(leaves(layer, 0)[0].2, Stacking::Common);
    let w = Writer::new()
        .text("general.architecture", "x")
        .u32("x.expert_count", 4)
        .tensor("blk.0.ffn_gate_exps.weight", &[32, 4], 8);
    assert!(w.open().unwrap_err().contains("cannot be told apart"));
}

#[test]
fn mtp_layers_lie_behind_the_trunk() {
    let c = Writer::new()
        .arch()
        .u32("qwen3moe.nextn_predict_layers", 1)
        .moe(0)
        .moe(1)
        .open()
        .unwrap();
    let classes: Vec<StackClass> = c.stacks.iter().map(|s| s.class).collect();
    assert_eq!(classes, [StackClass::Trunk, StackClass::Mtp]);
    let c = Writer::new()
        .arch()
        .u32("qwen3moe.x", 1)
        .moe(0)
        .open()
        .unwrap();
    assert!(c.warnings.is_empty());
    let c = Writer::new()
        .text("general.architecture", "q")
        .u32("q.expert_count", 9)
        .moe(0)
        .open()
        .unwrap();
    assert!(c.warnings[0].contains("says 9"), "{:?}", c.warnings);
    let c = Writer::new().moe(0).open().unwrap();
    assert!(
        c.warnings[0].contains("no general.architecture"),
        "{:?}",
        c.warnings
    );
}

#[test]
fn damage_is_named() {
    let w = || Writer::new().arch().moe(0);
    let refused = |w: Writer, want: &str| {
        let why = w.open().expect_err(want);
        assert!(why.contains(want), "{why}");
    };
    let version = |v: u32| {
        let mut w = w();
        w.version = v;
        w
    };
    refused(version(1), "version 1 is no longer in use");
    refused(version(4), "needs a newer build");
    refused(version(3u32.swap_bytes()), "big-endian");
    refused(w().tensor("x", &[32], 99), "element type 99");
    refused(w().tensor("x", &[32], 4), "element type 4");
    refused(w().tensor("x", &[33], 8), "not whole blocks of 32");
    refused(w().tensor("x", &[1 << 40, 1 << 40], 0), "too large");
    refused(w().tensor("x", &[u64::MAX], 0), "dimension of");
    refused(w().tensor("x", &[1; 5], 0), "5 dimensions");
    refused(w().tensor(&"x".repeat(64), &[1], 0), "the limit is 63");
    refused(w().tensor("", &[1], 0), "without a name");
    refused(
        w().tensor("blk.0.ffn_up_exps.weight", &[1], 0),
        "in the file twice",
    );
    refused(w().u32("qwen3moe.block_count", 2), "is there twice");
    refused(w().u32("general.alignment", 3), "power of two");
    refused(w().u32("general.alignment", 0), "power of two");
    refused(w().text("general.alignment", "x"), "power of two");
    refused(w().raw("a", 13, &[0]), "unknown type 13");
    let array =
        |element: u32, count: u64| [&element.to_le_bytes()[..], &count.to_le_bytes()].concat();
    refused(w().raw("a", 9, &array(9, 0)), "array of arrays");
    refused(w().raw("a", 9, &array(13, 0)), "unknown type 13");
    refused(
        w().raw("a", 9, &array(4, 1 << 31)),
        "the limit is 1073741824",
    );
    refused(w().raw("a", 9, &array(8, 1 << 29)), "do not fit");
    refused(
        w().raw("a", 8, &(1u64 << 30).to_le_bytes()),
        "cut off or damaged",
    );
    refused(w().text("general.type", "adapter"), "GGUF adapter");
    let mut wrong = w();
    wrong.tensors[1].3 = Some(7);
    refused(wrong, "is said to lie at 7");

    let good = w().bytes();
    let folder = |bytes: &[u8]| Folder::new().with("m.gguf", bytes);
    for n in (0..good.len() - 32).step_by(3) {
        folder(&good[..n]).refusal();
    }
    assert!(
        folder(&good[..good.len() - 40])
            .refusal()
            .contains("cut off")
    );
    assert!(
        folder(b"version https://git-lfs.github.com/spec/v1\noid")
            .refusal()
            .contains("LFS")
    );
    let mut counts = good.clone();
    counts[8..16].copy_from_slice(&1_000_000u64.to_le_bytes());
    assert!(folder(&counts).refusal().contains("do not fit"));
    let mut counts = good.clone();
    counts[16..24].copy_from_slice(&100_000u64.to_le_bytes());
    assert!(folder(&counts).refusal().contains("do not fit"));
    let longer = [&good[..], &[0; 100]].concat();
    assert!(
        folder(&longer).open().unwrap().warnings[0].contains("100 bytes after the last tensor")
    );
}

/// Sparse files make any count fit: what is read is bounded by the format's limits, not by the size.
#[test]
fn sparse_file_of_64_gib_is_refused_before_memory_is_taken() {
    let sparse = |header: &[u8]| {
        let folder = Folder::new().with("m.gguf", header);
        let file = std::fs::File::options()
            .write(true)
            .open(folder.path().join("m.gguf"))
            .unwrap();
        file.set_len(64 << 30).unwrap();
        let refusal = folder.refusal();
        drop(folder);
        refusal
    };
    let mut header = Writer::new().arch().bytes();
    header[8..16].copy_from_slice(&2_000_000_000u64.to_le_bytes());
    assert!(sparse(&header).contains("2000000000 tensors, the limit is 1000000"));
    header[8..16].copy_from_slice(&1_000_000u64.to_le_bytes());
    assert!(sparse(&header).contains("without a name"));
    header[16..24].copy_from_slice(&2_000_000_000u64.to_le_bytes());
    assert!(sparse(&header).contains("metadata entries, the limit is 100000"));
    let array = [&4u32.to_le_bytes()[..], &(1u64 << 30).to_le_bytes()].concat();
    let header = Writer::new().arch().raw("a", 9, &array).bytes();
    assert!(sparse(&header).contains("the header is longer"));
}

fn part(no: u16, count: u16, total: u32) -> Writer {
    Writer::new()
        .u16("split.no", no)
        .u16("split.count", count)
        .raw("split.tensors.count", 5, &total.to_le_bytes())
}

#[test]
fn split_models_are_read_from_any_part() {
    let name = |n: u32| format!("m-{n:05}-of-00003.gguf");
    let mut first = part(0, 3, 6);
    first.kv.extend(Writer::new().arch().kv);
    let folder = Folder::new()
        .with(&name(1), first.bytes())
        .with(&name(2), part(1, 3, 6).moe(0).bytes())
        .with(&name(3), part(2, 3, 6).moe(1).bytes())
        .with("mmproj-m.gguf", "x");
    let paths: Vec<PathBuf> = (1..=3).map(|n| folder.path().join(name(n))).collect();
    for path in paths.iter().chain([&folder.path().to_path_buf()]) {
        let c = open(path).unwrap();
        assert_eq!((c.files.len(), c.stacks[0].layers.len()), (3, 2));
        assert!(matches!(
            sources(&c.stacks[0].layers[1], 0)[0],
            LeafSource::Strided { file: 2, .. }
        ));
    }
    // Mixed up, miscounted, incomplete.
    let refusal = |folder: &Folder, want: &str| {
        let why = folder.refusal();
        assert!(why.contains(want), "{why}");
    };
    let folder = folder.with(&name(2), part(2, 3, 6).moe(1).bytes());
    refusal(&folder, "says it is part 3");
    let folder = folder.with(&name(2), part(1, 4, 6).moe(0).bytes());
    refusal(&folder, "of 4 parts");
    let folder = folder.with(&name(2), part(1, 3, 6).moe(1).bytes());
    refusal(&folder, "hold a tensor of the same name");
    let folder = folder.with(&name(2), part(1, 3, 6).bytes());
    refusal(&folder, "the parts hold 3 tensors, the first says 6");
    let folder = folder.with(&name(2), Writer::new().moe(0).bytes());
    refusal(&folder, "no split.count");
    std::fs::remove_file(folder.path().join(name(2))).unwrap();
    refusal(
        &folder,
        "1 of 3 parts are missing, the first is m-00002-of-00003.gguf",
    );
    let folder = Folder::new().with("renamed.gguf", part(1, 3, 6).moe(0).bytes());
    refusal(&folder, "part 2 of 3 but is not named so");
    let folder = folder.with("other.gguf", Writer::new().arch().moe(0).bytes());
    refusal(&folder, "2 GGUF models");
    // An adapter beside a model does not make the folder an adapter; safetensors come first.
    let lora: [crate::checkpoint::tests::T<'_>; 1] = [("x.lora_A.weight", "U8", &[1])];
    let folder = Folder::new()
        .with("m.gguf", Writer::new().arch().moe(0).bytes())
        .st("adapter_model.safetensors", &lora);
    assert_eq!(open(folder.path()).unwrap().files[0].name, "m.gguf");
    let own: [crate::checkpoint::tests::T<'_>; 1] = [("layers.0.experts.0.w1.weight", "U8", &[1])];
    let c = folder.st("model.safetensors", &own).open().unwrap();
    assert_eq!(c.files[0].name, "model.safetensors");
    assert!(
        c.warnings.iter().any(|w| w.contains("GGUF")),
        "{:?}",
        c.warnings
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn damaged_files_never_panic(
        changes in prop::collection::vec((0usize..600, any::<u8>()), 1..4), cut in 0usize..4000,
    ) {
        let mut bytes = Writer::new().arch().moe(0).raw("t", 9, &[8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 65]).bytes();
        let n = bytes.len();
        for (at, value) in changes {
            bytes[at % n] = value;
        }
        bytes.truncate(n - if cut < 1000 { cut % n } else { 0 });
        let folder = Folder::new().with("m.gguf", &bytes);
        let _ = open(folder.path());
    }
}

#[test]
#[ignore = "needs real GGUF files: set ATLAS_GGUF_DIR to a folder of them"]
fn real_files_are_read() {
    let dir = std::env::var("ATLAS_GGUF_DIR").expect("ATLAS_GGUF_DIR names a folder of GGUF files");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|x| x == "gguf"))
        .collect();
    paths.sort();
    let mut opened = 0;
    for path in paths {
        match open(&path) {
            Ok(c) => {
                opened += 1;
                let layer = &c.stacks[0].layers[0];
                println!(
                    "{}: {} MoE layers x {} experts, {} leaves, {:?}",
                    path.display(),
                    c.stacks[0].layers.len(),
                    layer.num_experts,
                    layer.classes[0].leaves.len(),
                    c.warnings
                );
            }
            // A dense model is no failure here, anything else is.
            Err(e) => {
                println!("{e}");
                assert!(matches!(e, StoreError::NoExperts { .. }));
            }
        }
    }
    assert!(opened > 0, "no MoE model among the files");
}
