//! File systems that fill up, are read-only, or let nobody write, under `pack`, `index` and a peer's reload: one
//! clear error, nothing half-written, and what was there stays and is served.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use atlas_expert_tests::binary::{self, Output, expert, expert_after};
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::pages::{get, metric};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::wait_until;
use atlas_expert_tests::tree;
use rustix::process::Signal;

const PAGE_BYTES: u64 = 4096;

/// A command in a mount namespace of its own, where it may mount a file system.
///
/// Panics, with what to allow, where this machine gives none.
fn in_own_mounts(script: &str) -> Output {
    let ways: [&[&str]; 2] = [
        &["--user", "--map-root-user", "--mount"],
        // For root without user namespaces.
        &["--mount"],
    ];
    let unshare = |way: &[&str], script: &str| {
        let mut command = Command::new("unshare");
        binary::run(command.args(way).args(["bash", "-c", script]))
    };
    let probe = "mount -t tmpfs none /mnt";
    let way = ways
        .into_iter()
        .find(|way| unshare(way, probe).code == Some(0));
    let way = way.expect(
        "no file system can be mounted: run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt seccomp=unconfined)",
    );
    unshare(way, script)
}

/// A command without any right beyond those of the files' modes, even for root.
fn without_privileges(command: &Command) -> Command {
    let mut unshare = Command::new("unshare");
    unshare.arg("--user").arg(command.get_program());
    unshare.args(command.get_args());
    unshare
}

/// What one command did on a small file system.
#[derive(Debug)]
struct Attempt {
    code: i32,
    stderr: String,
    /// Names that were there afterwards.
    left: Vec<String>,
}

/// A folder for a small file system, and scripts for it.
struct Small {
    dir: tempfile::TempDir,
    mount: PathBuf,
}

impl Small {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let mount = dir.path().join("mount");
        fs::create_dir(&mount).expect("a folder");
        Self { dir, mount }
    }

    /// Runs a command on a file system of its own for each of these mount options, after `before`; `after` follows,
    /// and must succeed.
    fn each(&self, options: &[String], before: &str, command: &str, after: &str) -> Vec<Attempt> {
        let (at, mount) = (self.dir.path().display(), self.mount.display());
        let program = binary::path("atlas-expert");
        let script: String = options
            .iter()
            .enumerate()
            .map(|(i, options)| {
                format!(
                    "mount -t tmpfs -o {options} none '{mount}' || exit 90\n\
                     ( {before} ) >'{at}/before.{i}' 2>&1 || {{ cat '{at}/before.{i}'; exit 91; }}\n\
                     ( {command} ) >/dev/null 2>'{at}/stderr.{i}'\n\
                     code=$?; echo $code >'{at}/code.{i}'; ls -A '{mount}' >'{at}/left.{i}'\n\
                     ( {after} ) >'{at}/after.{i}' 2>&1 || {{ cat '{at}/after.{i}'; exit 92; }}\n\
                     umount '{mount}'\n"
                )
            })
            .collect();
        let script = format!(
            "set -u; expert='{}'; m='{mount}'\n{script}",
            program.display()
        );
        let ran = in_own_mounts(&script);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let read = |name: String| fs::read_to_string(self.dir.path().join(name)).expect("text");
        (0..options.len())
            .map(|i| Attempt {
                code: read(format!("code.{i}")).trim().parse().expect("a number"),
                stderr: read(format!("stderr.{i}")),
                left: read(format!("left.{i}"))
                    .lines()
                    .map(str::to_owned)
                    .collect(),
            })
            .collect()
    }

    /// Asserts that attempts either failed with one error that names the place and says what to do, and left what
    /// was there, or succeeded; and that both happened.
    fn assert_failed_until_there_was_room(&self, attempts: &[Attempt], before: &[&str]) {
        let mut done = 0;
        for attempt in attempts {
            if attempt.code == 0 {
                done += 1;
                assert_eq!(attempt.left, ["out"], "{attempt:?}");
                continue;
            }
            self.assert_failed(attempt, "free some space");
            assert_eq!(attempt.left, before, "{attempt:?}");
        }
        assert!((1..attempts.len()).contains(&done), "{attempts:?}");
    }

    fn assert_failed(&self, attempt: &Attempt, what_to_do: &str) {
        assert_eq!(attempt.code, 1, "{attempt:?}");
        let errors: Vec<&str> = attempt
            .stderr
            .lines()
            .filter(|l| l.starts_with("error: "))
            .collect();
        let [error] = errors[..] else {
            panic!("not one error: {attempt:?}");
        };
        let place = self.mount.to_string_lossy();
        assert!(
            error.contains(&*place) && error.contains(what_to_do),
            "{error}"
        );
        assert!(!error.contains(" 0 bytes"), "{error}");
        assert!(!attempt.stderr.contains("panicked"), "{attempt:?}");
    }
}

