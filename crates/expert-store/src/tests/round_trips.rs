use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::*;
use crate::synth::FAMILIES;
use crate::{
    BuildOptions, Container, IndexOptions, Key, PayloadDigest, Piece, Selection, UnpackOptions,
    VerifyOptions, extract, index, pack, payload_digest, unpack, verify,
};

/// Every tensor of a safetensors folder: type, shape, bytes.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for name in names(dir).iter().filter(|n| n.ends_with(".safetensors")) {
        let bytes = fs::read(dir.join(name)).unwrap();
        for (name, t) in safetensors::SafeTensors::deserialize(&bytes)
            .unwrap()
            .tensors()
        {
            let value = (
                format!("{:?}", t.dtype()),
                t.shape().to_vec(),
                t.data().to_vec(),
            );
            assert!(all.insert(name, value).is_none());
        }
    }
    all
}

fn pack_at(source: &Path, out: &Path) -> crate::Report {
    let store = Store::open(source, &unhashed()).unwrap();
    pack(&store, out, &BuildOptions::default()).unwrap()
}

#[test]
fn every_family_survives_index_pack_verify_and_unpack_with_equal_ids() {
    for family in FAMILIES {
        let dir = scratch();
        let dir = dir.path();
        let source = checkpoint(dir, family.name, 3);
        let fly = open(&source);
        assert!(
            fly.warnings().is_empty(),
            "{}: {:?}",
            family.name,
            fly.warnings()
        );
        assert_eq!(fly.catalogue().record_count(), 10, "{}", family.name);
        let indexed = index(&source, &dir.join("index"), &IndexOptions::default()).unwrap();
        let packed = pack_at(&source, &dir.join("packed"));
        assert_eq!(indexed.content_id, packed.content_id, "{}", family.name);
        assert_eq!(indexed.content_id, fly.content_id());
        assert!(indexed.content_id.is_some());
        assert_eq!(indexed.layout_id, packed.layout_id);
        assert_eq!(indexed.payload_digest, packed.payload_digest);
        for path in [dir.join("index"), dir.join("packed")] {
            let store = open(&path);
            assert!(store.warnings().is_empty(), "{:?}", store.warnings());
            assert_eq!(store.content_id(), indexed.content_id);
            let options = VerifyOptions {
                payload_digest: true,
                ..VerifyOptions::default()
            };
            let report = verify(&store, &options).unwrap();
            assert!(report.is_ok(), "{}: {report:?}", family.name);
            assert_eq!(report.records, 10);
            assert_eq!(report.payload_digest, indexed.payload_digest);
            let digest = payload_digest(&store, &Default::default()).unwrap();
            assert_eq!(Some(digest), indexed.payload_digest);
            same_images(&fly, &store);
        }
        let store = open(&dir.join("packed"));
        let options = UnpackOptions {
            shard_bytes: 1_500_000,
            ..UnpackOptions::default()
        };
        let back = dir.join("back");
        let report = unpack(&store, &back, &options).unwrap();
        if store.catalogue().container == Container::Safetensors {
            let (was, is) = (tensors(&source), tensors(&back));
            assert_eq!(is.len(), report.tensors);
            assert!(is.len() > 1);
            for (name, tensor) in &is {
                assert_eq!(was.get(name), Some(tensor), "{}: {name}", family.name);
            }
        }
        // What was unpacked, with the config, is a checkpoint of the same experts.
        if source.join("config.json").exists() {
            fs::copy(source.join("config.json"), back.join("config.json")).unwrap();
        }
        let again = open(&back);
        assert_eq!(again.content_id(), indexed.content_id, "{}", family.name);
    }
}

