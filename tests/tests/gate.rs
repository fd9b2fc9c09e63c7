//! The bit-identity gate: a forward pass has the same hash however its experts come, and each of them really came.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::SLACK;
use atlas_expert_tests::net::gate::{
    FLAGS, SIZES, SPEC, STEPS, assert_all_was_fetched, hash_of_records, quiet, run_over,
};
use atlas_expert_tests::net::model::{self, Model, flip_unnoticed, place_of};
use atlas_expert_tests::net::parts::Parts;
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::rig::{Backend, Rig, largest, patient, serve};
use expert_moe::{MoeError, gate};
use expert_peer::Peer;
use expert_store::synth::{SynthSpec, synth};
use expert_store::{Key, Store};
use expert_tier::{StreamerBuilder, TierBuilder};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

fn resident(store: &Store) -> gate::Report {
    gate::run_resident(store, SPEC, STEPS, &mut quiet).expect("a run")
}

/// The hash that everything must come to.
fn want() -> u128 {
    resident(&Model::bf16(SIZES).open()).hash
}

#[test]
fn resident_weights_are_those_that_another_reader_finds_in_the_files() {
    let model = Model::bf16(SIZES);
    let report = resident(&model.open());
    assert_eq!(
        report.hash,
        hash_of_records(&model.open(), &model.records())
    );
    assert_eq!(report.moved, None);
    // Nearly all experts of each layer are needed, so that two layers fill the arena.
    assert_eq!(report.uses.len(), (SIZES.layers * STEPS) as usize);
    assert!(
        report.uses.iter().all(|u| u.experts.len() >= 5),
        "{report:?}"
    );
}

#[test]
fn hash_is_that_of_resident_weights_over_every_backend_and_every_record_is_fetched() {
    let (want, needed) = {
        let report = resident(&Model::bf16(SIZES).open());
        (report.hash, report.needed)
    };
    let one_and_two = [patient as fn() -> TierBuilder, || patient().streams(2)];
    for backend in [
        Backend::Posix,
        Backend::UmaInPlace,
        Backend::UmaPacked,
        Backend::RdmaInPlace,
        Backend::RdmaPacked,
    ] {
        for builder in one_and_two {
            let rig = Rig::of(backend, Model::bf16(SIZES));
            let report = run_over(&rig, builder());
            assert_eq!(report.hash, want, "{backend:?}");
            assert_eq!(report.needed, needed, "{backend:?}");
            assert_all_was_fetched(&report, largest(&rig.records) as u64);
        }
    }
}

/// The run of several peers of one model, and their rails' bytes.
fn run_over_peers(parts: &Parts, peers: &[Peer]) -> (gate::Report, Vec<u64>) {
    let arena = gate::arena(parts.whole.info(), &SPEC, 2).expect("an arena");
    let arena = arena.reserve_bytes(Some(0)).build().expect("memory");
    let addrs: Vec<String> = peers.iter().map(|p| p.local_addr().to_string()).collect();
    let tier = patient().connect(&addrs.join(","), arena.into());
    let streamer = StreamerBuilder::new().start(tier.expect("a tier"));
    let streamer = streamer.expect("a streamer");
    let report = gate::run_streamed(&streamer, SPEC, STEPS, SLACK, &mut quiet).expect("a run");
    let rails = streamer.tier().stats().rails;
    (report, rails.iter().map(|rail| rail.bytes).collect())
}

#[test]
fn hash_is_the_same_over_two_shards_and_over_two_replicas() {
    let parts = Parts::new(SIZES);
    let shards = [
        serve(parts.packed_shard(1, 2)),
        serve(parts.indexed_shard(2, 2)),
    ];
    let replicas = [serve(parts.packed()), serve(parts.whole.clone())];
    let want = want();
    for peers in [&shards, &replicas] {
        let (report, carried) = run_over_peers(&parts, peers);
        assert_eq!(report.hash, want);
        assert_all_was_fetched(&report, largest(&parts.records) as u64);
        assert!(carried.iter().all(|&bytes| bytes > 0), "{carried:?}");
    }
}

#[test]
fn records_stay_where_there_is_room_and_each_is_fetched_once() {
    let rig = Rig::of(Backend::RdmaInPlace, Model::bf16(SIZES));
    let arena = gate::arena(rig.store.info(), &SPEC, SIZES.layers).expect("an arena");
    let arena = arena.reserve_bytes(Some(0)).build().expect("memory");
    let tier = rig.connect(patient(), arena.into()).expect("a tier");
    let streamer = StreamerBuilder::new().start(tier).expect("a streamer");
    let report = gate::run_streamed(&streamer, SPEC, STEPS, SLACK, &mut quiet).expect("a run");
    assert_eq!(report.hash, want());
    let moved = report.moved.expect("experts were streamed");
    assert_eq!(moved.contradictions(report.needed), [""; 0]);
    assert_eq!(moved.misses, moved.misses_certain);
    assert!(moved.hits > moved.misses, "{moved:?}");
    assert_eq!(
        moved.transferred_bytes,
        moved.misses * largest(&rig.records) as u64
    );
}

