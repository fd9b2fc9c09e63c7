//! Errors of the tier, sorted by whose fault they are.

use std::time::Duration;

use expert_arena::{ArenaError, SlotId};
use expert_store::StoreError;
use expert_wire::Key;
use expert_wire::client::HandshakeError;
use thiserror::Error;

use crate::rail::BadChunk;

/// What a peer was to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Accept a connection.
    Connect,
    /// Shake hands.
    Handshake,
    /// Answer a question.
    Answer,
}

impl Step {
    fn todo(self) -> &'static str {
        match self {
            Self::Connect => {
                "is the machine up, and does a firewall let the port through (`nc -vz HOST PORT`)?"
            }
            Self::Handshake => {
                "somebody listens there and says nothing: another service, or a peer that hangs (look at its log, or at its /healthz)"
            }
            Self::Answer => {
                "the peer hangs, is overloaded, or the network lost the way to it: look at its log, or at its /healthz"
            }
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Connect => "connecting",
            Self::Handshake => "the handshake",
            Self::Answer => "an answer",
        })
    }
}

/// Why a tier could not be made or did not do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TierError {
    /// A value that cannot be used, of a flag, a variable or an argument.
    #[error("{0}")]
    Config(String),
    /// A device ordering was asked for, and there is none yet.
    #[error(
        "stream {stream} is not supported: only 0 (done when the call returns) is, until device ordering exists"
    )]
    UnsupportedStream {
        /// The value given.
        stream: u64,
    },
    /// The arena refused.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The store refused (`posix`).
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No connection.
    #[error("connecting to {addr} failed: {why}")]
    Connect {
        /// Address of the peer.
        addr: String,
        /// What happened, and what to do.
        why: String,
    },
    /// The peer did not do its part in time.
    #[error("{addr}: {step} timed out after {waited_ms} ms; {todo}", todo = .step.todo())]
    TimedOut {
        /// Address of the peer.
        addr: String,
        /// What was waited for.
        step: Step,
        /// How long.
        waited_ms: u128,
    },
    /// The system's resolver did not say in time where a peer is.
    #[error(
        "{addr}: looking up the name timed out after {waited_ms} ms; does the name server answer (`getent hosts NAME`)? an address instead of the name needs none"
    )]
    NameTimedOut {
        /// `host:port` of the peer.
        addr: String,
        /// How long it was waited for.
        waited_ms: u128,
    },
    /// One-sided READs were required, and this machine cannot do them.
    #[error(
        "verbs were required and cannot be had: {why}; use --expert-backend rdma for TCP, or do not require verbs"
    )]
    NoVerbs {
        /// What is missing, and what to do.
        why: String,
    },
    /// The other side is no peer, or refuses.
    #[error("{addr}: {source}")]
    Handshake {
        /// Address of the peer.
        addr: String,
        /// What happened.
        #[source]
        source: HandshakeError,
    },
    /// The peer's description of its store does not hold together.
    #[error("{addr}: catalogue of the peer is not sound: {why}")]
    Catalogue {
        /// Address of the peer.
        addr: String,
        /// What does not fit.
        why: String,
    },
    /// The peer serves another model than the one insisted on.
    #[error(
        "{addr} has content id {got}, expected {want}: it is another model, or another build of it"
    )]
    OtherContent {
        /// Name of the source.
        addr: String,
        /// What it serves.
        got: String,
        /// What was insisted on.
        want: String,
    },
    /// Sources of different models.
    #[error(
        "sources have different models: {one} has content {one_id}, {other} has {other_id}; drop one of them, or say which is meant with --expect-content-id"
    )]
    DifferentContents {
        /// Name of one.
        one: String,
        /// What it has, or is a part of.
        one_id: String,
        /// Name of another.
        other: String,
        /// What that has, or is a part of.
        other_id: String,
    },
    /// Nothing proves that a source has the same content as others.
    #[error(
        "{name} cannot be one of several sources: {why}, so nothing proves that all of them have the same content; use it alone"
    )]
    Unproven {
        /// Name of the source.
        name: String,
        /// What is missing.
        why: String,
    },
    /// The sources do not add up to the whole.
    #[error(
        "content {content} is incomplete: no source has {missing} (sources: {sources}); start a peer that has them, or allow it (--allow-missing)"
    )]
    Missing {
        /// The content.
        content: String,
        /// The records that nobody has, by layer and range.
        missing: String,
        /// All sources.
        sources: String,
    },
    /// No such record.
    #[error("{key}: {why}")]
    NoSuchRecord {
        /// What was asked for.
        key: Key,
        /// What there is.
        why: String,
    },
    /// A zero expert.
    #[error("{key} is a zero expert: its output is its input, there is nothing to fetch")]
    IdentityExpert {
        /// What was asked for.
        key: Key,
    },
    /// The slot is too small for the record.
    #[error("{key} has {need} bytes, {slot} has room for {have}; use slots of the largest record")]
    SlotTooSmall {
        /// The record.
        key: Key,
        /// The slot.
        slot: SlotId,
        /// Bytes of the record image.
        need: u64,
        /// Bytes of the slot.
        have: u64,
    },
    /// Bytes arrived that do not fit the catalogue, again after a repetition.
    #[error("{key} chunk {chunk}: checksum {got:016x}, the catalogue says {want:016x}; nothing was committed", chunk = .bad.chunk, got = .bad.got, want = .bad.want)]
    Checksum {
        /// The record.
        key: Key,
        /// The chunk.
        bad: BadChunk,
    },
    /// The peer answered with another record.
    #[error("{key}: {why}; nothing was committed")]
    WrongRecord {
        /// What was asked for.
        key: Key,
        /// What came.
        why: String,
    },
    /// The peer refuses this record.
    #[error("{key}: peer refuses: {why}")]
    Refused {
        /// What was asked for.
        key: Key,
        /// Its words.
        why: String,
    },
    /// The record's file cannot be read now, or the peer is overloaded.
    #[error("{key} cannot be had now: {why}")]
    Unavailable {
        /// What was asked for.
        key: Key,
        /// Words of the peer or of the system.
        why: String,
    },
    /// The peer's store changed to other content while the request was under way.
    #[error("{key}: the peer serves other content now; fetch again")]
    ContentChanged {
        /// What was asked for.
        key: Key,
    },
    /// Not done in time.
    #[error("{key}: not complete after {waited:?}: {why}")]
    Deadline {
        /// What was asked for.
        key: Key,
        /// The time allowed.
        waited: Duration,
        /// State of the rails at that moment.
        why: String,
    },
    /// A rail failed and the policy is to fail fast.
    #[error("{key}: rail failed: {why}")]
    RailFailed {
        /// What was asked for.
        key: Key,
        /// What happened to it.
        why: String,
    },
    /// Cancelled by the caller.
    #[error("{key}: cancelled")]
    Cancelled {
        /// What was asked for.
        key: Key,
    },
    /// More records at once than the arena has slots for.
    #[error(
        "{asked} records asked for at once, there are {slots} slots for them; walk through them in waves, or use a larger arena"
    )]
    TooManyAtOnce {
        /// Records.
        asked: usize,
        /// Slots.
        slots: usize,
    },
    /// Nothing more arrived on a ticket in time; the rest is still under way.
    #[error("nothing arrived within {waited:?}: {missing} of {asked} records are under way")]
    NotYet {
        /// How long the call waited.
        waited: Duration,
        /// Records that have not arrived.
        missing: usize,
        /// Records of the ticket.
        asked: usize,
    },
    /// Callers ask for more and more without waiting.
    #[error(
        "{asked} records asked for while {under_way} of at most {limit} are wanted; retry when some have arrived"
    )]
    TooManyUnderWay {
        /// Records of this call.
        asked: usize,
        /// Records wanted and not in memory.
        under_way: usize,
        /// The limit.
        limit: usize,
    },
    /// Too much is under way.
    #[error(
        "{asked} bytes asked for while {inflight} of at most {limit} are in flight; retry when requests have ended"
    )]
    Backpressure {
        /// Bytes of this request.
        asked: u64,
        /// Bytes under way.
        inflight: u64,
        /// The limit.
        limit: u64,
    },
    /// The tier was shut down.
    #[error("the tier is shut down")]
    ShutDown,
}

