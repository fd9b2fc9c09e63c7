//! Anonymous memory for copies: huge pages where there are any, and never more than there is.

use super::{Mapping, MappingError, page_bytes};
use rustix::mm::{Advice, MapFlags};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A pool of huge pages is passed over when rounding up to its pages would waste more than this part of the copy.
const HUGE_WASTE_DIVISOR: usize = 8;

/// What pages a copy is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyPages {
    /// Huge pages from the pool that an administrator set aside.
    Explicit {
        /// Bytes of one page.
        page_bytes: usize,
    },
    /// Huge pages were asked for; the kernel gives as many as it finds.
    Transparent {
        /// Bytes of one huge page.
        page_bytes: usize,
    },
    /// Pages of the ordinary size.
    Plain,
}

impl fmt::Display for CopyPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Explicit { page_bytes } => write!(f, "huge pages of {} KiB", page_bytes >> 10),
            Self::Transparent { page_bytes } => {
                write!(f, "transparent huge pages of {} KiB", page_bytes >> 10)
            }
            Self::Plain => write!(f, "pages of {} KiB", page_bytes() >> 10),
        }
    }
}

/// Bytes that copies could take now, and what limits them: available memory and the limits of this process's control
/// groups, with the huge pages that are set aside on top.
///
/// # Errors
///
/// Whatever reading `/proc/meminfo` gives.
pub fn copy_room_bytes() -> io::Result<(u64, String)> {
    let system = System::default();
    let (available_bytes, scope) = system.available()?;
    let huge = system.huge_pools().into_iter();
    let huge_bytes = huge.fold(0u64, |sum, pool| {
        sum.saturating_add((pool.page_bytes as u64).saturating_mul(pool.free_pages))
    });
    Ok((available_bytes.saturating_add(huge_bytes), scope))
}

/// Maps `bytes` of anonymous memory, a multiple of the page size, that holds zeros.
pub(super) fn map(label: &str, bytes: usize) -> Result<(Mapping, CopyPages), MappingError> {
    let system = System::default();
    for pool in system.huge_pools() {
        if let Some(mapping) = map_explicit(bytes, pool) {
            let page_bytes = pool.page_bytes;
            return Ok((mapping, CopyPages::Explicit { page_bytes }));
        }
    }
    // The kernel promises more memory than it has and kills somebody later: ask before.
    if let Ok((available_bytes, scope)) = system.available() {
        if bytes as u64 > available_bytes {
            return Err(MappingError::NoMemory {
                label: label.to_owned(),
                need_bytes: bytes as u64,
                available_bytes,
                scope,
            });
        }
    }
    let refused = |source| MappingError::Map {
        label: label.to_owned(),
        offset: 0,
        bytes: bytes as u64,
        mode: super::MappingMode::Copy,
        source,
    };
    if let Some(huge_bytes) = system.transparent_bytes().filter(|huge| bytes >= *huge) {
        let mapping = aligned(bytes, huge_bytes).map_err(refused)?;
        if mapping.advise(Advice::LinuxHugepage) {
            let page_bytes = huge_bytes;
            return Ok((mapping, CopyPages::Transparent { page_bytes }));
        }
        return Ok((mapping, CopyPages::Plain));
    }
    let mapping = Mapping::anonymous(bytes, MapFlags::empty()).map_err(refused)?;
    Ok((mapping, CopyPages::Plain))
}

/// Pages of a pool, all of them promised to this mapping, or nothing. Only the kernel touches them before they are
/// registered, so one that is missing after all (a limit of the control group) is an error of `pread`, not a signal.
fn map_explicit(bytes: usize, pool: HugePool) -> Option<Mapping> {
    let rounded = bytes.checked_next_multiple_of(pool.page_bytes)?;
    let wasteful = rounded - bytes > bytes / HUGE_WASTE_DIVISOR;
    if wasteful || (rounded / pool.page_bytes) as u64 > pool.free_pages {
        return None;
    }
    // The size is encoded as its logarithm, above MAP_HUGE_SHIFT (linux/mman.h).
    let size = pool.page_bytes.trailing_zeros() << 26;
    let flags = MapFlags::HUGETLB | MapFlags::from_bits_retain(size);
    Mapping::anonymous(rounded, flags).ok()
}

/// A mapping that starts at a multiple of `align`, a power of two.
fn aligned(bytes: usize, align: usize) -> io::Result<Mapping> {
    let slack = align.saturating_sub(page_bytes());
    let room = bytes.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
    let whole = Mapping::anonymous(room, MapFlags::empty())?;
    let addr = whole.base.as_ptr().addr();
    let before = addr.next_multiple_of(align) - addr;
    // The slack covers the way to the next multiple, so the cut stays inside.
    let (head, rest) = whole.split_at(before);
    let (kept, tail) = rest.split_at(bytes);
    drop((head, tail));
    Ok(kept)
}

/// A pool of explicit huge pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HugePool {
    page_bytes: usize,
    /// Pages that are free and not promised to another mapping.
    free_pages: u64,
}

/// Where `/proc` and `/sys` are; tests bring their own.
struct System {
    root: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self { root: "/".into() }
    }
}

