//! Registered memory.

use crate::error::{RdmaError, os};
use crate::leak::leaked;
use crate::memory::StableMemory;
use crate::pd::Pd;
use crate::sys::bindings::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_READ, ibv_mr,
};
use crate::sys::{check, last_errno};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a device may do with a region; one thing each, so that no region is open to more than its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// READs of this machine land in it. Writes within one READ may be reordered where library, kernel and card offer
    /// that; its completion still comes after all of them.
    LandingLocalWrite,
    /// The other machine READs it; nobody writes to it.
    RemoteRead,
}

/// The name of a region for requests of this machine; never sent anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalKey(pub u32);

/// The name of a region for the other machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteKey(pub u32);

/// Bytes of all regions of this process: what the kernel holds against the limit on locked memory.
static REGISTERED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes that this process has registered now, each registration counted.
pub fn registered_bytes() -> u64 {
    REGISTERED_BYTES.load(Ordering::Relaxed)
}

/// A registered region. It keeps its memory alive; dropping it deregisters first and lets the memory go then. Where
/// deregistering fails, the memory is leaked, because a device may still use it.
pub struct Mr {
    raw: NonNull<ibv_mr>,
    addr: u64,
    bytes: usize,
    lkey: LocalKey,
    rkey: RemoteKey,
    // Field order is drop order: the domain, then the memory, both after `drop` has deregistered the region.
    pd: Arc<Pd>,
    memory: Arc<dyn StableMemory>,
}

// SAFETY: every verb may be called from any thread; the memory is Send and Sync itself.
unsafe impl Send for Mr {}
// SAFETY: as above; a shared Mr only tells its names.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `bytes` bytes at `offset` of a memory.
    ///
    /// # Errors
    ///
    /// [`RdmaError::MemoryLock`] has the limit on locked memory, the need and the line to change;
    /// [`RdmaError::NotRegistrable`] where the kernel refuses this kind of memory (EFAULT);
    /// [`RdmaError::RegionTooLarge`]: register several; [`RdmaError::RegionOutside`]; [`RdmaError::Register`].
    pub fn register(
        pd: &Arc<Pd>,
        memory: Arc<dyn StableMemory>,
        offset: usize,
        bytes: usize,
        access: Access,
    ) -> Result<Self, RdmaError> {
        let memory_bytes = memory.len_bytes();
        let inside = bytes > 0
            && offset
                .checked_add(bytes)
                .is_some_and(|end| end <= memory_bytes);
        if !inside {
            return Err(RdmaError::RegionOutside {
                offset,
                bytes,
                memory_bytes,
            });
        }
        let limit_bytes = pd.context().attributes().max_mr_bytes;
        if bytes as u64 > limit_bytes {
            return Err(RdmaError::RegionTooLarge {
                device: pd.context().name().to_owned(),
                bytes: bytes as u64,
                limit_bytes,
            });
        }
        let start = memory.base().wrapping_add(offset);
        let raw = call(pd, start, bytes, access)
            .map_err(|errno| refused(pd.context().name(), bytes as u64, errno))?;
        REGISTERED_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: the region is alive.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: the region is alive.
        let rkey = unsafe { (*raw.as_ptr()).rkey };
        Ok(Self {
            raw,
            addr: start.addr() as u64,
            bytes,
            lkey: LocalKey(lkey),
            rkey: RemoteKey(rkey),
            pd: Arc::clone(pd),
            memory,
        })
    }

    /// Address of its first byte, also for the other machine.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Count of its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its name for requests of this machine.
    pub fn lkey(&self) -> LocalKey {
        self.lkey
    }

    /// Its name for the other machine.
    pub fn rkey(&self) -> RemoteKey {
        self.rkey
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let context = self.pd.context();
        // SAFETY: the region is alive and deregistered once, here.
        let answer = unsafe { (context.functions().dereg_mr)(self.raw.as_ptr()) };
        match check(answer) {
            Ok(()) => {
                REGISTERED_BYTES.fetch_sub(self.bytes as u64, Ordering::Relaxed);
            }
            Err(errno) => {
                leaked(
                    context.name(),
                    &format!("a region of {} bytes", self.bytes),
                    errno,
                );
                // The device may go on using the pages, so they stay for ever.
                std::mem::forget(Arc::clone(&self.memory));
                std::mem::forget(Arc::clone(&self.pd));
            }
        }
    }
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mr")
            .field("device", &self.pd.context().name())
            .field("addr", &self.addr)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Registers memory that the caller checked to be inside a [`StableMemory`] and keeps alive while the region is.
fn call(pd: &Pd, start: *mut u8, bytes: usize, access: Access) -> Result<NonNull<ibv_mr>, i32> {
    let functions = pd.context().functions();
    let start: *mut c_void = start.cast();
    let flags = match access {
        Access::LandingLocalWrite => IBV_ACCESS_LOCAL_WRITE,
        Access::RemoteRead => IBV_ACCESS_REMOTE_READ,
    };
    if access == Access::LandingLocalWrite {
        if let Some(register) = functions.reg_mr_iova2 {
            let relaxed = flags | IBV_ACCESS_RELAXED_ORDERING;
            // SAFETY: the domain is alive; the memory is mapped (`StableMemory`) and stays so while the region is.
            let raw = unsafe { register(pd.as_ptr(), start, bytes, start.addr() as u64, relaxed) };
            if let Some(raw) = NonNull::new(raw) {
                return Ok(raw);
            }
            let errno = last_errno();
            if !matches!(errno, libc::EINVAL | libc::EOPNOTSUPP) {
                return Err(errno);
            }
            // The wish was what it did not like, or the call below says what else.
        }
    }
    // The flags are small.
    let flags = flags as c_int;
    // SAFETY: as above.
    let raw = unsafe { (functions.reg_mr)(pd.as_ptr(), start, bytes, flags) };
    NonNull::new(raw).ok_or_else(last_errno)
}

fn refused(device: &str, bytes: u64, errno: i32) -> RdmaError {
    let device = device.to_owned();
    let source = os(errno);
    match errno {
        libc::ENOMEM | libc::EPERM => RdmaError::MemoryLock {
            bytes,
            device,
            limit_bytes: expert_arena::memlock_limit_bytes(),
            need_bytes: registered_bytes() + bytes,
            source,
        },
        libc::EFAULT => RdmaError::NotRegistrable {
            bytes,
            device,
            source,
        },
        _ => RdmaError::Register {
            device,
            bytes,
            source,
        },
    }
}
