//! What a store's bytes depend on: the experts, and neither the files that they came in nor the
//! part of them that is held.

use std::fs;
use std::path::Path;

use atlas_expert_tests::binary::{Output, expert};
use atlas_expert_tests::{fixtures, tree};
use expert_store::info::hex128;
use expert_store::{Key, OpenOptions, Store};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_128;

fn open(path: &Path) -> Store {
    Store::open(path, &OpenOptions::default()).unwrap()
}

fn image(store: &Store, key: Key) -> Vec<u8> {
    let (layer, position) = store.locate(key).unwrap();
    let mut bytes = vec![0; layer.class(position).image_bytes as usize];
    store.read_image(key, 0, &mut bytes).unwrap();
    bytes
}

/// All records held, in order.
fn keys(store: &Store) -> Vec<Key> {
    let layers = store.catalogue().layers.iter();
    let keys = layers.flat_map(|l| {
        let key = |&expert: &u32| Key {
            layer: l.layer,
            expert,
        };
        l.experts.iter().map(key).collect::<Vec<_>>()
    });
    keys.collect()
}

fn text(output: &serde_json::Value) -> String {
    output.to_string()
}

#[derive(Deserialize)]
struct Vector {
    records: Vec<VectorRecord>,
    layers: Vec<VectorLayer>,
    layer_0_id_input: String,
    content_id_input: String,
    content_id: String,
    layout_id: String,
    payload_digest: String,
    checksums_xxh3: String,
}

#[derive(Deserialize)]
struct VectorRecord {
    layer: u32,
    record_id_input: String,
    record_id: String,
}

