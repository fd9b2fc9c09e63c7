use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::select::{parse_ranges, parse_shard};
use crate::{
    BuildOptions, IndexOptions, Progress, Report, Selection, UnpackOptions, index, pack, unpack,
};

/// Cancels after some bytes.
struct CancelAt {
    left: AtomicU64,
    cancel: Arc<AtomicBool>,
}

impl Progress for CancelAt {
    fn start(&self, _: &str, _: u64) {}
    fn advance(&self, bytes: u64) {
        if self.left.fetch_sub(bytes, Ordering::Relaxed) < bytes {
            self.cancel.store(true, Ordering::Relaxed);
        }
    }
    fn finish(&self) {}
}

fn cancelled() -> BuildOptions {
    let cancel = Arc::new(AtomicBool::new(false));
    BuildOptions {
        progress: Some(Arc::new(CancelAt {
            left: AtomicU64::new(1 << 20),
            cancel: cancel.clone(),
        })),
        cancel: Some(cancel),
        ..BuildOptions::default()
    }
}

#[test]
fn cancelled_and_failed_builds_leave_nothing() {
    let dir = scratch();
    let source = checkpoint(dir.path(), "nvfp4-ct", 1);
    let store = Store::open(&source, &unhashed()).unwrap();
    let before = names(dir.path());
    let out = dir.path().join("out");
    let check = |result: Result<Report, StoreError>| {
        assert!(matches!(result, Err(StoreError::Interrupted)), "{result:?}");
        assert_eq!(names(dir.path()), before);
    };
    check(pack(&store, &out, &cancelled()));
    check(crate::pack_v1(&store, &out, &cancelled()));
    let options = IndexOptions {
        build: cancelled(),
        ..IndexOptions::default()
    };
    check(index(&source, &out, &options));
    let options = UnpackOptions {
        work: cancelled().work(),
        ..UnpackOptions::default()
    };
    assert!(matches!(
        unpack(&store, &out, &options),
        Err(StoreError::Interrupted)
    ));
    // A file that ends early fails in the middle.
    let file = fs::File::options()
        .write(true)
        .open(source.join("model.safetensors"))
        .unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    assert!(pack(&store, &out, &BuildOptions::default()).is_err());
    assert_eq!(names(dir.path()), before);
}

#[test]
fn panic_of_one_worker_ends_the_others() {
    struct Panics(AtomicBool);
    impl Progress for Panics {
        fn start(&self, _: &str, _: u64) {}
        fn advance(&self, _: u64) {
            assert!(
                self.0.swap(true, Ordering::Relaxed),
                "once, as the test wants"
            );
        }
        fn finish(&self) {}
    }
    type Pack = fn(&Store, &Path, &BuildOptions) -> Result<Report, StoreError>;
    for pack in [pack as Pack, crate::pack_v1] {
        let dir = scratch();
        let source = checkpoint(dir.path(), "nvfp4-ct", 1);
        let store = Store::open(&source, &unhashed()).unwrap();
        let options = BuildOptions {
            threads: 3,
            progress: Some(Arc::new(Panics(AtomicBool::new(false)))),
            ..BuildOptions::default()
        };
        let out = dir.path().join("out");
        let (done, ended) = std::sync::mpsc::channel();
        let builder = std::thread::spawn(move || {
            let _done = done;
            pack(&store, &out, &options)
        });
        let wait = ended.recv_timeout(std::time::Duration::from_secs(60));
        assert_eq!(
            wait,
            Err::<(), _>(std::sync::mpsc::RecvTimeoutError::Disconnected)
        );
        assert!(builder.join().is_err());
        assert_eq!(names(dir.path()), ["nvfp4-ct-1"]);
    }
}

/// Run by [`checkpoint_of_many_shards_opens_under_a_low_limit_on_open_files`] under its limits.
#[test]
#[ignore = "a child process of another test"]
fn child_opens_a_checkpoint_of_many_shards() {
    let path = PathBuf::from(std::env::var_os("ATLAS_TEST_CHECKPOINT").unwrap());
    match Store::open(&path, &OpenOptions::default()) {
        Ok(store) => println!("opened {}", store.files().len()),
        Err(e) => println!("refused: {e}"),
    }
}

