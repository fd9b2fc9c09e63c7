//! Completions: the queue that they arrive in, and the channel that wakes whoever sleeps.

use crate::context::{Context, nonblocking};
use crate::error::{RdmaError, os};
use crate::leak::leaked;
use crate::sys::bindings::{
    IBV_WC_GENERAL_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR,
    IBV_WC_LOC_QP_OP_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR,
    IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR,
    ibv_comp_channel, ibv_cq, ibv_wc,
};
use crate::sys::{check, last_errno, zeroed};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// How a work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// Done.
    Success,
    /// Given back undone: its queue pair went to the error state. What took it there is another completion's status.
    Flushed,
    /// The local ranges do not hold what the other end sent, or the message is too long.
    LocalLength,
    /// The queue pair could not do it.
    LocalOperation,
    /// A local range is not in the region that its lkey names.
    LocalProtection,
    /// A local region does not allow it.
    LocalAccess,
    /// The other end did not like the request.
    RemoteInvalidRequest,
    /// The other end's region is gone, smaller, or does not allow it.
    RemoteAccess,
    /// The other end could not do it.
    RemoteOperation,
    /// No acknowledgement after all tries: the other end or the path to it is gone.
    RetryExceeded,
    /// The other end stayed not ready.
    RnrRetryExceeded,
    /// The device failed.
    General,
    /// Anything else, as the library's number.
    Other(u32),
    /// Not a completion: the completion queue itself could not be read any more, and this is the error number.
    QueueBroken(i32),
    /// Not a completion: the device took only some requests of a post, and this is the error number.
    PostFailed(i32),
}

impl CompletionStatus {
    fn of(status: u32) -> Self {
        match status {
            IBV_WC_SUCCESS => Self::Success,
            IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            IBV_WC_LOC_LEN_ERR => Self::LocalLength,
            IBV_WC_LOC_QP_OP_ERR => Self::LocalOperation,
            IBV_WC_LOC_PROT_ERR => Self::LocalProtection,
            IBV_WC_LOC_ACCESS_ERR => Self::LocalAccess,
            IBV_WC_REM_INV_REQ_ERR => Self::RemoteInvalidRequest,
            IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            IBV_WC_REM_OP_ERR => Self::RemoteOperation,
            IBV_WC_RETRY_EXC_ERR => Self::RetryExceeded,
            IBV_WC_RNR_RETRY_EXC_ERR => Self::RnrRetryExceeded,
            IBV_WC_GENERAL_ERR => Self::General,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::Flushed => "flushed, because the queue pair is in the error state",
            Self::LocalLength => "local length error",
            Self::LocalOperation => "local queue pair operation error",
            Self::LocalProtection => "local protection error",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "invalid request, says the other end",
            Self::RemoteAccess => "remote access error: the region is gone or does not allow it",
            Self::RemoteOperation => "the other end could not do it",
            Self::RetryExceeded => "no answer after all retries",
            Self::RnrRetryExceeded => "the other end stayed not ready",
            Self::General => "device error",
            Self::Other(status) => return write!(f, "completion status {status}"),
            Self::QueueBroken(errno) => {
                return write!(f, "the completion queue cannot be read: {}", os(*errno));
            }
            Self::PostFailed(errno) => {
                return write!(f, "the device took only some requests: {}", os(*errno));
            }
        })
    }
}

/// One completion.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Completion(ibv_wc);

impl Completion {
    /// An entry to poll into.
    pub fn empty() -> Self {
        // SAFETY: integers alone.
        Self(unsafe { zeroed() })
    }

    /// What the work request was posted with.
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// How it ended.
    pub fn status(&self) -> CompletionStatus {
        CompletionStatus::of(self.0.status)
    }

    /// The device's own number for a failure.
    pub fn vendor_err(&self) -> u32 {
        self.0.vendor_err
    }

    /// Its queue pair.
    pub fn qpn(&self) -> u32 {
        self.0.qp_num
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("wr_id", &self.wr_id())
            .field("status", &self.status())
            .field("vendor_err", &self.vendor_err())
            .field("qpn", &self.qpn())
            .finish()
    }
}

/// A descriptor that becomes readable when an armed completion queue gets a completion.
pub struct CompletionChannel {
    raw: NonNull<ibv_comp_channel>,
    // Last: it closes the device.
    context: Arc<Context>,
}

// SAFETY: every verb may be called from any thread, and the library locks what they share.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// A channel on a device; its descriptor does not block.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Create`], when the process has no descriptors left for instance.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, RdmaError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.functions().create_comp_channel)(context.as_ptr()) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(Self::failed(context, os(last_errno())));
        };
        let channel = Self {
            raw,
            context: Arc::clone(context),
        };
        // From here on, drop destroys it.
        nonblocking(channel.fd()).map_err(|source| Self::failed(context, source))?;
        Ok(Arc::new(channel))
    }

    fn failed(context: &Context, source: std::io::Error) -> RdmaError {
        RdmaError::Create {
            device: context.name().to_owned(),
            what: "completion channel",
            detail: "one more; 'ulimit -n' limits them".to_owned(),
            source,
        }
    }

    /// Becomes readable with an event.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is alive.
        let fd = unsafe { (*self.raw.as_ptr()).fd };
        // SAFETY: the library closes the descriptor with the channel, which the borrow does not outlive.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Takes all events that are there, and says how many. Their queues can then be destroyed, which otherwise would
    /// wait for these.
    pub fn take_events(&self) -> usize {
        let functions = self.context.functions();
        let mut count = 0;
        loop {
            let mut cq: *mut ibv_cq = ptr::null_mut();
            let mut cq_context: *mut c_void = ptr::null_mut();
            // SAFETY: the channel is alive, both targets are writable; the descriptor does not block.
            let answer = unsafe {
                (functions.get_cq_event)(self.raw.as_ptr(), &raw mut cq, &raw mut cq_context)
            };
            if answer != 0 || cq.is_null() {
                return count;
            }
            // SAFETY: the queue of an event that was not acknowledged cannot have been destroyed: that waits.
            unsafe { (functions.ack_cq_events)(cq, 1) };
            count += 1;
        }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: the channel is alive and destroyed once, here; its queues held an Arc and are gone.
        let answer = unsafe { (self.context.functions().destroy_comp_channel)(self.raw.as_ptr()) };
        if let Err(errno) = check(answer) {
            leaked(self.context.name(), "a completion channel", errno);
        }
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel")
            .field("device", &self.context.name())
            .finish_non_exhaustive()
    }
}

