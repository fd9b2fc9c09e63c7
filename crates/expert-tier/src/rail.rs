//! The contract between the engine and whatever moves bytes: a [`Rail`].
//!
//! *Boundary*: a rail knows how to move one READ; it knows nothing of requests, deadlines, retries
//! or other rails. The engine knows nothing of sockets or queue pairs.
//!
//! *Invariant* (the memory rule): a posted [`Read`] **owns** its [`LandingRange`]. It comes back
//! only in a completion, and a rail gives it back only when nothing can write to it any more. As
//! ranges of one slot are disjoint by construction, no byte ever has two outstanding READs.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::LandingRange;
use expert_store::catalogue::{CHUNK_BYTES, Layer};
use expert_wire::Key;

use crate::config::Class;
use crate::rails::uma::IoReport;

/// Index of a rail in its tier, in the order of configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RailId(pub usize);

/// Identity of what a rail can fetch now: READs planned for one content never go to a rail that
/// has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentTag {
    /// Content id; without checksums the layout id.
    pub id: u128,
    /// Where there are no checksums nothing proves that two runs of a peer serve the same bytes:
    /// then the peer's instance and epoch are part of the identity, else `None`.
    pub instance: Option<(u64, u32)>,
}

impl ContentTag {
    /// The tag of a peer that introduced itself so.
    pub fn of(welcome: &expert_wire::message::Welcome) -> Self {
        match welcome.content_id {
            Some(id) => Self { id, instance: None },
            None => Self {
                id: welcome.layout_id,
                instance: Some((welcome.instance_id, welcome.epoch)),
            },
        }
    }
}

/// What a rail can do; constant over its life.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// Largest READ, bytes.
    pub read_max_bytes: u64,
    /// Whether only whole records can be read (v1 peers).
    pub whole_records: bool,
    /// Paths that work side by side within the rail (TCP streams, reader threads): the window is
    /// per lane.
    pub lanes: u32,
    /// How many READs what is left to be posted is cut into at least, down to a chunk each, so that every
    /// lane carries a part of a small request. 1 where that is not worth it.
    pub pieces: u32,
    /// No progress for this long with READs posted means that the rail is stalled.
    pub stall: Duration,
    /// Preference, 0 first: a rail takes READs only while none of a lower rank works with the same
    /// content.
    pub rank: u8,
}

/// What kind of thing a rail is; for people and statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RailKind {
    /// v2 frames over TCP streams.
    Tcp,
    /// The frozen protocol over TCP.
    TcpV1,
    /// Files of a store on this machine, by plain reads.
    Local,
    /// Files of a store on this machine, many reads at once.
    Uma,
    /// One-sided READs of a v2 peer's memory.
    Verbs,
    /// One-sided READs of a v1 peer's memory.
    VerbsV1,
    /// A test's.
    Mock,
}

/// Where a READ belongs: slot of the engine's table and its reuse count, so that a completion that
/// comes twice or late is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReadId {
    /// Index in the table of records under way.
    pub record: u32,
    /// Reuse count of that place.
    pub reuse: u32,
}

/// One READ: a piece of a record image and the memory that it lands in.
#[derive(Debug)]
pub struct Read {
    /// Engine's reference.
    pub id: ReadId,
    /// The record.
    pub key: Key,
    /// Its position in `layer`.
    pub position: usize,
    /// Layout and checksums of its layer.
    pub layer: Arc<Layer>,
    /// Content that it was planned for.
    pub content: ContentTag,
    /// Where the bytes go; offset and length are those in the record image.
    pub range: LandingRange,
    /// Whether checksums are to be compared as the bytes land.
    pub verify: bool,
    /// How urgent its request was when it was posted.
    pub class: Class,
    /// When the engine assigned it to its present rail.
    pub posted_at: Instant,
}

impl Read {
    /// Compares the checksums of the chunks that lie within `[from, from + bytes)` of the range
    /// (offsets relative to the range). READs begin and end at chunk boundaries or at the image's
    /// end, so that every chunk lies in exactly one READ.
    ///
    /// *Errors*: the first chunk that does not fit.
    pub fn check_chunks(&self, from: u64, bytes: u64) -> Result<(), BadChunk> {
        let Some(sums) = self
            .layer
            .record_checksums(self.position)
            .filter(|_| self.verify)
        else {
            return Ok(());
        };
        let mut at = from;
        while at < from + bytes {
            let image_at = self.range.offset() as u64 + at;
            debug_assert_eq!(image_at % CHUNK_BYTES, 0, "READs are cut at chunks");
            let take = CHUNK_BYTES.min(from + bytes - at);
            let chunk = image_at / CHUNK_BYTES;
            let got = self.range.xxh3_64(at as usize, take as usize);
            let want = sums[chunk as usize];
            if got != want {
                return Err(BadChunk {
                    chunk: chunk as u32,
                    got,
                    want,
                });
            }
            at += take;
        }
        Ok(())
    }

    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        self.range.len() as u64
    }
}

