//! `pack` and `index` that are killed at random moments: what lies at the destination is whole or not there, old or
//! new, and the same command succeeds afterwards and leaves nothing of the dead one.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use atlas_expert_tests::binary::{command, expert};
use atlas_expert_tests::killed::{Moments, run_and_kill, run_and_kill_when};
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::tree;
use expert_store::{OpenOptions, Store};
use tempfile::TempDir;

/// Random kills of each test.
const KILLS: usize = 50;
/// Kills around the moment at which a store appears, which random ones seldom meet.
const AIMED: usize = 10;
/// Those are at most so long after the manifest was begun.
const COMMIT: Duration = Duration::from_millis(8);

/// 16 records of 317,184 bytes.
const SIZES: Sizes = Sizes {
    layers: 2,
    ..Sizes::SMALL
};

/// The moment at which a build is killed.
#[derive(Debug, Clone, Copy)]
enum Aim {
    Random,
    /// Around the one at which its store appears.
    Commit,
    /// When the new store is there, before the old one is removed.
    Exchange,
}

/// A folder with nothing but what builds make, and what is built.
struct Place {
    command: &'static str,
    sources: Vec<Model>,
    /// Digest of the payload of each source.
    digests: Vec<String>,
    dir: TempDir,
    out: PathBuf,
}

impl Place {
    fn new(command: &'static str, sources: usize) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let sources: Vec<Model> = (0..sources as u64)
            .map(|i| Model::bf16(SIZES.seed(1 + i)))
            .collect();
        let digests = sources.iter().map(|m| digest(&m.index())).collect();
        Self {
            command,
            sources,
            digests,
            out: dir.path().join("out"),
            dir,
        }
    }

    fn args(&self, source: usize, replace: bool) -> Vec<&dyn AsRef<OsStr>> {
        let checkpoint = &self.sources[source].checkpoint;
        let mut args: Vec<&dyn AsRef<OsStr>> =
            vec![&self.command, checkpoint, &"-o", &self.out, &"-q"];
        if replace {
            args.push(&"--replace");
        }
        args
    }

    fn build(&self, source: usize, replace: bool) -> Command {
        command("atlas-expert", &self.args(source, replace))
    }

    /// Temporary directories of builds.
    fn left(&self) -> Vec<String> {
        let names = tree::names(self.dir.path());
        names.into_iter().filter(|n| n != "out").collect()
    }

    /// Whether a build has begun to write the manifest, which comes last.
    fn is_committing(&self) -> bool {
        self.left()
            .iter()
            .any(|name| self.dir.path().join(name).join("manifest.json").exists())
    }

    /// Kills a build at a moment.
    fn kill(&self, source: usize, replace: bool, aim: Aim, moments: &mut Moments) {
        let mut build = self.build(source, replace);
        let inode = || fs::metadata(&self.out).map(|m| m.ino()).ok();
        let before = inode();
        match aim {
            Aim::Random => run_and_kill(&mut build, moments.moment()),
            Aim::Commit => {
                run_and_kill_when(&mut build, || self.is_committing(), moments.below(COMMIT))
            }
            Aim::Exchange => run_and_kill_when(&mut build, || inode() != before, Duration::ZERO),
        };
    }

    /// Looks at what a killed build left; says which source lies at the destination, and how many temporary
    /// directories there are.
    fn look(&self) -> (Option<usize>, usize) {
        let left = self.left();
        assert!(left.len() <= 1, "{left:?}");
        for name in &left {
            assert!(name.starts_with(".out.tmp-"), "{left:?}");
            // It may be complete; it may not open and be wrong.
            let path = self.dir.path().join(name);
            if Store::open(&path, &OpenOptions::default()).is_ok() {
                assert!(self.digests.contains(&digest(&path)), "{left:?}");
            }
        }
        let at_out = match self.out.exists() {
            true => {
                let found = digest(&self.out);
                let source = self.digests.iter().position(|d| *d == found);
                Some(source.expect("old or new, and nothing else"))
            }
            false => {
                let refused = expert(&[&"verify", &self.out]);
                let error = refused.error(1);
                assert!(error.contains(&*self.out.to_string_lossy()), "{error}");
                None
            }
        };
        (at_out, left.len())
    }

