//! Records straight from this machine's disk: every layout, every way of reading, and files that go wrong.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::fixtures;
use atlas_expert_tests::net::model::{self, Model, Sizes, flip_unnoticed, place_of};
use atlas_expert_tests::net::rig::{arena_for, assert_all_right, batch, patient, slot, unsettled};
use atlas_expert_tests::net::wait_until;
use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory};
use expert_store::digest::PayloadDigest;
use expert_store::info::hex128;
use expert_store::{Key, OpenOptions, Store};
use expert_tier::{ExpertTier, IoMode, TierBuilder, TierError, UmaTier, largest_image_bytes};

/// Direct, buffered, plain.
const WAYS: [(bool, bool); 3] = [(true, true), (false, true), (true, false)];

fn open(builder: TierBuilder, store: &Arc<Store>, arena: Arc<ExpertArena>) -> UmaTier {
    builder.open_uma(store.clone(), arena).expect("a tier")
}

fn arena_of(store: &Store, slots: u32) -> Arc<ExpertArena> {
    let bytes = largest_image_bytes(store.info()).next_multiple_of(4096) as usize;
    let memory = ForeignMemory::heap(bytes * slots as usize).expect("memory");
    let arena = ArenaBuilder::new().slab(slots, bytes).foreign(memory);
    Arc::new(arena.build().expect("an arena"))
}

fn keys_of(store: &Store) -> Vec<Key> {
    let layers = store.catalogue().layers.iter();
    layers
        .flat_map(|l| l.experts.iter().map(|&e| Key::new(l.layer, e)))
        .collect()
}

/// Whether a folder's files take direct reads at all, as told by the system and not by what is tested.
fn takes_direct_reads(file: &Path) -> bool {
    let path = format!("if={}", file.display());
    let dd = std::process::Command::new("dd")
        .args([&path, "of=/dev/null", "iflag=direct", "bs=4096", "count=1"])
        .output()
        .expect("dd");
    dd.status.success()
}

#[test]
fn every_fixture_of_every_layout_has_the_oracles_digest() {
    let mut records = 0;
    for expected in fixtures::all() {
        for stack in &expected.stacks {
            let options = OpenOptions {
                stack: Some(stack.prefix.clone()),
                mtp: stack.class == "mtp",
                ..OpenOptions::default()
            };
            let store = Arc::new(Store::open(expected.checkpoint(), &options).expect("a store"));
            let tier = open(patient(), &store, arena_of(&store, 8));
            let mut digest = PayloadDigest::new();
            for keys in keys_of(&store).chunks(8) {
                for record in tier.fetch_many(&batch(keys), 0).expect("a batch") {
                    let record = record.unwrap_or_else(|e| panic!("{}: {e}", expected.fixture));
                    digest.update(record.class(), record.bytes());
                    records += 1;
                }
            }
            assert_eq!(
                hex128(digest.value()),
                stack.payload_digest,
                "{} {}",
                expected.fixture,
                stack.prefix
            );
        }
    }
    assert!(records > 100, "{records} records");
}

#[test]
fn every_way_of_reading_brings_the_same_bytes_at_every_depth() {
    let model = Model::bf16(Sizes::LARGE);
    let records = model.records();
    for path in [model.checkpoint.clone(), model.pack()] {
        let store = model::open(&path);
        let file = &store.files()[0].path;
        for (direct, ring) in WAYS {
            for (depth, streams) in [(1, 1), (3, 2), (16, 2), (128, 7)] {
                let builder = TierBuilder::new()
                    .uma_direct(direct)
                    .uma_ring(ring)
                    .uma_depth(depth)
                    .streams(streams);
                let tier = open(builder, &store, arena_for(&records, 8));
                assert_all_right(&tier, &records, 8);
                let io = tier.io();
                let want = match (direct && takes_direct_reads(file), ring) {
                    (_, false) => IoMode::Pread,
                    (true, true) => IoMode::IoUringDirect,
                    (false, true) => IoMode::IoUringBuffered,
                };
                assert_eq!(io.mode, want);
                // Nothing was refused that was asked for.
                assert!(io.fallbacks == 0 || want == IoMode::IoUringBuffered);
                assert_eq!(tier.stats().rails[0].io, Some(io));
            }
        }
    }
}

#[test]
fn v1_store_is_read_as_it_lies() {
    let model = Model::nvfp4(Sizes::V1);
    let path = model.pack_v1();
    let records = model::v1_records(&path);
    let tier = open(patient(), &model::open(&path), arena_for(&records, 4));
    assert_all_right(&tier, &records, 4);
}

/// Memory has no disk to read past the page cache: however its file system answers, records come.
#[test]
fn store_on_tmpfs_is_read() {
    let model = Model::bf16(Sizes::LARGE);
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let path = folder.path().join("packed");
    let packed = expert_store::pack(&model.open(), &path, &expert_store::BuildOptions::default());
    packed.expect("pack");
    let records = model.records();
    let tier = open(patient(), &model::open(&path), arena_for(&records, 4));
    assert_all_right(&tier, &records, 4);
    assert_ne!(tier.io().mode, IoMode::Pread);
}

