//! Builds beside each other, killed builds, and what others put in the way.

use std::fs::{self, File};

use rustix::fs::{FlockOperation, flock};

use super::*;

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn next_build_removes_what_a_killed_one_left_and_nothing_else() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    let out = dir.join("out");
    let make = |name: &str, files: &[&str]| {
        fs::create_dir(dir.join(name)).unwrap();
        for file in files {
            fs::write(dir.join(name).join(file), "x").unwrap();
        }
    };
    make(".out.tmp-1-0", &[LOCK, "layer_00000.xp2", "catalogue.bin"]);
    make(".out.tmp-1-1", &[LOCK, "model-00001-of-00002.safetensors"]);
    make(".out.tmp-1-2", &[]);
    // Somebody else's files, names and builds.
    make(".out.tmp-1-3", &[LOCK, "notes.txt"]);
    make(".out.tmp-1-4", &["layer_00000.xp2"]);
    make(".out.tmp-mine", &[LOCK]);
    make(".other.tmp-1-0", &[LOCK]);
    make(".out.tmp-1-5", &[LOCK, "layer_00000.xp2"]);
    let at_work = File::open(dir.join(".out.tmp-1-5").join(LOCK)).unwrap();
    flock(&at_work, FlockOperation::LockExclusive).unwrap();

    let first = Staging::directory(&out, false).unwrap();
    let second = Staging::directory(&out, false).unwrap();
    assert!(first.dir().exists() && second.dir().exists());
    drop((first, second));
    assert_eq!(
        names(dir),
        [
            ".other.tmp-1-0",
            ".out.tmp-1-3",
            ".out.tmp-1-4",
            ".out.tmp-1-5",
            ".out.tmp-mine"
        ]
    );
    assert_eq!(names(&dir.join(".out.tmp-1-3")), [LOCK, "notes.txt"]);
    drop(at_work);
    let staging = Staging::directory(&out, false).unwrap();
    fs::write(staging.dir().join("manifest.json"), "{}").unwrap();
    assert!(staging.commit().unwrap().warnings.is_empty());
    assert_eq!(names(&out), ["manifest.json"]);
    assert!(!dir.join(".out.tmp-1-5").exists());
}

#[test]
fn store_that_a_killed_build_was_replacing_is_put_back_or_removed() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    let out = dir.join("out");
    let make = |name: &str, with_lock: bool| {
        fs::create_dir(dir.join(name)).unwrap();
        fs::write(dir.join(name).join("manifest.json"), v1_manifest()).unwrap();
        fs::write(dir.join(name).join("layer_00000.xp2"), name).unwrap();
        if with_lock {
            fs::write(dir.join(name).join(LOCK), "").unwrap();
        }
    };
    // Moved aside, and the new one did not follow: it is the store.
    make(".out.tmp-1-0-old", true);
    make(".out.tmp-1-0", true);
    // Nothing tells whether its build is at work.
    make(".out.tmp-1-1-old", false);
    stale::sweep(&out);
    assert_eq!(names(dir), [".out.tmp-1-1-old", "out"]);
    assert_eq!(names(&out), ["layer_00000.xp2", "manifest.json"]);
    let bytes = fs::read(out.join("layer_00000.xp2")).unwrap();
    assert_eq!(bytes, b".out.tmp-1-0-old");

    // Killed when the new one was there: under either name the old one goes.
    make(".out.tmp-1-2", true);
    make(".out.tmp-1-3-old", true);
    fs::write(out.join(LOCK), "").unwrap();
    stale::sweep(&out);
    assert_eq!(names(dir), [".out.tmp-1-1-old", "out"]);
    assert_eq!(names(&out), ["layer_00000.xp2", "manifest.json"]);

    // Somebody else's lock, and a lock that is held, stay.
    fs::write(out.join(LOCK), "mine").unwrap();
    stale::sweep(&out);
    assert!(out.join(LOCK).exists());
    fs::write(out.join(LOCK), "").unwrap();
    let held = stale::mark(&out).unwrap();
    stale::sweep(&out);
    assert!(out.join(LOCK).exists());
    drop(held);
    fs::write(out.join("manifest.json"), "somebody else's").unwrap();
    stale::sweep(&out);
    assert!(out.join(LOCK).exists());
}

/// The least that counts as a store's.
fn v1_manifest() -> &'static str {
    r#"{"version": 1, "record_stride": 4096, "file_template": "x", "generation": 7}"#
}

#[test]
fn replacing_without_an_exchange_of_names_ends_the_same_way() {
    let scratch = tempfile::tempdir().unwrap();
    let (dir, out) = (
        scratch.path().join(".out.tmp-1-0"),
        scratch.path().join("out"),
    );
    for (path, text) in [(&dir, "new"), (&out, "old")] {
        fs::create_dir(path).unwrap();
        fs::write(path.join("manifest.json"), text).unwrap();
    }
    let mark = stale::mark(&out).unwrap();
    let aside = swap(&dir, &out).unwrap();
    assert_eq!(fs::read(out.join("manifest.json")).unwrap(), b"new");
    // The old one is still at work for others.
    stale::sweep(&out);
    assert_eq!(names(&aside), [LOCK, "manifest.json"]);
    assert_eq!(remove_old(&aside), None);
    drop(mark);
    assert_eq!(names(scratch.path()), ["out"]);
    assert_eq!(names(&out), ["manifest.json"]);
}

#[test]
fn replacing_leaves_and_names_what_came_into_the_old_directory_meanwhile() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    fs::create_dir(&out).unwrap();
    let staging = Staging::directory(&out, true).unwrap();
    fs::write(staging.dir().join("manifest.json"), "new").unwrap();
    fs::write(out.join("manifest.json"), "old").unwrap();
    fs::write(out.join("mine.txt"), "mine").unwrap();
    fs::create_dir(out.join("nested.xp2")).unwrap();
    let done = staging.commit().unwrap();
    assert_eq!(names(&out), ["manifest.json"]);
    let [warning] = &done.warnings[..] else {
        panic!("{:?}", done.warnings)
    };
    let all = names(scratch.path());
    assert_eq!(all.len(), 2, "{all:?}");
    let left = scratch.path().join(&all[0]);
    assert!(warning.contains(left.to_str().unwrap()), "{warning}");
    assert!(warning.contains("mine.txt"), "{warning}");
    assert_eq!(names(&left), ["mine.txt", "nested.xp2"]);
    // And it stays when the next build sweeps.
    drop(Staging::directory(&out, true));
    assert_eq!(names(&left), ["mine.txt", "nested.xp2"]);
}

#[test]
fn file_never_takes_the_place_of_another_even_without_renameat2() {
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("a"), scratch.path().join("b"));
    fs::write(&from, "new").unwrap();
    fs::write(&to, "old").unwrap();
    let e = link_new(&from, &to).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read(&to).unwrap(), b"old");
    fs::remove_file(&to).unwrap();
    link_new(&from, &to).unwrap();
    assert_eq!(names(scratch.path()), ["b"]);
}
