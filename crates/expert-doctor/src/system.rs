//! What `/proc`, `/sys` and `/dev` say, below a root that tests bring themselves, and the few things that are tried.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use expert_arena::FileQueue;

/// Capability number of `CAP_IPC_LOCK` (linux/capability.h).
const CAP_IPC_LOCK: u32 = 14;

/// A machine to look at.
#[derive(Debug, Clone)]
pub(crate) struct System {
    root: PathBuf,
    pub(crate) page_bytes: usize,
    pub(crate) io_uring: fn() -> io::Result<()>,
    pub(crate) listen: fn(SocketAddr) -> io::Result<()>,
}

impl System {
    /// This machine.
    pub(crate) fn here() -> Self {
        Self {
            root: PathBuf::from("/"),
            page_bytes: rustix::param::page_size(),
            io_uring: || FileQueue::<()>::new(1, rustix::param::page_size()).map(drop),
            listen: |addr| TcpListener::bind(addr).map(drop),
        }
    }

    /// A tree that stands for a machine on which everything that is tried works.
    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            page_bytes: 4096,
            io_uring: || Ok(()),
            listen: |_| Ok(()),
        }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// A file's text without blanks around it; `None` where it cannot be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let text = fs::read_to_string(self.root.join(path)).ok()?;
        Some(text.trim().to_owned())
    }

    pub(crate) fn number(&self, path: &str) -> Option<i64> {
        self.text(path)?.parse().ok()
    }

    /// Names in a folder, sorted; none where there is no such folder.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(path)).into_iter().flatten();
        let mut names: Vec<String> = entries
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// The value of a line `NAME:  value` of `/proc/self/status`.
    pub(crate) fn status(&self, name: &str) -> Option<String> {
        let text = self.text("proc/self/status")?;
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        Some(line.strip_prefix(':')?.trim().to_owned())
    }

    /// The limit on locked memory; `None` where there is none.
    pub(crate) fn memlock_bytes(&self) -> Option<u64> {
        let text = self.text("proc/self/limits")?;
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix("Max locked memory"))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Whether this process may lock more memory than its limit. Inside a user namespace the capability does not count.
    pub(crate) fn may_lock_all(&self) -> bool {
        let capabilities = self.status("CapEff");
        let has = capabilities
            .and_then(|text| u64::from_str_radix(&text, 16).ok())
            .is_some_and(|set| set & (1 << CAP_IPC_LOCK) != 0);
        let map = self.text("proc/self/uid_map").unwrap_or_default();
        let whole: Vec<&str> = map.split_whitespace().collect();
        has && (whole.is_empty() || whole == ["0", "0", "4294967295"])
    }

    /// Whether this is a container, and how that shows.
    pub(crate) fn container(&self) -> Option<&'static str> {
        for (path, how) in [
            (".dockerenv", "/.dockerenv is there"),
            ("run/.containerenv", "/run/.containerenv is there"),
            (
                "run/secrets/kubernetes.io",
                "/run/secrets/kubernetes.io is there",
            ),
            (
                "var/run/secrets/kubernetes.io",
                "/var/run/secrets/kubernetes.io is there",
            ),
        ] {
            if self.exists(path) {
                return Some(how);
            }
        }
        let groups = self.text("proc/1/cgroup")?;
        ["docker", "kubepods", "containerd", "libpod", "lxc"]
            .iter()
            .any(|name| groups.contains(name))
            .then_some("/proc/1/cgroup names one")
    }

    /// Soft-RoCE: a device without a card, on an interface.
    pub(crate) fn soft_parent(&self, device: &str) -> Option<String> {
        self.text(&format!("sys/class/infiniband/{device}/parent"))
    }

    /// A setting of an interface, as the kernel combines it with that of all interfaces.
    pub(crate) fn arp(&self, netdev: &str, name: &str) -> i64 {
        let of = |which: &str| {
            self.number(&format!("proc/sys/net/ipv4/conf/{which}/{name}"))
                .unwrap_or(0)
        };
        of("all").max(of(netdev))
    }
}

/// Whether a list such as `0-3,8` has a number.
pub(crate) fn list_has(list: &str, wanted: i64) -> bool {
    list.split(',').any(|part| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        match (from.trim().parse::<i64>(), to.trim().parse::<i64>()) {
            (Ok(from), Ok(to)) => (from..=to).contains(&wanted),
            _ => false,
        }
    })
}

/// Bytes in the decimal units of disks and networks.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}