fn same_images(a: &Store, b: &Store) {
    for layer in &a.catalogue().layers {
        for (position, &expert) in layer.experts.iter().enumerate() {
            let key = Key::new(layer.layer, expert);
            let n = layer.class(position).image_bytes as usize;
            let mut images = [vec![1; n], vec![2; n]];
            a.read_image(key, 0, &mut images[0]).unwrap();
            b.read_image(key, 0, &mut images[1]).unwrap();
            assert!(images[0] == images[1], "{key}");
            b.verify_record(key).unwrap();
            let mut leaves = [Vec::new(), Vec::new()];
            extract(a, key, &mut leaves[0]).unwrap();
            extract(b, key, &mut leaves[1]).unwrap();
            assert_eq!(
                leaves[0].len() as u64,
                layer.class(position).payload_bytes()
            );
            assert!(leaves[0] == leaves[1], "{key}");
        }
    }
}

#[test]
fn packing_twice_and_from_renamed_shards_gives_the_same_bytes() {
    let dir = scratch();
    let dir = dir.path();
    let one = checkpoint(dir, "nvfp4-modelopt", 1);
    let three = checkpoint(dir, "nvfp4-modelopt", 3);
    // Other names, in another order.
    let shard = |i: u32| format!("model-{i:05}-of-00003.safetensors");
    fs::rename(three.join(shard(1)), three.join("z.safetensors")).unwrap();
    fs::rename(three.join(shard(2)), three.join("k.safetensors")).unwrap();
    fs::rename(three.join(shard(3)), three.join("a.safetensors")).unwrap();
    fs::remove_file(three.join("model.safetensors.index.json")).unwrap();
    pack_at(&one, &dir.join("p1"));
    pack_at(&one, &dir.join("p2"));
    pack_at(&three, &dir.join("p3"));
    let p1 = contents(&dir.join("p1"));
    assert!(p1 == contents(&dir.join("p2")));
    assert!(p1 == contents(&dir.join("p3")));
    // A packed store packs into itself, too.
    pack_at(&dir.join("p1"), &dir.join("p4"));
    assert!(p1 == contents(&dir.join("p4")));
}

#[test]
fn stores_are_the_same_bytes_whatever_the_threads_and_synced_or_not() {
    type Build = fn(&Path, &Path, &BuildOptions);
    let builds: [Build; 3] = [
        |source, out, options| {
            let store = Store::open(source, &unhashed()).unwrap();
            pack(&store, out, options).unwrap();
        },
        |source, out, options| {
            let store = Store::open(source, &unhashed()).unwrap();
            crate::pack_v1(&store, out, options).unwrap();
        },
        |source, out, options| {
            let options = IndexOptions {
                build: options.clone(),
                ..IndexOptions::default()
            };
            index(source, out, &options).unwrap();
        },
    ];
    // Records of several blocks, so that blocks overtake each other; more bytes than a step of the
    // writing back.
    let dir = scratch();
    let dir = dir.path();
    let source = dir.join("source");
    let spec = crate::SynthSpec {
        family: "nvfp4-modelopt".into(),
        layers: Some(2),
        experts: Some(8),
        hidden: Some(2048),
        inter: Some(1536),
        ..crate::SynthSpec::default()
    };
    let made = crate::synth(&spec, &source).unwrap();
    assert!(made.bytes > 64 << 20, "{}", made.bytes);
    for (b, build) in builds.iter().enumerate() {
        let mut first = None;
        for (threads, sync) in [(1, true), (5, true), (1, false), (5, false)] {
            let out = dir.join("out");
            let options = BuildOptions {
                threads,
                sync,
                ..BuildOptions::default()
            };
            build(&source, &out, &options);
            let written = contents(&out);
            assert!(
                *first.get_or_insert_with(|| written.clone()) == written,
                "build {b}, {threads} threads, synced: {sync}"
            );
            fs::remove_dir_all(&out).unwrap();
        }
    }
}

#[test]
fn multi_token_prediction_is_a_stack_of_its_own() {
    let dir = scratch();
    let source = checkpoint(dir.path(), "deepseek-v3", 1);
    let trunk = open(&source);
    let options = OpenOptions {
        mtp: true,
        ..OpenOptions::default()
    };
    let mtp = Store::open(&source, &options).unwrap();
    assert_eq!(trunk.catalogue().layers.len(), 2);
    assert_eq!(mtp.catalogue().layers.len(), 1);
    assert_ne!(trunk.content_id(), mtp.content_id());
    let options = OpenOptions {
        stack: Some("nowhere".into()),
        ..unhashed()
    };
    let e = Store::open(&source, &options).unwrap_err().to_string();
    assert!(e.contains("model.layers (trunk, 2 layers)"), "{e}");
}

