//! Checkpoints that are large: in bytes, against a memory limit, and in tensors.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use atlas_expert_tests::binary::{expert, expert_after};
use expert_store::{IndexOptions, OpenOptions, Store, index};

/// All that a process may map, KiB: 512 MiB, with its code, its stacks and its heap.
const ADDRESS_SPACE_KIB: u64 = 512 << 10;

#[test]
fn pack_index_and_verify_of_a_checkpoint_larger_than_the_memory_limit_succeed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let checkpoint = at("checkpoint");
    // Qwen3-MoE's expert, 9,437,184 bytes: 76 of them are 717 MB.
    let made = expert(&[
        &"synth",
        &"--family",
        &"qwen3-moe",
        &"--layers",
        &"2",
        &"--experts",
        &"38",
        &"--hidden",
        &"2048",
        &"--inter",
        &"768",
        &"-o",
        &checkpoint,
        &"--json",
    ])
    .json();
    let bytes = made["bytes"].as_u64().unwrap();
    assert!(bytes > ADDRESS_SPACE_KIB * 1024 + (100 << 20), "{bytes}");

    let limit = format!("ulimit -v {ADDRESS_SPACE_KIB}");
    let limited = |args: &[&dyn AsRef<std::ffi::OsStr>]| expert_after(&limit, args).json();
    let (packed, in_place) = (at("packed"), at("in-place"));
    let threads = ["--threads", "2", "--json"];
    let [t, two, json] = &threads;
    let pack = limited(&[&"pack", &checkpoint, &"-o", &packed, t, two, json]);
    let index = limited(&[&"index", &checkpoint, &"-o", &in_place, t, two, json]);
    assert_eq!(pack["content_id"], index["content_id"]);
    assert_eq!(pack["payload_digest"], index["payload_digest"]);
    assert_eq!(pack["records"], 76);
    for store in [&packed, &in_place] {
        let verified = limited(&[&"verify", store, t, two, json]);
        assert_eq!(verified["ok"], true);
        assert_eq!(verified["bytes"], 76 * 9_437_184);
    }
}

const LAYERS: u64 = 96;
const EXPERTS: u64 = 896;
const LEAVES: [(&str, &str, &str, u64); 6] = [
    ("w1", "weight_packed", "[128,64]", 8192),
    ("w1", "weight_scale", "[128,4]", 512),
    ("w2", "weight_packed", "[128,64]", 8192),
    ("w2", "weight_scale", "[128,4]", 512),
    ("w3", "weight_packed", "[128,64]", 8192),
    ("w3", "weight_scale", "[128,4]", 512),
];
const SHARDS: u64 = 12;

/// Names, headers and a weight index in the shape of Kimi-K3, whose data are holes.
fn half_a_million_tensors(folder: &Path) -> u64 {
    fs::create_dir(folder).unwrap();
    let index = File::create(folder.join("model.safetensors.index.json")).unwrap();
    let mut index = BufWriter::new(index);
    index
        .write_all(b"{\"metadata\":{},\"weight_map\":{")
        .unwrap();
    let mut tensors = 0;
    for shard in 0..SHARDS {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        let mut header = String::from("{");
        let mut at = 0;
        for layer in shard * LAYERS / SHARDS..(shard + 1) * LAYERS / SHARDS {
            for expert in 0..EXPERTS {
                for (projection, leaf, shape, bytes) in LEAVES {
                    let tensor = format!(
                        "\"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}.{leaf}\":"
                    );
                    let comma = if at == 0 { "" } else { "," };
                    header.push_str(comma);
                    header.push_str(&tensor);
                    header.push_str(&format!(
                        "{{\"dtype\":\"U8\",\"shape\":{shape},\"data_offsets\":[{at},{}]}}",
                        at + bytes
                    ));
                    let comma = if tensors == 0 { "" } else { "," };
                    write!(index, "{comma}{tensor}\"{name}\"").unwrap();
                    at += bytes;
                    tensors += 1;
                }
            }
        }
        header.push('}');
        let mut file = File::create(folder.join(name)).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes())
            .unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + at).unwrap();
    }
    index.write_all(b"}}").unwrap();
    index.flush().unwrap();
    tensors
}

#[test]
fn half_a_million_tensors_are_indexed_from_headers_into_less_than_16_mb() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    let tensors = half_a_million_tensors(&checkpoint);
    assert!(tensors >= 500_000);

    let out = dir.path().join("store");
    let options = IndexOptions {
        checksums: false,
        ..IndexOptions::default()
    };
    let began = Instant::now();
    let report = index(&checkpoint, &out, &options).unwrap();
    println!(
        "index of {tensors} headers: {:.2} s",
        began.elapsed().as_secs_f64()
    );
    assert_eq!(report.records, LAYERS * EXPERTS);
    assert_eq!(report.content_id, None);

    let began = Instant::now();
    let store = Store::open(&out, &OpenOptions::default()).unwrap();
    println!("open: {:.2} s", began.elapsed().as_secs_f64());
    assert_eq!(store.catalogue().record_count(), LAYERS * EXPERTS);
    assert_eq!(store.catalogue().layers.len() as u64, LAYERS);
    for layer in &store.catalogue().layers {
        assert_eq!(u64::from(layer.num_experts), EXPERTS);
        assert_eq!(layer.classes[0].leaves.len(), LEAVES.len());
    }
    assert_eq!(store.layout_id(), report.layout_id);
    let bytes = fs::metadata(out.join("catalogue.bin")).unwrap().len();
    println!("catalogue.bin: {bytes} bytes");
    assert!(bytes < 16 << 20, "{bytes}");
}
