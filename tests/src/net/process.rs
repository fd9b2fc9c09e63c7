//! A peer that is a process of its own, as a user starts it.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::SLACK;
use crate::binary::{self, Output};

/// Longest time until a peer listens: it may have half a gigabyte to read and to register on an emulated machine.
const READY: Duration = Duration::from_secs(90);

/// See the module. Killed when it is dropped.
pub struct PeerProcess {
    /// Where it listens.
    pub addr: SocketAddr,
    /// What it said when it was ready.
    pub ready: serde_json::Value,
    child: Child,
    stderr: Option<JoinHandle<String>>,
}

impl PeerProcess {
    /// Serves a store on a port that the system chooses.
    ///
    /// Panics where the peer is not ready within a minute and a half.
    pub fn start(store: &Path, flags: &[&str]) -> Self {
        Self::start_on("127.0.0.1:0", store, flags).unwrap_or_else(|output| panic!("{output:?}"))
    }

    /// Serves a store on an address; what the process said where it ended instead.
    pub fn start_on(listen: &str, store: &Path, flags: &[&str]) -> Result<Self, Output> {
        Self::spawn(&mut Self::command(listen, store, flags))
    }

    /// The command that [`start_on`](Self::start_on) runs, for another environment.
    pub fn command(listen: &str, store: &Path, flags: &[&str]) -> Command {
        let mut args: Vec<&dyn AsRef<OsStr>> =
            vec![&"--store", &store, &"--listen", &listen, &"--json", &"-q"];
        args.extend(flags.iter().map(|f| f as &dyn AsRef<OsStr>));
        binary::command("atlas-expert-peer", &args)
    }

    /// Runs such a command; what the process said where it ended instead.
    pub fn spawn(command: &mut Command) -> Result<Self, Output> {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starting the peer");
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut stderr = child.stderr.take().expect("a pipe");
        let (send, line) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = stdout.read_line(&mut line);
            let _ = send.send(line);
            // A full pipe must not stop the peer.
            let _ = std::io::copy(&mut stdout, &mut std::io::sink());
        });
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        let unstarted = "0.0.0.0:0".parse().expect("an address");
        let mut peer = Self {
            addr: unstarted,
            ready: serde_json::Value::Null,
            child,
            stderr: Some(stderr),
        };
        let line = line.recv_timeout(READY).expect("a peer that is ready");
        if line.is_empty() {
            return Err(peer.wait());
        }
        let ready: serde_json::Value = serde_json::from_str(&line).expect("a line of JSON");
        let listening = ready["listening"].as_str().expect("an address");
        peer.addr = listening.parse().expect("an address");
        peer.ready = ready;
        Ok(peer)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where its numbers are; it must have been started with `--metrics`.
    pub fn metrics(&self) -> SocketAddr {
        let address = self.ready["metrics"].as_str().expect("an address");
        address.parse().expect("an address")
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("a process that runs");
    }

    /// Waits for its end, which has to come within [`SLACK`].
    pub fn wait(mut self) -> Output {
        let limit = Instant::now() + SLACK;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("waiting for a child") {
                break status;
            }
            assert!(Instant::now() < limit, "the peer does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        let stderr = self.stderr.take().expect("taken once");
        Output {
            code: status.code(),
            stdout: String::new(),
            stderr: stderr.join().expect("a reader"),
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
