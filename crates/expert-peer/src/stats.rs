//! What a peer has done so far.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use expert_metrics::{Buckets, Durations};
use expert_wire::message::ErrorCode;

use crate::refusal::{self, Refusal};

/// One more than the largest error code on the wire.
pub(crate) const CODES: usize = 16;

/// A rail of a peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RailStats {
    /// Device name; with its port where that is not 1.
    pub name: String,
    /// Bytes that can be read over it now.
    pub registered_bytes: u64,
    /// In so many regions.
    pub regions: u64,
    /// Queue pairs of clients now.
    pub qps_open: u64,
    /// Clients that opened it since the start.
    pub opens: u64,
}

/// Counters of a peer since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerStats {
    /// Connections that were let in.
    pub connections_accepted: u64,
    /// Connections that ended before they were served.
    pub connections_refused: u64,
    /// The same by reason; reasons that did not occur are left out.
    pub refusals: Vec<(Refusal, u64)>,
    /// Clients that did not prove that they know the token: another one, none, or v1.
    pub auth_refused: u64,
    /// Rails that were not opened because their client had too many queue pairs.
    pub qps_refused: u64,
    /// Turns to send that had to be waited for: more wanted to send than there are processors.
    pub turns_waited: u64,
    /// Connections now.
    pub connections_active: u64,
    /// Connections that ended because a deadline passed (handshake, half a frame, stalled send).
    pub connections_timed_out: u64,
    /// Requests of all kinds, refused ones too; not pings.
    pub requests: u64,
    /// Record bytes of answers that were sent whole.
    pub payload_bytes_sent: u64,
    /// Answers with record bytes that are being sent now.
    pub answers_active: u64,
    /// How long answers with record bytes took, from the request to their last byte in the socket.
    pub answer_times: Buckets,
    /// Answers that were broken off because a file changed, ended early or could not be read.
    pub replies_broken_off: u64,
    /// Error frames by code; codes that did not occur are left out.
    pub errors: Vec<(ErrorCode, u64)>,
    /// Checksum reports of clients.
    pub checksum_reports: u64,
    /// Files of the store that were found changed.
    pub store_changes: u64,
    /// Files of the store whose records are refused now.
    pub files_refused: u64,
    /// Stores taken up after the first.
    pub reloads: u64,
    /// Times that another store was to be taken up and was not.
    pub reloads_failed: u64,
    /// Whether the last of all was not, so that the store before it is served.
    pub last_reload_failed: bool,
    /// Number of the store served now.
    pub epoch: u32,
    /// Rails, in the order that clients see; empty without verbs.
    pub rails: Vec<RailStats>,
    /// How the store's memory was made registrable, and why so; `None` without verbs.
    pub mapping: Option<String>,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) accepted: AtomicU64,
    refusals: refusal::Counts,
    pub(crate) qps_refused: AtomicU64,
    pub(crate) timed_out: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) payload_bytes: AtomicU64,
    pub(crate) broken_off: AtomicU64,
    pub(crate) checksum_reports: AtomicU64,
    pub(crate) store_changes: AtomicU64,
    pub(crate) reloads: AtomicU64,
    pub(crate) reloads_failed: AtomicU64,
    /// Whether the last one did.
    pub(crate) last_reload_failed: AtomicBool,
    pub(crate) answering: AtomicU64,
    pub(crate) answers: Durations,
    errors: [AtomicU64; CODES],
}

impl PeerStats {
    /// Connections that ended before they were served, for that reason.
    pub fn refused(&self, why: Refusal) -> u64 {
        let found = self.refusals.iter().find(|(r, _)| *r == why);
        found.map_or(0, |(_, count)| *count)
    }
}

impl Counters {
    pub(crate) fn refused(&self, why: Refusal) {
        add(&self.refusals[why as usize], 1);
    }

    pub(crate) fn error(&self, code: ErrorCode) {
        if let Some(counter) = self.errors.get(code as usize) {
            add(counter, 1);
        }
    }

    pub(crate) fn snapshot(&self, active: u64) -> PeerStats {
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        PeerStats {
            connections_accepted: load(&self.accepted),
            connections_refused: self.refusals.iter().map(load).sum(),
            refusals: Refusal::ALL
                .into_iter()
                .map(|why| (why, load(&self.refusals[why as usize])))
                .filter(|(_, count)| *count > 0)
                .collect(),
            auth_refused: load(&self.refusals[Refusal::Auth as usize]),
            qps_refused: load(&self.qps_refused),
            turns_waited: 0,
            connections_active: active,
            connections_timed_out: load(&self.timed_out),
            requests: load(&self.requests),
            payload_bytes_sent: load(&self.payload_bytes),
            answers_active: load(&self.answering),
            answer_times: self.answers.snapshot(),
            replies_broken_off: load(&self.broken_off),
            errors: (1..CODES)
                .filter(|&code| load(&self.errors[code]) > 0)
                .map(|code| (ErrorCode::from_wire(code as u16), load(&self.errors[code])))
                .collect(),
            checksum_reports: load(&self.checksum_reports),
            store_changes: load(&self.store_changes),
            files_refused: 0, // the store served now knows
            reloads: load(&self.reloads),
            reloads_failed: load(&self.reloads_failed),
            last_reload_failed: self.last_reload_failed.load(Relaxed),
            epoch: 0, // ... and its number
            rails: Vec::new(),
            mapping: None,
        }
    }
}

/// Counts an answer from its request on, and as one under way as long as it lives.
pub(crate) struct Answering<'a> {
    counters: &'a Counters,
    since: Instant,
}

impl<'a> Answering<'a> {
    pub(crate) fn new(counters: &'a Counters) -> Self {
        add(&counters.answering, 1);
        Self {
            counters,
            since: Instant::now(),
        }
    }

    /// It was sent whole.
    pub(crate) fn done(self) {
        self.counters.answers.record(self.since.elapsed());
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.counters.answering.fetch_sub(1, Relaxed);
    }
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Relaxed);
}
