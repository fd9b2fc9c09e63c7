//! An open device.

use crate::attributes::{DeviceAttributes, LinkLayer, Mtu, PortAttributes, PortState};
use crate::device::{DeviceList, Transport, device_name, transport};
use crate::error::{RdmaError, os};
use crate::leak::leaked;
use crate::sys::bindings::{
    IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER, IBV_PORT_ARMED, IBV_PORT_DOWN,
    IBV_PORT_INIT, ibv_context, ibv_device, ibv_device_attr, ibv_port_attr, verbs_context,
};
use crate::sys::{Functions, check, last_errno, library, zeroed};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::ffi::CStr;
use std::fmt;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// An open device. Everything made on it keeps it open.
pub struct Context {
    raw: NonNull<ibv_context>,
    name: String,
    attributes: DeviceAttributes,
    functions: &'static Functions,
}

// SAFETY: every verb may be called from any thread, and the library locks what they share.
unsafe impl Send for Context {}
// SAFETY: as above; nothing in it changes after it was opened.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device of exactly this name.
    ///
    /// # Errors
    ///
    /// As [`devices`](crate::devices); [`RdmaError::UnknownDevice`] lists what is there; [`RdmaError::Permission`];
    /// [`RdmaError::UnsupportedTransport`] for iWARP, EFA and others without InfiniBand's reliable connections.
    pub fn open(name: &str) -> Result<Arc<Self>, RdmaError> {
        let functions = library()?;
        let list = DeviceList::new(functions)?;
        let Some(device) = list.find(name) else {
            return Err(RdmaError::UnknownDevice {
                name: name.to_owned(),
                present: list.names(),
            });
        };
        // SAFETY: the device is of the list, which outlives the call.
        unsafe { Self::open_device(functions, device) }
    }

    /// Opens a device of a list.
    ///
    /// # Safety
    ///
    /// The device is alive during the call, and belongs to the library of `functions`.
    pub(crate) unsafe fn open_device(
        functions: &'static Functions,
        device: *mut ibv_device,
    ) -> Result<Arc<Self>, RdmaError> {
        let name = device_name(device);
        let transport = transport(device);
        if transport != Transport::InfiniBand {
            let reason = match transport {
                Transport::Proprietary => {
                    "it has a transport of its own (such as EFA's) without reliable connections"
                        .to_owned()
                }
                other => format!("it offers {other}, not InfiniBand's reliable connections"),
            };
            return Err(RdmaError::UnsupportedTransport {
                device: name,
                reason,
            });
        }
        // SAFETY: the caller's promise.
        let raw = unsafe { (functions.open_device)(device) };
        let Some(raw) = NonNull::new(raw) else {
            let errno = last_errno();
            return Err(open_failed(name, &verbs_node(device), errno));
        };
        let mut context = Self {
            raw,
            name,
            attributes: empty_attributes(),
            functions,
        };
        // From here on, drop closes it.
        context.attributes = context.query_device()?;
        context.make_events_nonblocking()?;
        Ok(Arc::new(context))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its limits.
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    /// The state of a port now.
    ///
    /// # Errors
    ///
    /// [`RdmaError::UnknownPort`]; [`RdmaError::Query`] where the device is going away.
    pub fn port(&self, port: u8) -> Result<PortAttributes, RdmaError> {
        self.check_port(port)?;
        let attr = self.query_port(port).map_err(|errno| RdmaError::Query {
            device: self.name.clone(),
            what: "the attributes of a port",
            source: os(errno),
        })?;
        Ok(port_attributes(&attr))
    }

    pub(crate) fn check_port(&self, port: u8) -> Result<(), RdmaError> {
        if (1..=self.attributes.ports).contains(&port) {
            return Ok(());
        }
        Err(RdmaError::UnknownPort {
            device: self.name.clone(),
            port,
            ports: self.attributes.ports,
        })
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    /// Becomes readable when an asynchronous event is there; see [`async_event`](Self::async_event).
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.as_ptr()).async_fd };
        // SAFETY: the library opened the descriptor with the context and closes it with it; the borrow ends
        // before that.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn make_events_nonblocking(&self) -> Result<(), RdmaError> {
        nonblocking(self.event_fd()).map_err(|source| RdmaError::Wait {
            device: self.name.clone(),
            what: "asynchronous events",
            source,
        })
    }

    fn query_device(&self) -> Result<DeviceAttributes, RdmaError> {
        // SAFETY: integers alone.
        let mut attr: ibv_device_attr = unsafe { zeroed() };
        // SAFETY: the context is open, and `attr` is writable for the whole call.
        let answer = unsafe { (self.functions.query_device)(self.as_ptr(), &raw mut attr) };
        check(answer).map_err(|errno| RdmaError::Query {
            device: self.name.clone(),
            what: "its attributes",
            source: os(errno),
        })?;
        Ok(device_attributes(&attr))
    }

    fn query_port(&self, port: u8) -> Result<ibv_port_attr, i32> {
        // Zero, because an older library fills only the first part.
        // SAFETY: integers alone.
        let mut attr: ibv_port_attr = unsafe { zeroed() };
        let answer = match self.port_query() {
            Some(query) => {
                // SAFETY: the context is open, and `attr` is writable and of the size that is passed.
                unsafe {
                    query(
                        self.as_ptr(),
                        port,
                        &raw mut attr,
                        size_of::<ibv_port_attr>(),
                    )
                }
            }
            None => {
                let old = (&raw mut attr).cast();
                // SAFETY: the context is open; the old struct is the first part of this one.
                unsafe { (self.functions.query_port)(self.as_ptr(), port, old) }
            }
        };
        check(answer)?;
        Ok(attr)
    }

    /// The context's own port query, where its table is long enough to have one. `ibv_query_port` itself only fills
    /// what it filled in its first version.
    fn port_query(&self) -> Option<PortQuery> {
        // SAFETY: the context is open.
        let abi = unsafe { (*self.as_ptr()).abi_compat };
        // What the library sets where the context is the end of a larger struct.
        if abi.addr() != usize::MAX {
            return None;
        }
        let bytes_before = offset_of!(verbs_context, context);
        let outer = self
            .as_ptr()
            .wrapping_byte_sub(bytes_before)
            .cast::<verbs_context>();
        // SAFETY: the context lies inside the larger struct, whose field before it is its size. Fields are only added
        // at its start, so counted from the context they are where this header has them.
        let table_bytes = unsafe { (*outer).sz };
        // The size counts back from the end of the struct to the oldest field that this library has.
        if table_bytes < size_of::<verbs_context>() - offset_of!(verbs_context, query_port) {
            return None;
        }
        // SAFETY: the struct is long enough to have this field, as was just checked.
        unsafe { (*outer).query_port }
    }
}

