//! What a device says unasked: ports that come and go, queue pairs that fail.

use crate::context::Context;
use crate::error::{RdmaError, os};
use crate::sys::bindings::{
    IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR,
    IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, ibv_async_event,
};
use crate::sys::{last_errno, zeroed};
use crate::wait::readable;
use std::time::{Duration, Instant};

/// An asynchronous event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A port lost its link.
    PortDown {
        /// The port.
        port: u8,
    },
    /// A port works.
    PortUp {
        /// The port.
        port: u8,
    },
    /// A queue pair failed in a way that no completion tells.
    QpFatal {
        /// Its number.
        qpn: u32,
    },
    /// The device failed; nothing on it will work again.
    DeviceFatal,
    /// The GID table of a port changed.
    GidChange {
        /// The port.
        port: u8,
    },
    /// Anything else, as the library's number.
    Other {
        /// `enum ibv_event_type`.
        event_type: u32,
    },
}

impl Context {
    /// The next asynchronous event, acknowledged; `None` when there was none within `timeout`. Zero only looks.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Wait`] where the device is going away.
    pub fn async_event(&self, timeout: Duration) -> Result<Option<AsyncEvent>, RdmaError> {
        let failed = |source| RdmaError::Wait {
            device: self.name().to_owned(),
            what: "asynchronous events",
            source,
        };
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.take_event().map_err(|errno| failed(os(errno)))? {
                return Ok(Some(event));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            readable(&[self.event_fd()], left).map_err(failed)?;
        }
    }

    fn take_event(&self) -> Result<Option<AsyncEvent>, i32> {
        // SAFETY: integers and raw pointers alone.
        let mut raw: ibv_async_event = unsafe { zeroed() };
        // SAFETY: the context is open, `raw` is writable; the descriptor does not block.
        let answer = unsafe { (self.functions().get_async_event)(self.as_ptr(), &raw mut raw) };
        if answer != 0 {
            return match last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                errno => Err(errno),
            };
        }
        let event = read(&raw);
        // SAFETY: the event was just taken and is acknowledged once.
        unsafe { (self.functions().ack_async_event)(&raw mut raw) };
        Ok(Some(event))
    }
}

/// Reads an event that was taken and not acknowledged yet: what it names cannot have been destroyed, that waits.
fn read(raw: &ibv_async_event) -> AsyncEvent {
    let port = || {
        // SAFETY: reading any bytes of the union as a number is allowed; for these events they are a port.
        let port = unsafe { raw.element.port_num };
        u8::try_from(port).unwrap_or(0)
    };
    match raw.event_type {
        IBV_EVENT_PORT_ERR => AsyncEvent::PortDown { port: port() },
        IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortUp { port: port() },
        IBV_EVENT_GID_CHANGE => AsyncEvent::GidChange { port: port() },
        IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: for these events the union holds a queue pair.
            let qp = unsafe { raw.element.qp };
            // SAFETY: the queue pair is alive until the event is acknowledged.
            let qpn = unsafe { (*qp).qp_num };
            AsyncEvent::QpFatal { qpn }
        }
        event_type => AsyncEvent::Other { event_type },
    }
}
