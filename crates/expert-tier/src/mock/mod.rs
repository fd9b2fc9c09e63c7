//! A rail without a wire: bandwidth, latency and every fault that a test asks for, on a clock that
//! the test owns, or on the real one.
//!
//! It is as unforgiving as a network card. READs of a rail land in order, at the time that latency
//! and bandwidth give; whatever was cancelled, expired or given up meanwhile, the bytes are written
//! then, until the rail's own quiesce has returned. What it reads is what its peer serves at that
//! moment: it knows the content that a READ was planned for as little as a card does.
//!
//! Start with [`MockRail::new`], and call [`MockRail::advance`] whenever time passes; nothing else
//! moves it. [`RealRail`] is the same device with a thread that does so, for real drivers;
//! [`workload`] fetches over either.
//!
//! *A completion that comes twice* cannot be expressed: a completion owns its READ, which owns its
//! range, and none of them can be copied, so the second one would need a range that is gone. What
//! such an event would do to an engine without types is done by a completion that names a record
//! that ended meanwhile, when its place in the table is somebody else's: cancelled and expired
//! requests make those all the time, and the guard `epoch` is what tells them apart
//! (`stale_completion_that_counts_is_noticed`). A device that reports one work request twice is
//! stopped earlier, where its numbers are turned into READs.

mod real;
pub(crate) mod rng;
mod spec;
#[cfg(test)]
mod tests;
pub mod workload;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{DetachedWriter, Lease};
use expert_store::catalogue::CHUNK_BYTES;
use expert_wire::Key;

use crate::engine::Guards;
pub use real::{Control, RealRail};
pub use spec::{MockSpec, ReadFault, Verifies};

use crate::rail::{
    BadChunk, Capabilities, Completion, ContentTag, Landed, Rail, RailEvent, RailKind, Read,
    ReadError,
};
use rng::SplitMix;

/// Bytes that a mock peer serves.
pub trait MockSource: Send + Sync {
    /// The record image, if this content has such a record.
    fn record(&self, content: ContentTag, key: Key) -> Option<&[u8]>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// Not connected, or quiesced: nothing is posted.
    Idle,
    Probing {
        answer_at: Instant,
    },
    Up,
    Quiescing {
        until: Instant,
    },
}

#[derive(Debug)]
struct Posted {
    read: Read,
    starts_at: Instant,
    lands_at: Instant,
    fault: Option<ReadFault>,
    /// Its remote key was revoked before it was posted.
    revoked: bool,
    /// Bytes that are in memory already.
    written: usize,
    /// Of the chunks that are, and fit or not.
    verify: Result<Duration, BadChunk>,
}

/// A READ that is over and was not told of yet.
#[derive(Debug)]
struct Ended {
    completion: Completion,
    tell_at: Instant,
}

/// A write that is still to come although its READ was given back.
#[derive(Debug)]
struct Stray {
    writer: DetachedWriter,
    key: Key,
    content: ContentTag,
    image_offset: usize,
    bytes: usize,
    lands_at: Instant,
}

/// See the module.
pub struct MockRail {
    name: String,
    spec: MockSpec,
    source: Arc<dyn MockSource>,
    guards: Guards,
    rng: SplitMix,
    now: Instant,
    link: Link,
    /// What the peer serves.
    content: ContentTag,
    /// What the engine was told last: READs use the remote keys of that.
    told: Option<ContentTag>,
    /// When the wire has sent everything posted.
    free_at: Instant,
    broken_until: Option<Instant>,
    /// Cut since it came up last: nothing posted will land.
    cut: bool,
    stalled_until: Instant,
    slow_until: Instant,
    slow_factor: u32,
    armed: VecDeque<ReadFault>,
    posted: VecDeque<Posted>,
    ended: Vec<Ended>,
    events: Vec<RailEvent>,
    strays: Vec<Stray>,
    landed_bytes: u64,
    progress_bytes: u64,
    /// On the virtual clock comparing takes no time.
    clock: Option<fn() -> Instant>,
}

impl MockRail {
    /// A rail to a peer that serves `content`, at time `now`.
    pub fn new(
        name: String,
        spec: MockSpec,
        source: Arc<dyn MockSource>,
        content: ContentTag,
        seed: u64,
        now: Instant,
    ) -> Self {
        Self {
            name,
            spec,
            source,
            guards: Guards::ON,
            rng: SplitMix::new(seed),
            now,
            link: Link::Idle,
            content,
            told: None,
            free_at: now,
            broken_until: None,
            cut: false,
            stalled_until: now,
            slow_until: now,
            slow_factor: 1,
            armed: VecDeque::new(),
            posted: VecDeque::new(),
            ended: Vec::new(),
            events: Vec::new(),
            strays: Vec::new(),
            landed_bytes: 0,
            progress_bytes: 0,
            clock: None,
        }
    }