#[test]
fn checkpoint_of_many_shards_opens_under_a_low_limit_on_open_files() {
    let dir = scratch();
    let source = checkpoint(dir.path(), "mixtral", 30);
    let files = open(&source).files().len();
    assert!(files > 20, "{files}");
    let child = |limits: &str| {
        let output = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("{limits} && exec \"$0\" \"$@\""))
            .arg(std::env::current_exe().unwrap())
            .args(["--ignored", "--nocapture", "child_opens_a_checkpoint"])
            .env("ATLAS_TEST_CHECKPOINT", &source)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let said = child("ulimit -Sn 40");
    assert!(said.contains(&format!("opened {files}")), "{said}");
    let said = child("ulimit -n 40");
    assert!(said.contains("the limit is 40"), "{said}");
    assert!(said.contains("ulimit -n"), "{said}");
}

#[test]
fn existing_output_is_refused_and_replaced_by_the_next_generation() {
    let dir = scratch();
    let source = checkpoint(dir.path(), "mixtral", 1);
    let store = Store::open(&source, &unhashed()).unwrap();
    let out = dir.path().join("out");
    assert_eq!(
        pack(&store, &out, &BuildOptions::default())
            .unwrap()
            .generation,
        1
    );
    let e = pack(&store, &out, &BuildOptions::default()).unwrap_err();
    assert!(e.to_string().contains("--replace"), "{e}");
    let replace = BuildOptions {
        replace: true,
        ..BuildOptions::default()
    };
    assert_eq!(pack(&store, &out, &replace).unwrap().generation, 2);
    let options = IndexOptions {
        build: replace.clone(),
        ..IndexOptions::default()
    };
    assert_eq!(index(&source, &out, &options).unwrap().generation, 3);
    assert_eq!(open(&out).generation(), 3);
    assert_eq!(
        names(&out),
        ["catalogue.bin", "checksums.xxh3", "manifest.json"]
    );
    assert_eq!(names(dir.path()), ["mixtral-1", "out"]);
    // Never something that is not a store: neither the checkpoint nor a mixed directory.
    assert!(pack(&store, &source, &replace).is_err());
    fs::write(out.join("mine.txt"), "x").unwrap();
    let e = pack(&store, &out, &replace).unwrap_err();
    assert!(e.to_string().contains("mine.txt"), "{e}");
    assert!(out.join("mine.txt").exists());
}

#[test]
fn source_stays_as_it_is_and_a_change_while_reading_is_noticed() {
    struct Touch(PathBuf);
    impl Progress for Touch {
        fn start(&self, _: &str, _: u64) {}
        fn advance(&self, _: u64) {
            let file = fs::File::options().write(true).open(&self.0).unwrap();
            file.set_modified(std::time::SystemTime::UNIX_EPOCH)
                .unwrap();
        }
        fn finish(&self) {}
    }
    let dir = scratch();
    let source = checkpoint(dir.path(), "mixtral", 1);
    let file = source.join("model.safetensors");
    let state = || {
        let m = fs::metadata(&file).unwrap();
        (m.modified().unwrap(), fs::read(&file).unwrap())
    };
    let before = state();
    index(&source, &dir.path().join("a"), &IndexOptions::default()).unwrap();
    assert!(before == state());
    let options = IndexOptions {
        build: BuildOptions {
            progress: Some(Arc::new(Touch(file.clone()))),
            ..BuildOptions::default()
        },
        ..IndexOptions::default()
    };
    let e = index(&source, &dir.path().join("b"), &options).unwrap_err();
    assert!(matches!(e, StoreError::ChangedInUse { .. }), "{e}");
    assert_eq!(names(dir.path()), ["a", "mixtral-1"]);
}

