//! One life of a verbs rail: its threads, and where each READ is.
//!
//! ```text
//!            ┌─ session ─► up ──────────────┐
//!  start ─►──┤                              ├─► fail: queue pairs to ERR ─► all given back ─► ended
//!            └─ no session ─────────────────┘
//! ```
//!
//! A READ is in one of three places: parked (until it is known where its layer lies), in the
//! backlog (until the driver's next poll), or with a lane: posted, or in its inbox.
//! [`Attempt::fail`] empties the first two at once; lanes give theirs back as the flush comes in.
//!
//! Files: `attend` is the control thread, `lane` a queue pair and its thread, `post` how a READ gets
//! on it, `shared` what outlives an attempt.

mod attend;
mod lane;
mod post;
mod shared;

use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atlas_rdma::ReadQueue;
use expert_store::Layer;
use expert_wire::message::ChecksumReport;

use super::VerbsConfig;
use super::session::{Memory, V1Member};
use crate::notify::Wake;
use crate::rail::{ContentTag, RailEvent, Read, ReadError};
use crate::sync::lock;
use lane::{Inbound, Lane};
use post::{Posted, Scratch};
pub(super) use shared::{RailShared, Token};

/// Longest sleep of a thread that waits for events: a lost wake-up costs this much.
const NAP: Duration = Duration::from_millis(250);

/// See the module.
pub(super) struct Attempt {
    rail: Arc<RailShared>,
    config: VerbsConfig,
    state: Mutex<State>,
    /// Set with `State::error`, for lanes that look often.
    failing: AtomicBool,
    live_threads: AtomicUsize,
    /// Grows while READs wait for the catalogue, or in a system call that posts them: that is no
    /// standstill of the rail.
    waits: AtomicU64,
    wake: Wake,
}

#[derive(Default)]
struct State {
    error: Option<String>,
    socket: Option<TcpStream>,
    opened: Option<Arc<Opened>>,
    /// v1: keeps the run's identity while the connection is good.
    member: Option<V1Member>,
    layers: HashMap<u32, LayerSlot>,
    /// Layers to ask for.
    wanted: VecDeque<u32>,
    /// To be posted when the driver polls next.
    backlog: VecDeque<Read>,
    reports: VecDeque<ChecksumReport>,
    /// A device refused a post: the attempt fails with this as soon as the lock is free.
    broken: Option<String>,
    scratch: Scratch,
}

enum LayerSlot {
    Asked(Vec<Read>),
    Known(Arc<Layer>),
    /// The peer does not have it, or not as the catalogue says.
    Unusable(String),
}

/// What a session gave.
struct Opened {
    content: ContentTag,
    epoch: u32,
    lanes: Vec<Lane>,
    memory: Memory,
}

impl Attempt {
    /// Starts one; its first event says whether it came up.
    ///
    /// *Errors*: no descriptor for its threads' waits.
    pub(super) fn start(rail: Arc<RailShared>, config: VerbsConfig) -> std::io::Result<Arc<Self>> {
        let name = format!("verbs-{}", config.local().name());
        let wake = Wake::new()?;
        let attempt = Arc::new(Self {
            rail,
            config,
            state: Mutex::default(),
            failing: AtomicBool::new(false),
            live_threads: AtomicUsize::new(1),
            waits: AtomicU64::new(0),
            wake,
        });
        let spawned = std::thread::Builder::new().name(name).spawn({
            let attempt = attempt.clone();
            move || {
                // Runs when the thread ends, by a panic, too.
                let _leave = Leave(&attempt);
                let why = match attempt.live() {
                    Ok(never) => match never {},
                    Err(why) => why,
                };
                attempt.fail(why);
            }
        });
        if let Err(e) = spawned {
            attempt.fail(format!("no thread for a rail: {e}"));
            attempt.leave();
        }
        Ok(attempt)
    }

    /// Takes a READ over; gives it back when it cannot be taken now.
    pub(super) fn post(&self, read: Read) -> Result<(), Box<Read>> {
        let mut guard = lock(&self.state);
        let result = self.post_locked(&mut guard, read);
        let broken = guard.broken.take();
        drop(guard);
        if let Some(why) = broken {
            self.fail(why);
        }
        result
    }

    fn post_locked(&self, state: &mut State, read: Read) -> Result<(), Box<Read>> {
        let Some(opened) = state.opened.clone().filter(|_| state.error.is_none()) else {
            return Err(Box::new(read));
        };
        if opened.content != read.content {
            self.rail.complete(read, Err(ReadError::ContentChanged));
            return Ok(());
        }
        if matches!(opened.memory, Memory::Layers { .. }) {
            return self.post_now(state, &opened, read, None);
        }
        match state.layers.get_mut(&read.key.layer) {
            Some(LayerSlot::Known(layer)) => {
                let layer = layer.clone();
                self.post_now(state, &opened, read, Some(layer))
            }
            Some(LayerSlot::Asked(parked)) => {
                parked.push(read);
                Ok(())
            }
            Some(LayerSlot::Unusable(why)) => {
                let why = why.clone();
                self.rail.complete(read, Err(ReadError::Unavailable(why)));
                Ok(())
            }
            None => {
                let layer = read.key.layer;
                state.layers.insert(layer, LayerSlot::Asked(vec![read]));
                state.wanted.push_back(layer);
                self.wake.wake();
                Ok(())
            }
        }
    }