    /// Switches the memory rule off, for the simulation's negative control.
    #[doc(hidden)]
    pub fn set_guards(&mut self, guards: Guards) {
        self.guards = guards;
    }

    /// Lets time pass: what is due by `now` lands, ends, or is answered.
    pub fn advance(&mut self, now: Instant) {
        self.now = now;
        let flush_at = match self.link {
            Link::Quiescing { until } if until <= now => Some(until),
            _ => None,
        };
        self.land_until(flush_at.unwrap_or(now));
        if let Some(at) = flush_at {
            self.flush(at);
        }
        if let Link::Probing { answer_at } = self.link {
            if answer_at <= now {
                self.answer_probe();
            }
        }
        self.note_progress();
    }

    /// The next moment at which [`MockRail::advance`] or [`Rail::poll`] has something.
    pub fn next_event(&self) -> Option<Instant> {
        let pending = (!self.events.is_empty()).then_some(self.now);
        let landing = self.posted.front().filter(|_| !self.cut);
        let link = match self.link {
            Link::Probing { answer_at } => Some(answer_at),
            Link::Quiescing { until } => Some(until),
            Link::Idle | Link::Up => None,
        };
        let strays = self.strays.iter().map(|s| s.lands_at.max(self.now));
        pending
            .into_iter()
            .chain(landing.map(|p| p.lands_at))
            .chain(self.ended.iter().map(|e| e.tell_at))
            .chain(link)
            .chain(strays)
            .min()
    }

    /// READs posted and not told of, and their bytes.
    pub fn in_flight(&self) -> (usize, u64) {
        let posted = self.posted.iter().map(|p| &p.read);
        let reads = posted.chain(self.ended.iter().map(|e| &e.completion.read));
        reads.fold((0, 0), |(n, bytes), r| (n + 1, bytes + r.bytes()))
    }

    /// The connection breaks, and cannot be made again for a while.
    pub fn disconnect(&mut self, for_: Duration) {
        self.broken_until = self.broken_until.max(Some(self.now + for_));
        if self.link == Link::Up && !self.cut {
            self.cut = true;
            self.write_front_partly();
            self.events.push(RailEvent::Down("the link was cut".into()));
        }
    }

    /// Nothing moves for a while, and nobody says so; then everything goes on.
    pub fn stall(&mut self, for_: Duration) {
        self.stalled_until = self.stalled_until.max(self.now) + for_;
        self.free_at = self.free_at.max(self.now) + for_;
        for posted in &mut self.posted {
            posted.starts_at += for_;
            posted.lands_at += for_;
        }
    }

    /// READs posted from now on are slower by a factor, for a while.
    pub fn slow_down(&mut self, factor: u32, for_: Duration) {
        self.slow_factor = factor.max(1);
        self.slow_until = self.now + for_;
    }

    /// The next READ posted goes wrong; several add up, one READ each.
    pub fn arm(&mut self, fault: ReadFault) {
        self.armed.push_back(fault);
    }

    /// Forgets what was armed and met no READ.
    pub fn disarm(&mut self) {
        self.armed.clear();
    }

    /// What the next READ posted will meet.
    pub fn next_fault(&self) -> Option<ReadFault> {
        self.armed.front().copied()
    }

    /// The peer serves other content from now on: the remote keys of the old one are revoked.
    pub fn switch_content(&mut self, content: ContentTag) {
        if self.content == content {
            return;
        }
        if self.link == Link::Up && !self.cut {
            self.write_front_partly();
            while let Some(posted) = self.posted.pop_front() {
                self.end(posted.read, Err(ReadError::ContentChanged), self.now);
            }
            self.events.push(RailEvent::Ready(content));
        }
        self.content = content;
    }

    /// Lets writes through that should not happen any more; only without the memory rule there are
    /// any. `leases`: all that are held, see [`DetachedWriter::write`]; one that cannot be done now
    /// is tried again at the next call. Returns how many were done.
    #[doc(hidden)]
    pub fn write_strays(&mut self, leases: &mut [&mut Lease]) -> usize {
        let before = self.strays.len();
        let (now, source) = (self.now, &self.source);
        self.strays.retain(|s| {
            let Some(image) = source.record(s.content, s.key) else {
                return false;
            };
            let bytes = &image[s.image_offset..s.image_offset + s.bytes];
            s.lands_at > now || !s.writer.write(bytes, leases)
        });
        before - self.strays.len()
    }

