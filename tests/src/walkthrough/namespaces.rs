//! Two machines of one kernel: network namespaces that a cable joins, each with programs of its own in `/usr/local/bin`.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::machine::Machine;
use super::page::Side;
use crate::guest::Agent;

/// What is to be done where namespaces are refused.
const HELP: &str = "this test needs user namespaces or root. One of these allows them:
  sysctl -w user.max_user_namespaces=1000
  sysctl -w kernel.unprivileged_userns_clone=1                  (Debian)
  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0      (Ubuntu)
  docker run --security-opt seccomp=unconfined …                (in a container)
and the programs 'unshare', 'nsenter' (util-linux) and 'ip' (iproute2) have to be there";

/// Two namespaces in one user namespace, where this user may have one, else those of root. They go with this process.
pub struct Namespaces {
    /// A process in each: the peer's, the client's.
    holders: [Holder; 2],
    is_user: bool,
    folder: tempfile::TempDir,
}

/// A process that keeps namespaces until its standard input closes.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Namespaces {
    /// The peer's address.
    pub const ADDR: &str = "10.99.0.1";

    /// Makes both, and the cable.
    ///
    /// # Errors
    /// What was refused, and what allows it.
    pub fn new() -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|e| format!("a temporary folder: {e}"))?;
        for side in ["peer", "client"] {
            let programs = folder.path().join(side).join("local-bin");
            std::fs::create_dir_all(&programs)
                .map_err(|e| format!("{}: {e}", programs.display()))?;
        }
        let [peer_bin, client_bin] =
            ["peer", "client"].map(|side| folder.path().join(side).join("local-bin"));
        let all = ["unshare", "--user", "--map-root-user", "--mount", "--net"];
        let (peer, is_user) = match hold(&all, &peer_bin) {
            Ok(peer) => (peer, true),
            // Root of a system without user namespaces.
            Err(refused) => match hold(&["unshare", "--mount", "--net"], &peer_bin) {
                Ok(peer) => (peer, false),
                Err(_) => return Err(format!("{refused}\n{HELP}")),
            },
        };
        let pid = peer.0.id().to_string();
        let mut second = vec![];
        if is_user {
            second.extend(["nsenter", "-t", &pid, "--user", "--preserve-credentials"]);
        }
        second.extend(["unshare", "--mount", "--net"]);
        let client = hold(&second, &client_bin).map_err(|e| format!("{e}\n{HELP}"))?;
        let namespaces = Self {
            holders: [peer, client],
            is_user,
            folder,
        };
        let [peer, client] = [Side::Peer, Side::Client].map(|side| namespaces.enter(side));
        let there = namespaces.holders[0].0.id();
        let cable = format!(
            "{client} ip link add near type veth peer name far netns {there} &&
            {client} ip addr add 10.99.0.2/24 dev near && {client} ip link set near up &&
            {peer} ip addr add {}/24 dev far && {peer} ip link set far up",
            Self::ADDR
        );
        let laid = Command::new("sh").args(["-c", &cable]).output();
        match laid.map_err(|e| format!("sh: {e}"))? {
            output if output.status.success() => Ok(namespaces),
            output => Err(format!(
                "laying a cable between two network namespaces: {}(modprobe veth?)",
                String::from_utf8_lossy(&output.stderr)
            )),
        }
    }

    /// Both machines, peer first.
    ///
    /// # Errors
    /// What could not be made.
    pub fn machines(&self) -> Result<[Machine; 2], String> {
        let path = self.folder.path();
        let peer_home = path.join("peer").display().to_string();
        let scp = format!("cat \"{peer_home}/$1\"");
        let machine = |name: &str, side| {
            let agent = Agent::local(&path.join(name)).map_err(|e| e.to_string())?;
            let home = path.join(name).display().to_string();
            Machine::new(agent, &self.enter(side), &home, &scp)
        };
        Ok([
            machine("peer", Side::Peer)?,
            machine("client", Side::Client)?,
        ])
    }

    fn enter(&self, side: Side) -> String {
        let pid = self.holders[side as usize].0.id();
        let user = if self.is_user {
            "--user --preserve-credentials "
        } else {
            ""
        };
        format!("nsenter -t {pid} {user}--mount --net")
    }
}

/// Starts a process in new namespaces, where that folder is `/usr/local/bin`.
fn hold(command: &[&str], programs: &Path) -> Result<Holder, String> {
    let script = "mount --bind \"$1\" /usr/local/bin && ip link set lo up && echo up && exec cat";
    let mut child = Command::new(command[0])
        .args(&command[1..])
        .args(["sh", "-c", script, "sh"])
        .arg(programs)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{}: {e}", command[0]))?;
    let mut line = String::new();
    let stdout = child.stdout.take().expect("a pipe");
    // Ends by itself where the command fails.
    let read = BufReader::new(stdout).read_line(&mut line);
    if read.is_ok() && line == "up\n" {
        return Ok(Holder(child));
    }
    let output = child.wait_with_output();
    let said = output.map_or_else(
        |e| e.to_string(),
        |o| String::from_utf8_lossy(&o.stderr).trim().to_owned(),
    );
    Err(format!("'{}': {said}", command.join(" ")))
}
