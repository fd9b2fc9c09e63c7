//! A real store behind the peer: what clients get is what the store reads.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use common::{Client, request, until};
use expert_peer::{Peer, PeerConfig, Source};
use expert_store::codec::decode_layer;
use expert_store::info::StoreInfo;
use expert_store::synth::{SynthSpec, synth};
use expert_store::{OpenOptions, Store};
use expert_wire::Key;
use expert_wire::frame::FrameKind;
use expert_wire::message::{CatalogueRequest, ErrorCode, SECTION_CHECKSUMS};

#[test]
fn checkpoints_are_served_byte_for_byte_with_their_catalogue() {
    for family in ["nvfp4-ct", "gpt-oss", "gguf-qwen3moe"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint");
        let spec = SynthSpec {
            family: family.into(),
            layers: Some(2),
            experts: Some(4),
            hidden: Some(512),
            inter: Some(256),
            shards: 3,
            ..Default::default()
        };
        synth(&spec, &path).unwrap();
        // A GGUF checkpoint is named by its first file, not by its folder.
        let path = match family.starts_with("gguf") {
            true => {
                let mut parts: Vec<_> = std::fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path())
                    .filter(|p| p.extension().is_some_and(|e| e == "gguf"))
                    .collect();
                parts.sort();
                parts.swap_remove(0)
            }
            false => path,
        };
        let store = Arc::new(Store::open(&path, &OpenOptions::default()).unwrap());
        let mut config = PeerConfig::new(store.clone());
        config.listen = vec!["127.0.0.1:0".into()];
        config.populate = Some(Default::default());
        let peer = Peer::start(config).unwrap();
        let (mut client, welcome) = Client::v2(peer.local_addr());
        assert_eq!(welcome.content_id, store.content_id());
        assert_eq!(welcome.layout_id, store.layout_id());

        client.send(FrameKind::StoreInfo, 1, &[]);
        let info: StoreInfo = serde_json::from_slice(&client.frame().unwrap().1).unwrap();
        assert_eq!(info, *store.info());
        let catalogue = CatalogueRequest {
            layer: 1,
            sections: SECTION_CHECKSUMS,
        };
        client.send(FrameKind::Catalogue, 2, &catalogue.encode());
        let layer = decode_layer(&client.frame().unwrap().1).unwrap();
        assert_eq!(layer.checksums, store.catalogue().layers[1].checksums);

        let mut records = Vec::new();
        store.for_each_record(&mut |key, image_bytes| records.push((key, image_bytes)));
        assert_eq!(records.len(), 8);
        for (key, image_bytes) in records {
            let mut want = vec![0; image_bytes as usize];
            store.read_image(key, 0, &mut want).unwrap();
            let got = client.fetch(request(key, welcome.epoch, 0, image_bytes));
            assert!(got.unwrap() == want, "{family} {key}");
            let (from, to) = (image_bytes / 3, image_bytes / 2);
            let got = client.fetch(request(key, welcome.epoch, from, to - from));
            assert!(got.unwrap() == want[from as usize..to as usize]);
        }
        for (key, code) in [
            (Key::new(2, 0), ErrorCode::NoSuchLayer),
            (Key::new(0, 4), ErrorCode::NoSuchExpert),
        ] {
            let refused = client.fetch(request(key, welcome.epoch, 0, 1));
            assert_eq!(refused.unwrap_err().code, code);
        }
    }
}

/// A small checkpoint, open, and a place in one of its files.
fn open_small(dir: &std::path::Path) -> Arc<Store> {
    let path = dir.join("checkpoint");
    let spec = SynthSpec {
        family: "nvfp4-ct".into(),
        layers: Some(1),
        experts: Some(2),
        hidden: Some(512),
        inter: Some(256),
        ..Default::default()
    };
    synth(&spec, &path).unwrap();
    Arc::new(Store::open(&path, &OpenOptions::default()).unwrap())
}

/// Changes a byte and sets size and modification time as they were.
fn change_byte_and_restore_times(path: &std::path::Path) {
    std::thread::sleep(Duration::from_millis(20)); // a coarse clock's tick
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mtime = file.metadata().unwrap().modified().unwrap();
    let at = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    file.set_modified(mtime).unwrap();
}

#[test]
fn change_whose_modification_time_was_set_back_is_noticed_by_the_next_answer() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_small(dir.path());
    let mut config = PeerConfig::new(store.clone());
    config.listen = vec!["127.0.0.1:0".into()];
    config.restat_interval = Duration::from_secs(3600);
    let peer = Peer::start(config).unwrap();
    let (mut client, welcome) = Client::v2(peer.local_addr());
    let read = request(Key::new(0, 0), welcome.epoch, 0, 4096);
    assert!(client.fetch(read).is_ok());
    for file in store.files() {
        change_byte_and_restore_times(&file.path);
    }
    let error = client.fetch(read).unwrap_err();
    assert_eq!(error.code, ErrorCode::StoreUnreadable);
}

#[test]
fn change_whose_modification_time_was_set_back_is_noticed_by_the_watcher() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_small(dir.path());
    let mut config = PeerConfig::new(store.clone());
    config.listen = vec!["127.0.0.1:0".into()];
    config.restat_interval = Duration::from_millis(30);
    let peer = Peer::start(config).unwrap();
    change_byte_and_restore_times(&store.files()[0].path);
    until("the change is counted", || peer.stats().store_changes == 1);
}
