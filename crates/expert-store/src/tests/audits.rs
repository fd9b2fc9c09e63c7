use std::fs::{self, File};
use std::io::Write;

use super::*;
use crate::{
    BuildOptions, IndexOptions, Key, VerifyOptions, WorkOptions, index, pack, payload_digest,
    verify,
};

fn packed(dir: &Path) -> PathBuf {
    let source = checkpoint(dir, "mixtral", 2);
    let out = dir.join("store");
    let store = Store::open(&source, &unhashed()).unwrap();
    pack(&store, &out, &BuildOptions::default()).unwrap();
    out
}

#[test]
fn flipped_byte_is_named_by_layer_expert_and_chunk() {
    let dir = scratch();
    let store_dir = packed(dir.path());
    let stride = {
        let store = open(&store_dir);
        let crate::catalogue::Records::Packed { stride, .. } = store.catalogue().layers[1].records
        else {
            panic!("not packed")
        };
        stride
    };
    flip(
        &store_dir.join("layer_00001.xp2"),
        3 * stride + 256 + 300_000,
    );
    let store = open(&store_dir);
    let report = verify(&store, &VerifyOptions::default()).unwrap();
    assert_eq!((report.bad_count, report.error_count), (1, 0));
    assert_eq!(
        (report.bad[0].key, report.bad[0].chunk),
        (Key::new(1, 3), 1)
    );
    let e = store.verify_record(Key::new(1, 3)).unwrap_err().to_string();
    assert!(e.contains("layer 1 expert 3 chunk 1"), "{e}");
    let e = payload_digest(&store, &WorkOptions::default()).unwrap_err();
    assert!(matches!(e, StoreError::Checksum { .. }), "{e}");
    // Padding and headers of records are looked at as well.
    let records = fs::metadata(store_dir.join("layer_00000.xp2"))
        .unwrap()
        .len()
        / stride;
    flip(&store_dir.join("layer_00000.xp2"), records * stride - 1);
    let report = verify(&open(&store_dir), &VerifyOptions::default()).unwrap();
    assert_eq!((report.bad_count, report.error_count), (1, 1), "{report:?}");
    flip(&store_dir.join("layer_00000.xp2"), stride + 12);
    let e = open_err(&store_dir).to_string();
    assert!(e.contains("layer 0 expert 1: its header"), "{e}");
}

#[test]
fn what_a_power_loss_leaves_of_a_store_is_refused_before_or_as_its_bytes_are_read() {
    let dir = scratch();
    let dir = dir.path();
    let source = checkpoint(dir, "mixtral", 1);
    let out = dir.join("store");
    let options = BuildOptions {
        sync: false,
        ..BuildOptions::default()
    };
    let store = Store::open(&source, &unhashed()).unwrap();
    pack(&store, &out, &options).unwrap();
    // Space was given to a file, or its name was, and the bytes never came.
    let zeros = |bytes: &[u8]| vec![0; bytes.len()];
    let nothing = |_: &[u8]| Vec::new();
    let whole = contents(&out);
    assert_eq!(whole.len(), 5, "{:?}", names(&out));
    for (name, bytes) in &whole {
        for lost in [zeros(bytes), nothing(bytes)] {
            fs::write(out.join(name), lost).unwrap();
            let e = open_err(&out).to_string();
            assert!(e.contains(name.as_str()), "{name}: {e}");
        }
        fs::write(out.join(name), bytes).unwrap();
    }
    // The headers came and a page of the records did not: only who reads it can see that.
    let name = "layer_00001.xp2";
    let mut damaged = whole[name].clone();
    let at = damaged.len() / 4096 / 2 * 4096;
    damaged[at..at + 4096].fill(0);
    assert!(damaged != whole[name]);
    fs::write(out.join(name), damaged).unwrap();
    let store = open(&out);
    let options = VerifyOptions {
        payload_digest: true,
        ..VerifyOptions::default()
    };
    let report = verify(&store, &options).unwrap();
    assert_eq!((report.bad_count, report.error_count), (1, 0));
    assert_eq!(report.payload_digest, None);
    let key = report.bad[0].key;
    let extracted = crate::extract(&store, key, &mut Vec::new()).map(|_| ());
    for result in [store.verify_record(key), extracted] {
        let e = result.unwrap_err();
        assert!(matches!(e, StoreError::Checksum { .. }), "{e}");
    }
    let e = pack(&store, &dir.join("again"), &BuildOptions::default()).unwrap_err();
    assert!(matches!(e, StoreError::Checksum { .. }), "{e}");
}