#[derive(Deserialize)]
struct VectorLayer {
    layer: u32,
    class_id_input: String,
    class_id: String,
    layer_id: String,
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let byte = |i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn hash_of(hex: &str) -> String {
    hex128(xxh3_128(&bytes_of(hex)))
}

/// The digits of an id in the order of its bytes, as it enters the next hash.
fn stored(id: &str) -> String {
    let bytes: Vec<String> = bytes_of(id)
        .iter()
        .rev()
        .map(|b| format!("{b:02x}"))
        .collect();
    bytes.concat()
}

#[test]
fn worked_example_of_the_documentation_holds_for_both_forms_of_a_store() {
    let vector: Vector = fixtures::json("vector.json");
    let layer_of = |r: &VectorRecord| vector.layers.iter().find(|l| l.layer == r.layer).unwrap();
    for layer in &vector.layers {
        assert_eq!(hash_of(&layer.class_id_input), layer.class_id);
        assert!(vector.content_id_input.contains(&stored(&layer.layer_id)));
    }
    for record in &vector.records {
        assert_eq!(hash_of(&record.record_id_input), record.record_id);
        let class_id = stored(&layer_of(record).class_id);
        assert!(record.record_id_input.starts_with(&class_id));
        let in_layer = vector.layer_0_id_input.contains(&stored(&record.record_id));
        assert_eq!(in_layer, record.layer == 0);
    }
    assert_eq!(hash_of(&vector.layer_0_id_input), vector.layers[0].layer_id);
    assert_eq!(hash_of(&vector.content_id_input), vector.content_id);

    let dir = tempfile::tempdir().unwrap();
    for command in ["pack", "index"] {
        let out = dir.path().join(command);
        let source = fixtures::root().join("vector");
        let built = expert(&[&command, &source, &"-o", &out, &"--json"]).json();
        assert_eq!(built["content_id"], vector.content_id.as_str());
        assert_eq!(built["layout_id"], vector.layout_id.as_str());
        assert_eq!(built["payload_digest"], vector.payload_digest.as_str());
        let sums = fs::read(out.join("checksums.xxh3")).unwrap();
        assert_eq!(sums, bytes_of(&vector.checksums_xxh3));
        for (got, want) in open(&out).catalogue().layers.iter().zip(&vector.layers) {
            assert_eq!(hex128(got.id(true)), want.layer_id);
        }
    }
    let text = fs::read_to_string(fixtures::root().join("vector.md")).unwrap();
    let docs = fixtures::root().join("../../docs/store.md");
    let docs = fs::read_to_string(docs).unwrap();
    assert!(
        docs.contains(text.trim()),
        "docs/store.md has another example than vector.md"
    );
}

/// The shards of a checkpoint under new names that sort the other way round, its index rewritten.
fn renamed_and_reordered(from: &Path, to: &Path) {
    tree::copy(from, to);
    let index_path = to.join("model.safetensors.index.json");
    let mut index: serde_json::Value =
        serde_json::from_slice(&fs::read(&index_path).unwrap()).unwrap();
    let shards: Vec<String> = tree::names(to)
        .into_iter()
        .filter(|n| n.ends_with(".safetensors"))
        .collect();
    assert!(shards.len() > 1, "{shards:?}");
    let new_name = |old: &str| {
        let i = shards.iter().position(|s| s == old).unwrap();
        format!("part-{}.safetensors", shards.len() - i)
    };
    for old in &shards {
        fs::rename(to.join(old), to.join(new_name(old))).unwrap();
    }
    let map = index["weight_map"].as_object_mut().unwrap();
    let mut entries: Vec<(String, String)> = map
        .iter()
        .map(|(name, file)| (name.clone(), new_name(file.as_str().unwrap())))
        .collect();
    entries.reverse();
    map.clear();
    map.extend(entries.into_iter().map(|(n, f)| (n, f.into())));
    fs::write(&index_path, serde_json::to_vec(&index).unwrap()).unwrap();
}

#[test]
fn renamed_and_reordered_shards_pack_to_the_same_bytes() {
    for name in ["qwen3-moe-sharded", "qwen35-fp8", "step35-bf16"] {
        let dir = tempfile::tempdir().unwrap();
        let moved = dir.path().join("checkpoint");
        renamed_and_reordered(&fixtures::checkpoint(name), &moved);
        let at = |n: &str| dir.path().join(n);
        let build = |command: &str, source: &Path, out: &str| {
            text(&expert(&[&command, &source, &"-o", &at(out), &"--json"]).json()["content_id"])
        };
        let source = fixtures::checkpoint(name);
        let first = build("pack", &source, "a");
        for (command, source, out) in [
            ("pack", &source, "again"),
            ("pack", &moved, "b"),
            ("index", &source, "c"),
            ("index", &moved, "d"),
            // A store is a source as well.
            ("pack", &at("d"), "e"),
        ] {
            assert_eq!(build(command, source, out), first, "{name} {out}");
        }
        let bytes = tree::contents(&at("a"));
        for out in ["again", "b", "e"] {
            assert!(
                tree::contents(&at(out)) == bytes,
                "{name}: {out} differs from a"
            );
        }
        let sums = |out: &str| fs::read(at(out).join("checksums.xxh3")).unwrap();
        assert!(sums("c") == sums("d") && sums("c") == sums("a"), "{name}");
    }
}

#[test]
fn other_shards_of_the_same_tensors_give_the_same_content_id() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let source = fixtures::checkpoint("qwen3-moe-sharded");
    let first = expert(&[&"pack", &source, &"-o", &at("a"), &"--json"]).json();
    expert(&[&"unpack", &at("a"), &"-o", &at("one.safetensors")]).succeeded();
    let again = expert(&[&"pack", &at("one.safetensors"), &"-o", &at("b"), &"--json"]).json();
    assert_eq!(again["content_id"], first["content_id"]);
    assert_eq!(again["payload_digest"], first["payload_digest"]);
}

#[test]
fn moved_checkpoint_is_found_where_the_user_says() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    tree::copy(&fixtures::checkpoint("mixtral-bf16"), &at("before"));
    expert(&[&"index", &at("before"), &"-o", &at("store")]).succeeded();
    fs::rename(at("before"), at("after")).unwrap();
    let gone = expert(&[&"verify", &at("store")]);
    assert!(gone.error(1).contains("before"), "{gone:?}");
    expert(&[&"verify", &at("store"), &"--checkpoint", &at("after")]).succeeded();
}

/// Builds a partial store in both forms and compares each record with the whole store's.
fn check_part(whole: &Store, source: &Path, flags: [&str; 2], want: &[(u32, Vec<u32>)]) {
    let dir = tempfile::tempdir().unwrap();
    for command in ["pack", "index"] {
        let out = dir.path().join(command);
        let [flag, value] = &flags;
        expert(&[&command, &source, &"-o", &out, flag, value]).succeeded();
        expert(&[&"verify", &out]).succeeded();
        let part = open(&out);
        let held: Vec<(u32, Vec<u32>)> = (part.catalogue().layers.iter())
            .map(|l| (l.layer, l.experts.clone()))
            .collect();
        assert_eq!(held, want, "{command} {flags:?}");
        for layer in &part.catalogue().layers {
            let of_whole = whole.catalogue().layer(layer.layer).unwrap();
            assert_eq!(layer.model_layer, of_whole.model_layer);
            assert_eq!(layer.num_experts, of_whole.num_experts);
        }
        for key in keys(&part) {
            assert!(image(&part, key) == image(whole, key), "{flags:?} {key}");
            let (layer, position) = part.locate(key).unwrap();
            let (of_whole, at) = whole.locate(key).unwrap();
            let sums = layer.record_checksums(position);
            assert!(sums.is_some() && sums == of_whole.record_checksums(at));
        }
    }
}

