//! Stores and checkpoints that were damaged, and builds that could not finish.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use atlas_expert_tests::binary::{command, expert, expert_after};
use atlas_expert_tests::{fixtures, tree};
use expert_store::catalogue::Records;
use expert_store::{OpenOptions, Store};
use rustix::process::{Pid, Signal, kill_process};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

const CHUNK_BYTES: usize = 262_144;
const HEADER_BYTES: u64 = 256;

/// Makes a checkpoint of two layers of three experts, with two chunks in each record.
fn two_chunks(checkpoint: &Path) {
    expert(&[
        &"synth",
        &"--family",
        &"qwen3-moe",
        &"--layers",
        &"2",
        &"--experts",
        &"3",
        &"--hidden",
        &"256",
        &"--inter",
        &"200",
        &"-o",
        &checkpoint,
    ])
    .succeeded();
}

/// A packed store beside its checkpoint in a folder that goes away with the test.
struct Packed {
    dir: tempfile::TempDir,
    checkpoint: PathBuf,
    store: PathBuf,
    stride: u64,
    image_bytes: u64,
}

impl Packed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (checkpoint, store) = (dir.path().join("checkpoint"), dir.path().join("store"));
        two_chunks(&checkpoint);
        expert(&[&"pack", &checkpoint, &"-o", &store]).succeeded();
        let open = Store::open(&store, &OpenOptions::default()).unwrap();
        let layer = &open.catalogue().layers[0];
        let Records::Packed { stride, .. } = layer.records else {
            panic!("not packed");
        };
        let image_bytes = layer.image_bytes_max();
        assert!(image_bytes > CHUNK_BYTES as u64 && open.catalogue().layers.len() > 1);
        Self {
            dir,
            checkpoint,
            store,
            stride,
            image_bytes,
        }
    }

    /// Position in `layer_*.xp2` of a byte of a record's image.
    fn at(&self, expert: u64, offset: u64) -> u64 {
        expert * self.stride + HEADER_BYTES + offset
    }

    fn layer_file(&self, layer: u32) -> PathBuf {
        self.store.join(format!("layer_{layer:05}.xp2"))
    }

    fn edit_manifest(&self, edit: impl FnOnce(&mut serde_json::Value)) {
        let path = self.store.join("manifest.json");
        let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
    }

    /// The error that each command that opens the store ends with.
    fn refused(&self) -> String {
        let out = self.dir.path().join("out");
        let error = expert(&[&"verify", &self.store]).error(1).to_owned();
        for other in [
            expert(&[&"inspect", &self.store]),
            expert(&[&"unpack", &self.store, &"-o", &out]),
            expert(&[&"pack", &self.store, &"-o", &out]),
        ] {
            assert_eq!(other.error(1), error);
        }
        assert_eq!(tree::names(self.dir.path()), ["checkpoint", "store"]);
        error
    }
}

#[test]
fn flipped_byte_is_named_by_layer_expert_and_chunk_and_not_unpacked() {
    let packed = Packed::new();
    tree::flip(&packed.layer_file(1), packed.at(1, 7));
    tree::flip(&packed.layer_file(1), packed.at(2, packed.image_bytes - 1));
    let verified = expert(&[&"verify", &packed.store]);
    assert_eq!(verified.code, Some(1), "{verified:?}");
    let bad: Vec<&str> = verified
        .stdout
        .lines()
        .filter(|l| l.starts_with("bad:"))
        .collect();
    assert_eq!(bad.len(), 2, "{verified:?}");
    assert!(
        bad[0].starts_with("bad: layer 1 expert 1 chunk 0: "),
        "{bad:?}"
    );
    assert!(
        bad[1].starts_with("bad: layer 1 expert 2 chunk 1: "),
        "{bad:?}"
    );
    let json = expert(&[&"verify", &packed.store, &"--json"]);
    assert_eq!(json.code, Some(1));
    let report: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(
        (&report["ok"], &report["bad_count"]),
        (&false.into(), &2.into())
    );
    let bad = &report["bad"][1];
    assert_eq!(bad["key"], serde_json::json!({"layer": 1, "expert": 2}));
    assert_eq!(bad["chunk"], 1);
    // What reads the bad record fails, and leaves nothing; the others can be had.
    let out = packed.dir.path().join("out");
    let key = ["--layer", "1", "--expert", "1"];
    for (name, key) in [
        ("unpack", &key[..0]),
        ("pack", &key[..0]),
        ("extract", &key[..]),
    ] {
        let mut all: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&name, &packed.store, &"-o", &out];
        for part in key {
            all.push(part);
        }
        let output = expert(&all);
        let error = output.error(1);
        // Of two bad records whole-store work names the one that a worker came upon first.
        let names_a_bad_one = error.contains("layer 1 expert 1 chunk 0: checksum")
            || (key.is_empty() && error.contains("layer 1 expert 2 chunk 1: checksum"));
        assert!(names_a_bad_one, "{error}");
        assert_eq!(tree::names(packed.dir.path()), ["checkpoint", "store"]);
    }
    expert(&[
        &"extract",
        &packed.store,
        &"--layer",
        &"1",
        &"--expert",
        &"0",
        &"-o",
        &out,
    ])
    .succeeded();
}