#[test]
fn flipped_byte_with_a_matching_checksum_is_refused_by_the_content_id() {
    let dir = scratch();
    let store_dir = packed(dir.path());
    let sums = store_dir.join("checksums.xxh3");
    flip(&sums, 0);
    let e = open_err(&store_dir).to_string();
    assert!(e.contains("checksums.xxh3") && e.contains("damaged"), "{e}");
    let hash = xxhash_rust::xxh3::xxh3_128(&fs::read(&sums).unwrap());
    edit_manifest(&store_dir, |m| {
        m["checksums"]["xxh3_128"] = crate::info::hex128(hash).into();
    });
    let e = open_err(&store_dir).to_string();
    assert!(e.contains("content id"), "{e}");
}

#[test]
fn short_long_and_missing_record_files_are_refused_by_layer() {
    for (change, word) in [(-1i64, "1 too short"), (4096, "4096 too long")] {
        let dir = scratch();
        let store_dir = packed(dir.path());
        let file = File::options()
            .write(true)
            .open(store_dir.join("layer_00001.xp2"))
            .unwrap();
        let n = file.metadata().unwrap().len();
        file.set_len(n.checked_add_signed(change).unwrap()).unwrap();
        let e = open_err(&store_dir).to_string();
        assert!(e.contains("layer 1") && e.contains(word), "{e}");
    }
    let dir = scratch();
    let store_dir = packed(dir.path());
    fs::remove_file(store_dir.join("layer_00000.xp2")).unwrap();
    let e = open_err(&store_dir).to_string();
    assert!(e.contains("layer 0") && e.contains("missing"), "{e}");
}

#[test]
fn manifests_from_the_future_with_bad_names_or_sizes_are_refused() {
    type Edit = fn(&mut serde_json::Value);
    let cases: &[(Edit, &str)] = &[
        (|m| m["version"] = 3.into(), "from the future"),
        (|m| m["version"] = 0.into(), "version 0"),
        (|m| m["files"][0]["name"] = "../x".into(), "refused"),
        (|m| m["files"][0]["name"] = "/etc/passwd".into(), "refused"),
        (|m| m["files"][0]["name"] = "a\nb".into(), "refused"),
        (
            |m| m["catalogue"]["bytes"] = (1u64 << 40).into(),
            "the limit is",
        ),
        (|m| m["catalogue"]["bytes"] = 12.into(), "manifest says 12"),
        (
            |m| m["checksums"]["bytes"] = (1u64 << 60).into(),
            "checksums.xxh3 of",
        ),
        (|m| m["layers"][1]["blob_offset"] = 1.into(), "does not fit"),
        (
            |m| m["layers"][1]["blob_bytes"] = u64::MAX.into(),
            "does not fit",
        ),
        (|m| m["layers"] = serde_json::json!([]), "0 layers"),
        (|m| m["kind"] = "in-place".into(), "another kind"),
        (|m| m["content_id"] = serde_json::Value::Null, "content id"),
        (|m| m["layout_id"] = "0".repeat(32).into(), "layout id"),
        (|m| m["content_id"] = "xyz".into(), "xyz"),
        (|m| m["stack"] = "other".into(), "content id"),
    ];
    let dir = scratch();
    let store_dir = packed(dir.path());
    let good = fs::read(store_dir.join("manifest.json")).unwrap();
    for (edit, word) in cases {
        fs::write(store_dir.join("manifest.json"), &good).unwrap();
        edit_manifest(&store_dir, edit);
        let e = open_err(&store_dir).to_string();
        assert!(e.contains(word), "{word}: {e}");
    }
    fs::write(store_dir.join("manifest.json"), &good[..good.len() / 2]).unwrap();
    assert!(matches!(open_err(&store_dir), StoreError::Store { .. }));
    fs::remove_file(store_dir.join("manifest.json")).unwrap();
    let e = open_err(&store_dir).to_string();
    assert!(e.contains("did not finish"), "{e}");
}

