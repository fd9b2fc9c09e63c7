//! Which devices there are, and why there are none.

use crate::error::{RdmaError, os};
use crate::sys::bindings::{
    IBV_NODE_RNIC, IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, IBV_TRANSPORT_UNSPECIFIED,
    IBV_TRANSPORT_USNIC, IBV_TRANSPORT_USNIC_UDP, ibv_device,
};
use crate::sys::{Functions, last_errno, library};
use std::ffi::{CStr, c_int};
use std::fmt;
use std::path::Path;

/// The transport that a device offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// InfiniBand's, over InfiniBand or Ethernet (RoCE).
    InfiniBand,
    /// iWARP: RDMA over TCP.
    Iwarp,
    /// Cisco usNIC.
    UsNic,
    /// One of its own, such as EFA's.
    Proprietary,
    /// Anything else.
    Unknown,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Iwarp => "iWARP",
            Self::UsNic => "usNIC",
            Self::Proprietary => "a transport of its own",
            Self::Unknown => "an unknown transport",
        })
    }
}

/// A device that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceName {
    /// Its name, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// GUID of the node.
    pub node_guid: u64,
    /// Its transport.
    pub transport: Transport,
}

/// The devices of this machine, in the library's order; at least one.
///
/// # Errors
///
/// [`RdmaError::NoLibrary`], [`RdmaError::NoKernel`], [`RdmaError::NoDevice`], [`RdmaError::NoProvider`]: each says what
/// to install or load.
pub fn devices() -> Result<Vec<DeviceName>, RdmaError> {
    let list = DeviceList::new(library()?)?;
    Ok(list.iter().map(|device| list.describe(device)).collect())
}

/// The library's list; devices that are not opened live as long as it does.
pub(crate) struct DeviceList {
    functions: &'static Functions,
    first: *mut *mut ibv_device,
    len: usize,
}

impl DeviceList {
    /// A list with at least one device.
    pub(crate) fn new(functions: &'static Functions) -> Result<Self, RdmaError> {
        let mut count: c_int = 0;
        // SAFETY: `count` is writable for the whole call.
        let first = unsafe { (functions.get_device_list)(&raw mut count) };
        if first.is_null() {
            let errno = last_errno();
            return Err(why_none(Path::new("/"), Some(errno)));
        }
        let list = Self {
            functions,
            first,
            len: usize::try_from(count).unwrap_or(0),
        };
        if list.len == 0 {
            return Err(why_none(Path::new("/"), None));
        }
        Ok(list)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = *mut ibv_device> + '_ {
        (0..self.len).map(|index| {
            // SAFETY: the list has `len` entries.
            let entry = unsafe { self.first.add(index) };
            // SAFETY: the entry lies inside the list, which lives until it is freed by drop.
            unsafe { entry.read() }
        })
    }

    pub(crate) fn find(&self, name: &str) -> Option<*mut ibv_device> {
        self.iter()
            .find(|&device| self.describe(device).name == name)
    }

    pub(crate) fn names(&self) -> String {
        let names: Vec<String> = self
            .iter()
            .map(|device| self.describe(device).name)
            .collect();
        names.join(", ")
    }

    fn describe(&self, device: *mut ibv_device) -> DeviceName {
        DeviceName {
            name: device_name(device),
            // SAFETY: the device is of the list.
            node_guid: u64::from_be(unsafe { (self.functions.get_device_guid)(device) }),
            transport: transport(device),
        }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from get_device_list and is freed once; no device of it is used afterwards, except
        // opened ones, which the library keeps.
        unsafe { (self.functions.free_device_list)(self.first) }
    }
}

/// The name of a device that is alive: of a list, or opened.
pub(crate) fn device_name(device: *mut ibv_device) -> String {
    // SAFETY: the device is alive, and its name is an array inside it; only the address is taken.
    let name = unsafe { &raw const (*device).name };
    // SAFETY: the library ends every name with a zero.
    let name = unsafe { CStr::from_ptr(name.cast()) };
    name.to_string_lossy().into_owned()
}

/// The transport of a device that is alive.
pub(crate) fn transport(device: *mut ibv_device) -> Transport {
    // SAFETY: the device is alive.
    let transport = unsafe { (*device).transport_type };
    // SAFETY: the device is alive.
    let node = unsafe { (*device).node_type };
    match transport {
        IBV_TRANSPORT_IB if node != IBV_NODE_RNIC => Transport::InfiniBand,
        IBV_TRANSPORT_IB | IBV_TRANSPORT_IWARP => Transport::Iwarp,
        IBV_TRANSPORT_USNIC | IBV_TRANSPORT_USNIC_UDP => Transport::UsNic,
        IBV_TRANSPORT_UNSPECIFIED => Transport::Proprietary,
        _ => Transport::Unknown,
    }
}

/// Why the library has no device: looks below `root` at what the kernel shows.
fn why_none(root: &Path, errno: Option<i32>) -> RdmaError {
    if !root.join("sys/class/infiniband_verbs/abi_version").exists() {
        let reason = match errno {
            Some(errno) if errno != libc::ENOSYS => {
                format!("/sys/class/infiniband_verbs is missing ({})", os(errno))
            }
            _ => "/sys/class/infiniband_verbs is missing, so the module ib_uverbs is not loaded"
                .to_owned(),
        };
        return RdmaError::NoKernel { reason };
    }
    let mut devices: Vec<String> = std::fs::read_dir(root.join("sys/class/infiniband"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    if devices.is_empty() {
        return RdmaError::NoDevice;
    }
    devices.sort();
    let devices = devices.join(", ");
    if !root.join("dev/infiniband").exists() {
        let reason = format!("it has the devices {devices}, but /dev/infiniband is missing");
        return RdmaError::NoKernel { reason };
    }
    RdmaError::NoProvider { devices }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn each_missing_piece_has_its_own_error() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let error = why_none(root, Some(libc::ENOSYS));
        assert!(matches!(error, RdmaError::NoKernel { .. }), "{error}");
        assert!(error.to_string().contains("modprobe ib_uverbs"), "{error}");

        fs::create_dir_all(root.join("sys/class/infiniband_verbs")).unwrap();
        fs::write(root.join("sys/class/infiniband_verbs/abi_version"), "6\n").unwrap();
        let error = why_none(root, None);
        assert!(matches!(error, RdmaError::NoDevice), "{error}");
        assert!(error.to_string().contains("rdma link add"), "{error}");

        fs::create_dir_all(root.join("sys/class/infiniband/rxe0")).unwrap();
        let error = why_none(root, None);
        assert!(matches!(error, RdmaError::NoKernel { .. }), "{error}");
        assert!(
            error.to_string().contains("--device=/dev/infiniband"),
            "{error}"
        );

        fs::create_dir_all(root.join("dev/infiniband")).unwrap();
        let error = why_none(root, None);
        assert!(
            matches!(&error, RdmaError::NoProvider { devices } if devices == "rxe0"),
            "{error}"
        );
    }

    #[test]
    fn a_machine_without_verbs_is_told_what_to_install_or_load() {
        // Holds on every machine: with devices the list is not empty, without any the error says which piece.
        match devices() {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(error) => assert!(
                matches!(
                    error,
                    RdmaError::NoLibrary { .. }
                        | RdmaError::NoKernel { .. }
                        | RdmaError::NoDevice
                        | RdmaError::NoProvider { .. }
                ),
                "{error}"
            ),
        }
    }
}
