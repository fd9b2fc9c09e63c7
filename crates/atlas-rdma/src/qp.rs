//! Queue pairs: reliable connections, step by step.

use crate::completion::{Cq, other_device};
use crate::error::{RdmaError, os};
use crate::explain::{Known, init_sent, rtr_sent, rts_sent, why};
use crate::leak::leaked;
use crate::path::{PSN_MASK, Path, Step};
use crate::pd::Pd;
use crate::sys::bindings::{
    IBV_ACCESS_REMOTE_READ, IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN,
    IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU,
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN,
    IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET,
    IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, ibv_gid, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
    ibv_send_wr,
};
use crate::sys::{check, last_errno, zeroed};
use crate::timers::{ack_timeout_code, rnr_timer_code};
use std::ffi::c_int;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// How much a queue pair holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpCapabilities {
    /// Requests that are posted and not completed.
    pub send_wr: u32,
    /// Local ranges of each.
    pub send_sge: u32,
    /// Receives that are posted; one-sided READs need none.
    pub recv_wr: u32,
    /// Local ranges of each.
    pub recv_sge: u32,
}

impl QpCapabilities {
    /// For a queue pair that posts nothing. One of each, because some providers refuse none.
    pub const IDLE: Self = Self {
        send_wr: 1,
        send_sge: 1,
        recv_wr: 1,
        recv_sge: 1,
    };
}

/// What the other end may do through a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteAccess {
    /// Nothing.
    None,
    /// READ regions that allow it.
    Read,
}

/// The state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpState {
    /// Made, and nothing else.
    Reset,
    /// Has a port.
    Init,
    /// Knows the other end and answers it.
    ReadyToReceive,
    /// Works both ways.
    ReadyToSend,
    /// Failed, or was moved there: gives back everything that is posted.
    Error,
    /// Anything else, as the library's number.
    Other(u32),
}

/// A reliable connection. It goes RESET, INIT, RTR, RTS by the calls below, and to ERR by [`to_error`](Self::to_error)
/// or a failure.
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    number: u32,
    granted: QpCapabilities,
    /// The port that INIT named, for explanations.
    port: AtomicU8,
    destroyed: bool,
    // Field order is drop order, after `drop` has destroyed the queue pair: the queue, then the domain.
    cq: Arc<Cq>,
    pd: Arc<Pd>,
}