#[test]
fn flipped_byte_of_an_in_place_store_is_named_by_layer_expert_and_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, store) = (dir.path().join("checkpoint"), dir.path().join("store"));
    two_chunks(&checkpoint);
    expert(&[&"index", &checkpoint, &"-o", &store]).succeeded();
    // The damage of a disk: neither length nor time of the file tell of it.
    let open = Store::open(&store, &OpenOptions::default()).unwrap();
    let mut at = None;
    open.catalogue().layers[1].for_each_segment(2, |s| {
        let end = s.image_offset + s.bytes;
        if end > CHUNK_BYTES as u64 {
            at = Some((s.file as usize, s.file_offset + s.bytes - 1));
        }
    });
    let (file, offset) = at.unwrap();
    let path = &open.files()[file].path;
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    tree::flip(path, offset);
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    let verified = expert(&[&"verify", &store]);
    assert_eq!(verified.code, Some(1), "{verified:?}");
    let bad = "bad: layer 1 expert 2 chunk 1: ";
    assert!(verified.stdout.contains(bad), "{verified:?}");
}

#[test]
fn flipped_byte_with_its_matching_checksum_is_refused_by_the_content_id() {
    let packed = Packed::new();
    tree::flip(&packed.layer_file(0), packed.at(0, 0));
    let record = fs::read(packed.layer_file(0)).unwrap();
    let image = &record[HEADER_BYTES as usize..][..CHUNK_BYTES];
    let sums_path = packed.store.join("checksums.xxh3");
    let mut sums = fs::read(&sums_path).unwrap();
    sums[..8].copy_from_slice(&xxh3_64(image).to_le_bytes());
    fs::write(&sums_path, &sums).unwrap();
    let error = packed.refused();
    assert!(error.contains("checksums.xxh3"), "{error}");
    packed.edit_manifest(|m| {
        m["checksums"]["xxh3_128"] = format!("{:032x}", xxh3_128(&sums)).into();
    });
    let error = packed.refused();
    assert!(error.contains("content id"), "{error}");
}

#[test]
fn short_long_and_missing_record_files_are_refused_by_name_of_the_layer() {
    for (change, word) in [(-1i64, "short"), (1, "long"), (4096, "long")] {
        let packed = Packed::new();
        let file = File::options()
            .write(true)
            .open(packed.layer_file(1))
            .unwrap();
        let bytes = file.metadata().unwrap().len();
        file.set_len(bytes.checked_add_signed(change).unwrap())
            .unwrap();
        let error = packed.refused();
        assert!(error.contains("layer 1") && error.contains(word), "{error}");
    }
    let packed = Packed::new();
    fs::remove_file(packed.layer_file(0)).unwrap();
    let error = packed.refused();
    assert!(
        error.contains("layer 0") && error.contains("missing"),
        "{error}"
    );
}

