//! What goes into the engine and what comes out of it.

use std::sync::Arc;
use std::time::Duration;

use expert_arena::{Landing, Lease};
use expert_store::catalogue::Layer;
use expert_wire::Key;

use super::Handle;
use crate::rail::{BadChunk, ContentTag, RailId};
use crate::stats::RequestStats;

/// One record to fetch.
#[derive(Debug)]
pub struct Order {
    /// Its name.
    pub key: Key,
    /// Its position in `layer`.
    pub position: usize,
    /// Layout and checksums of its layer.
    pub layer: Arc<Layer>,
    /// The content that `layer` belongs to.
    pub content: ContentTag,
    /// Where it goes.
    pub landing: Landing,
    /// Whether to compare checksums.
    pub verify: bool,
}

impl Order {
    /// Bytes that are to come.
    pub(crate) fn bytes(&self) -> u64 {
        self.landing.image_bytes() as u64
    }
}

/// Why a record was not committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Checksums did not fit, again after repetition.
    Checksum(BadChunk),
    /// Another record came.
    WrongRecord(String),
    /// The peer refuses.
    Refused(String),
    /// The peer cannot read its file, or is overloaded, again after repetition.
    Unavailable(String),
    /// The content is not served any more.
    ContentChanged,
    /// Out of time; the state of the rails at that moment.
    Deadline(String),
    /// A rail failed under [`crate::OnFailure::FailFast`].
    RailFailed(String),
    /// The caller gave up.
    Cancelled,
}

/// A committed record.
#[derive(Debug)]
pub struct Committed {
    /// The slot's bytes.
    pub lease: Lease,
    /// Whether checksums were compared.
    pub verified: bool,
    /// From submission to this commit.
    pub took: Duration,
}

/// A request that ended.
#[derive(Debug)]
pub struct Finished {
    /// As [`super::Engine::submit`] returned it.
    pub request: Handle,
    /// Per record, in the order submitted.
    pub records: Vec<Result<Committed, Failure>>,
    /// Where its time went.
    pub stats: RequestStats,
}

/// What the driver has to do for the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Call `begin_quiesce`, and [`super::Engine::handle_quiesced`] once it is.
    Quiesce(RailId),
    /// Call `begin_probe`.
    Probe(RailId),
}

/// A request was not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Bytes of the request.
    pub asked: u64,
    /// Bytes under way.
    pub inflight: u64,
    /// The limit.
    pub limit: u64,
}

impl Finished {
    /// Whether every record was committed.
    pub fn is_complete(&self) -> bool {
        self.records.iter().all(Result::is_ok)
    }
}
