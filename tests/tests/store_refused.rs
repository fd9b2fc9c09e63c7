//! Checkpoints that must be refused: one clear error that names file and cause, and nothing written.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use atlas_expert_tests::binary::expert;
use atlas_expert_tests::failures::{self, Problems};
use atlas_expert_tests::{fixtures, tree};
use expert_store::{IndexOptions, OpenOptions, Store, StoreError, index};
use serde::Deserialize;

/// Fixture, the file or tensor that is at fault, and words of the cause.
const CAUSES: &[(&str, &str, &str)] = &[
    ("bad-utf8", "model.safetensors", "not UTF-8"),
    ("duplicate-key", "model.safetensors", "experts.0.gate_proj"),
    (
        "end-before-begin",
        "model.safetensors",
        "ends before it begins",
    ),
    (
        "expert-hole",
        "experts.1.gate_proj",
        "is missing (expert 1 of 3)",
    ),
    (
        "expert-index-huge",
        "model.safetensors",
        "expert index 4294967295",
    ),
    (
        "flattened-remainder",
        "experts.mlp",
        "7 rows, which 2 experts",
    ),
    ("gap", "model.safetensors", "leaves a gap before it"),
    ("gguf-alignment-0", "model.gguf", "general.alignment"),
    ("gguf-alignment-3", "model.gguf", "must be a power of two"),
    ("gguf-big-endian", "model.gguf", "big-endian"),
    ("gguf-dim-overflow", "model.gguf", "too large"),
    ("gguf-dims", "model.gguf", "5 dimensions, the limit is 4"),
    (
        "gguf-duplicate-tensor",
        "model.gguf",
        "is in the file twice",
    ),
    (
        "gguf-kv-count",
        "model.gguf",
        "1099511627776 metadata entries",
    ),
    ("gguf-magic", "model.gguf", "does not start with \"GGUF\""),
    (
        "gguf-missing-shard",
        "model-00001-of-00003.gguf",
        "2 of 3 parts are missing",
    ),
    ("gguf-offset", "model.gguf", "is said to lie at 0"),
    ("gguf-tensor-count", "model.gguf", "1099511627776 tensors"),
    ("gguf-truncated", "model.gguf", "finish the download"),
    ("gguf-unknown-type", "model.gguf", "element type 99"),
    (
        "gguf-version-1",
        "model.gguf",
        "version 1 is no longer in use",
    ),
    (
        "gguf-version-4",
        "model.gguf",
        "a newer one needs a newer build",
    ),
    (
        "header-length-huge",
        "model.safetensors",
        "the limit is 100000000",
    ),
    (
        "header-past-end",
        "model.safetensors",
        "header of 4096 bytes in a file of 10",
    ),
    (
        "index-absolute",
        "model.safetensors.index.json",
        "not inside the checkpoint's folder",
    ),
    (
        "index-dotdot",
        "model.safetensors.index.json",
        "not inside the checkpoint's folder",
    ),
    ("index-missing-file", "b.safetensors", "finish the download"),
    (
        "index-missing-tensor",
        "a.safetensors",
        "which does not hold it",
    ),
    (
        "index-two-files",
        "a.safetensors and in b.safetensors",
        "split for tensor parallelism",
    ),
    (
        "index-wrong-file",
        "a.safetensors",
        "which does not hold it",
    ),
    ("leading-space", "model.safetensors", "not a JSON object"),
    ("lfs-pointer", "model.safetensors", "git lfs pull"),
    (
        "metadata-not-strings",
        "model.safetensors",
        "expected a string",
    ),
    ("negative-dimension", "model.safetensors", "`-2`"),
    (
        "no-index-two-files",
        "model-TP-000.safetensors",
        "split for tensor parallelism",
    ),
    ("not-json", "model.safetensors", "the header cannot be read"),
    (
        "overlap",
        "model.safetensors",
        "overlaps the tensor before it",
    ),
    ("past-end", "model.safetensors", "finish the download"),
    (
        "shape-overflow",
        "model.safetensors",
        "[4294967296, 4294967296]",
    ),
    ("size-mismatch", "model.safetensors", "shape [2, 5]"),
    (
        "stacked-disagree",
        "experts.down_proj",
        "holds 2 experts, other weights of its layer 3",
    ),
    ("stacked-sub-byte", "experts.down_proj", "not whole bytes"),
    ("too-short", "model.safetensors", "5 bytes are too few"),
    ("trailing-bytes", "model.safetensors", "its tensors only 96"),
    ("unknown-dtype", "model.safetensors", "BF17"),
];

#[derive(Deserialize)]
struct Refused {
    refused: BTreeMap<String, String>,
}

