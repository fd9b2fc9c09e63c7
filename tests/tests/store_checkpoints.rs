//! Every checkpoint of the fixtures through `pack`, `index`, `verify` and `unpack`, held against the
//! answers of the oracle (`tests/python/oracle.py`), which shares no code with the store.

use std::collections::BTreeMap;
use std::path::Path;

use atlas_expert_tests::binary::expert;
use atlas_expert_tests::failures::{self, Problems};
use atlas_expert_tests::fixtures::{self, Class, Expected, Layer, Record, Stack};
use atlas_expert_tests::{tensors, tree};
use expert_store::info::hex128;
use expert_store::{
    BuildOptions, Catalogue, Container, IndexOptions, Leaf, OpenOptions, Role, StackClass,
    Stacking, Store, StoreError, UnpackOptions, VerifyOptions, WorkOptions, checkpoint, index,
    pack, payload_digest, unpack, verify,
};

/// The fixtures already run side by side.
const THREADS: usize = 1;

fn build() -> BuildOptions {
    BuildOptions {
        threads: THREADS,
        ..BuildOptions::default()
    }
}

fn work() -> WorkOptions {
    WorkOptions {
        threads: THREADS,
        ..WorkOptions::default()
    }
}

/// How to open one stack of a checkpoint, without hashing it.
fn stack_options(stack: &Stack) -> OpenOptions {
    OpenOptions {
        stack: Some(stack.prefix.clone()),
        mtp: stack.class == "mtp",
        checksums: false,
        threads: THREADS,
        ..OpenOptions::default()
    }
}

fn open(path: &Path) -> Store {
    Store::open(path, &OpenOptions::default()).expect("the store opens")
}

fn with_experts() -> Vec<Expected> {
    let all: Vec<Expected> = fixtures::all();
    let some: Vec<Expected> = all.into_iter().filter(|f| !f.stacks.is_empty()).collect();
    assert!(some.len() >= 36, "{} fixtures have experts", some.len());
    some
}

fn class_word(class: StackClass) -> &'static str {
    match class {
        StackClass::Trunk => "trunk",
        StackClass::Mtp => "mtp",
    }
}

fn leaf_text(leaf: &Leaf) -> String {
    let role = match leaf.role {
        Role::Gate => "gate",
        Role::GateUp => "gate-up",
        Role::Up => "up",
        Role::Down => "down",
        Role::Other => "other",
    };
    let stacking = match leaf.stacking {
        Stacking::PerExpert => "per-expert",
        Stacking::Stacked => "stacked",
        Stacking::Flattened => "flattened",
        Stacking::Common => "common",
    };
    let shape: Vec<String> = leaf.shape.iter().map(u64::to_string).collect();
    let (name, dtype, source) = (&leaf.leaf, leaf.dtype, &leaf.name);
    format!(
        "{role} {name} {stacking} {dtype} [{}] {source}",
        shape.join(",")
    )
}

/// A catalogue in the words of the oracle; ids of classes and records, which no one asks a store
/// for, are taken from the answer.
fn layers(catalogue: &Catalogue, want: &Stack) -> Vec<Layer> {
    let layer = |(i, l): (usize, &expert_store::Layer)| {
        let answer = want.layers.get(i);
        let class = |(c, class): (usize, &expert_store::Class)| Class {
            class_id: answer
                .and_then(|a| a.classes.get(c))
                .map_or(String::new(), |c| c.class_id.clone()),
            image_bytes: class.image_bytes,
            leaves: class.leaves.iter().map(leaf_text).collect(),
        };
        let record = |(p, &expert): (usize, &u32)| Record {
            expert,
            class: l.class_index(p) as u32,
            record_id: answer
                .and_then(|a| a.records.get(p))
                .map_or(String::new(), |r| r.record_id.clone()),
        };
        Layer {
            layer: l.layer,
            model_layer: l.model_layer,
            num_experts: l.num_experts,
            identity_experts: l.identity_experts,
            layer_id: hex128(l.id(true)),
            classes: l.classes.iter().enumerate().map(class).collect(),
            records: l.experts.iter().enumerate().map(record).collect(),
        }
    };
    catalogue.layers.iter().enumerate().map(layer).collect()
}

