//! v1 stores against goldens that `tests/python/v1_golden.py` computed from the checkpoints.

use std::collections::BTreeMap;
use std::fs;

use atlas_expert_tests::binary::expert;
use atlas_expert_tests::{fixtures, tree};
use serde::Deserialize;
use sha2::{Digest, Sha256};

#[derive(Deserialize)]
struct Golden {
    manifest: BTreeMap<String, serde_json::Value>,
    files: Vec<GoldenFile>,
    payload_digest: String,
    checksums_xxh3_sha256: String,
    content_id: String,
    layout_id: String,
    golden: GoldenRecord,
}

#[derive(Deserialize)]
struct GoldenFile {
    name: String,
    bytes: u64,
    sha256: String,
}

#[derive(Deserialize)]
struct GoldenRecord {
    file: String,
    layer: usize,
    expert: usize,
    sha256: String,
}

const NVFP4: [&str; 3] = [
    "nvfp4-compressed-tensors",
    "nvfp4-modelopt",
    "nvfp4-missing-input-scale",
];

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn v1_stores_of_nvfp4_checkpoints_equal_the_goldens() {
    for name in NVFP4 {
        let golden: Golden = fixtures::json(&format!("expected/v1-{name}.json"));
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("v1");
        let source = fixtures::checkpoint(name);
        let before = tree::snapshot(&source);
        let built = expert(&[&"pack", &source, &"-o", &out, &"--format", &"v1", &"--json"]).json();
        assert!(tree::snapshot(&source) == before, "{name} was changed");
        assert_eq!(built["content_id"], golden.content_id.as_str(), "{name}");
        assert_eq!(built["layout_id"], golden.layout_id.as_str(), "{name}");
        let digest = golden.payload_digest.as_str();
        assert_eq!(built["payload_digest"], digest, "{name}");

        let files = tree::contents(&out);
        let mut names: Vec<&str> = vec!["checksums.xxh3", "manifest.json"];
        names.extend(golden.files.iter().map(|f| f.name.as_str()));
        names.sort_unstable();
        assert_eq!(files.keys().collect::<Vec<_>>(), names, "{name}");
        for want in &golden.files {
            let got = &files[&want.name];
            let state = (got.len() as u64, sha256(got));
            assert_eq!(
                state,
                (want.bytes, want.sha256.clone()),
                "{name} {}",
                want.name
            );
        }
        let sums = sha256(&files["checksums.xxh3"]);
        assert_eq!(sums, golden.checksums_xxh3_sha256, "{name}");
        let manifest: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&files["manifest.json"]).unwrap();
        for (key, want) in &golden.manifest {
            assert_eq!(manifest.get(key), Some(want), "{name} {key}");
        }
        assert_eq!(manifest["payload_digest"], digest, "{name}");

        // The golden record byte for byte, so that a failure shows where.
        let want = fs::read(fixtures::root().join("expected").join(&golden.golden.file)).unwrap();
        assert_eq!(sha256(&want), golden.golden.sha256, "{name}");
        let file = &files[&format!("experts_{:05}.xpr", golden.golden.layer)];
        let got = &file[golden.golden.expert * want.len()..][..want.len()];
        let differs = got.iter().zip(&want).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{name}: first byte that differs");
    }
}

#[test]
fn v1_store_is_opened_verified_and_extracted_whole_but_not_unpacked_or_repacked() {
    let golden: Golden = fixtures::json("expected/v1-nvfp4-modelopt.json");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("v1");
    let source = fixtures::checkpoint("nvfp4-modelopt");
    expert(&[&"pack", &source, &"-o", &out, &"--format", &"v1"]).succeeded();
    let verified = expert(&[&"verify", &out, &"--digest", &"--json"]).json();
    assert_eq!(verified["ok"], true);
    assert_eq!(verified["payload_digest"], golden.payload_digest.as_str());
    assert_eq!(verified["content_id"], golden.content_id.as_str());
    let told = expert(&[&"inspect", &out, &"--json"]).json().to_string();
    assert!(told.contains(&golden.content_id), "{told}");

    let (layer, number) = (golden.golden.layer, golden.golden.expert);
    let record = dir.path().join("record");
    expert(&[
        &"extract",
        &out,
        &"--layer",
        &layer.to_string(),
        &"--expert",
        &number.to_string(),
        &"-o",
        &record,
    ])
    .succeeded();
    assert_eq!(sha256(&fs::read(&record).unwrap()), golden.golden.sha256);

    let before = tree::names(dir.path());
    let target = dir.path().join("target");
    for (command, word) in [
        ("unpack", "cannot be restored"),
        ("pack", "cannot be packed"),
    ] {
        let refused = expert(&[&command, &out, &"-o", &target]);
        let error = refused.error(2);
        assert!(
            error.contains("v1 store") && error.contains(word),
            "{error}"
        );
    }
    assert_eq!(tree::names(dir.path()), before);

    // A flipped byte is found in a v1 store as well.
    let stride = golden.manifest["record_stride"].as_u64().unwrap();
    tree::flip(&out.join("experts_00001.xpr"), 3 * stride + 300);
    let refused = expert(&[&"verify", &out]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    let bad = "bad: layer 1 expert 3 chunk 0: ";
    assert!(refused.stdout.contains(bad), "{refused:?}");
}

#[test]
fn v1_store_without_our_keys_is_opened_but_has_nothing_to_verify_with() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("v1");
    let source = fixtures::checkpoint("nvfp4-compressed-tensors");
    expert(&[&"pack", &source, &"-o", &out, &"--format", &"v1"]).succeeded();
    let golden: Golden = fixtures::json("expected/v1-nvfp4-compressed-tensors.json");
    let foreign = serde_json::to_vec(&golden.manifest).unwrap();
    fs::write(out.join("manifest.json"), foreign).unwrap();
    fs::remove_file(out.join("checksums.xxh3")).unwrap();
    let told = expert(&[&"inspect", &out, &"--json"]).json().to_string();
    assert!(told.contains(&golden.layout_id), "{told}");
    let refused = expert(&[&"verify", &out]);
    assert!(refused.error(1).contains("no checksums"), "{refused:?}");
}

#[test]
fn checkpoints_that_v1_cannot_hold_are_refused_by_name_of_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("v1");
    for name in [
        "mixtral-bf16",
        "deepseek-v4-mxfp4",
        "kimi-k25-int4",
        "nemotron-h-nvfp4",
        "gpt-oss-mxfp4",
        "gguf-nvfp4",
    ] {
        let source = fixtures::checkpoint(name);
        let refused = expert(&[&"pack", &source, &"-o", &out, &"--format", &"v1"]);
        let error = refused.error(2);
        assert!(
            error.contains("v1") && error.contains(name),
            "{name}: {error}"
        );
        assert_eq!(tree::names(dir.path()), Vec::<String>::new(), "{name}");
    }
}