#[test]
fn each_refused_fixture_has_a_cause_here() {
    let listed: Refused = fixtures::json("refused/refused.json");
    let here: Vec<&str> = CAUSES.iter().map(|c| c.0).collect();
    assert_eq!(listed.refused.keys().collect::<Vec<_>>(), here);
}

#[test]
fn bad_checkpoints_are_refused_with_file_and_cause_and_nothing_is_left() {
    failures::each(
        CAUSES,
        |c| c.0,
        |&(name, at_fault, cause), problems| {
            let checkpoint = fixtures::root().join("refused").join(name);
            let before = tree::snapshot(&checkpoint);
            let dir = tempfile::tempdir().expect("a folder");
            refused(
                &checkpoint,
                dir.path(),
                1,
                &[at_fault, cause, name],
                problems,
            );
            let out = dir.path().join("library");
            match index(&checkpoint, &out, &IndexOptions::default()) {
                Err(StoreError::Checkpoint { .. }) => {}
                other => problems.note(format!("index: {other:?}")),
            }
            match Store::open(&checkpoint, &OpenOptions::default()) {
                Err(StoreError::Checkpoint { .. }) => {}
                Err(other) => problems.note(format!("open: {other:?}")),
                Ok(_) => problems.note("open succeeded".into()),
            }
            problems.same("left behind", &tree::names(dir.path()), &Vec::new());
            if tree::snapshot(&checkpoint) != before {
                problems.note("the checkpoint was changed".into());
            }
        },
    );
}

/// `pack` and `index` end with that code and one error that says all the words, and leave nothing.
fn refused(source: &Path, dir: &Path, code: i32, words: &[&str], problems: &mut Problems) {
    let before = tree::names(dir);
    for command in ["pack", "index"] {
        let out = dir.join(command);
        let output = expert(&[&command, &source, &"-o", &out]);
        let error = output.error(code);
        for word in words {
            if !error.contains(word) {
                problems.note(format!("{command}: {word:?} is not in {error:?}"));
            }
        }
        problems.same("left behind", &tree::names(dir), &before);
    }
}

/// A safetensors file of tensors of one byte.
fn write_safetensors(path: &Path, names: &[&str]) {
    let tensor = |(i, name): (usize, &&str)| {
        let end = i + 1;
        format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{i},{end}]}}")
    };
    let tensors: Vec<String> = names.iter().enumerate().map(tensor).collect();
    let header = format!("{{{}}}", tensors.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend(names.iter().map(|_| 0));
    fs::write(path, bytes).expect("a file");
}

#[test]
fn what_is_no_checkpoint_is_refused_with_what_it_is() {
    type Make = fn(&Path);
    let cases: [(&str, Make, &str); 5] = [
        ("empty", |_| (), "no .safetensors or .gguf files"),
        (
            "text",
            |p| fs::write(p.join("README.md"), "x").expect("a file"),
            "no .safetensors or .gguf files",
        ),
        (
            "pickle",
            |p| fs::write(p.join("pytorch_model.bin"), "PK").expect("a file"),
            "convert the model to safetensors first",
        ),
        (
            "dense",
            |p| {
                let names = ["model.layers.0.mlp.gate_proj.weight"];
                write_safetensors(&p.join("model.safetensors"), &names);
            },
            "no routed experts found",
        ),
        (
            "adapter",
            |p| {
                let names = ["model.layers.0.mlp.experts.0.w1.lora_A.weight"];
                write_safetensors(&p.join("model.safetensors"), &names);
            },
            "give the base model",
        ),
    ];
    failures::each(
        &cases,
        |c| c.0,
        |&(name, make, cause), problems| {
            let dir = tempfile::tempdir().expect("a folder");
            let source = dir.path().join(name);
            fs::create_dir(&source).expect("a folder");
            make(&source);
            refused(&source, dir.path(), 1, &[name, cause], problems);
        },
    );
}

#[test]
fn missing_arguments_unknown_flags_and_paths_that_are_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let gone = dir.path().join("gone");
    for command in ["pack", "index", "unpack"] {
        let missing = expert(&[&command, &gone, &"-o", &out]);
        assert!(missing.error(1).contains("gone"), "{missing:?}");
        for output in [
            expert(&[&command]),
            expert(&[&command, &gone]),
            expert(&[&command, &gone, &"-o", &out, &"--no-such-flag"]),
        ] {
            assert_eq!(output.code, Some(2), "{output:?}");
            assert!(output.stderr.contains("Usage: "), "{output:?}");
        }
    }
    assert_eq!(expert(&[&"no-such-command"]).code, Some(2));
    assert_eq!(tree::names(dir.path()), Vec::<String>::new());
}
