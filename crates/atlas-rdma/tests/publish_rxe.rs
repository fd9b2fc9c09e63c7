//! Publishing on a real kernel. Needs soft-RoCE devices `rxe0` and `rxe1`, root, and a folder for each file system:
//! `PUBLISH_DIRS=/mnt/tmpfs:/mnt/ext4 publish_rxe-… --ignored --nocapture`.

use atlas_rdma::choose::{PortView, Wanted, choose_rails, pair};
use atlas_rdma::mapping::MappingMode;
use atlas_rdma::publish::{PublishFile, PublishOptions, Region, publish};
use atlas_rdma::sysfs::{CounterSource, Sysfs, prefix_len_of};
use atlas_rdma::{Context, Pd};
use std::fs::{self, File};
use std::io::Write;
use std::net::IpAddr;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const FILE_BYTES: u64 = 24 << 20;
const EXTENT: (u64, u64) = (12_345, FILE_BYTES - 20_000);

fn kernel() -> (u32, u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap())
}

fn folders() -> Vec<PathBuf> {
    let list =
        std::env::var("PUBLISH_DIRS").expect("PUBLISH_DIRS names the folders to publish from");
    list.split(':').map(PathBuf::from).collect()
}

fn domains() -> Vec<Arc<Pd>> {
    let open = |name| Pd::new(&Context::open(name).expect("soft-RoCE device")).unwrap();
    vec![open("rxe0"), open("rxe1")]
}

fn content() -> Vec<u8> {
    (0..FILE_BYTES).map(|i| (i * 31 % 251) as u8).collect()
}

/// A file whose pages are on the disk, so that whatever is modified later is our doing.
fn written(folder: &Path) -> (PathBuf, PublishFile) {
    let path = folder.join("weights.bin");
    let mut file = File::create(&path).unwrap();
    file.write_all(&content()).unwrap();
    file.sync_all().unwrap();
    let published = PublishFile {
        label: path.display().to_string(),
        file: Arc::new(File::open(&path).unwrap()),
        extents: vec![EXTENT],
    };
    (path, published)
}

/// Modification and change time in nanoseconds.
fn times(path: &Path) -> [i64; 4] {
    let meta = fs::metadata(path).unwrap();
    [
        meta.mtime(),
        meta.mtime_nsec(),
        meta.ctime(),
        meta.ctime_nsec(),
    ]
}

fn extent() -> Range<usize> {
    EXTENT.0 as usize..(EXTENT.0 + EXTENT.1) as usize
}

/// The bytes at the addresses of regions, read as a debugger does.
fn memory_of(regions: &[Region]) -> Vec<u8> {
    let memory = File::open("/proc/self/mem").unwrap();
    let mut all = Vec::new();
    for region in regions {
        let mut bytes = vec![0; region.bytes as usize];
        memory.read_exact_at(&mut bytes, region.addr).unwrap();
        all.extend(bytes);
    }
    all
}

/// Bytes of a file that are in the page cache.
fn cached_bytes(path: &Path) -> u64 {
    let mut fincore = Command::new("fincore");
    let shown = fincore.args(["-b", "-n", "-o", "RES"]).arg(path).output();
    let text = String::from_utf8(shown.expect("util-linux has fincore").stdout).unwrap();
    text.trim().parse().expect("fincore prints a number")
}

/// Regions of all processes: the kernel counts them for the thread that made their domain, not for a process.
fn regions() -> usize {
    let shown = Command::new("rdma")
        .args(["resource", "show", "mr"])
        .output();
    let text = String::from_utf8(shown.expect("iproute2 has rdma").stdout).unwrap();
    text.lines().filter(|line| line.contains(" mrn ")).count()
}

#[test]
#[ignore = "needs soft-RoCE devices and file systems: run it in a guest"]
fn files_are_published_without_being_changed() {
    let read_only_works = kernel() >= (6, 2);
    let rails = domains();
    for folder in folders() {
        let (path, file) = written(&folder);
        let before = times(&path);
        for (options, expected) in [
            (
                PublishOptions::default(),
                if read_only_works {
                    MappingMode::SharedReadOnly
                } else {
                    MappingMode::Copy
                },
            ),
            (
                PublishOptions {
                    force_copy: true,
                    ..Default::default()
                },
                MappingMode::Copy,
            ),
        ] {
            let registered_before = regions();
            let publication =
                publish(&rails, std::slice::from_ref(&file), &options, &|_| {}).unwrap();
            let report = &publication.modes()[0];
            println!(
                "kernel {:?} {} {}: {} ({:?})",
                kernel(),
                report.file_system,
                report.mode,
                report.why,
                report.pages
            );
            assert_eq!(report.mode, expected);
            let registered = regions() - registered_before;
            assert_eq!(registered, rails.len());
            for rail in 0..rails.len() {
                let bytes: u64 = publication
                    .regions(rail)
                    .iter()
                    .map(|region| region.bytes)
                    .sum();
                assert_eq!(bytes, EXTENT.1);
                assert!(
                    memory_of(publication.regions(rail)) == content()[extent()],
                    "{report:?}"
                );
            }
            publication.withdraw();
            assert_eq!(regions(), registered_before);
            Command::new("sync").status().unwrap();
            assert_eq!(times(&path), before, "{} was changed", path.display());
        }
        assert!(fs::read(&path).unwrap() == content());
    }
}

