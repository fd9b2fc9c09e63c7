//! Measurements against `cp` and against reading and discarding. Run with
//! `cargo test --release -p expert-store -- --ignored --nocapture bench`.

use std::fs;
use std::process::Command;
use std::time::Instant;

use super::*;
use crate::{BuildOptions, IndexOptions, SynthSpec, VerifyOptions, index, pack, verify};

fn drop_cache(dir: &Path) {
    for name in names(dir) {
        let file = fs::File::open(dir.join(name)).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
}

/// Cached kilobytes of the files of a directory, as `fincore` tells.
fn cached_mb(dir: &Path) -> u64 {
    let out = Command::new("fincore")
        .args(["-b", "-n", "-o", "RES"])
        .args(names(dir).iter().map(|n| dir.join(n)))
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines()
        .map(|l| l.trim().parse::<u64>().unwrap())
        .sum::<u64>()
        >> 20
}

fn peak_mb() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        >> 10
}

fn timed<T>(what: &str, bytes: u64, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let out = f();
    let s = start.elapsed().as_secs_f64();
    println!(
        "{what:34} {s:6.2} s  {:6.2} GB/s  peak {} MB",
        bytes as f64 / s / 1e9,
        peak_mb()
    );
    out
}

#[test]
#[ignore = "measures; writes some gigabytes"]
fn bench_build_against_cp() {
    let root = std::env::var("BENCH_DIR").unwrap_or_else(|_| "/tmp".into());
    let dir = tempfile::tempdir_in(root).unwrap();
    let dir = dir.path();
    for (family, layers, experts, hidden, inter) in [
        ("qwen3-moe", 4, 64, 2048, 768),
        ("nvfp4-modelopt", 10, 128, 2048, 768),
    ] {
        let source = dir.join(family);
        let spec = SynthSpec {
            family: family.into(),
            layers: Some(layers),
            experts: Some(experts),
            hidden: Some(hidden),
            inter: Some(inter),
            shards: 3,
            ..SynthSpec::default()
        };
        let bytes = 2_500_000_000;
        let n = timed("synth", bytes, || synth(&spec, &source).unwrap()).bytes;
        println!("{family}: {n} bytes");
        drop_cache(&source);
        timed("cold: read and discard (dd)", n, || {
            for name in names(&source) {
                let input = format!("if={}", source.join(name).display());
                let args = [input.as_str(), "of=/dev/null", "bs=1M", "status=none"];
                Command::new("dd").args(args).status().unwrap();
            }
        });
        drop_cache(&source);
        timed("cold: open without checksums", n, || {
            Store::open(&source, &unhashed()).unwrap()
        });
        println!("  cached of source: {} MB", cached_mb(&source));
        drop_cache(&source);
        timed("cold: index", n, || {
            index(&source, &dir.join("index"), &IndexOptions::default()).unwrap()
        });
        println!("  cached of source: {} MB", cached_mb(&source));
        for name in names(&source) {
            fs::read(source.join(name)).unwrap();
        }
        timed("cached: open with checksums", n, || open(&source));
        println!("  cached of source: {} MB", cached_mb(&source));
        let pack_it = |label: &str| {
            let store = Store::open(&source, &unhashed()).unwrap();
            timed(label, n, || {
                pack(&store, &dir.join("packed"), &BuildOptions::default()).unwrap()
            });
            println!(
                "  cached of source: {} MB, of store: {} MB",
                cached_mb(&source),
                cached_mb(&dir.join("packed"))
            );
        };
        let cp = |label: &str, sync: bool| {
            timed(label, n, || {
                Command::new("cp")
                    .arg("-r")
                    .args([&source, &dir.join("copy")])
                    .status()
                    .unwrap();
                if sync {
                    Command::new("sync").arg("-f").arg(dir).status().unwrap();
                }
            });
            fs::remove_dir_all(dir.join("copy")).unwrap();
        };
        pack_it("cached: pack");
        fs::remove_dir_all(dir.join("packed")).unwrap();
        cp("cached: cp and sync", true);
        cp("cached: cp", false);
        Command::new("sync").status().unwrap();
        drop_cache(&source);
        pack_it("cold: pack");
        drop_cache(&source);
        cp("cold: cp and sync", true);
        drop_cache(&dir.join("packed"));
        timed("cold: verify packed", n, || {
            verify(&open(&dir.join("packed")), &VerifyOptions::default()).unwrap()
        });
        println!("  cached of store: {} MB", cached_mb(&dir.join("packed")));
        for name in ["packed", "index", family] {
            fs::remove_dir_all(dir.join(name)).unwrap();
        }
    }
}

#[test]
#[ignore = "measures; writes some gigabytes"]
fn bench_half_a_million_small_leaves() {
    let dir = scratch();
    let source = dir.path().join("many");
    let spec = SynthSpec {
        family: "nvfp4-modelopt".into(),
        layers: Some(40),
        experts: Some(1040),
        hidden: Some(64),
        inter: Some(32),
        shards: 4,
        ..SynthSpec::default()
    };
    let report = timed("synth", 1 << 28, || synth(&spec, &source).unwrap());
    println!("{} tensors", report.tensors);
    timed("checkpoint::open", report.bytes, || {
        crate::checkpoint::open(&source).unwrap()
    });
    timed("open without checksums", report.bytes, || {
        Store::open(&source, &unhashed()).unwrap()
    });
    let store = timed("open with checksums", report.bytes, || open(&source));
    println!("{} records", store.catalogue().record_count());
}
