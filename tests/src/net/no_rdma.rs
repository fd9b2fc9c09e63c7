//! What client and peer do on a machine that has no RDMA: required verbs fail and say what is missing, others fall back
//! to TCP and say so once.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::model::{Model, Sizes};
use super::process::PeerProcess;
use crate::binary::{self, Output};

/// A machine without RDMA, as programs see it.
#[derive(Debug, Default)]
pub struct Machine {
    /// Part of what they say of it.
    pub complaint: String,
    /// Where they look for libraries first.
    pub library_path: Option<PathBuf>,
    /// A command that runs the command that follows it there, and its first arguments; empty: here.
    pub inside: Vec<String>,
}

impl Machine {
    /// The client fails, with one error that names what is missing, where verbs are required.
    pub fn required_verbs_fail(&self) {
        let served = Served::new();
        let peer = self.tcp_peer(&served);
        let output = self.fetch("rdma-verbs", &peer, &["--require-rdma"]);
        let error = output.error(1);
        assert!(error.contains(&self.complaint), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }

    /// The client fetches over TCP where it may, and says so and why, once.
    pub fn verbs_fall_back_to_tcp(&self) {
        let served = Served::new();
        let peer = self.tcp_peer(&served);
        let output = self.fetch("rdma-verbs", &peer, &[]);
        assert_eq!(output.stderr.matches("over TCP").count(), 1, "{output:?}");
        assert!(output.stderr.contains(&self.complaint), "{output:?}");
        let report = served.assert_fetched(output);
        assert_eq!(report["takeovers"], 1, "{report}");
        let rails = report["rails"].as_array().expect("rails");
        let carried = rails.iter().filter(|rail| rail["bytes"] != 0);
        let carried: Vec<_> = carried.map(|rail| &rail["kind"]).collect();
        assert_eq!(carried, ["tcp"], "{report}");
    }

    /// The TCP backend does not look for RDMA.
    pub fn tcp_works_and_says_nothing(&self) {
        let served = Served::new();
        let output = self.fetch("rdma", &self.tcp_peer(&served), &[]);
        assert!(output.stderr.is_empty(), "{output:?}");
        let report = served.assert_fetched(output);
        assert_eq!(report["takeovers"], 0, "{report}");
    }

    /// A peer that was told to serve verbs ends with an error.
    pub fn peer_that_must_serve_verbs_does_not_start(&self) {
        let served = Served::new();
        for flags in [&["--rdma", "require"][..], &["--rail", "rxe0"]] {
            let output = self.serve(&served, flags).err().expect("an end");
            let error = output.error(1);
            assert!(error.contains(&self.complaint), "{output:?}");
        }
    }

    /// A peer that was not told so serves TCP.
    pub fn peer_serves_tcp(&self) {
        let served = Served::new();
        for flags in [&[][..], &["--rdma", "auto"]] {
            let peer = self.serve(&served, flags).expect("a peer");
            for (backend, takeovers) in [("rdma", 0), ("rdma-verbs", 1)] {
                let report = served.assert_fetched(self.fetch(backend, &peer, &[]));
                assert_eq!(report["takeovers"], takeovers, "{report}");
            }
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
        binary::run(&mut self.of(&command))
    }

    fn tcp_peer(&self, served: &Served) -> PeerProcess {
        self.serve(served, &["--rdma", "off"]).expect("a peer")
    }

    fn serve(&self, served: &Served, flags: &[&str]) -> Result<PeerProcess, Output> {
        let command = PeerProcess::command("127.0.0.1:0", served.store(), flags);
        PeerProcess::spawn(&mut self.of(&command))
    }

    /// The same command, on this machine.
    fn of(&self, command: &Command) -> Command {
        let mut words = self.inside.iter().map(OsStr::new).collect::<Vec<_>>();
        words.push(command.get_program());
        words.extend(command.get_args());
        let mut here = Command::new(words[0]);
        here.args(&words[1..]).stdin(Stdio::null());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => here.env(name, value),
                None => here.env_remove(name),
            };
        }
        if let Some(path) = &self.library_path {
            here.env("LD_LIBRARY_PATH", path);
        }
        here
    }
}

/// A store, and the digest that a fetch of all of it must give.
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