    /// Takes a READ over that was posted a little earlier: the wire does not wait for whoever looks
    /// after it.
    fn post_at(&mut self, read: Read, at: Instant) -> Result<(), Box<Read>> {
        if self.link != Link::Up || self.posted.len() >= self.spec.depth {
            return Err(Box::new(read));
        }
        let factor = match self.now < self.slow_until {
            true => self.slow_factor,
            false => 1,
        };
        let fault = self.armed.pop_front();
        let late = match fault {
            Some(ReadFault::Late(by)) => by,
            _ => Duration::ZERO,
        };
        let jitter = Duration::from_micros(self.rng.below(self.spec.jitter.as_micros() as u64 + 1));
        let wire_ns = u128::from(read.bytes()) * 1_000_000_000 / u128::from(self.spec.bytes_per_s);
        let wire = Duration::from_nanos(wire_ns as u64) * factor + jitter;
        let starts_at = self.free_at.max(at + self.spec.latency) + late;
        self.free_at = starts_at + wire;
        self.posted.push_back(Posted {
            read,
            starts_at,
            lands_at: self.free_at,
            fault,
            revoked: self.told != Some(self.content),
            written: 0,
            verify: Ok(Duration::ZERO),
        });
        Ok(())
    }

    fn land_until(&mut self, then: Instant) {
        while !self.cut && self.posted.front().is_some_and(|p| p.lands_at <= then) {
            let mut posted = self.posted.pop_front().expect("just seen");
            let result = self.land(&mut posted);
            let extra = self.rng.below(self.spec.reorder.as_micros() as u64 + 1);
            let tell_at = posted.lands_at + Duration::from_micros(extra);
            self.end(posted.read, result, tell_at);
        }
    }

    fn land(&mut self, posted: &mut Posted) -> Result<Landed, ReadError> {
        let read = &mut posted.read;
        // Those that fail took their time on the wire, too.
        self.landed_bytes += read.bytes();
        if posted.revoked {
            return Err(ReadError::ContentChanged);
        }
        if posted.fault == Some(ReadFault::Unavailable) {
            return Err(ReadError::Unavailable("the mock peer cannot read".into()));
        }
        let len = read.range.len();
        let Some(image) = self.source.record(self.content, read.key) else {
            return Err(ReadError::Refused("no such record".into()));
        };
        let from = read.range.offset();
        let Some(bytes) = image.get(from..from + len) else {
            return Err(ReadError::Refused("beyond the record".into()));
        };
        match posted.fault {
            Some(ReadFault::Short) => {
                let part = self.rng.index(len);
                read.range.write(0, &bytes[..part]);
            }
            Some(ReadFault::Corrupt) => {
                read.range.write(0, bytes);
                let at = self.rng.index(len);
                read.range.write(at, &[!bytes[at]]);
            }
            _ => {
                posted.write_up_to(len, bytes, self.spec.verifies, self.clock);
                let verify_time = posted.verify.map_err(ReadError::Checksum)?;
                return Ok(Landed {
                    verified: self.spec.verifies == Verifies::Rail,
                    verify_time,
                });
            }
        }
        Ok(Landed::default())
    }

    /// When the next whole chunk of the READ on the wire is there, if that is before its end.
    fn next_chunk(&self) -> Option<Instant> {
        let healthy = |p: &&Posted| p.fault.is_none() && !p.revoked;
        let posted = self.posted.front().filter(healthy)?;
        let bytes = posted.read.bytes();
        let next = (posted.part_by(self.now) / CHUNK_BYTES + 1) * CHUNK_BYTES;
        if self.cut || next >= bytes {
            return None;
        }
        let wire = posted.lands_at - posted.starts_at;
        Some(posted.starts_at + wire.mul_f64(next as f64 / bytes as f64))
    }

    /// Writes what is on the wire by now, whole chunks of it, so that the end of a READ is not all
    /// its work. For the real clock, where writing takes time.
    fn write_early(&mut self) {
        let (now, content, clock) = (self.now, self.content, self.clock);
        let verifies = self.spec.verifies;
        if self.cut || self.link != Link::Up {
            return;
        }
        let healthy = |p: &&mut Posted| p.fault.is_none() && !p.revoked;
        let Some(posted) = self.posted.front_mut().filter(healthy) else {
            return;
        };
        let part = posted.part_by(now) / CHUNK_BYTES * CHUNK_BYTES;
        let from = posted.read.range.offset();
        let image = self.source.record(content, posted.read.key);
        if let Some(bytes) = image.and_then(|i| i.get(from..from + part as usize)) {
            posted.write_up_to(part as usize, bytes, verifies, clock);
        }
    }

    /// A READ that is interrupted has written what was on the wire by then.
    fn write_front_partly(&mut self) {
        self.note_progress();
        self.landed_bytes = self.progress_bytes;
        let (now, content) = (self.now, self.content);
        let Some(posted) = self.posted.front_mut().filter(|p| !p.revoked) else {
            return;
        };
        let part = posted.part_by(now) as usize;
        let from = posted.read.range.offset();
        let image = self.source.record(content, posted.read.key);
        if let Some(bytes) = image.and_then(|i| i.get(from..from + part)) {
            posted.read.range.write(0, bytes);
        }
    }

