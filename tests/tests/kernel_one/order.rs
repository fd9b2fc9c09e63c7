//! In which order memory ends, as the kernel is asked for it: seen by `strace`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use atlas_expert_tests::binary;
use atlas_expert_tests::net::process::PeerProcess;
use atlas_expert_tests::net::rig::{arena_for, largest, patient, patient_verbs};
use atlas_expert_tests::net::{model, wait_until};
use rustix::process::Signal;

use super::programs::{fetch_command, folder, number};

/// What a trace tells, in the order in which it happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// Something was asked of a device, and it was done.
    Device,
    /// That many bytes of address space were about to go.
    Unmap { bytes: u64 },
}

/// The calls in a file that `strace -f -y` wrote. The library asks a device through `ioctl`, or through `write` where a
/// kernel is old.
fn calls(trace: &Path) -> Vec<Call> {
    let text = fs::read_to_string(trace).expect("a trace");
    let mut begun = Vec::new();
    let mut calls = Vec::new();
    for line in text.lines() {
        let (thread, call) = line.trim_start().split_once(' ').expect("a thread's id");
        let call = call.trim_start();
        let is_device = ["ioctl(", "write("].iter().any(|c| call.starts_with(c))
            && call.contains("/dev/infiniband/uverbs");
        if is_device && call.contains("<unfinished") {
            begun.push(thread);
        } else if is_device {
            calls.push(Call::Device);
        } else if call.starts_with("<... ioctl resumed") || call.starts_with("<... write resumed") {
            if let Some(i) = begun.iter().position(|t| *t == thread) {
                begun.swap_remove(i);
                calls.push(Call::Device);
            }
        } else if let Some(arguments) = call.strip_prefix("munmap(") {
            let bytes = arguments.split([',', ')', '<']).nth(1).expect("a length");
            let bytes = bytes.trim().parse().expect("a length");
            calls.push(Call::Unmap { bytes });
        }
    }
    calls
}

fn is_large(call: &Call, from_bytes: u64) -> bool {
    matches!(call, Call::Unmap { bytes } if (from_bytes..from_bytes + (8 << 20)).contains(bytes))
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_peer_deregisters_its_store_and_destroys_queue_pairs_before_it_unmaps() {
    let model = model::Model::bf16(model::Sizes::LARGE);
    let records = model.records();
    let peer = PeerProcess::start(&model.pack(), &["--rail", "rxe0"]);
    let rail = "rxe0".parse().expect("a device name");
    let tier = patient()
        .verbs(patient_verbs(vec![rail]))
        .connect(&peer.addr.to_string(), arena_for(&records, 1))
        .expect("a tier");
    let rail = &peer.ready["rails"][0];
    let regions = number(&rail["regions"]);
    let region_bytes = number(&rail["registered_bytes"]) / regions;

    let folder = folder();
    let trace = folder.path().join("trace");
    let mut strace = Command::new("strace")
        .args(["-f", "-q", "-y", "-e", "trace=ioctl,write,munmap", "-o"])
        .arg(&trace)
        .args(["-p", &peer.pid().to_string()])
        .stdin(Stdio::null())
        .spawn()
        .expect("strace");
    let is_traced = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", peer.pid())).expect("its threads");
        tasks.flatten().all(|task| {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            status.contains("TracerPid:\t") && !status.contains("TracerPid:\t0\n")
        })
    };
    wait_until("every thread is traced", is_traced);
    peer.signal(Signal::TERM);
    assert_eq!(peer.wait().code, Some(0));
    assert!(strace.wait().expect("strace's end").success());
    drop(tier);

    let calls = calls(&trace);
    let unmaps = calls.iter().filter(|c| is_large(c, region_bytes)).count() as u64;
    let first = calls.iter().position(|c| is_large(c, region_bytes));
    let before = &calls[..first.unwrap_or_else(|| panic!("the store stays mapped: {calls:?}"))];
    let asked = before.iter().filter(|c| **c == Call::Device).count() as u64;
    println!("{regions} regions of {region_bytes} bytes, {asked} calls, then {unmaps} unmappings");
    assert_eq!(unmaps, regions, "{calls:?}");
    // The client has two queue pairs.
    assert!(asked >= regions + 2, "{calls:?}");
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_client_asks_nothing_of_its_device_once_the_arena_is_unmapped() {
    let model = model::Model::bf16(model::Sizes::LARGE);
    let records = model.records();
    let peer = PeerProcess::start(&model.pack(), &["--rail", "rxe0"]);
    let fetch = fetch_command(&peer, &["--rail", "rxe0", "--require-rdma"]);
    let folder = folder();
    let trace = folder.path().join("trace");
    let mut traced = Command::new("strace");
    traced
        .args([
            "-f",
            "-y",
            "--seccomp-bpf",
            "-e",
            "trace=ioctl,write,munmap",
            "-o",
        ])
        .arg(&trace)
        .arg(fetch.get_program())
        .args(fetch.get_args())
        .stdin(Stdio::null());
    // Two slabs of eight slots.
    let arena_bytes = 16 * largest(&records) as u64;
    // A thread that ends may hold the arena for longer than the program runs: then the kernel unmaps it, and
    // the trace does not show when.
    let traced = std::iter::repeat_with(|| {
        let report = binary::run(&mut traced).json();
        assert_eq!(report["records"], records.len());
        let calls = calls(&trace);
        let last = calls.iter().rposition(|c| is_large(c, arena_bytes));
        (calls, last)
    });
    let seen = traced
        .take(3)
        .find_map(|(calls, last)| Some((calls, last?)));
    let (calls, last) = seen.expect("the arena stays mapped, three times");
    let asked = calls[..last].iter().filter(|c| **c == Call::Device).count();
    println!(
        "{asked} calls, then the arena's unmapping, then {:?}",
        &calls[last..]
    );
    // Queue pairs and regions were made and destroyed.
    assert!(asked >= 8, "{calls:?}");
    assert!(!calls[last..].contains(&Call::Device), "{calls:?}");
}
