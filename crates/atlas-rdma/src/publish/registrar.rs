//! What registers memory: a protection domain, or a stand-in for one.

use crate::RdmaError;
use crate::memory::StableMemory;
use crate::mr::{Access, Mr, registered_bytes};
use crate::pd::Pd;
use expert_arena::{MEMLOCK_ADVICE, memlock_limit_bytes};
use std::error::Error;
use std::fs;
use std::sync::Arc;

/// Bit of CAP_IPC_LOCK in the sets of /proc/self/status (linux/capability.h).
const CAP_IPC_LOCK: u32 = 14;

/// One rail's way to register memory for reading by others.
pub trait Registrar: Sync {
    /// A registered region.
    type Region: Registered;

    /// Name of the rail, for people.
    fn name(&self) -> &str;

    /// Most bytes of one region.
    fn region_bytes_max(&self) -> u64;

    /// Most regions; 0 where that is not known.
    fn regions_max(&self) -> u64;

    /// Says before anything is registered whether `total_bytes`, on all rails, cannot work.
    ///
    /// # Errors
    ///
    /// Why it cannot.
    fn preflight(&self, total_bytes: u64) -> Result<(), RegisterRefusal>;

    /// Registers `bytes` bytes at `offset` of a memory, for reading by others alone.
    ///
    /// # Errors
    ///
    /// Why not, and whether other memory would do.
    fn register(
        &self,
        memory: Arc<dyn StableMemory>,
        offset: usize,
        bytes: usize,
    ) -> Result<Self::Region, RegisterRefusal>;
}

/// A region that is readable until it is dropped.
pub trait Registered: Send + Sync {
    /// Address of its first byte, for the other machine.
    fn addr(&self) -> u64;
    /// Its key, for the other machine.
    fn rkey(&self) -> u32;
}

/// A registration that was refused.
#[derive(Debug)]
pub struct RegisterRefusal {
    /// Whether it is this kind of memory that cannot be registered: a copy would do.
    pub wrong_memory: bool,
    /// The reason.
    pub source: Box<dyn Error + Send + Sync>,
}

impl Registered for Mr {
    fn addr(&self) -> u64 {
        Self::addr(self)
    }

    fn rkey(&self) -> u32 {
        Self::rkey(self).0
    }
}

impl Registrar for Arc<Pd> {
    type Region = Mr;

    fn name(&self) -> &str {
        self.context().name()
    }

    fn region_bytes_max(&self) -> u64 {
        self.context().attributes().max_mr_bytes
    }

    fn regions_max(&self) -> u64 {
        u64::from(self.context().attributes().max_mr)
    }

    fn preflight(&self, total_bytes: u64) -> Result<(), RegisterRefusal> {
        let Some(limit_bytes) = memlock_limit_bytes() else {
            return Ok(());
        };
        let need_bytes = registered_bytes().saturating_add(total_bytes);
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        if need_bytes <= limit_bytes || is_exempt(&status) {
            return Ok(());
        }
        Err(RegisterRefusal {
            wrong_memory: false,
            source: format!(
                "locked-memory limit is {limit_bytes} bytes, need {need_bytes} (every registration on every rail \
                 counts); raise it with {MEMLOCK_ADVICE}"
            )
            .into(),
        })
    }

    fn register(
        &self,
        memory: Arc<dyn StableMemory>,
        offset: usize,
        bytes: usize,
    ) -> Result<Mr, RegisterRefusal> {
        Mr::register(self, memory, offset, bytes, Access::RemoteRead).map_err(|error| {
            // EOPNOTSUPP is how files on persistent memory (DAX) are refused.
            let wrong_memory = matches!(error, RdmaError::NotRegistrable { .. })
                || error.errno() == Some(libc::EOPNOTSUPP);
            RegisterRefusal {
                wrong_memory,
                source: Box::new(error),
            }
        })
    }
}

/// Whether the limit on locked memory does not hold for this process, by its effective capabilities. Those of a user
/// namespace do not count for the kernel; then it is the registration that fails.
fn is_exempt(status: &str) -> bool {
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    // Without an answer nothing is refused ahead of time.
    set.is_none_or(|set| set >> CAP_IPC_LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::is_exempt;

    #[test]
    fn capability_to_lock_memory_lifts_the_limit() {
        assert!(is_exempt("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(is_exempt("CapEff:\t0000000000004000\n"));
        assert!(!is_exempt("CapEff:\t0000000000000000\n"));
        assert!(!is_exempt("CapEff:\t000001ffffffbfff\n"));
        assert!(is_exempt(""));
    }
}
