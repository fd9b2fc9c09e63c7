//! One-sided READs where there are none: without libibverbs, and on this machine with whatever it lacks. (Without
//! devices and without the kernel's part: `kernel_one`, where both can be taken away.)

use std::fs;

use atlas_expert_tests::net::no_rdma::Machine;
use atlas_rdma::RdmaError;
use tempfile::TempDir;

/// A file in the library's place that is none: the loader looks there first, and goes no further.
fn without_library() -> (Machine, TempDir) {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("libibverbs.so.1");
    fs::write(&file, "no library\n").expect("a file");
    let machine = Machine {
        complaint: format!("libibverbs.so.1 cannot be used: {}", file.display()),
        library_path: Some(dir.path().into()),
        ..Machine::default()
    };
    (machine, dir)
}

/// This machine, and a peer that serves TCP alone; with devices the peer is all that is wrong.
fn this_machine() -> Machine {
    let complaint = match atlas_rdma::devices() {
        Err(
            error @ (RdmaError::NoLibrary { .. }
            | RdmaError::NoKernel { .. }
            | RdmaError::NoDevice
            | RdmaError::NoProvider { .. }),
        ) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => "the peer serves no verbs".into(),
    };
    Machine {
        complaint,
        ..Machine::default()
    }
}

#[test]
fn required_verbs_without_the_library_fail_and_name_it() {
    let (machine, _dir) = without_library();
    machine.required_verbs_fail();
}

#[test]
fn required_verbs_to_a_tcp_peer_fail_with_what_this_machine_lacks() {
    this_machine().required_verbs_fail();
}

#[test]
fn verbs_without_the_library_fall_back_to_tcp_and_say_so_once() {
    let (machine, _dir) = without_library();
    machine.verbs_fall_back_to_tcp();
}

#[test]
fn verbs_to_a_tcp_peer_fall_back_to_tcp_and_say_so_once() {
    this_machine().verbs_fall_back_to_tcp();
}

#[test]
fn tcp_works_without_the_library_and_says_nothing() {
    let (machine, _dir) = without_library();
    machine.tcp_works_and_says_nothing();
}

#[test]
fn peer_that_must_serve_verbs_does_not_start_without_the_library() {
    let (machine, _dir) = without_library();
    machine.peer_that_must_serve_verbs_does_not_start();
}

#[test]
fn peer_without_the_library_serves_tcp() {
    let (machine, _dir) = without_library();
    machine.peer_serves_tcp();
}