type PortQuery =
    unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> std::ffi::c_int;

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is open and closed once, here; everything made on it held an Arc and is gone.
        let answer = unsafe { (self.functions.close_device)(self.as_ptr()) };
        if let Err(errno) = check(answer) {
            leaked(&self.name, "the context", errno);
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Makes reads of a descriptor return at once.
pub(crate) fn nonblocking(fd: impl AsFd) -> std::io::Result<()> {
    let flags = fcntl_getfl(&fd)?;
    fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    Ok(())
}

/// The device file of a device that is alive, for people.
fn verbs_node(device: *mut ibv_device) -> String {
    // SAFETY: the device is alive; only the address is taken.
    let node = unsafe { &raw const (*device).dev_name };
    // SAFETY: the library ends every name with a zero.
    let node = unsafe { CStr::from_ptr(node.cast()) };
    format!("/dev/infiniband/{}", node.to_string_lossy())
}

fn open_failed(device: String, node: &str, errno: i32) -> RdmaError {
    // Where it may not open the file that it was told of, the library looks for another one, and
    // what it says in the end is that there is none.
    let refused = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(node);
    let errno = match refused.err().and_then(|e| e.raw_os_error()) {
        Some(refused @ (libc::EACCES | libc::EPERM)) => refused,
        _ => errno,
    };
    let source = os(errno);
    match errno {
        libc::EACCES | libc::EPERM => RdmaError::Permission {
            device,
            path: node.to_owned(),
            source,
        },
        libc::ENOENT | libc::ENXIO | libc::ENODEV if !std::path::Path::new(node).exists() => {
            RdmaError::NoKernel {
                reason: format!("{device} exists, but its device file {node} does not"),
            }
        }
        _ => RdmaError::Open { device, source },
    }
}

fn empty_attributes() -> DeviceAttributes {
    // SAFETY: integers alone.
    device_attributes(&unsafe { zeroed() })
}

fn device_attributes(attr: &ibv_device_attr) -> DeviceAttributes {
    let firmware: Vec<u8> = attr
        .fw_ver
        .iter()
        .take_while(|&&c| c != 0)
        .map(|&c| c.to_ne_bytes()[0])
        .collect();
    DeviceAttributes {
        firmware: String::from_utf8_lossy(&firmware).into_owned(),
        node_guid: u64::from_be(attr.node_guid),
        max_mr_bytes: attr.max_mr_size,
        max_mr: count(attr.max_mr),
        max_qp: count(attr.max_qp),
        max_qp_wr: count(attr.max_qp_wr),
        max_sge: count(attr.max_sge),
        max_sge_rd: count(attr.max_sge_rd),
        max_cqe: count(attr.max_cqe),
        max_qp_rd_atom: count(attr.max_qp_rd_atom),
        max_qp_init_rd_atom: count(attr.max_qp_init_rd_atom),
        ports: attr.phys_port_cnt,
    }
}

/// A limit that the header has as a signed number.
fn count(limit: i32) -> u32 {
    u32::try_from(limit).unwrap_or(0)
}

fn port_attributes(attr: &ibv_port_attr) -> PortAttributes {
    PortAttributes {
        state: match attr.state {
            IBV_PORT_DOWN => PortState::Down,
            IBV_PORT_INIT => PortState::Initializing,
            IBV_PORT_ARMED => PortState::Armed,
            IBV_PORT_ACTIVE => PortState::Active,
            IBV_PORT_ACTIVE_DEFER => PortState::ActiveDefer,
            other => PortState::Unknown(other),
        },
        // A device that says nothing is an InfiniBand one of the time before RoCE.
        link_layer: if u32::from(attr.link_layer) == IBV_LINK_LAYER_ETHERNET {
            LinkLayer::Ethernet
        } else {
            LinkLayer::InfiniBand
        },
        lid: attr.lid,
        // A port that is down may say 0; the smallest is right for all.
        active_mtu: Mtu::from_code(attr.active_mtu).unwrap_or(Mtu::B256),
        max_message_bytes: attr.max_msg_sz,
        gid_table_len: count(attr.gid_tbl_len),
        link_mbit_per_s: lanes(attr.active_width) * lane_mbit_per_s(attr.active_speed),
    }
}

/// Lanes of a link, by the code of its width.
fn lanes(width: u8) -> u64 {
    match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    }
}

/// Megabits a second of a lane, by the code of its speed, as the standard names them (SDR 2.5 to NDR 100 gigabits).
fn lane_mbit_per_s(speed: u8) -> u64 {
    match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    }
}