#[test]
fn unknown_keys_are_ignored() {
    let dir = scratch();
    let store_dir = packed(dir.path());
    edit_manifest(&store_dir, |m| m["later"] = 1.into());
    open(&store_dir);
}

#[test]
fn changed_sources_refuse_an_in_place_store_and_moved_ones_warn() {
    let dir = scratch();
    let dir = dir.path();
    let source = checkpoint(dir, "mixtral", 1);
    let store_dir = dir.join("index");
    index(&source, &store_dir, &IndexOptions::default()).unwrap();
    let file = source.join("model.safetensors");
    let mtime = fs::metadata(&file).unwrap().modified().unwrap();
    let store = open(&store_dir);
    assert!(store.changed_files().is_empty());
    // The same bytes and time under another inode: served, with a warning.
    let copy = dir.join("copy");
    fs::copy(&file, &copy).unwrap();
    File::options()
        .write(true)
        .open(&copy)
        .unwrap()
        .set_modified(mtime)
        .unwrap();
    fs::rename(&copy, &file).unwrap();
    assert_eq!(store.changed_files().len(), 1);
    let moved = open(&store_dir);
    assert_eq!(moved.warnings().len(), 1, "{:?}", moved.warnings());
    assert!(verify(&moved, &VerifyOptions::default()).unwrap().is_ok());
    // Elsewhere, told by the caller.
    let elsewhere = dir.join("elsewhere");
    fs::rename(&source, &elsewhere).unwrap();
    assert!(matches!(open_err(&store_dir), StoreError::Io { .. }));
    let options = OpenOptions {
        checkpoint_override: Some(elsewhere.clone()),
        ..OpenOptions::default()
    };
    Store::open(&store_dir, &options).unwrap();
    // One byte more, or a second touch.
    let file = elsewhere.join("model.safetensors");
    let store = Store::open(&store_dir, &options).unwrap();
    File::options()
        .append(true)
        .open(&file)
        .unwrap()
        .write_all(b"x")
        .unwrap();
    let e = Store::open(&store_dir, &options).unwrap_err();
    assert!(matches!(e, StoreError::SourceChanged { .. }), "{e}");
    let changed = store.changed_files();
    assert!(changed[0].1.contains("bytes"), "{changed:?}");
    fs::remove_file(&file).unwrap();
    assert_eq!(store.changed_files().len(), 1);
}

/// The modification time can be put back, the time of the change of attributes cannot.
#[test]
fn overwrite_with_its_time_put_back_is_a_change_to_whoever_has_the_file_open() {
    let dir = scratch();
    let dir = dir.path();
    let source = checkpoint(dir, "mixtral", 1);
    let store_dir = dir.join("index");
    index(&source, &store_dir, &IndexOptions::default()).unwrap();
    let path = source.join("model.safetensors");
    let store = open(&store_dir);
    assert_eq!(store.files()[0].changed_now(), None);
    let mtime = fs::metadata(&path).unwrap().modified().unwrap();
    // The clock of file times moves in steps of some milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let n = fs::metadata(&path).unwrap().len();
    let file = File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", n - 1).unwrap();
    file.set_modified(mtime).unwrap();
    let why = store.files()[0].changed_now().unwrap();
    assert!(why.contains("put back"), "{why}");
    assert_eq!(store.changed_files(), [(0, why)]);
    let e = pack(&store, &dir.join("p"), &BuildOptions::default()).unwrap_err();
    assert!(matches!(e, StoreError::ChangedInUse { .. }), "{e}");
    assert!(!e.to_string().contains("index"), "{e}");
    // Whoever opens it later is told that it may be another one, and `verify` finds the byte.
    let later = open(&store_dir);
    assert_eq!(later.warnings().len(), 1);
    assert_eq!(later.files()[0].changed_now(), None);
    // A hard link cannot be told from that.
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::hard_link(&path, dir.join("link")).unwrap();
    assert!(later.files()[0].changed_now().is_some());
}