/// A chunk that does not fit its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadChunk {
    /// Index in the record image.
    pub chunk: u32,
    /// Checksum of what arrived.
    pub got: u64,
    /// Checksum of the catalogue.
    pub want: u64,
}

/// Why a READ did not do its work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadError {
    /// The rail went down or was told to give everything back; says nothing about the READ.
    Flushed,
    /// The peer has other content now than the READ was planned for.
    ContentChanged,
    /// Bytes arrived and do not fit the catalogue.
    Checksum(BadChunk),
    /// The peer, or the record's header, answered for another record.
    WrongRecord(String),
    /// The peer has no such record, or refuses the range.
    Refused(String),
    /// The peer cannot read its file, or is overloaded; another source may do.
    Unavailable(String),
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flushed => f.write_str("the rail went down"),
            Self::ContentChanged => f.write_str("the peer serves other content now"),
            Self::Checksum(bad) => write!(
                f,
                "chunk {} has checksum {:016x}, the catalogue says {:016x}",
                bad.chunk, bad.got, bad.want
            ),
            Self::WrongRecord(why) | Self::Refused(why) | Self::Unavailable(why) => {
                f.write_str(why)
            }
        }
    }
}

/// The end of a READ; gives its memory back.
#[derive(Debug)]
pub struct Completion {
    /// What was posted.
    pub read: Read,
    /// What came of it.
    pub result: Result<Landed, ReadError>,
}

/// What is known of bytes that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Landed {
    /// The rail compared the checksums already.
    pub verified: bool,
    /// Time that took.
    pub verify_time: Duration,
}

/// What a rail has to tell.
#[derive(Debug)]
pub enum RailEvent {
    /// A READ ended.
    Completion(Completion),
    /// The rail works, with this content: after a probe, or because the peer changed it.
    Ready(ContentTag),
    /// A probe failed.
    ProbeFailed(String),
    /// A part of the rail stands still although READs are posted on it.
    Stalled(String),
    /// The rail noticed that it is broken; READs still posted come back as `Flushed`.
    Down(String),
}

/// One independent path for bytes.
///
/// *Threads*: only the tier's driver thread calls these; none of them may block. A rail may own
/// helper threads, which wake the driver through the `Notifier` that it was built with.
/// *Cleanup*: dropping a rail gives no events any more; memory of READs still posted must be safe
/// (returned, or leaked on purpose) before drop returns.
pub trait Rail: Send {
    /// Name for people, e.g. `tcp:10.0.0.2:9909`.
    fn name(&self) -> &str;
    /// What kind it is.
    fn kind(&self) -> RailKind;
    /// What it can do.
    fn capabilities(&self) -> Capabilities;
    /// Takes a READ over, or gives it back when it cannot take it now.
    fn post(&mut self, read: Read) -> Result<(), Box<Read>>;
    /// Hands over what happened since the last call.
    fn poll(&mut self, sink: &mut Vec<RailEvent>);
    /// Bytes that arrived so far, partial READs included: the stall detector's evidence.
    fn progress_bytes(&self) -> u64;
    /// Time that its own threads ran or waited for a processor so far; 0 where it has none, or does not know.
    fn cpu_time(&self) -> Duration {
        Duration::ZERO
    }
    /// Bytes of the arena that its card may write to; 0 where it has none.
    fn registered_bytes(&self) -> u64 {
        0
    }
    /// How it reads files, where it reads them many at once.
    fn io(&self) -> Option<IoReport> {
        None
    }
    /// Starts to connect, or to rebuild what is broken; answers by `Ready` or `ProbeFailed`.
    /// Called only when quiesced.
    fn begin_probe(&mut self);
    /// Stops; every READ posted comes back as a completion.
    fn begin_quiesce(&mut self);
    /// Whether every READ came back and nothing can write to memory any more.
    fn is_quiesced(&self) -> bool;
}