fn record_bytes(store: &Path) -> u64 {
    let names = tree::names(store);
    let records = names.iter().filter(|name| name.ends_with(".xp2"));
    let bytes = |name| fs::metadata(store.join(name)).expect("a file").len();
    records.map(bytes).sum()
}

/// File systems of so many pages more than `bytes`, then some with too few inodes.
fn sizes(bytes: u64, pages: std::ops::Range<u64>) -> Vec<String> {
    let by_size = pages.map(|more| format!("size={}", bytes + more * PAGE_BYTES));
    let inodes = (2..10).map(|count| format!("size=64m,nr_inodes={count}"));
    by_size.chain(inodes).collect()
}

#[test]
fn build_on_a_file_system_that_fills_up_leaves_nothing_wherever_that_is() {
    let model = Model::bf16(Sizes::TINY);
    let packed = record_bytes(&model.pack());
    let checkpoint = model.checkpoint.display();
    for (name, bytes, pages) in [
        ("pack", packed / 2, 0..1),
        ("pack", packed, 0..12),
        ("index", 0, 1..12),
    ] {
        let small = Small::new();
        let build = format!("$expert {name} '{checkpoint}' -o $m/out -q");
        let check = "[ ! -e $m/out ] || $expert verify $m/out";
        let attempts = small.each(&sizes(bytes, pages), "true", &build, check);
        small.assert_failed_until_there_was_room(&attempts, &[]);
    }
}

#[test]
fn replacement_that_does_not_fit_leaves_the_old_store() {
    let model = Model::bf16(Sizes::TINY);
    let other = Model::bf16(Sizes::TINY.seed(2));
    let packed = record_bytes(&model.pack());
    let [old, new] = [&model, &other].map(|m| m.checkpoint.display());
    for (name, bytes, pages) in [("pack", 2 * packed, 4..16), ("index", packed, 4..16)] {
        let small = Small::new();
        let before = format!(
            "$expert pack '{old}' -o $m/out -q && cp -r $m/out '{}/was'",
            small.dir.path().display()
        );
        // Where there are inodes for the old store alone, `before` is what fails; those are left out.
        let options: Vec<String> = sizes(bytes, pages)
            .into_iter()
            .filter(|o| !o.contains("inodes"))
            .collect();
        let build = format!("$expert {name} '{new}' -o $m/out --replace -q");
        let check = format!(
            "[ $code = 0 ] || diff -r $m/out '{0}/was' || exit 1; rm -r '{0}/was'; $expert verify $m/out",
            small.dir.path().display()
        );
        let attempts = small.each(&options, &before, &build, &check);
        small.assert_failed_until_there_was_room(&attempts, &["out"]);
    }
}

#[test]
fn limit_on_file_sizes_during_an_index_leaves_nothing() {
    let model = Model::bf16(Sizes::SMALL);
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("out");
    // Of 1024 bytes: less than the catalogue has.
    let full = expert_after("ulimit -f 1", &[&"index", &model.checkpoint, &"-o", &out]);
    let error = full.error(1);
    assert!(error.contains("free some space"), "{error}");
    assert_eq!(tree::names(dir.path()), Vec::<String>::new());
}

#[test]
fn read_only_file_system_is_told_as_such_and_its_store_stays() {
    let model = Model::bf16(Sizes::TINY);
    let checkpoint = model.checkpoint.display();
    for name in ["pack", "index"] {
        let small = Small::new();
        let before = format!("$expert pack '{checkpoint}' -o $m/old -q && mount -o remount,ro $m");
        for (build, kept) in [("new", "old"), ("old --replace", "old")] {
            let build = format!("$expert {name} '{checkpoint}' -o $m/{build} -q");
            let check = format!("$expert verify $m/{kept}");
            let attempts = small.each(&["size=16m".into()], &before, &build, &check);
            small.assert_failed(&attempts[0], "mounted read-only");
            assert_eq!(attempts[0].left, ["old"]);
        }
    }
}

/// Takes the right to write to a folder away while it lives.
struct ReadOnly<'a>(&'a Path);

