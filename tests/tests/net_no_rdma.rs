//! One-sided READs on a machine that has none: without libibverbs, and with whatever this machine lacks. Each of the
//! three errors is named; where falling back is allowed, TCP does the work and says so.

use std::fs;
use std::path::Path;
use std::process::Command;

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use atlas_rdma::RdmaError;
use tempfile::TempDir;

/// A machine for one process: as it is, or with a file in the library's place that is none.
enum Machine {
    AsItIs,
    WithoutLibrary(TempDir),
}

impl Machine {
    fn without_library() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        // The loader looks here first, and does not go on where a file of the name cannot be used.
        fs::write(dir.path().join("libibverbs.so.1"), "no library\n").expect("a file");
        Self::WithoutLibrary(dir)
    }

    fn apply<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        match self {
            Self::AsItIs => command,
            Self::WithoutLibrary(dir) => command.env("LD_LIBRARY_PATH", dir.path()),
        }
    }

    /// What a program on it says of RDMA; a peer that serves none is all that is wrong with a machine with devices.
    fn complaint(&self) -> String {
        match self {
            Self::WithoutLibrary(dir) => {
                let file = dir.path().join("libibverbs.so.1");
                format!("libibverbs.so.1 cannot be used: {}", file.display())
            }
            Self::AsItIs => match atlas_rdma::devices() {
                Err(
                    error @ (RdmaError::NoLibrary { .. }
                    | RdmaError::NoKernel { .. }
                    | RdmaError::NoDevice
                    | RdmaError::NoProvider { .. }),
                ) => error.to_string(),
                Err(other) => panic!("{other}"),
                Ok(_) => "the peer serves no verbs".into(),
            },
        }
    }

    fn fetch(&self, backend: &str, peer: &PeerProcess, flags: &[&str]) -> Output {
        let mut command = binary::command("atlas-expert", &[&"fetch", &"-q", &"--json"]);
        command
            .args(["--expert-backend", backend, "--expert-peer"])
            .arg(peer.addr.to_string())
            .args(flags)
            .env_remove("ATLAS_EXPERT_CONTENT_ID")
            .env_remove("ATLAS_EXPERT_RAILS");
        binary::run(self.apply(&mut command))
    }
}

/// A served store, and the digest that a fetch of all of it must give.
struct Served {
    model: Model,
    digest: String,
}

impl Served {
    fn new() -> Self {
        let model = Model::bf16(Sizes::TINY);
        let digest = digest(&model.checkpoint);
        Self { model, digest }
    }

    fn store(&self) -> &Path {
        &self.model.checkpoint
    }

    fn tcp_peer(&self) -> PeerProcess {
        PeerProcess::start(self.store(), &["--rdma", "off"])
    }

    fn assert_fetched(&self, output: Output) -> serde_json::Value {
        let report = output.json();
        assert_eq!(report["records"], 32, "{report}");
        assert_eq!(report["payload_digest"], self.digest.as_str());
        report
    }
}

/// By plain reads of the files.
fn digest(store: &Path) -> String {
    let report = binary::expert(&[
        &"fetch",
        &"-q",
        &"--json",
        &"--expert-backend",
        &"posix",
        &"--store",
        &store,
    ]);
    let report = report.json();
    report["payload_digest"].as_str().expect("a digest").into()
}

fn required_verbs_fail(machine: &Machine) {
    let served = Served::new();
    let peer = served.tcp_peer();
    let output = machine.fetch("rdma-verbs", &peer, &["--require-rdma"]);
    let error = output.error(1);
    assert!(error.contains(&machine.complaint()), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
}

fn verbs_fall_back_to_tcp(machine: &Machine) {
    let served = Served::new();
    let peer = served.tcp_peer();
    let output = machine.fetch("rdma-verbs", &peer, &[]);
    assert_eq!(output.stderr.matches("over TCP").count(), 1, "{output:?}");
    assert!(output.stderr.contains(&machine.complaint()), "{output:?}");
    let report = served.assert_fetched(output);
    assert_eq!(report["takeovers"], 1, "{report}");
    let carried: Vec<&serde_json::Value> = report["rails"]
        .as_array()
        .expect("rails")
        .iter()
        .filter(|rail| rail["bytes"] != 0)
        .map(|rail| &rail["kind"])
        .collect();
    assert_eq!(carried, ["tcp"], "{report}");
}

#[test]
fn required_verbs_without_the_library_fail_and_name_it() {
    required_verbs_fail(&Machine::without_library());
}

#[test]
fn required_verbs_to_a_tcp_peer_fail_with_what_this_machine_lacks() {
    required_verbs_fail(&Machine::AsItIs);
}

#[test]
fn verbs_without_the_library_fall_back_to_tcp_and_say_so_once() {
    verbs_fall_back_to_tcp(&Machine::without_library());
}

#[test]
fn verbs_to_a_tcp_peer_fall_back_to_tcp_and_say_so_once() {
    verbs_fall_back_to_tcp(&Machine::AsItIs);
}

#[test]
fn tcp_works_without_the_library_and_says_nothing() {
    let served = Served::new();
    let output = Machine::without_library().fetch("rdma", &served.tcp_peer(), &[]);
    assert!(output.stderr.is_empty(), "{output:?}");
    let report = served.assert_fetched(output);
    assert_eq!(report["takeovers"], 0);
}

#[test]
fn peer_that_must_serve_verbs_does_not_start_without_the_library() {
    let served = Served::new();
    let machine = Machine::without_library();
    for flags in [&["--rdma", "require"][..], &["--rail", "rxe0"]] {
        let mut command = PeerProcess::command("127.0.0.1:0", served.store(), flags);
        let output = PeerProcess::spawn(machine.apply(&mut command)).err();
        let output = output.expect("an end");
        assert!(output.error(1).contains(&machine.complaint()), "{output:?}");
    }
}

#[test]
fn peer_without_the_library_serves_tcp() {
    let served = Served::new();
    let machine = Machine::without_library();
    for flags in [&[][..], &["--rdma", "auto"]] {
        let mut command = PeerProcess::command("127.0.0.1:0", served.store(), flags);
        let peer = PeerProcess::spawn(machine.apply(&mut command)).expect("a peer");
        for (backend, takeovers) in [("rdma", 0), ("rdma-verbs", 1)] {
            let report = served.assert_fetched(machine.fetch(backend, &peer, &[]));
            assert_eq!(report["takeovers"], takeovers, "{report}");
        }
    }
}
