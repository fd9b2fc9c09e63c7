//! Whole stores over verbs, in place and packed, on a file system in memory and on a disk: nothing of them changes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use atlas_expert_tests::guest;
use atlas_expert_tests::net::process::PeerProcess;
use rustix::process::Signal;
use tempfile::TempDir;

use super::programs::{
    Shape, digest, fetch, folder, number, packets, posix_digest, proc_bytes, registers_mappings,
    shell,
};

const MTU: u64 = 4096;
/// What a peer has in memory of its own, beside a store.
const OWN_BYTES: u64 = 48 << 20;

/// 544 MB in 200 records of twelve leaves.
const LARGE: Shape = Shape {
    family: "nvfp4-ct",
    layers: 4,
    experts: 50,
    hidden: 1536,
    inter: 1050,
};
/// 64 MB in 24 records of twelve leaves.
const SMALL: Shape = Shape {
    layers: 2,
    experts: 12,
    ..LARGE
};

/// Where a store lies.
trait Place {
    fn path(&self) -> &Path;
    /// Sectors written to the disk so far; `None` where there is no disk.
    fn written_sectors(&self) -> Option<u64>;
    /// What the kernel calls it.
    fn kind(&self) -> &'static str;
}

struct Memory(TempDir);

impl Place for Memory {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn written_sectors(&self) -> Option<u64> {
        None
    }

    fn kind(&self) -> &'static str {
        "tmpfs"
    }
}

/// An ext4 on a loop device of its own, whose file lies in memory.
struct Disk {
    mounted: PathBuf,
    device: String,
    _folder: TempDir,
}

impl Disk {
    fn new(bytes: u64) -> Self {
        let folder = folder();
        let (image, mounted) = (folder.path().join("image"), folder.path().join("ext4"));
        fs::create_dir(&mounted).expect("a folder");
        // Nothing is left for the kernel to write later.
        let make = format!(
            "truncate -s {bytes} {image} && mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 {image} && \
             device=$(losetup -f --show {image}) && mount -o noatime $device {mounted} && echo $device",
            image = image.display(),
            mounted = mounted.display(),
        );
        let device = shell(&make).trim().to_owned();
        Self {
            mounted,
            device,
            _folder: folder,
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let (mounted, device) = (self.mounted.display(), &self.device);
        let undone =
            super::programs::run_shell(&format!("umount {mounted} && losetup -d {device}"));
        if undone.code != Some(0) {
            eprintln!("{undone:?}");
        }
    }
}

impl Place for Disk {
    fn path(&self) -> &Path {
        &self.mounted
    }

    fn written_sectors(&self) -> Option<u64> {
        let name = self.device.rsplit('/').next().expect("a device");
        let text = fs::read_to_string(format!("/sys/block/{name}/stat")).expect("its numbers");
        let number = text.split_whitespace().nth(6).expect("sectors written");
        Some(number.parse().expect("a number"))
    }

    fn kind(&self) -> &'static str {
        "ext4"
    }
}

/// Path, size and modification time of every file below a folder.
fn files(folder: &Path) -> Vec<(PathBuf, u64, i64, i64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true if path.ends_with("lost+found") => {}
            true => found.extend(files(&path)),
            false => {
                let m = fs::metadata(&path).expect("a file");
                found.push((path, m.len(), m.mtime(), m.mtime_nsec()));
            }
        }
    }
    found.sort();
    found
}