#[test]
fn record_files_of_two_layers_that_changed_places_are_refused() {
    let packed = Packed::new();
    let (a, b) = (packed.layer_file(0), packed.layer_file(1));
    let aside = packed.store.join("aside");
    fs::rename(&a, &aside).unwrap();
    fs::rename(&b, &a).unwrap();
    fs::rename(&aside, &b).unwrap();
    let error = packed.refused();
    assert!(error.contains("layer 0 expert 0: its header"), "{error}");
}

#[test]
fn damaged_missing_and_foreign_parts_of_a_store_are_refused() {
    type Damage = fn(&Packed);
    let cases: [(Damage, &str); 7] = [
        (
            |p| p.edit_manifest(|m| m["version"] = 3.into()),
            "from the future",
        ),
        (
            |p| p.edit_manifest(|m| m["files"][0]["name"] = "../x".into()),
            "refused",
        ),
        (
            |p| p.edit_manifest(|m| m["content_id"] = "0".repeat(32).into()),
            "content id",
        ),
        (
            |p| fs::write(p.store.join("manifest.json"), "{").unwrap(),
            "manifest.json",
        ),
        (
            |p| fs::remove_file(p.store.join("manifest.json")).unwrap(),
            "did not finish",
        ),
        (
            |p| fs::remove_file(p.store.join("checksums.xxh3")).unwrap(),
            "checksums.xxh3",
        ),
        (
            |p| tree::flip(&p.store.join("catalogue.bin"), 100),
            "catalogue.bin",
        ),
    ];
    for (damage, word) in cases {
        let packed = Packed::new();
        damage(&packed);
        let error = packed.refused();
        assert!(error.contains(word), "{word}: {error}");
    }
}

/// An in-place store of a copy of a fixture, and the copy's only file of tensors.
fn indexed(dir: &Path) -> (PathBuf, PathBuf) {
    let (checkpoint, store) = (dir.join("checkpoint"), dir.join("store"));
    tree::copy(&fixtures::checkpoint("mixtral-bf16"), &checkpoint);
    expert(&[&"index", &checkpoint, &"-o", &store]).succeeded();
    (store, checkpoint.join("model.safetensors"))
}

#[test]
fn checkpoint_that_was_truncated_overwritten_or_replaced_refuses_its_in_place_store() {
    type Change = fn(&Path);
    let cases: [(Change, &str); 4] = [
        (
            |path| {
                let file = File::options().write(true).open(path).unwrap();
                file.set_len(file.metadata().unwrap().len() - 1).unwrap();
            },
            "changed since it was indexed",
        ),
        (
            |path| {
                let file = File::options().write(true).open(path).unwrap();
                let bytes = file.metadata().unwrap().len();
                file.write_all_at(b"x", bytes - 1).unwrap();
                file.set_modified(std::time::SystemTime::now() + Duration::from_secs(1))
                    .unwrap();
            },
            "changed since it was indexed",
        ),
        (
            |path| {
                let other = fixtures::checkpoint("olmoe-f32").join("model.safetensors");
                fs::remove_file(path).unwrap();
                fs::copy(other, path).unwrap();
            },
            "changed since it was indexed",
        ),
        (|path| fs::remove_file(path).unwrap(), "No such file"),
    ];
    for (change, word) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (store, file) = indexed(dir.path());
        change(&file);
        let out = dir.path().join("out");
        for output in [
            expert(&[&"verify", &store]),
            expert(&[&"inspect", &store]),
            expert(&[&"pack", &store, &"-o", &out]),
            expert(&[&"unpack", &store, &"-o", &out]),
        ] {
            let error = output.error(1);
            assert!(
                error.contains(word) && error.contains("model.safetensors"),
                "{error}"
            );
        }
        assert_eq!(tree::names(dir.path()), ["checkpoint", "store"]);
    }
}

#[test]
fn same_bytes_in_another_file_of_the_same_time_only_warn() {
    let dir = tempfile::tempdir().unwrap();
    let (store, file) = indexed(dir.path());
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    let copy = file.with_extension("copy");
    fs::copy(&file, &copy).unwrap();
    File::options()
        .write(true)
        .open(&copy)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    fs::rename(&copy, &file).unwrap();
    let verified = expert(&[&"verify", &store]).succeeded();
    assert!(verified.stderr.contains("warning: "), "{verified:?}");
}

