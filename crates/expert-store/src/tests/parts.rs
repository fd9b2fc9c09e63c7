//! Parts that name their whole.

use super::*;
use crate::info::hex128;
use crate::{BuildOptions, IndexOptions, NameWhole, Report, Selection, StoreInfo, index, pack};

fn shard(i: u32, n: u32) -> Selection {
    Selection {
        shard: Some((i, n)),
        ..Selection::default()
    }
}

fn layers(first: u32, end: u32) -> Selection {
    Selection {
        layers: Some(vec![first..end]),
        ..Selection::default()
    }
}

fn pack_part(source: &Path, out: &Path, selection: &Selection, name_whole: NameWhole) -> Report {
    let source = Store::open(
        source,
        &OpenOptions {
            selection: Some(selection.clone()),
            name_whole,
            ..unhashed()
        },
    );
    pack(&source.unwrap(), out, &BuildOptions::default()).unwrap()
}

/// The whole that a store names, proven by opening it.
fn named(path: &Path) -> crate::Whole {
    let info: StoreInfo = open(path).info().clone();
    info.check().unwrap();
    info.whole.expect("a part that names its whole")
}

#[test]
fn parts_name_the_whole_from_whatever_they_were_made() {
    for family in ["qwen3-moe", "gpt-oss", "nvfp4-ct"] {
        let dir = scratch();
        let at = |name: &str| dir.path().join(name);
        let source = checkpoint(dir.path(), family, 2);
        index(&source, &at("whole"), &IndexOptions::default()).unwrap();
        let whole = open(&at("whole"));
        assert_eq!(whole.info().whole, None);
        for (i, selection) in [shard(1, 2), shard(2, 2), layers(1, 2)].iter().enumerate() {
            let out = |kind: &str| at(&format!("{kind}-{i}"));
            let free = pack_part(&at("whole"), &out("free"), selection, NameWhole::IfFree);
            let read = pack_part(&source, &out("read"), selection, NameWhole::Always);
            let indexed = IndexOptions {
                selection: Some(selection.clone()),
                name_whole: NameWhole::Always,
                ..IndexOptions::default()
            };
            let indexed = index(&source, &out("indexed"), &indexed).unwrap();
            let want = whole.content_id().map(hex128);
            for report in [&free, &read, &indexed] {
                assert_eq!(report.content_id, free.content_id);
                assert_eq!(
                    report.whole_content_id,
                    want,
                    "{family} {}",
                    report.path.display()
                );
                let named = named(&report.path);
                assert_eq!(named.layers, whole.info().layers, "{family}");
                assert_eq!(named.layout_id, whole.info().layout_id);
            }
            assert_eq!(contents(&free.path), contents(&read.path));
        }
    }
}

#[test]
fn part_of_a_part_names_the_first_whole() {
    let dir = scratch();
    let at = |name: &str| dir.path().join(name);
    let source = checkpoint(dir.path(), "qwen3-moe", 1);
    index(&source, &at("whole"), &IndexOptions::default()).unwrap();
    let want = open(&at("whole")).info().clone();
    pack_part(&at("whole"), &at("half"), &shard(2, 2), NameWhole::IfFree);
    for (name, selection) in [("layer", layers(0, 1)), ("one", shard(4, 5))] {
        pack_part(&at("half"), &at(name), &selection, NameWhole::IfFree);
        assert_eq!(named(&at(name)).layers, want.layers);
        assert_eq!(Some(named(&at(name)).content_id), want.content_id);
    }
    // What is served from a part of an open store is a part, too.
    let opened = Store::open(
        at("half"),
        &OpenOptions {
            selection: Some(layers(1, 2)),
            ..OpenOptions::default()
        },
    );
    assert_eq!(
        opened.unwrap().info().group_id(),
        want.content_id.as_deref()
    );
}

