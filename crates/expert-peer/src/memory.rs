//! How much memory the machine has to give.

use std::fs;
use std::path::Path;

/// Bytes that stay free by default on a large machine: one whose memory is shared with a GPU freezes
/// when all of it is pinned.
const RESERVE_BYTES: u64 = 8_000_000_000;
/// ... and in percent, where that is more.
const RESERVE_PERCENT: u64 = 8;
/// What needs less than this is no danger to a machine ...
const SMALL_BYTES: u64 = 1 << 30;
/// ... and leaves at most this part free.
const SMALL_RESERVE_PERCENT: u64 = 25;

/// What the system says of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total_bytes: u64,
    /// What can be had without swapping, as far as this process's control groups let it.
    pub(crate) available_bytes: u64,
}

impl Memory {
    /// `None` where the system does not say.
    pub(crate) fn now() -> Option<Self> {
        Self::at(Path::new("/"))
    }

    fn at(root: &Path) -> Option<Self> {
        let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        let available = field("MemAvailable:")?;
        Some(Self {
            total_bytes: field("MemTotal:")?,
            available_bytes: group_available(root).map_or(available, |g| g.min(available)),
        })
    }

    /// What stays free of it where the caller named nothing and needs so much.
    pub(crate) fn default_reserve_bytes(self, need_bytes: u64) -> u64 {
        let percent = |percent| self.total_bytes / 100 * percent;
        let reserve = RESERVE_BYTES.max(percent(RESERVE_PERCENT));
        match need_bytes < SMALL_BYTES {
            true => reserve.min(percent(SMALL_RESERVE_PERCENT)),
            false => reserve,
        }
    }
}

/// `MemAvailable`, bytes; `None` where the system does not say.
pub(crate) fn memory_available() -> Option<u64> {
    Some(Memory::now()?.available_bytes)
}

/// What this process's control group and those above it have left: pinned pages count there, page
/// cache gives way. `None` without a limit.
fn group_available(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let own = groups.lines().find_map(|l| l.strip_prefix("0::/"))?;
    let top = root.join("sys/fs/cgroup");
    let mut left = None;
    for group in top
        .join(own)
        .ancestors()
        .take_while(|g| g.starts_with(&top))
    {
        let number = |file: &str| -> Option<u64> {
            let text = fs::read_to_string(group.join(file)).ok()?;
            text.trim().parse().ok()
        };
        let (Some(max), Some(used)) = (number("memory.max"), number("memory.current")) else {
            continue;
        };
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cache: u64 = ["inactive_file ", "active_file "]
            .iter()
            .filter_map(|name| stat.lines().find_map(|l| l.strip_prefix(name)))
            .filter_map(|n| n.trim().parse::<u64>().ok())
            .sum();
        let here = max.saturating_sub(used.saturating_sub(cache));
        left = Some(left.map_or(here, |l: u64| l.min(here)));
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn control_group_with_less_left_than_the_machine_is_what_counts() {
        let meminfo = (
            "proc/meminfo",
            "MemTotal:   16000 kB\nMemAvailable:  8000 kB\n",
        );
        let root = tree(&[meminfo]);
        let memory = Memory::at(root.path()).unwrap();
        assert_eq!(memory.total_bytes, 16000 * 1024);
        assert_eq!(memory.available_bytes, 8000 * 1024);
        let root = tree(&[
            meminfo,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "5000\n"),
            ("sys/fs/cgroup/a/memory.current", "3000\n"),
            (
                "sys/fs/cgroup/a/memory.stat",
                "anon 5\ninactive_file 400\nactive_file 100\n",
            ),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "1\n"),
        ]);
        assert_eq!(Memory::at(root.path()).unwrap().available_bytes, 2500);
    }

    #[test]
    fn large_need_leaves_the_larger_of_8_gb_and_8_percent_and_a_small_one_at_most_a_quarter() {
        let memory = |total_bytes| Memory {
            total_bytes,
            available_bytes: 0,
        };
        let reserve = |total, need| memory(total).default_reserve_bytes(need);
        assert_eq!(reserve(16_000_000_000, 1 << 30), 8_000_000_000);
        assert_eq!(reserve(1_000_000_000_000, 1 << 40), 80_000_000_000);
        assert_eq!(reserve(4_000_000_000, 1 << 20), 1_000_000_000);
    }

    #[test]
    fn system_that_says_nothing_gives_nothing() {
        assert_eq!(Memory::at(tree(&[]).path()), None);
        assert_eq!(Memory::at(tree(&[("proc/meminfo", "x\n")]).path()), None);
    }
}
