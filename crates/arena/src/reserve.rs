//! How much memory must stay free, and whether an arena respects it.

use crate::error::ArenaError;
use crate::system::System;
use std::path::Path;

/// Bytes that stay free by default on a large machine. Machines whose memory is shared with a GPU freeze when all of
/// it is locked; 8 GB is what a desktop and an inference engine's host side were seen to need.
const RESERVE_BYTES: u64 = 8_000_000_000;

/// The part of the memory that stays free if that is more.
const RESERVE_PERCENT: u64 = 8;

/// Below this size an arena counts as small: it cannot be what freezes a machine.
const SMALL_ARENA_BYTES: u64 = 1 << 30;

/// The part of the memory that stays free at most, for small arenas: laptops and CI have less than 8 GB in all.
const SMALL_RESERVE_PERCENT: u64 = 25;

/// What the system says of its memory, as far as this process's control groups let it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SystemMemory {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that can be had without swapping.
    pub available_bytes: u64,
}

impl SystemMemory {
    /// The memory as it is now; `None` where the system does not say.
    pub fn now() -> Option<Self> {
        Self::below(Path::new("/"))
    }

    /// The same, from the `proc` and `sys` below a folder: for tests that bring their own.
    pub fn below(root: &Path) -> Option<Self> {
        let view = System::at(root).memory().ok()?;
        Some(Self {
            total_bytes: view.total_bytes,
            available_bytes: view.available_bytes,
        })
    }

    /// Bytes that whoever pins `need_bytes` leaves free where nobody named a reserve: the larger of 8 GB and 8 %, for
    /// less than 1 GiB at most a quarter of the memory.
    pub fn default_reserve_bytes(self, need_bytes: u64) -> u64 {
        default_reserve(need_bytes, self.total_bytes)
    }
}

/// Checks that the arena leaves the reserve free; returns the reserve.
pub(crate) fn check_reserve(
    need_bytes: usize,
    explicit: Option<u64>,
    system: &System,
) -> Result<u64, ArenaError> {
    let need_bytes = need_bytes as u64;
    let view = match system.memory() {
        Ok(view) => view,
        // Whoever asked for no reserve can do without the measurement.
        Err(_) if explicit == Some(0) => return Ok(0),
        Err(source) => {
            let path = system.meminfo_path().display().to_string();
            return Err(ArenaError::MemoryUnknown { path, source });
        }
    };
    let reserve_bytes = explicit.unwrap_or_else(|| default_reserve(need_bytes, view.total_bytes));
    let left = view.available_bytes.checked_sub(need_bytes);
    if left.is_some_and(|left| left >= reserve_bytes) {
        return Ok(reserve_bytes);
    }
    Err(ArenaError::NotEnoughMemory {
        need_bytes,
        available_bytes: view.available_bytes,
        reserve_bytes,
        scope: view.scope,
    })
}

fn default_reserve(need_bytes: u64, total_bytes: u64) -> u64 {
    let percent = |percent| total_bytes / 100 * percent;
    let reserve = RESERVE_BYTES.max(percent(RESERVE_PERCENT));
    if need_bytes < SMALL_ARENA_BYTES {
        reserve.min(percent(SMALL_RESERVE_PERCENT))
    } else {
        reserve
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_need_leaves_the_larger_of_8_gb_and_8_percent_and_a_small_one_at_most_a_quarter() {
        let memory = |total_bytes| SystemMemory {
            total_bytes,
            available_bytes: 0,
        };
        let reserve = |total, need| memory(total).default_reserve_bytes(need);
        assert_eq!(reserve(16_000_000_000, 1 << 30), 8_000_000_000);
        assert_eq!(reserve(1_000_000_000_000, 1 << 40), 80_000_000_000);
        assert_eq!(reserve(4_000_000_000, 1 << 20), 1_000_000_000);
    }

    const GIB: u64 = 1 << 30;

    #[test]
    fn large_arena_leaves_the_larger_of_8_gb_and_8_percent() {
        assert_eq!(default_reserve(GIB, 16 * GIB), 8_000_000_000);
        assert_eq!(default_reserve(GIB, 1000 * GIB), 10 * GIB * 8);
    }

    #[test]
    fn small_arena_leaves_at_most_a_quarter() {
        assert_eq!(default_reserve(GIB - 1, 4_000_000_000), 1_000_000_000);
        assert_eq!(default_reserve(GIB - 1, 100_000_000_000), 8_000_000_000);
    }

    fn system(available_kib: u64) -> (tempfile::TempDir, System) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("proc")).unwrap();
        let text = format!("MemTotal: 16000000 kB\nMemAvailable: {available_kib} kB\n");
        std::fs::write(root.path().join("proc/meminfo"), text).unwrap();
        let system = System::at(root.path());
        (root, system)
    }

    #[test]
    fn reserve_is_respected_to_the_byte() {
        let (_root, system) = system(1000);
        let available = 1000 * 1024;
        assert_eq!(
            check_reserve(1024, Some(available - 1024), &system).unwrap(),
            available - 1024
        );
        let error = check_reserve(1025, Some(available - 1024), &system).unwrap_err();
        let text = error.to_string();
        for value in [
            "1025",
            "1024000",
            "1022976",
            "this machine",
            "lower the reserve",
        ] {
            assert!(text.contains(value), "{value} is missing in: {text}");
        }
    }

    #[test]
    fn arena_larger_than_available_is_refused_even_without_reserve() {
        let (_root, system) = system(1);
        assert!(check_reserve(1025, Some(0), &system).is_err());
        assert_eq!(check_reserve(1024, Some(0), &system).unwrap(), 0);
    }

    #[test]
    fn unreadable_meminfo_is_an_error_unless_no_reserve_is_wanted() {
        let root = tempfile::tempdir().unwrap();
        let system = System::at(root.path());
        let error = check_reserve(1, None, &system).unwrap_err();
        assert!(error.to_string().contains("proc/meminfo"), "{error}");
        assert_eq!(check_reserve(1, Some(0), &system).unwrap(), 0);
    }
}
