//! What can go wrong, by whose move it is next.

use crate::path::Step;
use expert_arena::MEMLOCK_ADVICE;
use std::fmt;
use std::io;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    // The machine cannot do it yet: install, load or allow something.
    /// The library is missing or too old.
    #[error(
        "libibverbs.so.1 cannot be used: {reason}; install it with 'apt install libibverbs1 ibverbs-providers' or \
         'dnf install libibverbs'"
    )]
    NoLibrary {
        /// What the loader says.
        reason: String,
    },
    /// The kernel offers no verbs, or this container does not see them.
    #[error(
        "the kernel offers no RDMA here: {reason}; load the modules with 'modprobe ib_uverbs' and the driver of the \
         card (mlx5_ib, bnxt_re, irdma, … or rdma_rxe for soft-RoCE); in a container, pass the devices with \
         '--device=/dev/infiniband'"
    )]
    NoKernel {
        /// What is missing.
        reason: String,
    },
    /// Library and kernel are there, and no device is.
    #[error(
        "there is no RDMA device: load the driver of the card (for example 'modprobe mlx5_ib'), or make a soft-RoCE \
         device with 'modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0'"
    )]
    NoDevice,
    /// The kernel has devices, and the library has no part for any of them.
    #[error(
        "the kernel has the RDMA devices {devices}, but libibverbs has no provider for them; install them with \
         'apt install ibverbs-providers' or 'dnf install libibverbs'"
    )]
    NoProvider {
        /// Their names.
        devices: String,
    },
    /// The device exists, but this process may not open it.
    #[error(
        "opening RDMA device {device} failed: no access to {path}: {source}; allow this user to read and write it \
         (group or udev rule), or in a container pass '--device=/dev/infiniband'"
    )]
    Permission {
        /// Name of the device.
        device: String,
        /// The file that cannot be opened.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
    /// More memory than this process may lock.
    #[error("{}", LockText(.bytes, .device, .limit_bytes, .need_bytes, .source))]
    MemoryLock {
        /// Bytes of the region.
        bytes: u64,
        /// Name of the device.
        device: String,
        /// `RLIMIT_MEMLOCK` now; `None` if there is no limit.
        limit_bytes: Option<u64>,
        /// Bytes that this process has registered, this region included.
        need_bytes: u64,
        /// The system's reason.
        source: io::Error,
    },

    // What was asked for does not exist or does not fit: change the call or the setting.
    /// No device of this name.
    #[error("there is no RDMA device {name:?}; present are: {present}")]
    UnknownDevice {
        /// The name that was asked for.
        name: String,
        /// The devices that exist, as a list.
        present: String,
    },
    /// No such port.
    #[error("RDMA device {device} has no port {port}; its ports are 1 to {ports}")]
    UnknownPort {
        /// Name of the device.
        device: String,
        /// The port that was asked for.
        port: u8,
        /// Count of its ports.
        ports: u8,
    },
    /// A device without reliable connections with one-sided READs as this crate uses them.
    #[error(
        "RDMA device {device} cannot be used: {reason}; use an InfiniBand or RoCE device, or plain TCP"
    )]
    UnsupportedTransport {
        /// Name of the device.
        device: String,
        /// What it is or lacks.
        reason: String,
    },
    /// More than the device can do.
    #[error(
        "{what} of {asked} was asked for on RDMA device {device}, its limit is {limit}; ask for less"
    )]
    LimitExceeded {
        /// Name of the device.
        device: String,
        /// What of.
        what: &'static str,
        /// Asked for.
        asked: u64,
        /// The limit.
        limit: u64,
    },
    /// A region larger than the device takes.
    #[error(
        "a region of {bytes} bytes was asked for on RDMA device {device}, its largest is {limit_bytes} bytes; register \
         several smaller ones"
    )]
    RegionTooLarge {
        /// Name of the device.
        device: String,
        /// Bytes asked for.
        bytes: u64,
        /// The device's limit.
        limit_bytes: u64,
    },
    /// A region that is empty or not inside its memory.
    #[error(
        "a region of {bytes} bytes at {offset} does not lie inside memory of {memory_bytes} bytes; correct the call"
    )]
    RegionOutside {
        /// First byte.
        offset: usize,
        /// Bytes asked for.
        bytes: usize,
        /// Bytes of the memory.
        memory_bytes: usize,
    },
    /// Memory of a kind that the kernel does not register, such as a read-only file mapping before Linux 6.2.
    #[error(
        "{bytes} bytes cannot be registered on RDMA device {device}: {source}; this kernel does not pin memory of this \
         kind for the access asked for: copy it into anonymous memory, or map it writable"
    )]
    NotRegistrable {
        /// Bytes of the region.
        bytes: u64,
        /// Name of the device.
        device: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A path or option that makes no sense.
    #[error("{what} is {value}; {next}")]
    Invalid {
        /// What is wrong.
        what: &'static str,
        /// Its value.
        value: String,
        /// What to do.
        next: &'static str,
    },

    // A call to the library failed.
    /// A device did not open, for another reason than permissions.
    #[error("opening RDMA device {device} failed: {source}; 'dmesg' may say why")]
    Open {
        /// Name of the device.
        device: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A question was not answered.
    #[error(
        "asking RDMA device {device} for {what} failed: {source}; is the device being removed?"
    )]
    Query {
        /// Name of the device.
        device: String,
        /// What was asked for.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The first READ on a new connection did not come back with its byte.
    #[error(
        "a READ to test the path failed on RDMA device {device}: {why}; can this port reach the other one?"
    )]
    Probe {
        /// Name of the device.
        device: String,
        /// How it ended.
        why: String,
    },
    /// An object was not made.
    #[error(
        "creating a {what} on RDMA device {device} failed: {source}; asked for {detail}; 'rdma resource' shows what \
         is in use"
    )]
    Create {
        /// Name of the device.
        device: String,
        /// Which kind of object.
        what: &'static str,
        /// What was asked for, and the device's limits.
        detail: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A registration failed for another reason than the limit on locked memory.
    #[error(
        "registering {bytes} bytes on RDMA device {device} failed: {source}; 'rdma resource' shows what is in use"
    )]
    Register {
        /// Name of the device.
        device: String,
        /// Bytes of the region.
        bytes: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// A queue pair did not go to its next state.
    #[error(
        "queue pair {qpn} of RDMA device {device} did not go to {step}: {source}; {why}; sent were {sent}"
    )]
    Transition {
        /// Name of the device.
        device: String,
        /// Its number.
        qpn: u32,
        /// The step.
        step: Step,
        /// Which attribute exceeds which limit, as far as can be told.
        why: String,
        /// Every attribute that was sent.
        sent: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Waiting for or reading an event failed.
    #[error(
        "waiting for {what} of RDMA device {device} failed: {source}; is the device being removed?"
    )]
    Wait {
        /// Name of the device.
        device: String,
        /// Which events.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

impl RdmaError {
    /// The system's error number, where a call failed.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Permission { source, .. }
            | Self::MemoryLock { source, .. }
            | Self::NotRegistrable { source, .. }
            | Self::Open { source, .. }
            | Self::Query { source, .. }
            | Self::Create { source, .. }
            | Self::Register { source, .. }
            | Self::Transition { source, .. }
            | Self::Wait { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Whether the same call may work a little later without anybody changing a setting: the device was busy or out
    /// of something, or the other side was not reachable yet.
    pub fn is_retryable(&self) -> bool {
        match self {
            // Neighbour resolution and a port that is just coming up end this way.
            Self::Transition { source, .. } => matches!(
                source.raw_os_error(),
                Some(
                    libc::EAGAIN
                        | libc::EBUSY
                        | libc::EINTR
                        | libc::ENOMEM
                        | libc::ETIMEDOUT
                        | libc::EHOSTUNREACH
                        | libc::ENETUNREACH
                )
            ),
            Self::Probe { .. } => true,
            Self::Open { .. }
            | Self::Query { .. }
            | Self::Create { .. }
            | Self::Register { .. }
            | Self::Wait { .. } => matches!(
                self.errno(),
                Some(libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::ENOMEM)
            ),
            _ => false,
        }
    }
}

/// The text of [`RdmaError::MemoryLock`].
struct LockText<'a>(&'a u64, &'a String, &'a Option<u64>, &'a u64, &'a io::Error);

impl fmt::Display for LockText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes, device, limit, need, source) = self;
        write!(f, "registering {bytes} bytes on rail {device} failed: ")?;
        match limit {
            Some(limit) => write!(
                f,
                "locked-memory limit is {limit} bytes, need {need} (every registration on every rail counts); raise it \
                 with {MEMLOCK_ADVICE} ({source})"
            ),
            None => write!(
                f,
                "{source}, although locked memory is not limited (need {need} bytes in all): the machine, its control \
                 group or the device has no memory left; register less, or raise the group's memory limit"
            ),
        }
    }
}

/// An error number as an error.
pub(crate) fn os(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}