    /// The end of a quiesce: everything comes back, and nothing is written any more.
    fn flush(&mut self, at: Instant) {
        if !self.cut {
            self.write_front_partly();
        }
        while let Some(posted) = self.posted.pop_front() {
            if !self.guards.memory_rule && !self.cut && !posted.revoked {
                self.strays.push(Stray {
                    writer: posted.read.range.detach_for_simulation(),
                    key: posted.read.key,
                    content: self.content,
                    image_offset: posted.read.range.offset(),
                    bytes: posted.read.range.len(),
                    lands_at: posted.lands_at,
                });
            }
            self.end(posted.read, Err(ReadError::Flushed), at);
        }
        for ended in &mut self.ended {
            ended.tell_at = ended.tell_at.min(at);
        }
        self.link = Link::Idle;
    }

    fn end(&mut self, read: Read, result: Result<Landed, ReadError>, tell_at: Instant) {
        self.ended.push(Ended {
            completion: Completion { read, result },
            tell_at,
        });
    }

    fn answer_probe(&mut self) {
        if self.broken_until.is_some_and(|until| self.now < until) {
            self.link = Link::Idle;
            self.events
                .push(RailEvent::ProbeFailed("the link is cut".into()));
            return;
        }
        self.broken_until = None;
        self.cut = false;
        self.free_at = self.now;
        self.link = Link::Up;
        self.events.push(RailEvent::Ready(self.content));
    }

    /// Bytes count as they arrive, not only at the end of a READ.
    fn note_progress(&mut self) {
        let part = match self.posted.front() {
            Some(front) if !self.cut => front.part_by(self.now),
            _ => 0,
        };
        // A stall in the middle of a READ moves its times; what has arrived stays so.
        self.progress_bytes = self.progress_bytes.max(self.landed_bytes + part);
    }
}

impl Posted {
    /// Writes the bytes up to `end` that are not there yet, and compares them where the rail does.
    fn write_up_to(
        &mut self,
        end: usize,
        bytes: &[u8],
        verifies: Verifies,
        clock: Option<fn() -> Instant>,
    ) {
        let chunk = CHUNK_BYTES as usize;
        while self.written < end {
            let at = self.written;
            let next = (at / chunk + 1) * chunk;
            let next = next.min(end);
            self.read.range.write(at, &bytes[at..next]);
            self.written = next;
            if verifies == Verifies::Rail && self.read.verify && self.verify.is_ok() {
                let began = clock.map(|clock| clock());
                let checked = self.read.check_chunks(at as u64, (next - at) as u64);
                let took = clock.zip(began).map(|(clock, began)| clock() - began);
                self.verify = match (checked, self.verify) {
                    (Ok(()), Ok(before)) => Ok(before + took.unwrap_or_default()),
                    (Err(bad), _) | (_, Err(bad)) => Err(bad),
                };
            }
        }
    }

    fn part_by(&self, now: Instant) -> u64 {
        let done = now.saturating_duration_since(self.starts_at).as_nanos();
        let all = (self.lands_at - self.starts_at).as_nanos().max(1);
        (u128::from(self.read.bytes()) * done / all).min(u128::from(self.read.bytes())) as u64
    }
}

impl Rail for MockRail {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> RailKind {
        RailKind::Mock
    }

    fn capabilities(&self) -> Capabilities {
        self.spec.capabilities.clone()
    }

    fn post(&mut self, read: Read) -> Result<(), Box<Read>> {
        self.post_at(read, self.now)
    }

    fn poll(&mut self, sink: &mut Vec<RailEvent>) {
        let now = self.now;
        let ended = std::mem::take(&mut self.ended);
        let (mut due, later): (Vec<_>, Vec<_>) = ended.into_iter().partition(|e| e.tell_at <= now);
        self.ended = later;
        due.sort_by_key(|e| e.tell_at);
        sink.extend(due.into_iter().map(|e| RailEvent::Completion(e.completion)));
        for event in &self.events {
            if let RailEvent::Ready(content) = event {
                self.told = Some(*content);
            }
        }
        sink.append(&mut self.events);
    }

    fn progress_bytes(&self) -> u64 {
        self.progress_bytes
    }

    fn begin_probe(&mut self) {
        let answer_at = (self.now + self.spec.connect).max(self.stalled_until);
        self.link = Link::Probing { answer_at };
    }

    fn begin_quiesce(&mut self) {
        self.link = match self.link {
            Link::Up => Link::Quiescing {
                until: self.now + self.spec.flush,
            },
            Link::Probing { .. } => Link::Idle,
            link @ (Link::Idle | Link::Quiescing { .. }) => link,
        };
    }

    fn is_quiesced(&self) -> bool {
        self.link == Link::Idle && self.posted.is_empty() && self.ended.is_empty()
    }
}