impl<'a> ReadOnly<'a> {
    fn new(folder: &'a Path) -> Self {
        fs::set_permissions(folder, Permissions::from_mode(0o555)).expect("a mode");
        Self(folder)
    }
}

impl Drop for ReadOnly<'_> {
    fn drop(&mut self) {
        let _ = fs::set_permissions(self.0, Permissions::from_mode(0o755));
    }
}

#[test]
fn directory_that_nobody_may_write_to_is_told_as_such() {
    let model = Model::bf16(Sizes::TINY);
    let dir = tempfile::tempdir().expect("a folder");
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    expert(&[&"pack", &model.checkpoint, &"-o", &old]).succeeded();
    let before = tree::snapshot(dir.path());
    let closed = ReadOnly::new(dir.path());
    for name in ["pack", "index"] {
        for (out, flag) in [(&new, "-q"), (&old, "--replace")] {
            let build = binary::command(
                "atlas-expert",
                &[&name, &model.checkpoint, &"-o", out, &flag],
            );
            let refused = binary::run(&mut without_privileges(&build));
            let error = refused.error(1);
            let place = format!(
                "cannot write in {}: Permission denied",
                dir.path().display()
            );
            assert!(
                error.contains(&place) && error.contains("ls -ld"),
                "{error}"
            );
        }
    }
    drop(closed);
    assert!(tree::snapshot(dir.path()) == before);
}

fn digest(addr: &str) -> String {
    let fetch = [
        "fetch",
        "--expert-backend",
        "rdma",
        "--json",
        "-q",
        "--expert-peer",
        addr,
    ];
    let report = binary::run(binary::command("atlas-expert", &[]).args(fetch)).json();
    report["payload_digest"]
        .as_str()
        .expect("a digest")
        .to_owned()
}

#[test]
fn peer_whose_reload_fails_serves_the_old_store_and_says_so_until_one_succeeds() {
    let model = Model::bf16(Sizes::TINY);
    let store = model.pack();
    let peer = PeerProcess::command("127.0.0.1:0", &store, &["--metrics", "0"]);
    let peer = PeerProcess::spawn(&mut without_privileges(&peer)).expect("a peer");
    let (addr, status) = (peer.addr.to_string(), peer.metrics());
    let now = |name: &str| metric(status, &format!("atlas_expert_peer_{name}"));
    let want = digest(&addr);
    assert_eq!(now("last_reload_ok"), 1.0);

    // A replacement that finds no room changes nothing, and the reload after it neither.
    let other = Model::bf16(Sizes::TINY.seed(2));
    let replace = |setup: &str| {
        let source = &other.checkpoint;
        expert_after(
            setup,
            &[&"pack", source, &"-o", &store, &"--replace", &"-q"],
        )
    };
    let full = replace("ulimit -f 64");
    assert!(full.error(1).contains("free some space"), "{full:?}");
    // The peer has no right to write there either, and needs none.
    let closed = ReadOnly::new(&store);
    peer.signal(Signal::HUP);
    wait_until("the reload is counted", || now("reloads_total") == 1.0);
    assert_eq!(digest(&addr), want);
    drop(closed);

    // One that cannot be opened.
    fs::set_permissions(&store, Permissions::from_mode(0o000)).expect("a mode");
    peer.signal(Signal::HUP);
    wait_until("the failure is counted", || {
        now("reloads_failed_total") == 1.0
    });
    fs::set_permissions(&store, Permissions::from_mode(0o755)).expect("a mode");
    assert_eq!((now("last_reload_ok"), now("epoch")), (0.0, 2.0));
    let (code, text) = get(status, "/readyz");
    assert!(
        code == 200 && text.contains("the last reload failed"),
        "{text}"
    );
    assert_eq!(digest(&addr), want);

    // And one that can.
    replace("true").succeeded();
    peer.signal(Signal::HUP);
    wait_until("the reload is counted", || now("reloads_total") == 2.0);
    assert_eq!(now("last_reload_ok"), 1.0);
    assert_eq!(get(status, "/readyz"), (200, "ready\n".into()));
    assert_ne!(digest(&addr), want);
    peer.signal(Signal::TERM);
    let output = peer.wait();
    assert_eq!(output.code, Some(0), "{output:?}");
    let line = output
        .stderr
        .lines()
        .find(|l| l.contains("serving what was there before"));
    let line = line.unwrap_or_else(|| panic!("{output:?}"));
    assert!(line.contains("Permission denied"), "{line}");
}