    /// Posts what waited for its layer.
    pub(super) fn post_backlog(&self) {
        loop {
            let Some(read) = lock(&self.state).backlog.pop_front() else {
                return;
            };
            if let Err(read) = self.post(read) {
                let mut state = lock(&self.state);
                match state.error {
                    None => state.backlog.push_front(*read),
                    // Whoever set the error has emptied the backlog before.
                    Some(_) => self.rail.complete(*read, Err(ReadError::Flushed)),
                }
                return;
            }
        }
    }

    fn post_now(
        &self,
        state: &mut State,
        opened: &Opened,
        read: Read,
        layer: Option<Arc<Layer>>,
    ) -> Result<(), Box<Read>> {
        let bytes = read.bytes();
        let lane = opened
            .lanes
            .iter()
            .min_by_key(|l| l.outstanding_bytes.load(Ordering::Relaxed))
            .expect("a session has at least one queue pair");
        // Counted before: the lane's thread may see the end before this thread goes on.
        let before = lane.outstanding_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before == 0 {
            lane.moved_at_ms
                .store(self.rail.now_ms(), Ordering::Relaxed);
        }
        let posted = match self.rail.is_eager() {
            true => lane.hand_over(Inbound { read, layer }),
            false => self.post_on(&mut state.scratch, opened, lane, read, layer),
        };
        if !matches!(posted, Posted::Taken) {
            lane.outstanding_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        match posted {
            Posted::Taken | Posted::Ended => Ok(()),
            Posted::Refused(read) => Err(read),
            Posted::Broken(read, why) => {
                state.broken = Some(why);
                Err(read)
            }
        }
    }

    /// A lane that stands still although others move.
    pub(super) fn stalled_lane(&self, stall: Duration) -> Option<String> {
        let state = lock(&self.state);
        let opened = state.opened.as_ref().filter(|_| state.error.is_none())?;
        let now = self.rail.now_ms();
        let stall_ms = u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
        for (i, lane) in opened.lanes.iter().enumerate() {
            let seen = lane.with_queue(ReadQueue::progress_bytes).unwrap_or(0);
            let is_posting = lane.is_posting.load(Ordering::Relaxed);
            if lane.seen_bytes.swap(seen, Ordering::Relaxed) != seen || is_posting {
                lane.moved_at_ms.store(now, Ordering::Relaxed);
            }
            let moved_at = lane.moved_at_ms.load(Ordering::Relaxed);
            if lane.outstanding_bytes.load(Ordering::Relaxed) > 0
                && now.saturating_sub(moved_at) >= stall_ms
            {
                return Some(format!("queue pair {i}: no byte for {stall:?}"));
            }
        }
        None
    }

    /// Bytes of READs under way that are known to have arrived.
    pub(super) fn progress_bytes(&self) -> u64 {
        let state = lock(&self.state);
        // The question has a deadline of its own.
        let asked = |slot: &LayerSlot| matches!(slot, LayerSlot::Asked(reads) if !reads.is_empty());
        let lanes = state.opened.iter().flat_map(|o| &o.lanes);
        // A post that takes long is the kernel at work.
        let posting = |lane: &Lane| lane.is_posting.load(Ordering::Relaxed);
        if state.layers.values().any(asked) || lanes.clone().any(posting) {
            self.waits.fetch_add(1, Ordering::Relaxed);
        }
        let seen: u64 = lanes
            .filter_map(|l| l.with_queue(ReadQueue::progress_bytes))
            .sum();
        seen + self.waits.load(Ordering::Relaxed)
    }

    pub(super) fn is_quiesced(&self) -> bool {
        self.live_threads.load(Ordering::Acquire) == 0
    }

    /// The first failure decides what is told, and ends everything.
    pub(super) fn fail(&self, why: String) {
        let mut state = lock(&self.state);
        if state.error.is_some() {
            return;
        }
        state.error = Some(why.clone());
        self.failing.store(true, Ordering::Release);
        if state.opened.is_some() {
            self.rail.push(RailEvent::Down(why));
        }
        let mut waiting: Vec<Read> = state.backlog.drain(..).collect();
        for (_, slot) in state.layers.drain() {
            if let LayerSlot::Asked(parked) = slot {
                waiting.extend(parked);
            }
        }
        if let Some(socket) = state.socket.take() {
            // Wakes the control thread out of a question; fails only where that has happened.
            let _ = socket.shutdown(Shutdown::Both);
        }
        let opened = state.opened.clone();
        drop(state.member.take());
        drop(state);
        for read in waiting {
            self.rail.complete(read, Err(ReadError::Flushed));
        }
        for lane in opened.iter().flat_map(|o| &o.lanes) {
            lane.with_queue(ReadQueue::begin_quiesce);
            lane.wake.wake();
        }
        self.wake.wake();
    }

    fn leave(&self) {
        if self.live_threads.fetch_sub(1, Ordering::AcqRel) == 1 {
            let state = lock(&self.state);
            let was_up = state.opened.is_some();
            let why = state.error.clone().unwrap_or_default();
            drop(state);
            if !was_up {
                self.rail.push(RailEvent::ProbeFailed(why));
            }
            self.rail.notifier.notify();
        }
    }
}

/// The end of one of an attempt's threads.
struct Leave<'a>(&'a Attempt);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0
            .fail("a thread of the rail ended unexpectedly".into());
        self.0.leave();
    }
}
