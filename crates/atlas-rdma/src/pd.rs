//! Protection domains: what may be used together.

use crate::completion::Cq;
use crate::context::Context;
use crate::error::{RdmaError, os};
use crate::leak::leaked;
use crate::sys::bindings::ibv_pd;
use crate::sys::{check, last_errno};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// A protection domain: queue pairs reach the regions of their own domain alone.
pub struct Pd {
    raw: NonNull<ibv_pd>,
    /// For queue pairs that post nothing.
    idle_cq: Mutex<Option<Arc<Cq>>>,
    // Last: it closes the device.
    context: Arc<Context>,
}

// SAFETY: every verb may be called from any thread, and the library locks what they share.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// A new domain on a device.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Create`] when the device has none left.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, RdmaError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.functions().alloc_pd)(context.as_ptr()) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(RdmaError::Create {
                source: os(last_errno()),
                device: context.name().to_owned(),
                what: "protection domain",
                detail: "one more".to_owned(),
            });
        };
        Ok(Arc::new(Self {
            raw,
            idle_cq: Mutex::new(None),
            context: Arc::clone(context),
        }))
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }

    /// The one completion queue of all queue pairs of this domain that post nothing.
    pub(crate) fn idle_cq(&self) -> Result<Arc<Cq>, RdmaError> {
        let mut idle = self.idle_cq.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cq) = &*idle {
            return Ok(Arc::clone(cq));
        }
        let cq = Cq::new(&self.context, 1, None)?;
        *idle = Some(Arc::clone(&cq));
        Ok(cq)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: the domain is alive and freed once, here; everything made in it held an Arc and is gone.
        let answer = unsafe { (self.context.functions().dealloc_pd)(self.as_ptr()) };
        if let Err(errno) = check(answer) {
            leaked(self.context.name(), "a protection domain", errno);
        }
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pd")
            .field("device", &self.context.name())
            .finish_non_exhaustive()
    }
}