/// A completion queue.
pub struct Cq {
    raw: NonNull<ibv_cq>,
    // Field order is drop order: the channel, then what closes the device, both after `drop` has destroyed the queue.
    channel: Option<Arc<CompletionChannel>>,
    context: Arc<Context>,
}

// SAFETY: every verb may be called from any thread, and the provider locks the queue.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// A queue with room for at least `entries` completions. It must have room for every request that is posted,
    /// signalled or not: when a queue pair fails, all of them complete.
    ///
    /// # Errors
    ///
    /// [`RdmaError::LimitExceeded`] above the device's limit, [`RdmaError::Create`].
    pub fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<Arc<CompletionChannel>>,
    ) -> Result<Arc<Self>, RdmaError> {
        let limit = context.attributes().max_cqe;
        let entries_int = c_int::try_from(entries).unwrap_or(c_int::MAX);
        if entries > limit {
            return Err(RdmaError::LimitExceeded {
                device: context.name().to_owned(),
                what: "a completion queue",
                asked: u64::from(entries),
                limit: u64::from(limit),
            });
        }
        if channel
            .as_ref()
            .is_some_and(|channel| !Arc::ptr_eq(&channel.context, context))
        {
            return Err(other_device(
                "the channel of a completion queue",
                context.name(),
            ));
        }
        let channel_ptr = channel
            .as_ref()
            .map_or(ptr::null_mut(), |channel| channel.raw.as_ptr());
        // SAFETY: the context is open; the channel is null, or alive and of the same context.
        let raw = unsafe {
            (context.functions().create_cq)(
                context.as_ptr(),
                entries_int.max(1),
                ptr::null_mut(),
                channel_ptr,
                0,
            )
        };
        let Some(raw) = NonNull::new(raw) else {
            return Err(RdmaError::Create {
                source: os(last_errno()),
                device: context.name().to_owned(),
                what: "completion queue",
                detail: format!("{entries} entries (the device's limit is {limit})"),
            });
        };
        Ok(Arc::new(Self {
            raw,
            channel,
            context: Arc::clone(context),
        }))
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The channel that it was made with.
    pub fn channel(&self) -> Option<&Arc<CompletionChannel>> {
        self.channel.as_ref()
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    /// Takes up to `into.len()` completions, oldest first, and says how many. It never waits.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Wait`] when the queue cannot be read any more: destroy its queue pairs.
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize, RdmaError> {
        self.poll_raw(into).map_err(|errno| RdmaError::Wait {
            device: self.context.name().to_owned(),
            what: "completions",
            source: os(errno),
        })
    }

    /// [`poll`](Self::poll), with the bare error number.
    pub(crate) fn poll_raw(&self, into: &mut [Completion]) -> Result<usize, i32> {
        // SAFETY: the context is open.
        let poll = unsafe { (*self.context.as_ptr()).ops.poll_cq }.ok_or(libc::EOPNOTSUPP)?;
        let max = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        let first: *mut ibv_wc = into.as_mut_ptr().cast();
        // SAFETY: the queue is alive, and `first` has `max` entries (a Completion is transparent around one).
        let got = unsafe { poll(self.as_ptr(), max, first) };
        // Providers answer with a negative number of their own and no errno.
        usize::try_from(got).map_err(|_| if got == -1 { libc::EIO } else { -got })
    }

    /// Asks for one event on the channel with the next completion that arrives after this call. Whoever sleeps next
    /// polls once more before: a completion that was there already makes no event.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Wait`].
    pub fn arm(&self) -> Result<(), RdmaError> {
        // SAFETY: the context is open.
        let notify = unsafe { (*self.context.as_ptr()).ops.req_notify_cq };
        let armed = notify.ok_or(libc::EOPNOTSUPP).and_then(|notify| {
            // SAFETY: the queue is alive.
            check(unsafe { notify(self.as_ptr(), 0) })
        });
        armed.map_err(|errno| RdmaError::Wait {
            device: self.context.name().to_owned(),
            what: "completions",
            source: os(errno),
        })
    }
}

/// Objects that are to work together are of one open device.
pub(crate) fn other_device(what: &'static str, device: &str) -> RdmaError {
    RdmaError::Invalid {
        what,
        value: format!("of another open device than {device}"),
        next: "make both on the same context",
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // Destroying waits for events that were taken and not acknowledged; there are none, as taking acknowledges.
        // SAFETY: the queue is alive and destroyed once, here; its queue pairs held an Arc and are gone.
        let answer = unsafe { (self.context.functions().destroy_cq)(self.as_ptr()) };
        if let Err(errno) = check(answer) {
            leaked(self.context.name(), "a completion queue", errno);
        }
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("device", &self.context.name())
            .finish_non_exhaustive()
    }
}
