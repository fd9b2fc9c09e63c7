//! What a queue of READs is made for, and why it refuses a post.

use crate::attributes::DeviceAttributes;
use crate::error::{RdmaError, os};
use crate::in_flight::POSTS_MAX;
use expert_arena::LandingRange;
use std::fmt;

/// What a queue is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadQueueOptions {
    /// The port.
    pub port: u8,
    /// Index in the port's table of partition keys.
    pub pkey_index: u16,
    /// Posts in flight at most.
    pub posts_max: u32,
    /// Requests of all posts in flight at most; the send queue and the completion queue hold so many and one more.
    pub work_requests_max: u32,
    /// Local ranges of one request at most.
    pub sge_max: u32,
}

impl ReadQueueOptions {
    /// The same, lowered to what a device can do.
    #[must_use]
    pub fn limited_to(mut self, device: &DeviceAttributes) -> Self {
        let requests = device.max_qp_wr.min(device.max_cqe).saturating_sub(1);
        self.work_requests_max = self.work_requests_max.min(requests);
        self.posts_max = self.posts_max.min(self.work_requests_max).min(POSTS_MAX);
        self.sge_max = self.sge_max.min(read_sge_limit(device));
        self
    }
}

/// Local ranges of a READ that a device takes.
fn read_sge_limit(device: &DeviceAttributes) -> u32 {
    match device.max_sge_rd {
        0 => device.max_sge,
        reads => reads.min(device.max_sge),
    }
}

/// A post that was not taken; nothing of it will be written.
#[derive(Debug)]
pub struct PostRefused<T> {
    /// What it was to be posted with.
    pub token: T,
    /// The range.
    pub range: LandingRange,
    /// Why.
    pub why: Refusal,
}

/// Why a post was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// No room until something that is posted has completed.
    Full,
    /// The queue is not connected, or failed, or is being closed.
    Down,
    /// The device took nothing of it, and this is the system's error number.
    Failed(i32),
    /// It can never be posted: correct the call.
    Invalid(&'static str),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the queue is full; poll it and post again"),
            Self::Down => f.write_str("the queue is not connected or has failed"),
            Self::Failed(errno) => write!(f, "posting failed: {}", os(*errno)),
            Self::Invalid(reason) => f.write_str(reason),
        }
    }
}

/// Refuses what a device cannot do.
pub(crate) fn check_options(
    device: &str,
    limits: &DeviceAttributes,
    options: &ReadQueueOptions,
) -> Result<(), RdmaError> {
    let most = limits.max_qp_wr.min(limits.max_cqe).saturating_sub(1);
    let limited = [
        ("a number of posts in flight", options.posts_max, POSTS_MAX),
        (
            "a number of requests in flight",
            options.work_requests_max,
            most,
        ),
        (
            "a number of local ranges of a READ",
            options.sge_max,
            read_sge_limit(limits),
        ),
    ];
    for (what, asked, limit) in limited {
        if asked == 0 {
            return Err(RdmaError::Invalid {
                what,
                value: "0".to_owned(),
                next: "ask for 1 at least",
            });
        }
        if asked > limit {
            return Err(RdmaError::LimitExceeded {
                device: device.to_owned(),
                what,
                asked: u64::from(asked),
                limit: u64::from(limit),
            });
        }
    }
    Ok(())
}
