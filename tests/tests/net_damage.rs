//! Stores that are damaged or changed, before or while they are served: no client ever takes wrong bytes for right.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atlas_expert_tests::net::model::{self, Model, Records, Sizes, flip_unnoticed, place_of};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::rig::{
    arena_for, assert_all_right, assert_right, batch, patient, serve, serve_with, slot,
};
use atlas_expert_tests::net::wait_until;
use expert_arena::SlotState;
use expert_peer::Peer;
use expert_store::info::hex128;
use expert_store::{Key, Store};
use expert_tier::{ExpertTier, RdmaTier, TierError};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

const BAD: Key = Key::new(1, 3);
/// In the second chunk of a record, and no padding.
const BAD_BYTE: u64 = (256 << 10) + 100;

fn tier(peer: &Peer, records: &Records) -> RdmaTier {
    let arena = arena_for(records, records.len() as u32);
    let addr = peer.local_addr().to_string();
    patient().connect(&addr, arena).expect("a tier")
}

/// Fetches all records at once: those that come are right, the others fail as `check` says. Gives back their number.
fn fetch_what_comes(
    tier: &RdmaTier,
    records: &Records,
    check: impl Fn(Key, &TierError) -> bool,
) -> usize {
    let keys: Vec<Key> = records.keys().copied().collect();
    let batch = batch(&keys);
    let mut failed = 0;
    let fetched = tier.fetch_many(&batch, 0).expect("a batch");
    for (record, (key, place)) in fetched.into_iter().zip(batch) {
        match record {
            Ok(record) => assert_right(&record, records),
            Err(error) => {
                assert!(check(key, &error), "{key}: {error}");
                failed += 1;
                wait_until("its slot is free", || {
                    tier.arena().slot_state(place) == Some(SlotState::Free)
                });
            }
        }
    }
    failed
}

/// The byte is bad before the peer opens the store, and the file's size and modification time say nothing of it: only the
/// checksums do. (Under a running peer the time of the last change of attributes gives it away.)
fn flipped_byte_fails_that_record_alone(store: &Path, records: &Records) {
    let (path, offset) = place_of(&model::open(store), BAD, BAD_BYTE);
    flip_unnoticed(&path, offset);
    let peer = serve_with(model::open(store), |c| {
        c.restat_interval = Duration::from_secs(3600);
    });
    let tier = tier(&peer, records);
    let is_bad = |key, e: &TierError| {
        key == BAD && matches!(e, TierError::Checksum { bad, .. } if bad.chunk == 1)
    };
    assert_eq!(fetch_what_comes(&tier, records, is_bad), 1);
    let stats = tier.stats();
    assert_eq!((stats.failed, stats.verify_failures), (1, 2));
    assert_eq!(stats.rails[0].errors_by_cause.downs, 0);
    wait_until("the peer was told", || peer.stats().checksum_reports == 2);
}

#[test]
fn flipped_byte_of_a_checkpoint_fails_that_record_alone_and_is_reported() {
    let model = Model::bf16(Sizes::SMALL);
    flipped_byte_fails_that_record_alone(&model.index(), &model.records());
}

#[test]
fn flipped_byte_of_a_packed_store_fails_that_record_alone_and_is_reported() {
    let model = Model::bf16(Sizes::SMALL);
    flipped_byte_fails_that_record_alone(&model.pack(), &model.records());
}

#[test]
fn report_of_bad_bytes_makes_the_peer_look_at_its_files_at_once() {
    let model = Model::bf16(Sizes::SMALL);
    let (store, records) = (model.open(), model.records());
    let peer = serve_with(store.clone(), |c| {
        c.restat_interval = Duration::from_secs(3600);
    });
    let tier = tier(&peer, &records);
    assert_all_right(&tier, &records, records.len() as u32);
    // The bad byte is not noticed by itself; another file changes openly, and only its path shows it.
    let (path, offset) = place_of(&store, BAD, BAD_BYTE);
    flip_unnoticed(&path, offset);
    let other = store
        .files()
        .iter()
        .find(|f| f.path != path)
        .expect("two files");
    let moved = model.beside("moved");
    fs::rename(&other.path, &moved).expect("a rename");
    fs::copy(&moved, &other.path).expect("another file of that name");
    assert_eq!(peer.stats().store_changes, 0);
    tier.fetch(BAD, slot(0), 0).expect_err("a bad byte");
    wait_until("the other change was noticed", || {
        peer.stats().store_changes == 1
    });
}

#[test]
fn flipped_byte_with_its_matching_checksum_keeps_the_peer_from_starting() {
    let model = Model::bf16(Sizes::SMALL);
    let path = model.pack();
    let store = model::open(&path);
    let (file, offset) = place_of(&store, BAD, BAD_BYTE);
    flip_unnoticed(&file, offset);
    // Whoever did that also wrote the checksum of the chunk, and the hash of the table of checksums.
    let mut image = vec![0; model.records()[&BAD].len()];
    store.read_image(BAD, 0, &mut image).expect("the record");
    let sum = xxh3_64(&image[256 << 10..]).to_le_bytes();
    let table_path = path.join("checksums.xxh3");
    let mut table = fs::read(&table_path).expect("checksums");
    // Two chunks a record, eight records a layer: the second chunk of record 8 + 3.
    let at = 8 * (2 * (8 + 3) + 1);
    table[at..at + 8].copy_from_slice(&sum);
    fs::write(&table_path, &table).expect("writing checksums");
    let manifest_path = path.join("manifest.json");
    let text = fs::read(&manifest_path).expect("a manifest");
    let mut manifest: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    manifest["checksums"]["xxh3_128"] = hex128(xxh3_128(&table)).into();
    fs::write(&manifest_path, manifest.to_string()).expect("writing the manifest");
    let output = PeerProcess::start_on("127.0.0.1:0", &path, &[])
        .err()
        .expect("an end");
    let error = output.error(1);
    assert!(error.contains("content id"), "{error}");
}