    /// Runs the same command again, to its end; `left` is the number of temporary directories that it finds.
    fn build_again(&self, source: usize, replace: bool, left: usize) {
        let again = expert(&self.args(source, replace)).succeeded();
        let is_told = again.stderr.contains("a build that was killed had left");
        assert_eq!(is_told, left > 0, "{again:?}");
        self.assert_clean(source);
    }

    fn assert_clean(&self, source: usize) {
        assert_eq!(tree::names(self.dir.path()), ["out"]);
        let names = tree::names(&self.out);
        assert!(!names.contains(&"build.lock".into()), "{names:?}");
        assert_eq!(digest(&self.out), self.digests[source]);
    }
}

/// Verifies all of a store, and gives back its digest.
fn digest(store: &Path) -> String {
    let verified = expert(&[&"verify", &store, &"--digest", &"--json"]).json();
    assert_eq!(verified["ok"], true, "{verified}");
    let digest = verified["payload_digest"].as_str().expect("a digest");
    digest.to_owned()
}

/// What kills of one test met.
#[derive(Debug, Default)]
struct Met {
    nothing: usize,
    unfinished: usize,
    whole: usize,
}

fn killed_builds_into_an_empty_place(name: &'static str) {
    let place = Place::new(name, 1);
    let mut moments = Moments::of(name, || {
        let _ = fs::remove_dir_all(&place.out);
        expert(&place.args(0, false)).succeeded();
    });
    let reference = tree::contents(&place.out);
    let mut met = Met::default();
    for i in 0..KILLS + AIMED {
        let _ = fs::remove_dir_all(&place.out);
        let aim = if i < KILLS { Aim::Random } else { Aim::Commit };
        place.kill(0, false, aim, &mut moments);
        let (at_out, left) = place.look();
        if left > 0 {
            met.unfinished += 1;
        }
        match at_out {
            None => {
                met.nothing += 1;
                place.build_again(0, false, left);
            }
            Some(_) => {
                met.whole += 1;
                let refused = expert(&place.args(0, false));
                let error = refused.error(1);
                assert!(error.contains("exists already"), "{error}");
                assert!(error.contains("--replace"), "{error}");
                // What had been left was removed all the same.
                place.assert_clean(0);
                place.build_again(0, true, 0);
                continue;
            }
        }
        assert!(tree::contents(&place.out) == reference);
    }
    eprintln!("{name}: {met:?}");
    // Else the moments were not those of the work.
    assert!(met.unfinished > 0, "{met:?}");
}

#[test]
fn killed_pack_leaves_a_whole_store_or_none_and_the_next_one_succeeds() {
    killed_builds_into_an_empty_place("pack");
}

#[test]
fn killed_index_leaves_a_whole_store_or_none_and_the_next_one_succeeds() {
    killed_builds_into_an_empty_place("index");
}

#[test]
fn killed_replacement_leaves_the_old_store_or_the_new_one_and_the_next_one_succeeds() {
    let place = Place::new("pack", 2);
    let mut moments = Moments::of("replacement", || {
        expert(&place.args(0, true)).succeeded();
    });
    let (mut now, mut old, mut new, mut unfinished) = (0, 0, 0, 0);
    for i in 0..KILLS {
        let next = 1 - now;
        let aim = [Aim::Random, Aim::Commit, Aim::Random, Aim::Exchange][i % 4];
        place.kill(next, true, aim, &mut moments);
        let (at_out, left) = place.look();
        match at_out {
            Some(source) if source == now => old += 1,
            Some(_) => new += 1,
            None => panic!("neither the old store nor the new one"),
        }
        unfinished += left;
        place.build_again(next, true, left);
        now = next;
    }
    eprintln!("replacement: old {old}, new {new}, unfinished {unfinished}");
    assert!(old > 0 && new > 0 && unfinished > 0);
}
