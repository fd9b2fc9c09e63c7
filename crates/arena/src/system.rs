//! What the system says about its memory: available bytes, huge page pools, NUMA nodes. Only reads files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where `/proc` and `/sys` are; tests point it at a directory of their own.
#[derive(Clone, Debug)]
pub(crate) struct System {
    root: PathBuf,
}

/// Bytes of memory in all and available, and where that was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryView {
    pub(crate) total_bytes: u64,
    pub(crate) available_bytes: u64,
    pub(crate) scope: String,
}

/// A pool of explicit huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HugePool {
    pub(crate) page_bytes: usize,
    /// Pages that are free and not promised to another mapping.
    pub(crate) free_pages: usize,
}

impl Default for System {
    fn default() -> Self {
        Self {
            root: PathBuf::from("/"),
        }
    }
}

impl System {
    pub(crate) fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// The path of /proc/meminfo, for error texts.
    pub(crate) fn meminfo_path(&self) -> PathBuf {
        self.root.join("proc/meminfo")
    }

    /// The tighter of the machine's memory and the limits of this process's control groups (cgroup v2).
    pub(crate) fn memory(&self) -> io::Result<MemoryView> {
        let text = fs::read_to_string(self.meminfo_path())?;
        let field = |name| {
            kib_field(&text, name).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, format!("no field {name}"))
            })
        };
        let mut view = MemoryView {
            total_bytes: field("MemTotal:")?,
            available_bytes: field("MemAvailable:")?,
            scope: "this machine".to_owned(),
        };
        for (group, max_bytes, available_bytes) in self.cgroup_limits() {
            view.total_bytes = view.total_bytes.min(max_bytes);
            if available_bytes < view.available_bytes {
                view.available_bytes = available_bytes;
                view.scope = format!("control group {} (memory.max {max_bytes})", group.display());
            }
        }
        Ok(view)
    }

    /// Every limit between this process's group and the root: path, memory.max, and what is left of it when the page
    /// cache of the group is given up.
    fn cgroup_limits(&self) -> Vec<(PathBuf, u64, u64)> {
        let mount = self.root.join("sys/fs/cgroup");
        let Ok(groups) = fs::read_to_string(self.root.join("proc/self/cgroup")) else {
            return Vec::new();
        };
        let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::")) else {
            return Vec::new();
        };
        let mut path = mount.join(group.trim().trim_start_matches('/'));
        let mut limits = Vec::new();
        while path.starts_with(&mount) {
            if let Some(max) = number_file(&path.join("memory.max")) {
                let current = number_file(&path.join("memory.current")).unwrap_or(0);
                let stat = fs::read_to_string(path.join("memory.stat")).unwrap_or_default();
                let cache = ["active_file", "inactive_file"]
                    .iter()
                    .filter_map(|name| word_field(&stat, name))
                    .sum::<u64>();
                let available = max.saturating_sub(current.saturating_sub(cache));
                limits.push((path.clone(), max, available));
            }
            if !path.pop() {
                break;
            }
        }
        limits
    }

    /// Pools of explicit huge pages, largest page first.
    pub(crate) fn huge_pools(&self) -> Vec<HugePool> {
        let dir = self.root.join("sys/kernel/mm/hugepages");
        let Ok(entries) = fs::read_dir(dir) else {
            return Vec::new();
        };
        let mut pools: Vec<HugePool> = entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name();
                let kib: usize = name
                    .to_str()?
                    .strip_prefix("hugepages-")?
                    .strip_suffix("kB")?
                    .parse()
                    .ok()?;
                let free = number_file(&entry.path().join("free_hugepages"))?;
                let promised = number_file(&entry.path().join("resv_hugepages")).unwrap_or(0);
                Some(HugePool {
                    page_bytes: kib.checked_mul(1024)?,
                    free_pages: usize::try_from(free.saturating_sub(promised)).ok()?,
                })
            })
            .filter(|pool| pool.page_bytes.is_power_of_two())
            .collect();
        pools.sort_by_key(|pool| std::cmp::Reverse(pool.page_bytes));
        pools
    }

    /// Bytes of a transparent huge page, if the kernel gives them to those who ask.
    pub(crate) fn transparent_huge_page_bytes(&self) -> Option<usize> {
        let dir = self.root.join("sys/kernel/mm/transparent_hugepage");
        let enabled = fs::read_to_string(dir.join("enabled")).ok()?;
        if enabled.contains("[never]") {
            return None;
        }
        let bytes = number_file(&dir.join("hpage_pmd_size"))?;
        usize::try_from(bytes)
            .ok()
            .filter(|bytes| bytes.is_power_of_two())
    }

    /// Bytes of transparent huge pages inside `start..start + bytes` of this process.
    pub(crate) fn transparent_huge_bytes(&self, start: usize, bytes: usize) -> usize {
        let smaps = fs::read_to_string(self.root.join("proc/self/smaps")).unwrap_or_default();
        huge_bytes_in_smaps(&smaps, start, bytes)
    }

    /// The list of NUMA nodes in the kernel's notation, such as `0-1`.
    pub(crate) fn numa_online(&self) -> String {
        fs::read_to_string(self.root.join("sys/devices/system/node/online"))
            .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
    }

    /// Bytes of a NUMA node that are free or hold page cache that can be given up; `None` if the node does not say.
    pub(crate) fn numa_available_bytes(&self, node: u32) -> Option<u64> {
        let path = format!("sys/devices/system/node/node{node}/meminfo");
        let text = fs::read_to_string(self.root.join(path)).ok()?;
        let free = kib_field(&text, "MemFree:")?;
        let active = kib_field(&text, "Active(file):").unwrap_or(0);
        let inactive = kib_field(&text, "Inactive(file):").unwrap_or(0);
        Some(free + active + inactive)
    }
}