impl System {
    /// Bytes of memory that can be had without swapping, and what limits them.
    fn available(&self) -> io::Result<(u64, String)> {
        let text = fs::read_to_string(self.root.join("proc/meminfo"))?;
        let field = text
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"));
        let kib = field.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "no field MemAvailable");
        let mut room = (
            kib.ok_or_else(missing)?.saturating_mul(1024),
            "MemAvailable of this machine".to_owned(),
        );
        for (group, left_bytes) in self.group_limits() {
            if left_bytes < room.0 {
                room = (left_bytes, format!("memory.max of control group {group}"));
            }
        }
        Ok(room)
    }

    /// What the control groups (version 2) of this process leave it, page cache that can go not counted.
    fn group_limits(&self) -> Vec<(String, u64)> {
        let mount = self.root.join("sys/fs/cgroup");
        let groups = fs::read_to_string(self.root.join("proc/self/cgroup")).unwrap_or_default();
        let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
            return Vec::new();
        };
        let own = mount.join(group.trim());
        let above = own.ancestors().take_while(|dir| dir.starts_with(&mount));
        let left = |dir: &Path| {
            let max = number(&dir.join("memory.max"))?;
            let used = number(&dir.join("memory.current")).unwrap_or(0);
            let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
            let cache = stat.lines().filter_map(|line| {
                let (name, value) = line.split_once(' ')?;
                matches!(name, "active_file" | "inactive_file")
                    .then(|| value.parse::<u64>().ok())?
            });
            let fixed = used.saturating_sub(cache.sum());
            Some((dir.display().to_string(), max.saturating_sub(fixed)))
        };
        above.filter_map(left).collect()
    }

    /// Pools of explicit huge pages, the largest page first.
    fn huge_pools(&self) -> Vec<HugePool> {
        let entries = fs::read_dir(self.root.join("sys/kernel/mm/hugepages"));
        let pool = |entry: fs::DirEntry| {
            let name = entry.file_name();
            let kib = name.to_str()?.strip_prefix("hugepages-")?;
            let page_bytes = kib.strip_suffix("kB")?.parse::<usize>().ok()?;
            let free = number(&entry.path().join("free_hugepages"))?;
            let promised = number(&entry.path().join("resv_hugepages")).unwrap_or(0);
            Some(HugePool {
                page_bytes: page_bytes.checked_mul(1024)?,
                free_pages: free.saturating_sub(promised),
            })
        };
        let found = entries.into_iter().flatten().flatten().filter_map(pool);
        let mut pools: Vec<HugePool> = found.filter(|p| p.page_bytes.is_power_of_two()).collect();
        pools.sort_by_key(|pool| std::cmp::Reverse(pool.page_bytes));
        pools
    }

    /// Bytes of a transparent huge page, where the kernel gives them to those who ask.
    fn transparent_bytes(&self) -> Option<usize> {
        let dir = self.root.join("sys/kernel/mm/transparent_hugepage");
        let enabled = fs::read_to_string(dir.join("enabled")).ok()?;
        let bytes = usize::try_from(number(&dir.join("hpage_pmd_size"))?).ok()?;
        let offered = !enabled.contains("[never]") && bytes.is_power_of_two();
        offered.then_some(bytes)
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let system = System {
            root: root.path().to_owned(),
        };
        (root, system)
    }

    #[test]
    fn tightest_control_group_limits_what_is_available() {
        let (_root, system) = tree(&[
            (
                "proc/meminfo",
                "MemTotal: 9000 kB\nMemAvailable:   800 kB\n",
            ),
            ("proc/self/cgroup", "1:cpu:/x\n0::/pod/app\n"),
            ("sys/fs/cgroup/pod/app/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/memory.max", "500000\n"),
            ("sys/fs/cgroup/pod/memory.current", "400000\n"),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "anon 1\nactive_file 30000\ninactive_file 20000\nfile 70000\n",
            ),
        ]);
        let (bytes, scope) = system.available().unwrap();
        // 400000 are charged, of which 50000 can go.
        assert_eq!(bytes, 150_000);
        assert!(scope.ends_with("/pod"), "{scope}");
    }

    #[test]
    fn without_control_groups_the_machine_is_the_limit_and_a_missing_field_an_error() {
        let (_root, system) = tree(&[("proc/meminfo", "MemAvailable: 800 kB\n")]);
        assert_eq!(system.available().unwrap().0, 800 * 1024);
        let (_root, system) = tree(&[("proc/meminfo", "MemTotal: 800 kB\n")]);
        let error = system.available().unwrap_err().to_string();
        assert!(error.contains("MemAvailable"), "{error}");
    }

    #[test]
    fn huge_pools_come_largest_first_without_promised_pages() {
        let dir = "sys/kernel/mm/hugepages";
        let (_root, system) = tree(&[
            (&format!("{dir}/hugepages-2048kB/free_hugepages"), "10\n"),
            (&format!("{dir}/hugepages-2048kB/resv_hugepages"), "4\n"),
            (&format!("{dir}/hugepages-1048576kB/free_hugepages"), "1\n"),
        ]);
        let pools: Vec<(usize, u64)> = system
            .huge_pools()
            .iter()
            .map(|pool| (pool.page_bytes, pool.free_pages))
            .collect();
        assert_eq!(pools, [(1 << 30, 1), (2 << 20, 6)]);
    }

    #[test]
    fn pool_without_enough_pages_or_with_too_much_waste_is_passed_over() {
        let pool = |page_bytes, free_pages| HugePool {
            page_bytes,
            free_pages,
        };
        assert!(map_explicit(64 << 20, pool(2 << 20, 31)).is_none());
        assert!(map_explicit(64 << 20, pool(1 << 30, 5)).is_none());
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_need_and_room() {
        let error = map("expert weights", 1 << 46).unwrap_err();
        let MappingError::NoMemory { need_bytes, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(need_bytes, 1 << 46);
        let text = error.to_string();
        assert!(
            text.contains("expert weights") && text.contains("70368744177664"),
            "{text}"
        );
    }

    #[test]
    fn aligned_mapping_is_aligned_and_as_long_as_asked() {
        let mapping = aligned(16 * page_bytes(), 4 << 20).unwrap();
        assert_eq!(mapping.base.as_ptr().addr() % (4 << 20), 0);
        assert_eq!(mapping.bytes, 16 * page_bytes());
    }
}