#[test]
fn parts_of_a_store_keep_their_indices_and_pack_to_the_same_content() {
    let dir = scratch();
    let dir = dir.path();
    let select = |path: &Path, selection: &Selection| {
        let options = OpenOptions {
            selection: Some(selection.clone()),
            ..OpenOptions::default()
        };
        Store::open(path, &options).unwrap()
    };
    let source = checkpoint(dir, "nvfp4-modelopt", 2);
    pack_at(&source, &dir.join("packed"));
    let selection = Selection {
        layers: Some(vec![1..2]),
        shard: Some((2, 2)),
        ..Selection::default()
    };
    let part = select(&source, &selection);
    assert_eq!(part.catalogue().layers[0].experts, [3, 4]);
    assert_eq!(part.catalogue().layers[0].layer, 1);
    let of_packed = select(&dir.join("packed"), &selection);
    assert_eq!(of_packed.content_id(), part.content_id());
    same_images(&part, &of_packed);
    pack(&part, &dir.join("part"), &BuildOptions::default()).unwrap();
    let packed_part = open(&dir.join("part"));
    assert_eq!(packed_part.content_id(), part.content_id());
    assert!(
        verify(&packed_part, &VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
    same_images(&part, &packed_part);
    assert!(matches!(
        packed_part.locate(Key::new(1, 0)),
        Err(StoreError::NoSuchRecord { .. })
    ));
    // Tensors per expert can come back from a part; a tensor that holds all experts cannot.
    unpack(&packed_part, &dir.join("back"), &UnpackOptions::default()).unwrap();
    let stacked = checkpoint(dir, "gpt-oss", 1);
    let e = unpack(
        &select(&stacked, &selection),
        &dir.join("no"),
        &UnpackOptions::default(),
    )
    .unwrap_err()
    .to_string();
    assert!(e.contains("experts 0..3 are not in this store"), "{e}");
    assert!(!dir.join("no").exists());
}

#[test]
fn pieces_of_any_range_make_up_the_image_built_from_the_leaves() {
    use proptest::test_runner::{Config, TestRunner};
    let dir = scratch();
    let source = checkpoint(dir.path(), "nvfp4-modelopt", 3);
    let store = Store::open(&source, &unhashed()).unwrap();
    let all = tensors(&source);
    let files: Vec<Vec<u8>> = store
        .files()
        .iter()
        .map(|f| fs::read(&f.path).unwrap())
        .collect();
    let key = Key::new(1, 3);
    let (layer, position) = store.locate(key).unwrap();
    let class = layer.class(position);
    let mut image = vec![0; class.image_bytes as usize];
    for leaf in &class.leaves {
        let data = &all[&leaf.name.replace("{}", "3")].2;
        let at = leaf.image_offset as usize;
        image[at..at + data.len()].copy_from_slice(data);
    }
    let mut runner = TestRunner::new(Config::with_cases(200));
    let n = image.len();
    runner
        .run(&(0..n, 0..n), |(a, b)| {
            let (from, to) = (a.min(b), a.max(b));
            let mut got = Vec::new();
            store
                .for_each_piece(key, from as u64, (to - from) as u64, &mut |p| match p {
                    Piece::Zeros { bytes } => got.resize(got.len() + bytes as usize, 0),
                    Piece::File {
                        file,
                        offset,
                        bytes,
                    } => got.extend_from_slice(
                        &files[file as usize][offset as usize..(offset + bytes) as usize],
                    ),
                })
                .unwrap();
            assert!(got == image[from..to]);
            let mut read = vec![9; to - from];
            store.read_image(key, from as u64, &mut read).unwrap();
            assert!(read == image[from..to]);
            Ok(())
        })
        .unwrap();
    let over = store.for_each_piece(key, 1, n as u64, &mut |_| ());
    assert!(matches!(over, Err(StoreError::BadRange { .. })));
    let over = store.for_each_piece(key, u64::MAX, 2, &mut |_| ());
    assert!(matches!(over, Err(StoreError::BadRange { .. })));
    // In parts or as a whole: the digest is the same.
    let (mut whole, mut parts) = (PayloadDigest::new(), PayloadDigest::new());
    whole.update(class, &image);
    for (i, part) in image.chunks(1000).enumerate() {
        parts.update_part(class, i as u64 * 1000, part);
    }
    assert_eq!(whole.value(), parts.value());
}

#[test]
fn v1_records_are_transposed_scaled_and_proven() {
    for (family, global, invert) in [
        ("nvfp4-ct", "weight_global_scale", true),
        ("nvfp4-modelopt", "weight_scale_2", false),
    ] {
        let dir = scratch();
        let dir = dir.path();
        let source = checkpoint(dir, family, 2);
        let store = open(&source);
        let out = dir.join("v1");
        let report = crate::pack_v1(&store, &out, &BuildOptions::default()).unwrap();
        let v1 = open(&out);
        assert!(v1.warnings().is_empty(), "{:?}", v1.warnings());
        let m = v1.v1_manifest().unwrap();
        assert_eq!((m.inter, m.hidden, m.group_size), (256, 512, 16));
        assert_eq!(v1.content_id(), report.content_id);
        assert_eq!(
            payload_digest(&v1, &Default::default()).ok(),
            report.payload_digest
        );
        assert!(verify(&v1, &VerifyOptions::default()).unwrap().is_ok());
        // Layer 1, expert 4, byte by byte.
        let all = tensors(&source);
        let mut record = vec![0; m.record_stride as usize];
        v1.read_image(Key::new(1, 4), 0, &mut record).unwrap();
        let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap());
        assert_eq!(word(0), 0x5850_5254);
        let words: Vec<u32> = (1..8).map(|i| word(4 * i)).collect();
        assert_eq!(words, [1, 1, 4, 256, 512, 16, 7]);
        let mut at = 256;
        for (p, projection) in ["gate_proj", "up_proj", "down_proj"].iter().enumerate() {
            let leaf =
                |leaf: &str| &all[&format!("model.layers.1.mlp.experts.4.{projection}.{leaf}")];
            let scale = f32::from_le_bytes(leaf(global).2[..4].try_into().unwrap());
            let want = if invert { 1.0 / scale } else { scale };
            assert_eq!(word(32 + 4 * p), want.to_bits());
            let input = if invert {
                "input_global_scale"
            } else {
                "input_scale"
            };
            assert_eq!(record[44 + 4 * p..48 + 4 * p], leaf(input).2[..4]);
            let packed = if invert { "weight_packed" } else { "weight" };
            for name in [packed, "weight_scale"] {
                let (_, shape, data) = leaf(name);
                for (i, &byte) in data.iter().enumerate() {
                    let (row, column) = (i / shape[1], i % shape[1]);
                    assert_eq!(record[at + column * shape[0] + row], byte);
                }
                at = (at + data.len()).next_multiple_of(256);
            }
        }
        assert_eq!(at as u64, m.record_raw_bytes);
        // Not back, and not on.
        assert!(unpack(&v1, &dir.join("back"), &UnpackOptions::default()).is_err());
        assert!(pack(&v1, &dir.join("p"), &BuildOptions::default()).is_err());
    }
}

#[test]
fn what_does_not_fit_v1_is_refused_with_the_reason() {
    let dir = scratch();
    for (family, why) in [
        ("qwen3-moe", "only NVFP4 gate, up and down fit"),
        ("gpt-oss", "only NVFP4 gate, up and down fit"),
    ] {
        let source = checkpoint(dir.path(), family, 1);
        let store = Store::open(&source, &unhashed()).unwrap();
        let out = dir.path().join("v1");
        let e = crate::pack_v1(&store, &out, &BuildOptions::default()).unwrap_err();
        assert!(e.to_string().contains(why), "{e}");
        assert!(!out.exists());
    }
}

#[test]
fn gguf_comes_back_as_one_file_or_a_directory() {
    let dir = scratch();
    let source = checkpoint(dir.path(), "gguf-gpt-oss", 1);
    let store = open(&source);
    let file = dir.path().join("back.gguf");
    unpack(&store, &file, &UnpackOptions::default()).unwrap();
    let back = open(&file);
    assert_eq!(back.content_id(), store.content_id());
    assert_eq!(
        back.metadata()
            .get("general.architecture")
            .map(String::as_str),
        Some("gpt-oss")
    );
    assert_eq!(names(dir.path()), ["back.gguf", "gguf-gpt-oss-1"]);
}

#[test]
fn gguf_of_another_alignment_comes_back_byte_for_byte() {
    use crate::containers::{GgufValue, TensorOut, gguf_header};
    let dir = scratch();
    let dir = dir.path();
    let tensors: Vec<TensorOut> = ["gate", "up", "down"]
        .iter()
        .map(|p| TensorOut {
            name: format!("blk.0.ffn_{p}_exps.weight"),
            dtype: crate::Dtype::from_gguf_id(0).unwrap(),
            shape: if *p == "down" {
                vec![2, 5, 3]
            } else {
                vec![2, 3, 5]
            },
            bytes: 120,
        })
        .collect();
    let metadata = [
        (
            "general.architecture".to_owned(),
            GgufValue::Text("qwen3moe".into()),
        ),
        ("general.alignment".to_owned(), GgufValue::U32(64)),
    ];
    let tensors: Vec<&TensorOut> = tensors.iter().collect();
    let header = gguf_header(&metadata, &tensors, 64).unwrap();
    let mut bytes = header.bytes;
    bytes.resize(header.file_bytes as usize, 0);
    for &at in &header.offsets {
        assert_eq!(at % 64, 0);
        for i in 0..120 {
            bytes[at as usize + i] = i as u8;
        }
    }
    let source = dir.join("model.gguf");
    fs::write(&source, &bytes).unwrap();
    pack_at(&source, &dir.join("packed"));
    let packed = open(&dir.join("packed"));
    assert_eq!(packed.metadata()["general.alignment"], "64");
    let back = dir.join("back.gguf");
    unpack(&packed, &back, &UnpackOptions::default()).unwrap();
    assert!(fs::read(&back).unwrap() == bytes);
}

#[test]
fn unpacking_to_a_file_of_the_other_container_is_refused() {
    let dir = scratch();
    for (family, name) in [("mixtral", "x.gguf"), ("gguf-gpt-oss", "x.safetensors")] {
        let store = Store::open(checkpoint(dir.path(), family, 1), &unhashed()).unwrap();
        let out = dir.path().join(name);
        let e = unpack(&store, &out, &UnpackOptions::default()).unwrap_err();
        assert!(matches!(e, StoreError::Usage(_)), "{e}");
        assert!(e.to_string().contains(name), "{e}");
        assert!(!out.exists());
    }
}

#[test]
fn v1_records_are_made_of_the_bytes_that_were_proven() {
    let dir = scratch();
    let dir = dir.path();
    let source = checkpoint(dir, "nvfp4-ct", 2);
    pack_at(&source, &dir.join("packed"));
    let store = open(&dir.join("packed"));
    let bare = Store::open(&source, &unhashed()).unwrap();
    let a = crate::pack_v1(&store, &dir.join("a"), &BuildOptions::default()).unwrap();
    let b = crate::pack_v1(&bare, &dir.join("b"), &BuildOptions::default()).unwrap();
    assert_eq!(a.payload_digest, b.payload_digest);
    let file = dir.join("packed/layer_00001.xp2");
    flip(&file, fs::metadata(&file).unwrap().len() / 2);
    let store = open(&dir.join("packed"));
    let e = crate::pack_v1(&store, &dir.join("c"), &BuildOptions::default()).unwrap_err();
    assert!(
        matches!(e, StoreError::Checksum { key, .. } if key == Key::new(1, 2)),
        "{e}"
    );
    assert!(!dir.join("c").exists());
}