#[test]
fn truncated_file_is_refused_from_the_next_answer_on() {
    for store in [Model::index, Model::pack] {
        let model = Model::bf16(Sizes::SMALL);
        let store = model::open(&store(&model));
        let records = model.records();
        let peer = serve(store.clone());
        let tier = tier(&peer, &records);
        assert_all_right(&tier, &records, records.len() as u32);
        let (path, offset) = place_of(&store, BAD, 0);
        File::options()
            .write(true)
            .open(&path)
            .and_then(|f| f.set_len(offset + 1000))
            .expect("cutting the file");
        let failed = fetch_what_comes(
            &tier,
            &records,
            |_, e| matches!(e, TierError::Unavailable { why, .. } if why.contains("changed on the peer")),
        );
        assert!(failed > 0 && failed < records.len(), "{failed}");
        // The connection lives on: only the file is refused.
        assert_eq!(tier.stats().rails[0].errors_by_cause.downs, 0);
        assert_eq!(peer.stats().store_changes, 1);
    }
}

#[test]
fn file_that_is_overwritten_while_it_is_served_is_refused_until_the_store_is_loaded_again() {
    let model = Model::bf16(Sizes::SMALL);
    let other = Model::bf16(Sizes::SMALL.seed(2));
    let records = model.records();
    let peer = serve(model.open());
    let tier = tier(&peer, &records);
    assert_all_right(&tier, &records, records.len() as u32);
    for (file, others) in model.files().iter().zip(other.files()) {
        fs::write(file, fs::read(others).expect("a file")).expect("overwriting");
    }
    let failed = fetch_what_comes(&tier, &records, |_, e| {
        matches!(e, TierError::Unavailable { .. })
    });
    assert_eq!(failed, records.len());
    peer.reload(model.open()).expect("a reload");
    let others = other.records();
    wait_until("the new content is served", || {
        fetch_what_comes(&tier, &others, |_, e| e.is_retryable()) == 0
    });
}

#[test]
fn file_that_is_replaced_is_refused_once_the_peer_has_looked() {
    let model = Model::bf16(Sizes::SMALL);
    let records = model.records();
    let peer = serve_with(model.open(), |c| {
        c.restat_interval = Duration::from_millis(20);
    });
    let tier = tier(&peer, &records);
    assert_all_right(&tier, &records, records.len() as u32);
    let other = Model::bf16(Sizes::SMALL.seed(2));
    for (file, others) in model.files().iter().zip(other.files()) {
        fs::rename(others, file).expect("replacing");
    }
    // Until then the old file, which is still open, gives the old bytes: right ones.
    wait_until("all records are refused", || {
        fetch_what_comes(&tier, &records, |_, e| {
            matches!(e, TierError::Unavailable { .. })
        }) == records.len()
    });
    peer.reload(model.open()).expect("a reload");
    let others = other.records();
    wait_until("the new content is served", || {
        fetch_what_comes(&tier, &others, |_, e| e.is_retryable()) == 0
    });
}

#[test]
fn client_fetches_where_the_path_of_the_store_does_not_exist() {
    let model = Model::bf16(Sizes::SMALL);
    let records = model.records();
    let (first, store) = (Model::bf16(Sizes::TINY), model.open());
    let gone = |model: &Model| {
        fs::rename(&model.checkpoint, model.beside("elsewhere")).expect("a rename");
    };
    // A peer looks at its files by path when it starts, and this one not again: what it finds then
    // belongs to another store.
    let opened = first.open();
    gone(&first);
    let peer = serve_with(opened, |c| {
        c.restat_interval = Duration::from_secs(3600);
    });
    wait_until("the peer has looked", || peer.stats().store_changes > 0);
    peer.reload(store).expect("a reload");
    gone(&model);
    assert!(Store::open(&model.checkpoint, &Default::default()).is_err());
    let tier = tier(&peer, &records);
    assert_all_right(&tier, &records, records.len() as u32);
    let bytes: usize = records.values().map(Vec::len).sum();
    wait_until("the peer sent each byte", || {
        peer.stats().payload_bytes_sent == bytes as u64
    });
}

#[test]
fn posix_backend_names_the_record_that_it_cannot_read() {
    let model = Model::bf16(Sizes::SMALL);
    let records = model.records();
    let store = model.open();
    let arena = arena_for(&records, records.len() as u32);
    let tier = patient()
        .open_posix(Arc::clone(&store), arena)
        .expect("a tier");
    let (path, offset) = place_of(&store, BAD, BAD_BYTE);
    flip_unnoticed(&path, offset);
    let keys: Vec<Key> = records.keys().copied().collect();
    for (record, key) in tier
        .fetch_many(&batch(&keys), 0)
        .expect("a batch")
        .into_iter()
        .zip(&keys)
    {
        match record {
            Ok(record) => assert_right(&record, &records),
            Err(TierError::Checksum { key: named, bad }) => {
                assert_eq!((named, *key, bad.chunk), (BAD, BAD, 1));
            }
            Err(error) => panic!("{error}"),
        }
    }
    File::options()
        .write(true)
        .open(&path)
        .and_then(|f| f.set_len(0))
        .expect("emptying the file");
    let error = tier.fetch(BAD, slot(0), 0).expect_err("no bytes");
    assert!(matches!(error, TierError::Unavailable { .. }), "{error}");
}