/// `atlas-expert gate` as a consumer has it: in an empty folder, with an empty environment, with nothing but these
/// flags.
fn gate_command(folder: &Path, flags: &[&str]) -> Command {
    let mut command = binary::command("atlas-expert", &[&"gate"]);
    command
        .args(FLAGS)
        .arg("--json")
        .args(flags)
        .env_clear()
        .current_dir(folder);
    command
}

fn run_gate(flags: &[&str]) -> Output {
    let empty = tempfile::tempdir().expect("an empty folder");
    let output = binary::run(&mut gate_command(empty.path(), flags));
    let left = fs::read_dir(empty.path()).expect("the folder").count();
    assert_eq!(left, 0, "files were left behind");
    output
}

fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn consumer_that_knows_nothing_but_an_address_computes_the_same() {
    let model = Model::bf16(SIZES);
    let checkpoint = model.checkpoint.to_str().expect("UTF-8");
    let steps = STEPS.to_string();
    let alone = run_gate(&["--resident", checkpoint, "--steps", &steps, "-q"]).json();
    assert_eq!(alone["hash"], hex(want()));
    let peer = PeerProcess::start(&model.pack(), &[]);
    let addr = peer.addr.to_string();
    let output = run_gate(&["--expert-peer", &addr, "--steps", &steps]);
    let report = output.json();
    assert_eq!(report["hash"], alone["hash"]);
    assert_eq!(report["hits"], 0, "{report:#}");
    let bytes = number(&report["records_needed"]) * largest(&model.records()) as u64;
    assert_eq!(number(&report["transferred_bytes"]), bytes, "{report:#}");
    assert_eq!(number(&report["rails"][0]["bytes"]), bytes, "{report:#}");
    let steps = output.stderr.lines().filter(|l| l.starts_with("step "));
    assert_eq!(steps.count(), STEPS as usize, "{output:?}");
}

#[test]
fn peer_that_is_killed_and_restarted_under_it_changes_nothing() {
    const STEPS: u32 = 24;
    let model = Model::bf16(SIZES);
    let want = gate::run_resident(&model.open(), SPEC, STEPS, &mut quiet).expect("a run");
    let store = model.index();
    let mut peer = PeerProcess::start(&store, &[]);
    let addr = peer.addr.to_string();
    let empty = tempfile::tempdir().expect("an empty folder");
    let flags = ["--expert-peer", &addr, "--steps", &STEPS.to_string()];
    let mut gate = gate_command(empty.path(), &flags)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a consumer");
    let said = BufReader::new(gate.stderr.take().expect("a pipe"));
    let mut last = String::new();
    for line in said.lines() {
        last = line.expect("text");
        if last.starts_with("step 2 of") || last.starts_with("step 7 of") {
            drop(peer); // SIGKILL
            peer = PeerProcess::start_on(&addr, &store, &[]).expect("the same place");
        }
    }
    let mut stdout = String::new();
    gate.stdout
        .take()
        .expect("a pipe")
        .read_to_string(&mut stdout)
        .expect("text");
    let status = gate.wait().expect("an end");
    assert!(status.success(), "{last} {stdout}");
    let report: Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(report["hash"], hex(want.hash));
    let downs = number(&report["rails"][0]["errors_by_cause"]["downs"]);
    assert!(downs >= 2, "the peer was not missed: {report:#}");
    assert_eq!(report["failed"], 0, "{report:#}");
    let bytes = want.needed * largest(&model.records()) as u64;
    assert_eq!(number(&report["transferred_bytes"]), bytes, "{report:#}");
}

#[test]
fn flipped_weight_whose_checksum_was_made_anew_changes_the_hash() {
    let model = Model::bf16(SIZES);
    let right = resident(&model.open());
    // The last of a layer that every run needs; a weight between 1 and 2, whose sign and size change.
    let used = &right.uses[0];
    let key = Key::new(used.layer, used.experts[0]);
    let record = &model.records()[&key];
    let weight = record.chunks_exact(2).position(|w| w[1] == 0x3f);
    let offset = weight.expect("a large weight") as u64 * 2 + 1;
    let (file, at) = place_of(&model.open(), key, offset);
    flip_unnoticed(&file, at);

    let rig = Rig::of(Backend::RdmaInPlace, model);
    let report = run_over(&rig, patient());
    assert_all_was_fetched(&report, largest(&rig.records) as u64);
    assert_ne!(report.hash, right.hash);
    assert_eq!(report.hash, resident(&rig.store).hash);
}