#[test]
fn store_that_can_only_be_read_is_enough() {
    let model = Model::bf16(Sizes::SMALL);
    let path = model.pack();
    let set = |mode| {
        for entry in fs::read_dir(&path).expect("the store") {
            let entry = entry.expect("an entry").path();
            fs::set_permissions(entry, fs::Permissions::from_mode(mode & 0o666)).expect("chmod");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
    };
    set(0o555);
    let store = model::open(&path);
    let before: Vec<_> = store.files().iter().map(|f| f.stamp).collect();
    let records = model.records();
    let tier = open(patient(), &store, arena_for(&records, 8));
    assert_all_right(&tier, &records, 8);
    let after = model::open(&path);
    assert!(after.files().iter().map(|f| f.stamp).eq(before));
    set(0o755);
}

#[test]
fn file_truncated_under_the_tier_fails_its_records_with_its_name_and_no_others() {
    let model = Model::bf16(Sizes::SMALL);
    let records = model.records();
    let path = model.pack();
    for (direct, ring) in WAYS {
        let store = model::open(&path);
        let builder = patient().uma_direct(direct).uma_ring(ring);
        let tier = open(builder, &store, arena_for(&records, 8));
        let bad = Key::new(1, 0);
        let (file, _) = place_of(&store, bad, 0);
        let whole = fs::read(&file).expect("a layer's file");
        let cut = fs::OpenOptions::new().write(true).open(&file);
        cut.and_then(|f| f.set_len(1000)).expect("truncating it");
        let error = tier.fetch(bad, slot(0), 0).expect_err("a short file");
        let TierError::Unavailable { why, .. } = &error else {
            panic!("{error}");
        };
        let name = file.display().to_string();
        assert!(why.contains(&name) && why.contains("truncated"), "{why}");
        assert!(error.is_retryable());
        tier.fetch(Key::new(0, 0), slot(1), 0)
            .expect("another layer");
        wait_until("no READ is out", || unsettled(tier.arena()) == 0);
        fs::write(&file, whole).expect("restoring it");
        tier.fetch(bad, slot(0), 0)
            .expect("a file that is whole again");
    }
}

#[test]
fn byte_that_changed_on_the_disk_is_noticed_and_nothing_is_committed() {
    let model = Model::bf16(Sizes::LARGE);
    let records = model.records();
    let path = model.pack();
    let store = model::open(&path);
    let bad = Key::new(1, 2);
    // In the third chunk.
    let (file, offset) = place_of(&store, bad, 600_000);
    flip_unnoticed(&file, offset);
    for (direct, ring) in WAYS {
        let builder = patient().uma_direct(direct).uma_ring(ring);
        let tier = open(builder, &store, arena_for(&records, 8));
        let error = tier.fetch(bad, slot(0), 0).expect_err("a wrong byte");
        let TierError::Checksum { key, bad: chunk } = error else {
            panic!("{error}");
        };
        assert_eq!((key, chunk.chunk), (bad, 2));
        tier.fetch(Key::new(1, 3), slot(1), 0)
            .expect("its neighbour");
        assert_eq!(tier.stats().verify_failures, 2, "it was read again once");
    }
}

#[test]
fn tiers_dropped_at_any_moment_free_their_memory() {
    let model = Model::bf16(Sizes::LARGE);
    let store = model::open(&model.pack());
    let keys = keys_of(&store);
    for round in 0..20 {
        let arena = arena_of(&store, keys.len() as u32);
        let memory = Arc::downgrade(&arena);
        let tier = open(patient(), &store, arena);
        let pending = tier.submit(&batch(&keys), None).expect("a batch");
        std::thread::sleep(Duration::from_micros(200 * round));
        drop(pending);
        drop(tier);
        wait_until("the arena is freed", || memory.strong_count() == 0);
    }
    assert_eq!(expert_arena::leaked_windows(), 0);
}

#[test]
fn depths_and_streams_beyond_their_limits_are_refused_with_both() {
    let model = Model::bf16(Sizes::TINY);
    let store = model.open();
    for (builder, value) in [
        (TierBuilder::new().uma_depth(0), "0"),
        (TierBuilder::new().uma_depth(129), "129"),
        (TierBuilder::new().streams(0), "0"),
        (TierBuilder::new().streams(65), "65"),
    ] {
        let error = builder.open_uma(store.clone(), arena_of(&store, 1));
        let error = error.err().expect("a limit");
        let TierError::Config(why) = &error else {
            panic!("{error}");
        };
        assert!(why.starts_with(value) && why.contains("limits"), "{why}");
    }
}

fn fetch(store: &Path, flags: &[&str]) -> Output {
    let store = store.to_str().expect("a path in UTF-8");
    let fixed = ["-q", "--json", "--store", store, "--expert-backend"];
    let mut command = binary::command("atlas-expert", &[&"fetch"]);
    command.args(fixed).args(flags);
    command.env_remove("ATLAS_EXPERT_CONTENT_ID");
    binary::run(&mut command)
}

#[test]
fn fetch_reports_what_posix_reports_and_how_files_were_read() {
    let model = Model::bf16(Sizes::SMALL);
    let path = model.pack();
    let posix = fetch(&path, &["posix"]).json();
    for (flags, mode) in [
        (&["uma"][..], None),
        (
            &["uma", "--buffered", "--io-depth", "1"],
            Some("io-uring-buffered"),
        ),
    ] {
        let uma = fetch(&path, flags).json();
        for key in [
            "records",
            "bytes",
            "payload_digest",
            "content_id",
            "verified",
        ] {
            assert_eq!(uma[key], posix[key], "{key}");
        }
        let keys = |report: &serde_json::Value| {
            let object = report.as_object().expect("an object");
            object.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(keys(&uma), keys(&posix));
        assert_eq!(uma["backend"], "uma");
        let rail = &uma["rails"][0];
        assert_eq!(rail["kind"], "uma");
        assert_eq!(rail["name"], format!("uma:{}", path.display()));
        if let Some(mode) = mode {
            assert_eq!(rail["io"]["mode"], mode);
        }
        assert!(rail["io"]["fallbacks"].is_u64());
        assert!(posix["rails"][0]["io"].is_null());
    }
}