// SAFETY: every verb may be called from any thread, and library and provider lock the queue pair.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// A reliable-connection queue pair in RESET, with one completion queue for both directions. Only requests that
    /// ask for it complete one by one; when it fails, all do, so the queue needs room for all.
    ///
    /// # Errors
    ///
    /// [`RdmaError::LimitExceeded`] above the device's limits; [`RdmaError::Create`].
    pub fn create(
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        capabilities: QpCapabilities,
    ) -> Result<Self, RdmaError> {
        let context = pd.context();
        let limits = context.attributes();
        let limited = [
            ("a send queue", capabilities.send_wr, limits.max_qp_wr),
            ("a receive queue", capabilities.recv_wr, limits.max_qp_wr),
            (
                "local ranges of a request",
                capabilities.send_sge,
                limits.max_sge,
            ),
            (
                "local ranges of a receive",
                capabilities.recv_sge,
                limits.max_sge,
            ),
        ];
        for (what, asked, limit) in limited {
            if asked > limit {
                return Err(RdmaError::LimitExceeded {
                    device: context.name().to_owned(),
                    what,
                    asked: u64::from(asked),
                    limit: u64::from(limit),
                });
            }
        }
        if !Arc::ptr_eq(cq.context(), context) {
            return Err(other_device(
                "the completion queue of a queue pair",
                context.name(),
            ));
        }
        // SAFETY: integers and raw pointers alone.
        let mut init: ibv_qp_init_attr = unsafe { zeroed() };
        init.send_cq = cq.as_ptr();
        init.recv_cq = cq.as_ptr();
        init.cap.max_send_wr = capabilities.send_wr;
        init.cap.max_send_sge = capabilities.send_sge;
        init.cap.max_recv_wr = capabilities.recv_wr;
        init.cap.max_recv_sge = capabilities.recv_sge;
        init.qp_type = IBV_QPT_RC;
        // SAFETY: the domain and the queue are alive, `init` is a whole struct and writable.
        let raw = unsafe { (context.functions().create_qp)(pd.as_ptr(), &raw mut init) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(RdmaError::Create {
                source: os(last_errno()),
                device: context.name().to_owned(),
                what: "queue pair",
                detail: format!(
                    "{} requests of {} local ranges (the device's limits are {} and {}, and together they may be less; \
                     it has {} queue pairs)",
                    capabilities.send_wr,
                    capabilities.send_sge,
                    limits.max_qp_wr,
                    limits.max_sge,
                    limits.max_qp
                ),
            });
        };
        // SAFETY: the queue pair is alive.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        Ok(Self {
            raw,
            number,
            granted: QpCapabilities {
                send_wr: init.cap.max_send_wr,
                send_sge: init.cap.max_send_sge,
                recv_wr: init.cap.max_recv_wr,
                recv_sge: init.cap.max_recv_sge,
            },
            port: AtomicU8::new(0),
            destroyed: false,
            cq: Arc::clone(cq),
            pd: Arc::clone(pd),
        })
    }

    /// Its number, for the other end.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What the provider gave, at least what was asked for.
    pub fn capabilities(&self) -> QpCapabilities {
        self.granted
    }

    /// Its domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Its completion queue.
    pub fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// To INIT, on a port and a partition.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Transition`] says which attribute exceeds which limit.
    pub fn to_init(
        &self,
        port: u8,
        pkey_index: u16,
        access: RemoteAccess,
    ) -> Result<(), RdmaError> {
        self.port.store(port, Ordering::Relaxed);
        // SAFETY: integers alone.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = port;
        attr.pkey_index = pkey_index;
        attr.qp_access_flags = match access {
            RemoteAccess::None => 0,
            RemoteAccess::Read => IBV_ACCESS_REMOTE_READ,
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, mask).map_err(|errno| {
            let sent = init_sent(port, pkey_index, access == RemoteAccess::Read);
            self.explained(Step::Init, errno, sent, None)
        })
    }

    /// To ready-to-receive: from here on it answers the other end.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Transition`] says which attribute exceeds which limit; [`is_retryable`](RdmaError::is_retryable)
    /// where the other end's address was not resolved in time.
    pub fn to_rtr(&self, path: &Path) -> Result<(), RdmaError> {
        // SAFETY: integers alone.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = path.mtu.code();
        attr.dest_qp_num = path.remote.qpn;
        attr.rq_psn = path.remote.psn & PSN_MASK;
        attr.max_dest_rd_atomic = path.reads_in;
        attr.min_rnr_timer = rnr_timer_code(path.min_rnr_timer);
        attr.ah_attr.dlid = path.remote.lid;
        attr.ah_attr.sl = path.service_level;
        attr.ah_attr.port_num = path.port;
        let gid_index = u8::try_from(path.gid_index);
        if path.has_grh() {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid = ibv_gid {
                raw: path.remote.gid.0,
            };
            // One that does not fit is refused below, as one of the table's end would be.
            attr.ah_attr.grh.sgid_index = gid_index.unwrap_or(u8::MAX);
            attr.ah_attr.grh.hop_limit = path.hop_limit;
            attr.ah_attr.grh.traffic_class = path.traffic_class;
        }
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        let moved = if path.has_grh() && gid_index.is_err() {
            Err(libc::EINVAL)
        } else {
            self.modify(&mut attr, mask)
        };
        moved.map_err(|errno| {
            self.explained(Step::ReadyToReceive, errno, rtr_sent(path), Some(path))
        })
    }

    /// To ready-to-send: from here on requests go out.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Transition`] says which attribute exceeds which limit.
    pub fn to_rts(&self, path: &Path) -> Result<(), RdmaError> {
        // SAFETY: integers alone.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = IBV_QPS_RTS;
        attr.sq_psn = path.local_psn & PSN_MASK;
        attr.timeout = ack_timeout_code(path.timeout);
        attr.retry_cnt = path.retry_count;
        attr.rnr_retry = path.rnr_retry;
        attr.max_rd_atomic = path.reads_out;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask)
            .map_err(|errno| self.explained(Step::ReadyToSend, errno, rts_sent(path), Some(path)))
    }

    /// To ERR, from any state: everything that is posted completes, most of it as flushed. It says nothing to the
    /// other end.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Transition`] where the device is going away.
    pub fn to_error(&self) -> Result<(), RdmaError> {
        // SAFETY: integers alone.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = IBV_QPS_ERR;
        self.modify(&mut attr, IBV_QP_STATE)
            .map_err(|errno| self.explained(Step::Error, errno, "the state alone".to_owned(), None))
    }

    /// Its state now, as the kernel has it.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Query`].
    pub fn state(&self) -> Result<QpState, RdmaError> {
        // SAFETY: integers alone.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        // SAFETY: integers and raw pointers alone.
        let mut init: ibv_qp_init_attr = unsafe { zeroed() };
        let mask = IBV_QP_STATE as c_int;
        let query = self.pd.context().functions().query_qp;
        // SAFETY: the queue pair is alive, both structs are whole and writable.
        let answer = unsafe { query(self.raw.as_ptr(), &raw mut attr, mask, &raw mut init) };
        check(answer).map_err(|errno| RdmaError::Query {
            device: self.pd.context().name().to_owned(),
            what: "the state of a queue pair",
            source: os(errno),
        })?;
        Ok(match attr.qp_state {
            IBV_QPS_RESET => QpState::Reset,
            IBV_QPS_INIT => QpState::Init,
            IBV_QPS_RTR => QpState::ReadyToReceive,
            IBV_QPS_RTS => QpState::ReadyToSend,
            IBV_QPS_ERR => QpState::Error,
            other => QpState::Other(other),
        })
    }

    /// Posts a chain of requests; on failure, the error number and the first request that was not posted.
    ///
    /// # Safety
    ///
    /// `first` is a chain of whole requests with their local ranges, alive during the call. Every local range stays
    /// valid for writes by the device until its request's completion was polled or this queue pair was destroyed.
    pub(crate) unsafe fn post_send(
        &self,
        first: *mut ibv_send_wr,
    ) -> Result<(), (i32, *mut ibv_send_wr)> {
        // SAFETY: the context is open.
        let post = unsafe { (*self.pd.context().as_ptr()).ops.post_send };
        let Some(post) = post else {
            return Err((libc::EOPNOTSUPP, first));
        };
        let mut bad: *mut ibv_send_wr = ptr::null_mut();
        // SAFETY: the queue pair is alive; the chain is the caller's promise; `bad` is writable.
        let answer = unsafe { post(self.raw.as_ptr(), first, &raw mut bad) };
        check(answer).map_err(|errno| (errno, bad))
    }

    /// Destroys the queue pair now: when this succeeds, the device has let go of everything that was posted.
    pub(crate) fn destroy(mut self) -> Result<(), i32> {
        self.destroy_once()
    }

    fn destroy_once(&mut self) -> Result<(), i32> {
        if self.destroyed {
            return Ok(());
        }
        self.destroyed = true;
        // SAFETY: the queue pair is alive and destroyed once, as the flag says; its owner is giving it up.
        let answer = unsafe { (self.pd.context().functions().destroy_qp)(self.raw.as_ptr()) };
        check(answer).inspect_err(|&errno| {
            leaked(
                self.pd.context().name(),
                &format!("queue pair {}", self.number),
                errno,
            );
            // It still refers to them.
            std::mem::forget(Arc::clone(&self.cq));
            std::mem::forget(Arc::clone(&self.pd));
        })
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> Result<(), i32> {
        let modify = self.pd.context().functions().modify_qp;
        // SAFETY: the queue pair is alive, `attr` is a whole struct.
        check(unsafe { modify(self.raw.as_ptr(), &raw mut *attr, mask as c_int) })
    }

    fn explained(&self, step: Step, errno: i32, sent: String, path: Option<&Path>) -> RdmaError {
        let context = self.pd.context();
        let port = path.map_or_else(|| self.port.load(Ordering::Relaxed), |path| path.port);
        let attributes = context.port(port).ok();
        let gids = match step {
            Step::ReadyToReceive => context.gid_table(port).ok(),
            _ => None,
        };
        let known = Known {
            device: context.attributes(),
            port: attributes.as_ref(),
            gids: gids.as_deref(),
        };
        RdmaError::Transition {
            device: context.name().to_owned(),
            qpn: self.number,
            step,
            why: why(step, errno, port, path, &known),
            sent,
            source: os(errno),
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // A failure is logged and counted there.
        let _ = self.destroy_once();
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("device", &self.pd.context().name())
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}