#[test]
fn record_that_no_longer_fits_its_checksum_gives_no_hash() {
    let model = Model::bf16(SIZES);
    let store = model.pack();
    let used = &resident(&model.open()).uses[0];
    let key = Key::new(used.layer, used.experts[0]);
    let (file, at) = place_of(&model::open(&store), key, 1);
    flip_unnoticed(&file, at);
    let store = store.to_str().expect("UTF-8");
    let output = run_gate(&["--expert-backend", "posix", "--store", store, "-q"]);
    assert!(output.error(1).contains("checksum"), "{output:?}");
    assert_eq!(output.stdout, "");
}

/// Resident and streamed from files, of a whole checkpoint.
fn both_ways(checkpoint: &Path) -> [Output; 2] {
    let checkpoint = checkpoint.to_str().expect("UTF-8");
    [
        run_gate(&["--resident", checkpoint, "-q"]),
        run_gate(&["--expert-backend", "posix", "--store", checkpoint, "-q"]),
    ]
}

fn of_family(family: &str, folder: &Path) {
    let spec = SynthSpec {
        family: family.into(),
        layers: Some(3),
        experts: Some(5),
        hidden: Some(128),
        inter: Some(64),
        ..SynthSpec::default()
    };
    synth(&spec, folder).expect("synth");
}

/// A Qwen3-MoE whose weights are `f32`, with other values by layer, expert and projection.
fn f32_checkpoint(folder: &Path) {
    const SHAPES: [(&str, [usize; 2]); 3] = [
        ("gate_proj", [6, 10]),
        ("up_proj", [6, 10]),
        ("down_proj", [10, 6]),
    ];
    let mut weights = Vec::new();
    for (layer, expert) in (0..3).flat_map(|l| (0..4).map(move |e| (l, e))) {
        for (i, (projection, shape)) in SHAPES.into_iter().enumerate() {
            let value = |at: usize| ((at * 7 + i * 5 + expert * 3 + layer) % 11) as f32 / 8.0 - 0.6;
            let bytes: Vec<u8> = (0..60).flat_map(|at| value(at).to_le_bytes()).collect();
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{projection}.weight");
            weights.push((name, shape, bytes));
        }
    }
    let views = weights.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("a tensor");
        (name, view)
    });
    fs::create_dir(folder).expect("a new folder");
    let path = folder.join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).expect("a file");
}

#[test]
fn fused_projections_and_f32_weights_are_computed_alike() {
    let dir = tempfile::tempdir().expect("a folder");
    let (fused, wide) = (dir.path().join("fused"), dir.path().join("f32"));
    of_family("granite", &fused);
    f32_checkpoint(&wide);
    for checkpoint in [fused, wide] {
        let [alone, streamed] = both_ways(&checkpoint).map(|output| output.json());
        assert_eq!(alone["hash"], streamed["hash"]);
        assert!(number(&streamed["fetched"]) > 0, "{streamed:#}");
    }
}

#[test]
fn model_that_the_block_cannot_compute_is_refused_by_the_name_of_what_it_cannot() {
    for (family, why) in [
        ("nvfp4-modelopt", "the block knows"),
        ("gpt-oss-bf16", "[inter, hidden]"),
        ("nemotron", "needs gate, up and down"),
        ("dbrx", "[inter, hidden]"),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let checkpoint = dir.path().join("checkpoint");
        of_family(family, &checkpoint);
        for output in both_ways(&checkpoint) {
            assert!(output.error(1).contains(why), "{family}: {output:?}");
        }
    }
}

#[test]
fn flags_that_do_not_fit_are_wrong_usage() {
    for flags in [
        &["--resident", "x", "--store", "y"][..],
        &["--resident", "x", "--expert-backend", "rdma"],
        &["--tokens", "0"],
        &["--expert-backend", "posix"],
    ] {
        assert_eq!(run_gate(flags).code, Some(2), "{flags:?}");
    }
}

#[test]
fn run_ends_with_an_error_where_the_peer_does_not_come_back() {
    let rig = Rig::of(Backend::RdmaPacked, Model::bf16(SIZES));
    let arena = gate::arena(rig.store.info(), &SPEC, 2).expect("an arena");
    let arena = arena.reserve_bytes(Some(0)).build().expect("memory");
    let tier = rig.connect(patient(), arena.into()).expect("a tier");
    let streamer = StreamerBuilder::new().start(tier).expect("a streamer");
    let mut rig = Some(rig);
    let time = std::time::Duration::from_millis(300);
    let error = gate::run_streamed(&streamer, SPEC, STEPS, time, &mut |_, _| {
        rig = None;
        Ok(())
    });
    assert!(matches!(error, Err(MoeError::Tier(_))), "{error:?}");
}