/// The size of a page as the system gives it: 4, 16 or 64 KiB.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: sysconf reads a constant of the process and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("every Linux system has a page size")
}

/// The value in bytes of a line `... NAME   123 kB`.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text
        .lines()
        .find(|line| line.split_whitespace().any(|word| word == name))?;
    let mut words = line.split_whitespace().skip_while(|word| *word != name);
    words.nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The value of a line `NAME 123`.
fn word_field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

fn number_file(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Sums AnonHugePages over the mappings that overlap the range, clamped to each overlap.
fn huge_bytes_in_smaps(smaps: &str, start: usize, bytes: usize) -> usize {
    let end = start.saturating_add(bytes);
    let mut overlap = 0;
    let mut sum: usize = 0;
    for line in smaps.lines() {
        let head = line.split_whitespace().next().unwrap_or("");
        if let Some((from, to)) = address_range(head) {
            overlap = to.min(end).saturating_sub(from.max(start));
        } else if head == "AnonHugePages:" && overlap > 0 {
            let huge = kib_field(line, "AnonHugePages:").unwrap_or(0);
            sum += usize::try_from(huge).unwrap_or(usize::MAX).min(overlap);
        }
    }
    sum
}

fn address_range(word: &str) -> Option<(usize, usize)> {
    let (from, to) = word.split_once('-')?;
    let from = usize::from_str_radix(from, 16).ok()?;
    let to = usize::from_str_radix(to, 16).ok()?;
    Some((from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake_root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: &str = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    800 kB\n";

    #[test]
    fn without_control_groups_the_machine_is_the_limit() {
        let root = fake_root(&[("proc/meminfo", MEMINFO)]);
        let view = System::at(root.path()).memory().unwrap();
        assert_eq!(view.total_bytes, 1000 * 1024);
        assert_eq!(view.available_bytes, 800 * 1024);
        assert_eq!(view.scope, "this machine");
    }

    #[test]
    fn tightest_control_group_above_the_process_limits_it() {
        let root = fake_root(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "1:cpu:/x\n0::/pod/app\n"),
            ("sys/fs/cgroup/pod/app/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/memory.max", "500000\n"),
            ("sys/fs/cgroup/pod/memory.current", "400000\n"),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "anon 1\nactive_file 30000\ninactive_file 20000\nfile 70000\n",
            ),
        ]);
        let view = System::at(root.path()).memory().unwrap();
        assert_eq!(view.total_bytes, 500_000);
        // 400000 are charged, of which 50000 are page cache that can go.
        assert_eq!(view.available_bytes, 150_000);
        assert!(view.scope.contains("pod"), "{}", view.scope);
    }

    #[test]
    fn unlimited_control_group_changes_nothing() {
        let root = fake_root(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
        ]);
        let view = System::at(root.path()).memory().unwrap();
        assert_eq!(view.available_bytes, 800 * 1024);
    }

    #[test]
    fn missing_field_is_an_error_and_not_zero() {
        let root = fake_root(&[("proc/meminfo", "MemTotal: 1000 kB\n")]);
        let error = System::at(root.path()).memory().unwrap_err();
        assert!(error.to_string().contains("MemAvailable"), "{error}");
    }

    #[test]
    fn huge_pools_come_largest_first_without_promised_pages() {
        let base = "sys/kernel/mm/hugepages";
        let file = |size: &str, name: &str| format!("{base}/hugepages-{size}/{name}");
        let root = fake_root(&[
            (&file("2048kB", "free_hugepages"), "10\n"),
            (&file("2048kB", "resv_hugepages"), "4\n"),
            (&file("1048576kB", "free_hugepages"), "1\n"),
            (&file("64kB", "free_hugepages"), "0\n"),
        ]);
        let pools = System::at(root.path()).huge_pools();
        let expected =
            [(1 << 30, 1), (2 << 20, 6), (64 << 10, 0)].map(|(page_bytes, free_pages)| HugePool {
                page_bytes,
                free_pages,
            });
        assert_eq!(pools, expected);
    }

    #[test]
    fn transparent_huge_pages_that_are_off_are_not_offered() {
        let dir = "sys/kernel/mm/transparent_hugepage";
        let size = format!("{dir}/hpage_pmd_size");
        let enabled = format!("{dir}/enabled");
        let off = fake_root(&[(&size, "2097152\n"), (&enabled, "always madvise [never]\n")]);
        assert_eq!(System::at(off.path()).transparent_huge_page_bytes(), None);
        let on = fake_root(&[(&size, "2097152\n"), (&enabled, "always [madvise] never\n")]);
        let bytes = System::at(on.path()).transparent_huge_page_bytes();
        assert_eq!(bytes, Some(2 << 20));
    }

    #[test]
    fn smaps_counts_only_mappings_in_the_range() {
        let smaps = "1000-3000 rw-p 0 00:00 0\nAnonHugePages:    100 kB\n\
                     5000-9000 rw-p 0 00:00 0 [heap]\nRss: 4 kB\nAnonHugePages:    8 kB\n";
        assert_eq!(huge_bytes_in_smaps(smaps, 0x5000, 0x4000), 8192);
        // A mapping that merged with ours counts at most by its overlap.
        assert_eq!(huge_bytes_in_smaps(smaps, 0x2000, 0x1000), 0x1000);
        assert_eq!(huge_bytes_in_smaps(smaps, 0x9000, 0x1000), 0);
    }

    #[test]
    fn numa_node_counts_free_memory_and_page_cache() {
        let root = fake_root(&[(
            "sys/devices/system/node/node1/meminfo",
            "Node 1 MemTotal: 90 kB\nNode 1 MemFree: 10 kB\nNode 1 Active(file): 3 kB\n\
             Node 1 Inactive(file): 4 kB\n",
        )]);
        let system = System::at(root.path());
        assert_eq!(system.numa_available_bytes(1), Some(17 * 1024));
        assert_eq!(system.numa_available_bytes(2), None);
    }
}
