//! A device without a kernel: it records every call in order, has limits, and fails where a test says so.
//!
//! It stands behind the same table of functions as the library, and its objects are the library's own structs, so the
//! code under test cannot tell. Nothing happens on its own: requests stay posted until [`Fake::complete`] or the error
//! state ends them.

mod functions;

use crate::context::Context;
use crate::sys::bindings::{IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, ibv_device, ibv_wc};
use crate::sys::zeroed;
use functions::{FUNCTIONS, FakeDevice, OLD_FUNCTIONS};
use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

/// A request as the device saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    pub(crate) signaled: bool,
    pub(crate) remote_addr: u64,
    /// Address, bytes, lkey of each local range.
    pub(crate) local: Vec<(u64, u32, u32)>,
}

/// What the device does, and what it was asked.
#[derive(Default)]
struct State {
    calls: Vec<String>,
    /// Calls that fail, and how.
    failures: HashMap<&'static str, i32>,
    /// Requests that the next posts take before they fail.
    post_budget: Option<(usize, i32)>,
    /// Regions smaller than this, but for single bytes, are refused, and how.
    refuse_below: Option<(usize, i32)>,
    /// Whether unsignalled requests end as soon as they are posted.
    at_once: bool,
    max_mr_bytes: u64,
    with_iova2: bool,
    posted: VecDeque<Posted>,
    in_error: bool,
    completions: VecDeque<ibv_wc>,
    armed: bool,
    next_key: u32,
}

/// The device.
pub(crate) struct Fake {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// What the channel's descriptor reads, and its other end.
    events: (UnixStream, UnixStream),
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Records a call; the error number if it is to fail.
    fn call(&self, name: &'static str) -> Result<(), i32> {
        let mut state = self.lock();
        state.calls.push(name.to_owned());
        state.failures.get(name).map_or(Ok(()), |&errno| Err(errno))
    }

    fn complete(&self, state: &mut State, wr_id: u64, status: u32) {
        // SAFETY: integers alone.
        let mut wc: ibv_wc = unsafe { zeroed() };
        wc.wr_id = wr_id;
        wc.status = status;
        state.completions.push_back(wc);
        if std::mem::take(&mut state.armed) {
            (&self.events.1).write_all(&[1]).unwrap();
        }
    }

    fn flush(&self, state: &mut State) {
        state.in_error = true;
        while let Some(posted) = state.posted.pop_front() {
            self.complete(state, posted.wr_id, IBV_WC_WR_FLUSH_ERR);
        }
    }
}

impl Fake {
    /// A device with generous limits.
    pub(crate) fn new() -> Self {
        let events = UnixStream::pair().unwrap();
        events.0.set_nonblocking(true).unwrap();
        let state = State {
            max_mr_bytes: u64::MAX,
            with_iova2: true,
            next_key: 1,
            ..State::default()
        };
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                events,
            }),
        }
    }

    /// Opens it.
    pub(crate) fn open(&self) -> Arc<Context> {
        let functions = if self.shared.lock().with_iova2 {
            &FUNCTIONS
        } else {
            &OLD_FUNCTIONS
        };
        // SAFETY: integers, function pointers and arrays of them.
        let mut device: ibv_device = unsafe { zeroed() };
        for (slot, byte) in device.name.iter_mut().zip(*b"fake0") {
            *slot = byte as _;
        }
        let mut device = FakeDevice {
            device,
            shared: Arc::clone(&self.shared),
        };
        // SAFETY: the device lives until the end of this function; the functions are its own.
        unsafe { Context::open_device(functions, (&raw mut device).cast()) }.unwrap()
    }

    pub(crate) fn set_max_mr_bytes(&self, bytes: u64) {
        self.shared.lock().max_mr_bytes = bytes;
    }

    /// An older library, without `ibv_reg_mr_iova2`. Before [`open`](Self::open).
    pub(crate) fn set_old_library(&self) {
        self.shared.lock().with_iova2 = false;
    }

    /// Makes every further call of this name fail.
    pub(crate) fn fail(&self, call: &'static str, errno: i32) {
        self.shared.lock().failures.insert(call, errno);
    }

    pub(crate) fn heal(&self, call: &'static str) {
        self.shared.lock().failures.remove(call);
    }

    /// Lets the next post take so many requests and fail with this number then.
    pub(crate) fn fail_post_after(&self, requests: usize, errno: i32) {
        self.shared.lock().post_budget = Some((requests, errno));
    }

    /// Refuses regions that are smaller, but for single bytes.
    pub(crate) fn refuse_below(&self, bytes: usize, errno: i32) {
        self.shared.lock().refuse_below = Some((bytes, errno));
    }

    /// Lets unsignalled requests end, with success and so without a word, as soon as they are posted.
    pub(crate) fn complete_posted_at_once(&self) {
        self.shared.lock().at_once = true;
    }

    /// Notes something in the order of calls that is not one.
    pub(crate) fn noting(&self, what: &'static str) -> Note {
        Note(Arc::clone(&self.shared), what)
    }

    /// The calls since the last time, in order.
    pub(crate) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().calls)
    }

    pub(crate) fn posted(&self) -> Vec<Posted> {
        self.shared.lock().posted.iter().cloned().collect()
    }

    /// Ends the oldest requests: all but the last with success, the last with this status, which takes the queue pair
    /// to the error state if it is none of success.
    pub(crate) fn complete(&self, count: usize, status: u32) {
        let mut state = self.shared.lock();
        for index in 0..count {
            let posted = state.posted.pop_front().expect("more than is posted");
            let status = if index + 1 == count {
                status
            } else {
                IBV_WC_SUCCESS
            };
            if posted.signaled || status != IBV_WC_SUCCESS {
                self.shared.complete(&mut state, posted.wr_id, status);
            }
        }
        if status != IBV_WC_SUCCESS {
            self.shared.flush(&mut state);
        }
    }

    /// A completion that nothing posted.
    pub(crate) fn complete_stray(&self, wr_id: u64) {
        let mut state = self.shared.lock();
        self.shared.complete(&mut state, wr_id, IBV_WC_SUCCESS);
    }

    /// Loses the completions of everything that is posted, as a dead device does.
    pub(crate) fn lose_all(&self) {
        self.shared.lock().posted.clear();
    }
}

/// Notes its drop among the calls.
pub(crate) struct Note(Arc<Shared>, &'static str);

impl Drop for Note {
    fn drop(&mut self) {
        self.0.lock().calls.push(self.1.to_owned());
    }
}
