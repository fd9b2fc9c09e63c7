//! The library's functions, on the fake device.

use super::{Posted, Shared};
use crate::sys::bindings::{
    _compat_ibv_port_attr, IBV_LINK_LAYER_ETHERNET, IBV_MTU_1024, IBV_PORT_ACTIVE, IBV_QP_STATE,
    IBV_QPS_ERR, IBV_SEND_SIGNALED, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq,
    ibv_device, ibv_device_attr, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_send_wr, ibv_wc, verbs_context,
};
use crate::sys::{Functions, zeroed};
use std::ffi::{c_int, c_uint, c_void};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::Arc;

#[repr(C)]
pub(super) struct FakeDevice {
    pub(super) device: ibv_device,
    pub(super) shared: Arc<Shared>,
}

/// An open device: the library's larger struct, and the state behind it.
#[repr(C)]
struct FakeContext {
    verbs: verbs_context,
    shared: Arc<Shared>,
    async_events: UnixStream,
}

/// The state behind an open context.
fn shared<'a>(context: *mut ibv_context) -> &'a Shared {
    let before =
        std::mem::offset_of!(FakeContext, verbs) + std::mem::offset_of!(verbs_context, context);
    let outer: *mut FakeContext = context.wrapping_byte_sub(before).cast();
    // SAFETY: every context of this module is the field of a FakeContext, boxed until it is closed.
    unsafe { &(*outer).shared }
}

fn set_errno(errno: i32) {
    // SAFETY: the address of this thread's errno is always valid.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { place.write(errno) };
}

fn null<T>(errno: i32) -> *mut T {
    set_errno(errno);
    ptr::null_mut()
}

/// The context of an object.
macro_rules! of {
    ($object:expr) => {{
        // SAFETY: the object is alive: it came from this module and was not released.
        let context = unsafe { (*$object).context };
        shared(context)
    }};
}

/// An object of all zeros on a context.
macro_rules! object {
    ($type:ty, $context:expr) => {{
        // SAFETY: integers, raw pointers and C unions.
        let mut object: $type = unsafe { zeroed() };
        object.context = $context;
        object
    }};
}

/// Frees an object, as a function of the library does.
macro_rules! release {
    ($name:literal, $object:expr) => {{
        match of!($object).call($name) {
            Ok(()) => {
                // SAFETY: the object was boxed by this module and is released once.
                drop(unsafe { Box::from_raw($object) });
                0
            }
            Err(errno) => errno,
        }
    }};
}

pub(super) static FUNCTIONS: Functions = functions(true);
pub(super) static OLD_FUNCTIONS: Functions = functions(false);

const fn functions(with_iova2: bool) -> Functions {
    Functions {
        get_device_list,
        free_device_list,
        get_device_guid,
        open_device,
        close_device,
        query_device,
        query_port,
        get_async_event,
        ack_async_event,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        reg_mr_iova2: if with_iova2 { Some(reg_mr_iova2) } else { None },
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_qp,
        modify_qp,
        query_qp,
        destroy_qp,
        query_gid_table: None,
    }
}

unsafe extern "C" fn get_device_list(_: *mut c_int) -> *mut *mut ibv_device {
    null(libc::ENOSYS)
}

unsafe extern "C" fn free_device_list(_: *mut *mut ibv_device) {}

unsafe extern "C" fn get_device_guid(_: *mut ibv_device) -> u64 {
    0
}

unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: `Fake::open` passes the first field of a FakeDevice.
    let shared = unsafe { Arc::clone(&(*device.cast::<FakeDevice>()).shared) };
    let (events, _) = UnixStream::pair().unwrap();
    // SAFETY: integers, raw pointers and Options of functions.
    let mut verbs: verbs_context = unsafe { zeroed() };
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(query_port_ex);
    verbs.context.abi_compat = ptr::without_provenance_mut(usize::MAX);
    verbs.context.async_fd = events.as_raw_fd();
    verbs.context.ops.post_send = Some(post_send);
    verbs.context.ops.poll_cq = Some(poll_cq);
    verbs.context.ops.req_notify_cq = Some(req_notify_cq);
    let context = Box::new(FakeContext {
        verbs,
        shared,
        async_events: events,
    });
    let context = Box::into_raw(context);
    // SAFETY: the box is alive; only an address is taken.
    unsafe { &raw mut (*context).verbs.context }
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    let result = shared(context).call("close_device");
    let before = std::mem::offset_of!(verbs_context, context);
    let outer: *mut FakeContext = context.wrapping_byte_sub(before).cast();
    // SAFETY: every context of this module is the field of a boxed FakeContext, closed once.
    drop(unsafe { Box::from_raw(outer) });
    result.err().unwrap_or(0)
}

unsafe extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: integers alone.
    let mut answer: ibv_device_attr = unsafe { zeroed() };
    answer.max_mr_size = shared(context).lock().max_mr_bytes;
    answer.max_mr = 1000;
    answer.max_qp = 1000;
    answer.max_qp_wr = 1000;
    answer.max_sge = 8;
    answer.max_cqe = 1000;
    answer.max_qp_rd_atom = 16;
    answer.max_qp_init_rd_atom = 16;
    answer.phys_port_cnt = 1;
    // SAFETY: the caller's struct is writable.
    unsafe { attr.write(answer) };
    0
}

unsafe extern "C" fn query_port(
    _: *mut ibv_context,
    _: u8,
    _: *mut _compat_ibv_port_attr,
) -> c_int {
    // It would fill a part; whoever has the larger struct must not come here.
    libc::ENOTSUP
}

unsafe extern "C" fn query_port_ex(
    _: *mut ibv_context,
    _: u8,
    attr: *mut ibv_port_attr,
    bytes: usize,
) -> c_int {
    assert_eq!(bytes, size_of::<ibv_port_attr>());
    // SAFETY: integers alone.
    let mut answer: ibv_port_attr = unsafe { zeroed() };
    answer.state = IBV_PORT_ACTIVE;
    answer.link_layer = IBV_LINK_LAYER_ETHERNET as u8;
    answer.active_mtu = IBV_MTU_1024;
    answer.max_msg_sz = 1 << 30;
    answer.gid_tbl_len = 4;
    // SAFETY: the caller's struct is writable.
    unsafe { attr.write(answer) };
    0
}

unsafe extern "C" fn get_async_event(_: *mut ibv_context, _: *mut ibv_async_event) -> c_int {
    set_errno(libc::EAGAIN);
    -1
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    match shared(context).call("alloc_pd") {
        Ok(()) => Box::into_raw(Box::new(object!(ibv_pd, context))),
        Err(errno) => null(errno),
    }
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    release!("dealloc_pd", pd)
}

unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    bytes: usize,
    access: c_int,
) -> *mut ibv_mr {
    register(pd, addr, bytes, access as u32, "reg_mr")
}

unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    bytes: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    assert_eq!(iova, addr.addr() as u64);
    register(pd, addr, bytes, access, "reg_mr_iova2")
}

fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    bytes: usize,
    access: u32,
    name: &'static str,
) -> *mut ibv_mr {
    let shared = of!(pd);
    if let Err(errno) = shared.call(name) {
        return null(errno);
    }
    let mut state = shared.lock();
    *state.calls.last_mut().unwrap() = format!("{name} {bytes} {access:#x}");
    if let Some((least, errno)) = state.refuse_below {
        if bytes > 1 && bytes < least {
            return null(errno);
        }
    }
    // SAFETY: the domain is alive.
    let context = unsafe { (*pd).context };
    let mut mr = object!(ibv_mr, context);
    mr.addr = addr;
    mr.length = bytes;
    mr.lkey = state.next_key;
    mr.rkey = state.next_key + 1000;
    state.next_key += 1;
    Box::into_raw(Box::new(mr))
}

unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    release!("dereg_mr", mr)
}

unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let mut channel = object!(ibv_comp_channel, context);
    channel.fd = shared(context).events.0.as_raw_fd();
    Box::into_raw(Box::new(channel))
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    release!("destroy_comp_channel", channel)
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let mut cq = object!(ibv_cq, context);
    cq.channel = channel;
    cq.cqe = entries;
    Box::into_raw(Box::new(cq))
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    release!("destroy_cq", cq)
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    let mut event = [0];
    if (&of!(channel).events.0).read(&mut event).unwrap_or(0) == 0 {
        set_errno(libc::EAGAIN);
        return -1;
    }
    // Whoever asks only acknowledges it.
    let some = ptr::NonNull::dangling().as_ptr();
    // SAFETY: the caller's place is writable.
    unsafe { cq.write(some) };
    0
}

unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    if let Err(errno) = of!(pd).call("create_qp") {
        return null(errno);
    }
    // SAFETY: the domain is alive.
    let context = unsafe { (*pd).context };
    let mut qp = object!(ibv_qp, context);
    qp.pd = pd;
    // SAFETY: the caller's struct is readable.
    qp.send_cq = unsafe { (*init).send_cq };
    qp.qp_num = 77;
    Box::into_raw(Box::new(qp))
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's struct is readable.
    let state = unsafe { (*attr).qp_state };
    assert_ne!(mask as u32 & IBV_QP_STATE, 0);
    let shared = of!(qp);
    let name = match state {
        1 => "to_init",
        2 => "to_rtr",
        3 => "to_rts",
        _ => "to_error",
    };
    if let Err(errno) = shared.call(name) {
        return errno;
    }
    // SAFETY: the queue pair is alive.
    unsafe { (*qp).state = state };
    if state == IBV_QPS_ERR {
        shared.flush(&mut shared.lock());
    }
    0
}

unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the queue pair is alive.
    let state = unsafe { (*qp).state };
    // SAFETY: the caller's struct is writable.
    unsafe { (*attr).qp_state = state };
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    release!("destroy_qp", qp)
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let shared = of!(qp);
    let mut guard = shared.lock();
    let state = &mut *guard;
    state.calls.push("post_send".to_owned());
    let mut next = first;
    let mut budget = state.post_budget.take();
    while !next.is_null() {
        // SAFETY: requests of the caller's chain are readable.
        let wr = unsafe { &*next };
        if let Some((left, errno)) = &mut budget {
            if *left == 0 {
                // SAFETY: the caller's place is writable.
                unsafe { bad.write(next) };
                return *errno;
            }
            *left -= 1;
        }
        let local = (0..wr.num_sge as usize).map(|index| {
            // SAFETY: the list has `num_sge` entries.
            let sge = unsafe { wr.sg_list.add(index) };
            // SAFETY: as above.
            let sge = unsafe { &*sge };
            (sge.addr, sge.length, sge.lkey)
        });
        state.posted.push_back(Posted {
            wr_id: wr.wr_id,
            signaled: wr.send_flags & IBV_SEND_SIGNALED != 0,
            // SAFETY: READs are all that is posted here.
            remote_addr: unsafe { wr.wr.rdma.remote_addr },
            local: local.collect(),
        });
        if state.at_once && wr.send_flags & IBV_SEND_SIGNALED == 0 {
            state.posted.pop_back();
        }
        next = wr.next;
    }
    if state.in_error {
        shared.flush(state);
    }
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, into: *mut ibv_wc) -> c_int {
    let mut state = of!(cq).lock();
    if let Some(errno) = state.failures.get("poll_cq") {
        return -errno;
    }
    let mut count = 0;
    while count < entries {
        let Some(wc) = state.completions.pop_front() else {
            break;
        };
        // SAFETY: the caller's array has `entries` places.
        let place = unsafe { into.add(count as usize) };
        // SAFETY: as above.
        unsafe { place.write(wc) };
        count += 1;
    }
    count
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _: c_int) -> c_int {
    of!(cq).lock().armed = true;
    0
}