/// Holds an open store against the oracle: layers, leaves, ids, digests, and every byte.
fn check_store(store: &Store, want: &Stack, problems: &mut Problems) {
    let catalogue = store.catalogue();
    problems.same("stack", &catalogue.stack, &want.prefix);
    problems.same("class", &class_word(catalogue.class), &want.class.as_str());
    problems.same("records", &catalogue.record_count(), &want.records);
    let got = layers(catalogue, want);
    problems.same("number of layers", &got.len(), &want.layers.len());
    for (got, want) in got.iter().zip(&want.layers) {
        problems.same("layer", got, want);
    }
    let id = |id: Option<u128>| id.map_or("none".to_owned(), hex128);
    problems.same("content id", &id(store.content_id()), &want.content_id);
    problems.same("layout id", &hex128(store.layout_id()), &want.layout_id);
    let recorded = store.recorded_payload_digest();
    problems.same("recorded digest", &id(recorded), &want.payload_digest);
    match payload_digest(store, &work()) {
        Ok(digest) => problems.same("payload digest", &hex128(digest), &want.payload_digest),
        Err(e) => problems.note(format!("payload digest: {e}")),
    }
    let options = VerifyOptions {
        work: work(),
        payload_digest: true,
        ..VerifyOptions::default()
    };
    match verify(store, &options) {
        Ok(report) if report.is_ok() => {
            problems.same("verified", &report.records, &want.records);
            let digest = id(report.payload_digest);
            problems.same("digest while verifying", &digest, &want.payload_digest);
        }
        Ok(report) => problems.note(format!("verify: {report:?}")),
        Err(e) => problems.note(format!("verify: {e}")),
    }
}

#[test]
fn pack_verify_unpack_gives_back_every_expert_tensor_bit_for_bit() {
    failures::each(
        &with_experts(),
        |f| &f.fixture,
        |fixture, problems| {
            let before = tree::snapshot(&fixture.folder());
            let dir = tempfile::tempdir().expect("a folder");
            let mut whole = BTreeMap::new();
            let mut single = BTreeMap::new();
            for (i, stack) in fixture.stacks.iter().enumerate() {
                let source = match Store::open(fixture.checkpoint(), &stack_options(stack)) {
                    Ok(source) => source,
                    Err(e) => return problems.note(format!("open {}: {e}", stack.prefix)),
                };
                let out = dir.path().join(format!("{i}.store"));
                let report = match pack(&source, &out, &build()) {
                    Ok(report) => report,
                    Err(e) => return problems.note(format!("pack {}: {e}", stack.prefix)),
                };
                let id = report.content_id.map(hex128);
                problems.same("reported content id", &id, &Some(stack.content_id.clone()));
                let store = open(&out);
                check_store(&store, stack, problems);
                let suffix = match store.catalogue().container {
                    Container::Gguf => "gguf",
                    _ => "safetensors",
                };
                problems.same("container", &suffix, &fixture.container.as_str());
                // Into a folder of several small files, and into one file.
                let folder = dir.path().join(format!("{i}.unpacked"));
                let file = dir.path().join(format!("{i}.{suffix}"));
                for (out, tensors) in [(folder, &mut whole), (file, &mut single)] {
                    let options = UnpackOptions {
                        work: work(),
                        shard_bytes: 16 << 10,
                    };
                    if let Err(e) = unpack(&store, &out, &options) {
                        return problems.note(format!("unpack {}: {e}", stack.prefix));
                    }
                    for (name, tensor) in tensors::read(&out) {
                        if tensors.insert(name.clone(), tensor).is_some() {
                            problems.note(format!("{name} is in two stacks"));
                        }
                    }
                }
            }
            compare_tensors(&whole, fixture, problems);
            compare_tensors(&single, fixture, problems);
            if tree::snapshot(&fixture.folder()) != before {
                problems.note("the checkpoint was changed".into());
            }
        },
    );
}

fn compare_tensors(
    got: &BTreeMap<String, tensors::Tensor>,
    fixture: &Expected,
    problems: &mut Problems,
) {
    for (name, want) in &fixture.experts {
        problems.same(name, &got.get(name), &Some(want));
    }
    for name in got.keys().filter(|n| !fixture.experts.contains_key(*n)) {
        problems.note(format!("{name} is no tensor of an expert"));
    }
}

#[test]
fn index_verify_agrees_with_the_oracle_and_leaves_the_checkpoint_as_it_was() {
    failures::each(
        &with_experts(),
        |f| &f.fixture,
        |fixture, problems| {
            let before = tree::snapshot(&fixture.folder());
            let dir = tempfile::tempdir().expect("a folder");
            for (i, stack) in fixture.stacks.iter().enumerate() {
                let out = dir.path().join(i.to_string());
                let options = IndexOptions {
                    stack: Some(stack.prefix.clone()),
                    mtp: stack.class == "mtp",
                    build: build(),
                    ..IndexOptions::default()
                };
                match index(&fixture.checkpoint(), &out, &options) {
                    Ok(_) => check_store(&open(&out), stack, problems),
                    Err(e) => problems.note(format!("index {}: {e}", stack.prefix)),
                }
            }
            if tree::snapshot(&fixture.folder()) != before {
                problems.note("the checkpoint was changed".into());
            }
        },
    );
}