#[test]
fn catalogue_value_that_is_not_the_records_is_found_by_verify() {
    let dir = scratch();
    let dir = dir.path();
    let source = checkpoint(dir, "nvfp4-ct", 2);
    let in_place = dir.join("index");
    index(&source, &in_place, &IndexOptions::default()).unwrap();
    let packed = dir.join("packed");
    pack(&open(&source), &packed, &BuildOptions::default()).unwrap();
    for store_dir in [in_place, packed] {
        // Values of small leaves end a blob.
        let table = store_dir.join("catalogue.bin");
        flip(&table, fs::metadata(&table).unwrap().len() - 1);
        let hash = xxhash_rust::xxh3::xxh3_128(&fs::read(&table).unwrap());
        edit_manifest(&store_dir, |m| {
            m["catalogue"]["xxh3_128"] = crate::info::hex128(hash).into();
        });
        let report = verify(&open(&store_dir), &VerifyOptions::default()).unwrap();
        assert_eq!((report.bad_count, report.error_count), (0, 1), "{report:?}");
        let error = &report.errors[0];
        assert!(error.contains("layer 1 expert 4"), "{error}");
        assert!(
            error.contains("down_proj.") && error.contains("_scale"),
            "{error}"
        );
    }
}

#[test]
fn truncated_file_is_an_error_of_the_read() {
    let dir = scratch();
    let store_dir = packed(dir.path());
    let store = open(&store_dir);
    let file = File::options()
        .write(true)
        .open(store_dir.join("layer_00001.xp2"))
        .unwrap();
    file.set_len(5000).unwrap();
    let mut buf = vec![0; 8192];
    let e = store.read_image(Key::new(1, 0), 0, &mut buf).unwrap_err();
    assert!(e.to_string().contains("ends before"), "{e}");
    let e = store.read_image(Key::new(1, 4), 0, &mut buf).unwrap_err();
    assert!(matches!(e, StoreError::Io { .. }), "{e}");
}

#[test]
fn v1_store_of_another_writer_needs_no_checksums_and_its_files_must_fit() {
    let dir = scratch();
    let dir = dir.path();
    let source = checkpoint(dir, "nvfp4-modelopt", 1);
    let out = dir.join("v1");
    let store = Store::open(&source, &unhashed()).unwrap();
    crate::pack_v1(&store, &out, &BuildOptions::default()).unwrap();
    let good = fs::read(out.join("manifest.json")).unwrap();
    // Twelve keys only, as older writers have it.
    edit_manifest(&out, |m| {
        for key in ["generation", "content_id", "payload_digest", "checksums"] {
            m.as_object_mut().unwrap().remove(key);
        }
    });
    assert!(open(&out).content_id().is_some());
    fs::rename(out.join("checksums.xxh3"), dir.join("sums")).unwrap();
    let bare = open(&out);
    assert_eq!(bare.content_id(), None);
    assert_eq!(bare.warnings().len(), 1);
    assert!(verify(&bare, &VerifyOptions::default()).is_err());
    edit_manifest(&out, |m| m["file_template"] = "../{:05}".into());
    assert!(open_err(&out).to_string().contains("refused"));
    edit_manifest(&out, |m| {
        m["file_template"] = "experts_{:05}.xpr".into();
        m["num_moe_layers"] = 100_000.into();
    });
    assert!(open_err(&out).to_string().contains("layer count"));
    fs::write(out.join("manifest.json"), &good).unwrap();
    fs::rename(dir.join("sums"), out.join("checksums.xxh3")).unwrap();
    flip(&out.join("experts_00001.xpr"), 12);
    let e = open_err(&out).to_string();
    assert!(
        e.contains("layer 1 expert 0: its header says expert 1"),
        "{e}"
    );
    let file = File::options()
        .write(true)
        .open(out.join("experts_00000.xpr"))
        .unwrap();
    file.set_len(10).unwrap();
    let e = open_err(&out).to_string();
    assert!(e.contains("layer 0: 10 bytes"), "{e}");
}