impl TierError {
    /// Whether the same call can succeed later without a change by the caller.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::TimedOut { .. }
            | Self::NameTimedOut { .. }
            | Self::Missing { .. }
            | Self::ContentChanged { .. }
            | Self::Unavailable { .. }
            | Self::Deadline { .. }
            | Self::RailFailed { .. }
            | Self::NotYet { .. }
            | Self::TooManyUnderWay { .. }
            | Self::Backpressure { .. } => true,
            Self::Handshake { source, .. } => source.is_retryable(),
            _ => false,
        }
    }

    /// Whether the caller should slow down.
    pub fn is_backpressure(&self) -> bool {
        matches!(
            self,
            Self::Backpressure { .. } | Self::TooManyUnderWay { .. }
        )
    }

    /// The same once more, for another caller who waits for the same record. What cannot be copied
    /// keeps its words.
    pub(crate) fn repeat(&self, key: Key) -> Self {
        match self {
            Self::NoSuchRecord { key, why } => Self::NoSuchRecord {
                key: *key,
                why: why.clone(),
            },
            Self::IdentityExpert { key } => Self::IdentityExpert { key: *key },
            Self::Checksum { key, bad } => Self::Checksum {
                key: *key,
                bad: *bad,
            },
            Self::WrongRecord { key, why } => Self::WrongRecord {
                key: *key,
                why: why.clone(),
            },
            Self::Refused { key, why } => Self::Refused {
                key: *key,
                why: why.clone(),
            },
            Self::ContentChanged { key } => Self::ContentChanged { key: *key },
            Self::Deadline { key, waited, why } => Self::Deadline {
                key: *key,
                waited: *waited,
                why: why.clone(),
            },
            Self::RailFailed { key, why } => Self::RailFailed {
                key: *key,
                why: why.clone(),
            },
            Self::Cancelled { key } => Self::Cancelled { key: *key },
            Self::ShutDown => Self::ShutDown,
            other => Self::Unavailable {
                key,
                why: other.to_string(),
            },
        }
    }
}