#[test]
fn part_stands_alone_where_that_is_asked_for_or_costs_reads() {
    let dir = scratch();
    let at = |name: &str| dir.path().join(name);
    let source = checkpoint(dir.path(), "qwen3-moe", 1);
    index(&source, &at("whole"), &IndexOptions::default()).unwrap();
    pack_part(&at("whole"), &at("never"), &shard(1, 2), NameWhole::Never);
    pack_part(&source, &at("free"), &shard(1, 2), NameWhole::IfFree);
    for name in ["never", "free"] {
        assert_eq!(open(&at(name)).info().whole, None, "{name}");
        assert!(!at(name).join("whole.bin").exists());
    }
    // All of it is no part.
    let all = pack_part(&source, &at("all"), &shard(1, 1), NameWhole::Always);
    assert_eq!(all.whole_content_id, None);
}

#[test]
fn part_that_claims_another_whole_or_more_than_it_has_is_refused() {
    let dir = scratch();
    let at = |name: &str| dir.path().join(name);
    let source = checkpoint(dir.path(), "qwen3-moe", 1);
    let other = checkpoint(dir.path(), "nvfp4-ct", 1);
    pack_part(&source, &at("part"), &shard(1, 2), NameWhole::Always);
    pack_part(&other, &at("other"), &shard(1, 2), NameWhole::Always);
    let good = contents(&at("part"));
    let of_other: serde_json::Value =
        serde_json::from_slice(&contents(&at("other"))["manifest.json"]).unwrap();
    type Edit<'a> = &'a dyn Fn(&mut serde_json::Value);
    let edits: [(&str, Edit<'_>); 5] = [
        ("another whole", &|m| m["whole"] = of_other["whole"].clone()),
        ("another id", &|m| {
            m["whole"]["content_id"] = hex128(7).into();
        }),
        ("fewer experts", &|m| {
            m["whole"]["layers"][0]["experts"] = serde_json::json!([[0, 4]]);
        }),
        ("more experts", &|m| {
            m["whole"]["layers"][0]["num_experts"] = 9.into();
        }),
        ("a layer less", &|m| {
            m["whole"]["layers"].as_array_mut().unwrap().pop();
        }),
    ];
    for (what, edit) in edits {
        edit_manifest(&at("part"), edit);
        let error = open_err(&at("part")).to_string();
        let is_named = error.contains(&at("part").display().to_string());
        assert!(is_named, "{what}: {error}");
        fs::write(at("part").join("manifest.json"), &good["manifest.json"]).unwrap();
    }
    flip(&at("part").join("whole.bin"), 3);
    assert!(open_err(&at("part")).to_string().contains("whole.bin"));
}

#[test]
fn description_of_a_part_that_does_not_hold_together_is_refused() {
    let dir = scratch();
    let source = checkpoint(dir.path(), "qwen3-moe", 1);
    let out = dir.path().join("part");
    pack_part(&source, &out, &shard(1, 2), NameWhole::Always);
    let sound = open(&out).info().clone();
    sound.check().unwrap();
    type Edit<'a> = &'a dyn Fn(&mut StoreInfo, &mut crate::Whole);
    let edits: [Edit<'_>; 6] = [
        &|_, whole| whole.content_id = hex128(1),
        &|_, whole| whole.layers[0].id = hex128(1),
        &|_, whole| whole.layers.clear(),
        &|_, whole| whole.layers[0].experts = vec![[0, 1]],
        &|_, whole| whole.layers[0].model_layer += 1,
        &|info, _| info.layers[0].experts = vec![[4, 2]],
    ];
    for edit in edits {
        let mut info = sound.clone();
        let mut whole = info.whole.take().unwrap();
        edit(&mut info, &mut whole);
        info.whole = Some(whole);
        assert!(info.check().is_err(), "{info:?}");
    }
    // Older readers and writers know of no whole.
    let mut value = serde_json::to_value(&sound).unwrap();
    value.as_object_mut().unwrap().remove("whole");
    let old: StoreInfo = serde_json::from_value(value).unwrap();
    assert_eq!(old.whole, None);
    old.check().unwrap();
}