#[test]
fn full_disk_is_reported_before_anything_is_copied() {
    // A sparse file of 8 TiB: one expert of a stacked tensor takes none of the disk, its copy would.
    let dir = scratch();
    let source = dir.path().join("huge");
    fs::create_dir(&source).unwrap();
    let rows = 1u64 << 10;
    let bytes = 8u64 << 40;
    let header = format!(
        r#"{{"model.layers.0.mlp.experts.gate_up_proj":{{"dtype":"U8","shape":[{rows},{},1024],"data_offsets":[0,{bytes}]}}}}"#,
        bytes / rows / 1024
    );
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header.as_bytes());
    let path = source.join("model.safetensors");
    fs::write(&path, &start).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(start.len() as u64 + bytes).unwrap();
    let store = Store::open(&source, &unhashed()).unwrap();
    let e = pack(&store, &dir.path().join("out"), &BuildOptions::default()).unwrap_err();
    assert!(matches!(e, StoreError::Full { .. }), "{e}");
    // And from a write.
    let full = crate::writeback::OutFile {
        file: fs::File::options().write(true).open("/dev/full").unwrap(),
        path: "/dev/full".into(),
        bytes: 1,
    };
    let e = full.write_at(b"x", 0).unwrap_err();
    assert!(matches!(e, StoreError::Full { .. }), "{e}");
    assert_eq!(names(dir.path()), ["huge"]);
}

#[test]
fn selections_are_read_strictly_and_checked_against_the_model() {
    assert_eq!(parse_ranges("3, 8..16").unwrap(), [3..4, 8..16]);
    for bad in [
        "",
        "a",
        "4..4",
        "5..3",
        "1..=2",
        "1,,2",
        "-1",
        "4294967295",
        "1..99999999999",
    ] {
        assert!(parse_ranges(bad).is_err(), "{bad}");
    }
    assert_eq!(parse_shard("1/2").unwrap(), (1, 2));
    for bad in ["0/2", "3/2", "1", "1/0", "a/b", "/"] {
        assert!(parse_shard(bad).is_err(), "{bad}");
    }
    let dir = scratch();
    let source = checkpoint(dir.path(), "mixtral", 1);
    let open = |selection| {
        let options = OpenOptions {
            selection: Some(selection),
            ..unhashed()
        };
        Store::open(&source, &options)
    };
    let shards: Vec<Vec<u32>> = (1..=3)
        .map(|i| {
            let store = open(Selection {
                shard: Some((i, 3)),
                ..Selection::default()
            });
            store.unwrap().catalogue().layers[0].experts.clone()
        })
        .collect();
    assert_eq!(shards, [vec![0, 1], vec![2, 3], vec![4]]);
    for (selection, word) in [
        (
            Selection {
                layers: Some(vec![1..3]),
                ..Selection::default()
            },
            "layer 2",
        ),
        (
            Selection {
                layers: Some(vec![0..u32::MAX]),
                ..Selection::default()
            },
            "0..2",
        ),
        (
            Selection {
                experts: Some(vec![4..6]),
                ..Selection::default()
            },
            "has 0..5",
        ),
        (
            Selection {
                shard: Some((1, 6)),
                ..Selection::default()
            },
            "each needs an expert",
        ),
        (
            Selection {
                experts: Some(vec![0..1]),
                shard: Some((2, 2)),
                ..Selection::default()
            },
            "nothing selected",
        ),
    ] {
        let e = open(selection).unwrap_err();
        assert!(matches!(e, StoreError::Usage(_)), "{e}");
        assert!(e.to_string().contains(word), "{e}");
    }
}

#[test]
fn synth_is_a_function_of_its_specification() {
    let dir = scratch();
    let make = |name: &str, seed, threads| {
        let spec = crate::SynthSpec {
            family: "nvfp4-modelopt".into(),
            layers: Some(1),
            experts: Some(2),
            seed,
            work: crate::WorkOptions {
                threads,
                ..Default::default()
            },
            ..Default::default()
        };
        crate::synth(&spec, &dir.path().join(name)).unwrap();
        contents(&dir.path().join(name))
    };
    let a = make("a", 1, 1);
    assert!(a == make("b", 1, 3));
    assert!(a != make("c", 2, 1));
    let spec = crate::SynthSpec {
        family: "nothing".into(),
        ..Default::default()
    };
    let e = crate::synth(&spec, &dir.path().join("x")).unwrap_err();
    assert!(e.to_string().contains("mixtral"), "{e}");
    let spec = crate::SynthSpec {
        family: "gguf-qwen3moe".into(),
        hidden: Some(100),
        ..Default::default()
    };
    let e = crate::synth(&spec, &dir.path().join("x")).unwrap_err();
    assert!(e.to_string().contains("choose other sizes"), "{e}");
}