#[test]
#[ignore = "needs soft-RoCE devices and file systems: run it in a guest"]
fn read_write_mapping_is_taken_where_allowed_and_needed() {
    let read_only_works = kernel() >= (6, 2);
    let rails = domains();
    for folder in folders() {
        let (path, file) = written(&folder);
        let options = PublishOptions {
            allow_rw_map: true,
            ..PublishOptions::default()
        };
        let publication = publish(&rails, &[file], &options, &|_| {}).unwrap();
        let report = &publication.modes()[0];
        println!(
            "kernel {:?} {} allowed: {} ({})",
            kernel(),
            report.file_system,
            report.mode,
            report.why
        );
        let expected = if read_only_works {
            MappingMode::SharedReadOnly
        } else {
            MappingMode::SharedReadWrite
        };
        assert_eq!(report.mode, expected);
        publication.withdraw();
        assert!(fs::read(&path).unwrap() == content());
    }
}

#[test]
#[ignore = "needs soft-RoCE devices and file systems: run it in a guest"]
fn copy_of_a_file_on_disk_leaves_the_page_cache_as_it_was() {
    let rails = domains();
    let mut on_disk = 0;
    for folder in folders() {
        let (path, file) = written(&folder);
        fs::write("/proc/sys/vm/drop_caches", "3").expect("needs root");
        // Where the page cache is the file itself, as on tmpfs, there is nothing to keep clean.
        if cached_bytes(&path) > 0 {
            continue;
        }
        on_disk += 1;
        let options = PublishOptions {
            force_copy: true,
            ..PublishOptions::default()
        };
        let publication = publish(&rails, &[file], &options, &|_| {}).unwrap();
        let cached = cached_bytes(&path);
        println!(
            "kernel {:?}: {cached} bytes in the page cache after a copy",
            kernel()
        );
        assert_eq!(cached, 0);
        assert!(memory_of(publication.regions(0)) == content()[extent()]);
    }
    assert!(on_disk > 0, "PUBLISH_DIRS has no folder on a disk");
}

#[test]
#[ignore = "needs soft-RoCE devices and file systems: run it in a guest"]
fn rails_are_chosen_with_their_ipv4_gid_and_counted() {
    let sysfs = Sysfs::default();
    let mut views = Vec::new();
    for device in ["rxe0", "rxe1"] {
        let context = Context::open(device).expect("soft-RoCE device");
        views.push(PortView {
            device: device.to_owned(),
            port: 1,
            attributes: context.port(1).unwrap(),
            gids: context.gid_table(1).unwrap(),
        });
    }
    let wanted = Wanted::Automatic {
        count: 2,
        preferred: vec![],
    };
    let rails = choose_rails(&views, wanted).unwrap();
    for rail in &rails {
        println!(
            "{} port {}: GID {:?} ({}; {})",
            rail.device, rail.port, rail.gid.entry, rail.gid.why, rail.why
        );
        let ip = rail.gid.entry.gid.ip();
        assert!(matches!(ip, IpAddr::V4(_)), "{rail:?}");
        let netdev = sysfs.netdev_of(&rail.device, rail.port).unwrap().unwrap();
        assert_eq!(rail.gid.entry.netdev.as_deref(), Some(netdev.as_str()));
        assert_eq!(prefix_len_of(&netdev, ip).unwrap(), Some(24));
        assert_eq!(rail.gid.entry.prefix_len, Some(24));
        let counters = sysfs.counters(&rail.device, rail.port).unwrap();
        println!("{counters:?}");
        assert_eq!(counters.source, CounterSource::Driver);
        assert!(counters.rx_packets.is_some() && counters.tx_packets.is_some());
    }
    let ends: Vec<_> = rails.iter().map(|rail| rail.endpoint()).collect();
    let turned: Vec<_> = ends.iter().rev().copied().collect();
    assert_eq!(pair(&ends, &turned).paired, [(0, 1), (1, 0)]);
}