#[test]
fn existing_output_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, file) = (dir.path().join("folder"), dir.path().join("file"));
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("mine"), "mine").unwrap();
    fs::write(&file, "mine").unwrap();
    let before = tree::snapshot(dir.path());
    let source = fixtures::checkpoint("mixtral-bf16");
    for out in [&folder, &file] {
        for command in ["pack", "index", "unpack"] {
            let refused = expert(&[&command, &source, &"-o", out]);
            let error = refused.error(1);
            assert!(error.contains("exists already"), "{error}");
        }
        // What is not a store is not replaced either.
        let refused = expert(&[&"pack", &source, &"-o", out, &"--replace"]);
        assert!(refused.error(1).contains("not"), "{refused:?}");
    }
    assert!(tree::snapshot(dir.path()) == before);
}

#[test]
fn output_in_a_folder_that_is_not_there_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixtures::checkpoint("mixtral-bf16");
    let out = dir.path().join("no/such/folder");
    for command in ["pack", "index", "unpack"] {
        let refused = expert(&[&command, &source, &"-o", &out]);
        assert!(refused.error(1).contains("no/such"), "{refused:?}");
    }
    assert_eq!(tree::names(dir.path()), Vec::<String>::new());
}

/// A checkpoint that is all holes: it costs nothing to make and takes long to read.
fn gibibytes_of_holes(gibibytes: u64, folder: &Path) {
    fs::create_dir(folder).unwrap();
    let mut tensors = Vec::new();
    let mut at = 0u64;
    for expert in 0..32 {
        for projection in ["gate_proj", "up_proj", "down_proj"] {
            let bytes = (gibibytes << 30) / 96 / 1024 * 1024;
            tensors.push(format!(
                "\"model.layers.0.mlp.experts.{expert}.{projection}.weight\":{{\"dtype\":\"U8\",\"shape\":[{},1024],\"data_offsets\":[{at},{}]}}",
                bytes / 1024,
                at + bytes
            ));
            at += bytes;
        }
    }
    let header = format!("{{{}}}", tensors.join(","));
    let mut file = File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + at).unwrap();
}

#[test]
fn interrupted_builds_leave_nothing_and_exit_with_1() {
    // Long enough that no signal comes too late: a pack writes what an index only reads.
    for (name, gibibytes, signal) in [
        ("pack", 2, Signal::INT),
        ("pack", 2, Signal::TERM),
        ("index", 16, Signal::INT),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (checkpoint, out) = (dir.path().join("checkpoint"), dir.path().join("out"));
        gibibytes_of_holes(gibibytes, &checkpoint);
        let mut child = command(
            "atlas-expert",
            &[&name, &checkpoint, &"-o", &out, &"--threads", &"1"],
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        // It has begun when its temporary folder is there.
        while tree::names(dir.path()).len() == 1 {
            assert_eq!(child.try_wait().unwrap(), None, "{name} ended too soon");
            std::thread::sleep(Duration::from_millis(1));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}: {stderr}");
        assert!(stderr.contains("error: interrupted"), "{name}: {stderr}");
        assert_eq!(tree::names(dir.path()), ["checkpoint"], "{name} {signal:?}");
    }
}

#[test]
fn file_size_limit_during_a_build_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let packed = Packed::new();
    // 1024-byte blocks.
    let limit = "ulimit -f 64";
    let source = &packed.checkpoint;
    for command in ["pack", "unpack"] {
        let full = expert_after(limit, &[&command, source, &"-o", &out]);
        let error = full.error(1);
        assert!(error.contains("free some space"), "{command}: {error}");
        assert_eq!(tree::names(dir.path()), Vec::<String>::new(), "{command}");
    }
    // The store that is to be replaced stays when its successor does not fit.
    let before = tree::contents(&packed.store);
    let full = expert_after(
        limit,
        &[&"pack", source, &"-o", &packed.store, &"--replace"],
    );
    assert!(full.error(1).contains("free some space"), "{full:?}");
    assert!(tree::contents(&packed.store) == before);
    assert_eq!(tree::names(packed.dir.path()), ["checkpoint", "store"]);
}