/// Serves a store from that place, fetches all of it over verbs, and checks what must not change.
fn every_record_arrives_and_nothing_is_written(shape: Shape, packed: bool, place: &dyn Place) {
    let store = match packed {
        true => shape.packed(place.path()),
        false => shape.in_place(place.path()),
    };
    let want = posix_digest(&store);
    let is_mapped = registers_mappings();
    // The disk has everything, and the page cache nothing.
    shell("sync && echo 3 >/proc/sys/vm/drop_caches");
    let files_before = files(place.path());
    let sectors_before = place.written_sectors();
    let dirty_before = proc_bytes("/proc/meminfo", "Dirty");

    let peer = PeerProcess::start(&store, &["--rail", "rxe0"]);
    let mapping = peer.ready["mapping"].as_str().expect("text").to_owned();
    println!("mapping: {mapping}");
    let mode = match is_mapped {
        true => "shared read-only mapping",
        false => "copy",
    };
    assert!(
        mapping.contains(mode) && mapping.contains(place.kind()),
        "{mapping}"
    );
    let registered = number(&peer.ready["rails"][0]["registered_bytes"]);
    let status = format!("/proc/{}/status", peer.pid());
    let own = proc_bytes(&status, "RssAnon") + proc_bytes(&status, "HugetlbPages");
    let pinned = proc_bytes(&status, "VmPin");
    println!("{registered} bytes registered, {own} of its own, {pinned} pinned");
    assert!(
        (registered..registered + registered / 8 + OWN_BYTES).contains(&pinned),
        "{pinned}"
    );
    match is_mapped {
        true => assert!(own < OWN_BYTES, "{own} bytes of memory beside the mapping"),
        false => assert!(
            (registered..registered + registered / 8 + OWN_BYTES).contains(&own),
            "a copy in {own} bytes"
        ),
    }

    let packets_before = packets(0);
    let report = fetch(&peer, &["--rail", "rxe0"]);
    let count = packets(0) - packets_before;
    assert_eq!(digest(&report), want);
    assert_eq!(report["records"], shape.records());
    let bytes = number(&report["bytes"]);
    assert!(count >= bytes / MTU, "{bytes} bytes in {count} packets");

    let unchanged = |when: &str| {
        assert_eq!(files(place.path()), files_before, "{when}");
        let dirty = proc_bytes("/proc/meminfo", "Dirty").saturating_sub(dirty_before);
        assert!(dirty < registered / 16, "{when}: {dirty} dirty bytes");
        shell("sync");
        assert_eq!(place.written_sectors(), sectors_before, "{when}");
    };
    unchanged("while it is registered");
    peer.signal(Signal::TERM);
    assert_eq!(peer.wait().code, Some(0));
    unchanged("after the peer's end");
    for (name, value) in [
        ("bytes", bytes),
        ("registered_bytes", registered),
        ("anonymous_bytes", own),
        ("pinned_bytes", pinned),
        ("packets", count),
    ] {
        guest::figure(name, value);
    }
    guest::figure("mapping", mapping);
    guest::figure(
        "mb_per_s",
        bytes as f64 / 1e6 / report["seconds"].as_f64().expect("seconds"),
    );
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_512_mb_in_place_on_ext4_arrive_and_nothing_is_written() {
    let disk = Disk::new(800 << 20);
    every_record_arrives_and_nothing_is_written(LARGE, false, &disk);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_packed_on_ext4_arrives_and_nothing_is_written() {
    let disk = Disk::new(400 << 20);
    every_record_arrives_and_nothing_is_written(SMALL, true, &disk);
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_in_place_on_tmpfs_arrives_and_nothing_is_written() {
    every_record_arrives_and_nothing_is_written(SMALL, false, &Memory(folder()));
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_packed_on_tmpfs_arrives_and_nothing_is_written() {
    let shape = Shape {
        family: "nvfp4-modelopt",
        inter: 1056,
        ..SMALL
    };
    every_record_arrives_and_nothing_is_written(shape, true, &Memory(folder()));
}

/// What the other tests look at does change where it must: a kernel that takes no read-only mapping writes back what is
/// mapped read-write for it.
#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_read_write_mapping_is_only_for_those_who_ask_and_is_seen() {
    let disk = Disk::new(400 << 20);
    let store = SMALL.packed(disk.path());
    shell("sync && echo 3 >/proc/sys/vm/drop_caches");
    let before = (files(disk.path()), disk.written_sectors());
    let peer = PeerProcess::start(&store, &["--rail", "rxe0", "--allow-rw-map"]);
    let mapping = peer.ready["mapping"].as_str().expect("text").to_owned();
    let report = fetch(&peer, &["--rail", "rxe0"]);
    assert_eq!(digest(&report), posix_digest(&store));
    peer.signal(Signal::TERM);
    assert_eq!(peer.wait().code, Some(0));
    shell("sync");
    let after = (files(disk.path()), disk.written_sectors());
    match registers_mappings() {
        true => {
            assert!(mapping.contains("shared read-only mapping"), "{mapping}");
            assert_eq!(after, before);
        }
        false => {
            assert!(mapping.contains("shared read-write mapping"), "{mapping}");
            assert_ne!(after.0, before.0, "modification times");
            let sectors = after.1.expect("a disk") - before.1.expect("a disk");
            guest::figure("sectors_written", sectors);
            assert!(
                sectors * 512 >= number(&report["bytes"]),
                "{sectors} sectors"
            );
        }
    }
}