#[test]
fn stacks_and_mtp_parts_are_those_of_the_oracle_and_chosen_by_their_flags() {
    failures::each(
        &with_experts(),
        |f| &f.fixture,
        |fixture, problems| {
            let opened = match checkpoint::open(&fixture.checkpoint()) {
                Ok(opened) => opened,
                Err(e) => return problems.note(format!("open: {e}")),
            };
            let mut got: Vec<(&str, &str)> = (opened.stacks.iter())
                .map(|s| (s.prefix.as_str(), class_word(s.class)))
                .collect();
            let mut want: Vec<(&str, &str)> = (fixture.stacks.iter())
                .map(|s| (s.prefix.as_str(), s.class.as_str()))
                .collect();
            got.sort_unstable();
            want.sort_unstable();
            problems.same("stacks", &got, &want);
            // Without a prefix the class alone chooses, where it can.
            for (mtp, class) in [(false, "trunk"), (true, "mtp")] {
                let options = OpenOptions {
                    mtp,
                    checksums: false,
                    ..OpenOptions::default()
                };
                let chosen = Store::open(fixture.checkpoint(), &options);
                let of_class: Vec<&Stack> = (fixture.stacks.iter())
                    .filter(|s| s.class == class)
                    .collect();
                match (chosen, of_class.as_slice()) {
                    (Ok(store), [one]) => {
                        problems.same("chosen", &store.catalogue().stack, &one.prefix);
                    }
                    (Err(StoreError::Usage(why)), several) if several.len() != 1 => {
                        // The error lists what there is to choose from.
                        for stack in &fixture.stacks {
                            if (several.is_empty() || stack.class == class)
                                && !why.contains(&stack.prefix)
                            {
                                problems.note(format!("{} is not in {why:?}", stack.prefix));
                            }
                        }
                    }
                    (chosen, _) => problems.note(format!(
                        "{class}: {:?} of {}",
                        chosen.map(|s| s.catalogue().stack.clone()),
                        of_class.len()
                    )),
                }
            }
        },
    );
}

#[test]
fn checkpoints_without_routed_experts_are_refused_as_such() {
    let dense: Vec<Expected> = fixtures::all()
        .into_iter()
        .filter(|f| f.stacks.is_empty())
        .collect();
    failures::each(
        &dense,
        |f| &f.fixture,
        |fixture, problems| {
            let dir = tempfile::tempdir().expect("a folder");
            let opened = Store::open(fixture.checkpoint(), &OpenOptions::default());
            if !matches!(opened, Err(StoreError::NoExperts { .. })) {
                problems.note(format!("open: {:?}", opened.err()));
            }
            for command in ["pack", "index"] {
                let out = dir.path().join(command);
                let output = expert(&[&command, &fixture.checkpoint(), &"-o", &out]);
                let error = output.error(1);
                if !error.contains("no routed experts found") {
                    problems.note(error.to_owned());
                }
            }
            problems.same("left behind", &tree::names(dir.path()), &Vec::new());
        },
    );
}

#[test]
fn the_commands_print_the_ids_of_the_oracle_and_write_the_same_tensors() {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["deepseek-v3-fp8-mtp", "gguf-q4k-q6k", "qwen3-omni"] {
        let fixture: Expected = fixtures::json(&format!("expected/{name}.json"));
        let mut got = BTreeMap::new();
        for (i, stack) in fixture.stacks.iter().enumerate() {
            let at = |what: &str| dir.path().join(format!("{name}-{i}.{what}"));
            let prefix = ["--stack", stack.prefix.as_str()];
            let mtp: &[&str] = if stack.class == "mtp" {
                &["--mtp"]
            } else {
                &[]
            };
            for (command, store) in [("pack", at("packed")), ("index", at("index"))] {
                let checkpoint = fixture.checkpoint();
                let mut args: Vec<&dyn AsRef<std::ffi::OsStr>> =
                    vec![&command, &checkpoint, &"-o", &store, &"--json"];
                for part in prefix.iter().chain(mtp) {
                    args.push(part);
                }
                let built = expert(&args).json();
                assert_eq!(built["content_id"], stack.content_id.as_str());
                assert_eq!(built["layout_id"], stack.layout_id.as_str());
                assert_eq!(built["payload_digest"], stack.payload_digest.as_str());
                let verified = expert(&[&"verify", &store, &"--digest", &"--json"]).json();
                assert_eq!(verified["ok"], true);
                assert_eq!(verified["payload_digest"], stack.payload_digest.as_str());
                let told = expert(&[&"inspect", &store, &"--json"]).json().to_string();
                assert!(told.contains(&stack.content_id), "{told}");
            }
            expert(&[&"unpack", &at("index"), &"-o", &at("unpacked")]).succeeded();
            got.extend(tensors::read(&at("unpacked")));
        }
        assert_eq!(got, fixture.experts, "{name}");
    }
}