#[test]
fn partial_stores_hold_what_was_asked_for_and_the_bytes_of_the_whole() {
    let source = fixtures::checkpoint("qwen3-moe-sharded");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("whole");
    expert(&[&"pack", &source, &"-o", &out]).succeeded();
    let whole = open(&out);
    let layers: Vec<u32> = whole.catalogue().layers.iter().map(|l| l.layer).collect();
    let experts = whole.catalogue().layers[0].num_experts;
    assert!(layers.len() >= 2 && experts >= 4);
    let each = |experts: &[u32]| -> Vec<(u32, Vec<u32>)> {
        layers.iter().map(|&l| (l, experts.to_vec())).collect()
    };
    let all: Vec<u32> = (0..experts).collect();
    check_part(&whole, &source, ["--layers", "1..2"], &[(1, all.clone())]);
    check_part(&whole, &source, ["--experts", "1..3"], &each(&[1, 2]));
    check_part(&whole, &source, ["--experts", "0,2..4"], &each(&[0, 2, 3]));
    // Three shards: contiguous ranges, the first ones the larger, and together all there is.
    let sizes: Vec<u32> = (0..3)
        .map(|i| experts / 3 + u32::from(i < experts % 3))
        .collect();
    let mut first = 0;
    for (i, size) in (1..).zip(&sizes) {
        let range: Vec<u32> = (first..first + size).collect();
        check_part(
            &whole,
            &source,
            ["--shard", &format!("{i}/3")],
            &each(&range),
        );
        first += size;
    }
    assert_eq!(first, experts);
}

#[test]
fn shards_of_stacked_tensors_hold_the_bytes_of_the_whole() {
    for name in ["gpt-oss-mxfp4", "gguf-q4k-q6k", "mlx-qwen3"] {
        let source = fixtures::checkpoint(name);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("whole");
        expert(&[&"index", &source, &"-o", &out]).succeeded();
        let whole = open(&out);
        let half = |l: &expert_store::Layer| {
            let first = l.num_experts.div_ceil(2);
            (l.layer, (first..l.num_experts).collect::<Vec<u32>>())
        };
        let want: Vec<(u32, Vec<u32>)> = whole.catalogue().layers.iter().map(half).collect();
        check_part(&whole, &source, ["--shard", "2/2"], &want);
    }
}

#[test]
fn partial_store_of_stacked_tensors_is_not_unpacked_into_tensors_with_holes() {
    let dir = tempfile::tempdir().unwrap();
    let part = dir.path().join("part");
    let source = fixtures::checkpoint("gpt-oss-mxfp4");
    expert(&[&"pack", &source, &"-o", &part, &"--experts", &"0..1"]).succeeded();
    let refused = expert(&[&"unpack", &part, &"-o", &dir.path().join("out")]);
    let error = refused.error(2);
    assert!(error.contains("are not in this store"), "{error}");
    assert_eq!(tree::names(dir.path()), ["part"]);
}

#[test]
fn selections_that_make_no_sense_are_wrong_usage_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let source = fixtures::checkpoint("qwen3-moe-sharded");
    for (flag, value) in [
        ("--layers", "0..99"),
        ("--layers", "2..1"),
        ("--layers", "one"),
        ("--experts", "0..=1"),
        ("--experts", "70000"),
        ("--shard", "0/2"),
        ("--shard", "3/2"),
        ("--shard", "1/70000"),
        ("--stack", "no.such.stack"),
        ("--threads", "0"),
    ] {
        for command in ["pack", "index"] {
            let refused: Output = expert(&[&command, &source, &"-o", &out, &flag, &value]);
            assert_eq!(refused.code, Some(2), "{flag} {value}: {refused:?}");
            assert!(refused.stderr.starts_with("error: "), "{refused:?}");
            assert_eq!(tree::names(dir.path()), Vec::<String>::new());
        }
    }
}
