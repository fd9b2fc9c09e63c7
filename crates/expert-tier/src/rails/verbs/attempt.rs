//! One life of a verbs rail: its threads, and where each READ is.
//!
//! ```text
//!            ┌─ session ─► up ──────────────┐
//!  start ─►──┤                              ├─► fail: queue pairs to ERR ─► all given back ─► ended
//!            └─ no session ─────────────────┘
//! ```
//!
//! A READ is in one of three places: parked (until it is known where its layer lies), in the
//! backlog (until the driver's next poll), or posted on a lane. [`Attempt::fail`] empties the first
//! two at once; lanes give theirs back as the flush comes in.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use atlas_rdma::{
    AsyncEvent, CompletionError, CompletionStatus, LocalPart, ReadDone, ReadQueue, Refusal,
    RemoteKey, RemoteRead,
};
use expert_store::{Layer, codec};
use expert_wire::Key;
use expert_wire::frame::FrameKind;
use expert_wire::message::{CatalogueRequest, ChecksumReport, SECTION_SEGMENTS};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::VerbsConfig;
use super::plan::{self, Limits, Plan, Unplannable};
use super::session::{self, ControlStream, Memory, Session, V1Member};
use crate::control::{AskError, Connection};
use crate::engine::later;
use crate::notify::{Notifier, Wake};
use crate::rail::{Completion, ContentTag, Landed, RailEvent, Read, ReadError, ReadId};
use crate::sync::lock;

/// Longest sleep of a thread that waits for events: a lost wake-up costs this much.
const NAP: Duration = Duration::from_millis(250);
/// How long a flush may take before the queue pair is destroyed. It is local and takes under 2 ms;
/// emulated machines take longer.
const FLUSH_TIME: Duration = Duration::from_millis(500);
/// Time for a question on the control connection, and for the rest of a frame that has begun.
const ASK_TIME: Duration = Duration::from_secs(5);
/// Checksum reports that wait to be sent; more say nothing new.
const REPORTS_MAX: usize = 16;

/// What threads of all attempts share with the driver.
pub(super) struct RailShared {
    events: Mutex<Vec<RailEvent>>,
    notifier: Arc<Notifier>,
    landed: AtomicU64,
    start: Instant,
    /// Layers of the peer's catalogue, for as long as it is the same run and epoch of the peer.
    known: Mutex<KnownLayers>,
}

#[derive(Default)]
struct KnownLayers {
    run: Option<(u64, u32)>,
    layers: HashMap<u32, Arc<Layer>>,
}

impl RailShared {
    pub(super) fn new(notifier: Arc<Notifier>) -> Self {
        Self {
            events: Mutex::new(Vec::new()),
            notifier,
            landed: AtomicU64::new(0),
            start: Instant::now(),
            known: Mutex::default(),
        }
    }

    pub(super) fn take_events(&self, sink: &mut Vec<RailEvent>) {
        sink.append(&mut lock(&self.events));
    }

    pub(super) fn landed_bytes(&self) -> u64 {
        self.landed.load(Ordering::Relaxed)
    }

    fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// What is known already of the layers of this run and epoch of the peer.
    fn layers_of(&self, run: (u64, u32)) -> HashMap<u32, LayerSlot> {
        let mut known = lock(&self.known);
        if known.run != Some(run) {
            known.run = Some(run);
            known.layers.clear();
        }
        let slots = known.layers.iter();
        slots
            .map(|(&layer, known)| (layer, LayerSlot::Known(known.clone())))
            .collect()
    }

    fn note_layer(&self, run: (u64, u32), layer: &Arc<Layer>) {
        let mut known = lock(&self.known);
        if known.run == Some(run) {
            known.layers.insert(layer.layer, layer.clone());
        }
    }

    pub(super) fn push(&self, event: RailEvent) {
        lock(&self.events).push(event);
        self.notifier.notify();
    }

    fn complete(&self, read: Read, result: Result<Landed, ReadError>) {
        self.push(RailEvent::Completion(Completion { read, result }));
    }
}

/// A READ without its range, while the range is with a queue.
pub(super) struct Token {
    id: ReadId,
    key: Key,
    position: usize,
    layer: Arc<Layer>,
    content: ContentTag,
    verify: bool,
    posted_at: Instant,
    /// Layer and position in the peer's catalogue; `None` for v1.
    peer: Option<(Arc<Layer>, usize)>,
}

impl Token {
    fn split(read: Read, peer: Option<(Arc<Layer>, usize)>) -> (Self, expert_arena::LandingRange) {
        let token = Self {
            id: read.id,
            key: read.key,
            position: read.position,
            layer: read.layer,
            content: read.content,
            verify: read.verify,
            posted_at: read.posted_at,
            peer,
        };
        (token, read.range)
    }

    fn join(self, range: expert_arena::LandingRange) -> Read {
        Read {
            id: self.id,
            key: self.key,
            position: self.position,
            layer: self.layer,
            content: self.content,
            range,
            verify: self.verify,
            posted_at: self.posted_at,
        }
    }
}

/// See the module.
pub(super) struct Attempt {
    rail: Arc<RailShared>,
    config: VerbsConfig,
    state: Mutex<State>,
    /// Set with `State::error`, for lanes that look often.
    failing: AtomicBool,
    live_threads: AtomicUsize,
    /// Grows while READs wait for the catalogue: that is no standstill of the rail.
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
    plan: Plan,
    requests: Vec<RemoteRead>,
    parts: Vec<LocalPart>,
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

struct Lane {
    /// Taken out by the lane's thread alone, when it ends.
    queue: RwLock<Option<ReadQueue<Token>>>,
    wake: Wake,
    outstanding_bytes: AtomicU64,
    /// Bytes of READs under way that were seen to arrive, for the stall detector.
    seen_bytes: AtomicU64,
    moved_at_ms: AtomicU64,
}

impl Lane {
    fn with_queue<R>(&self, f: impl FnOnce(&ReadQueue<Token>) -> R) -> Option<R> {
        let queue = self.queue.read().unwrap_or_else(PoisonError::into_inner);
        queue.as_ref().map(f)
    }
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
        let limits = lane.with_queue(|queue| {
            let options = queue.options();
            // A v1 record of any size must fit half the queue.
            let fits = bytes.div_ceil(u64::from(options.work_requests_max / 2).max(1));
            Limits {
                request_max_bytes: self
                    .config
                    .options
                    .request_bytes
                    .max(fits)
                    .min(u64::from(queue.max_message_bytes())),
                parts_max: options.sge_max as usize,
            }
        });
        let Some(limits) = limits else {
            return Err(Box::new(read));
        };
        let peer = match self.plan(state, opened, &read, layer, limits) {
            Ok(peer) => peer,
            Err(error) => {
                self.rail.complete(read, Err(error));
                return Ok(());
            }
        };
        if state.plan.requests.is_empty() {
            // Padding and small leaves alone: nothing to wait for.
            let (token, range) = Token::split(read, peer);
            self.conclude(
                opened,
                ReadDone {
                    token,
                    range,
                    result: Ok(()),
                },
            );
            return Ok(());
        }
        state.requests.clear();
        state
            .requests
            .extend(state.plan.requests.iter().map(|r| RemoteRead {
                remote_addr: r.remote_addr,
                rkey: RemoteKey(r.rkey),
                part_count: r.parts,
            }));
        state.parts.clear();
        state.parts.extend(
            state
                .plan
                .parts
                .iter()
                .map(|&(at, bytes)| LocalPart { at, bytes }),
        );
        let (token, range) = Token::split(read, peer);
        // Counted before: the lane's thread may see the end before this thread goes on.
        let before = lane.outstanding_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before == 0 {
            lane.moved_at_ms
                .store(self.rail.now_ms(), Ordering::Relaxed);
        }
        let queue = lane.queue.read().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = queue.as_ref() else {
            lane.outstanding_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(Box::new(token.join(range)));
        };
        match queue.post(token, range, &state.requests, &state.parts) {
            Ok(()) => Ok(()),
            Err(refused) => {
                lane.outstanding_bytes.fetch_sub(bytes, Ordering::Relaxed);
                let read = refused.token.join(refused.range);
                match refused.why {
                    // It comes again: there will be room, or the rail goes down.
                    Refusal::Full | Refusal::Down => Err(Box::new(read)),
                    // A device that takes nothing would be asked for ever.
                    why @ Refusal::Failed(_) => {
                        state.broken = Some(why.to_string());
                        Err(Box::new(read))
                    }
                    why => {
                        self.rail
                            .complete(read, Err(ReadError::Refused(why.to_string())));
                        Ok(())
                    }
                }
            }
        }
    }

    /// Fills the plan; says where the record is in the peer's catalogue.
    #[allow(clippy::type_complexity)] // a layer and a position in it
    fn plan(
        &self,
        state: &mut State,
        opened: &Opened,
        read: &Read,
        layer: Option<Arc<Layer>>,
        limits: Limits,
    ) -> Result<Option<(Arc<Layer>, usize)>, ReadError> {
        let offset = read.range.offset() as u64;
        match (&opened.memory, layer) {
            (Memory::Regions(table), Some(layer)) => {
                let position = layer.position(read.key.expert).ok_or_else(|| {
                    ReadError::Refused(format!("the peer does not hold {}", read.key))
                })?;
                let ours = read.layer.class(read.position).image_bytes;
                if layer.class(position).image_bytes != ours {
                    return Err(ReadError::Refused(format!(
                        "the peer's record has {} bytes, the catalogue says {ours}",
                        layer.class(position).image_bytes
                    )));
                }
                state
                    .plan
                    .of_image(&layer, position, offset, read.bytes(), table, limits)
                    .map_err(|e| {
                        ReadError::Unavailable(match e {
                            Unplannable::NotRegistered => "the file below this record changed on the peer; load the store there again".into(),
                            Unplannable::NotDescribed => "the peer does not say where its records lie".into(),
                        })
                    })?;
                Ok(Some((layer, position)))
            }
            (Memory::Layers { regions, manifest }, _) => {
                let region = regions
                    .get(read.key.layer as usize)
                    .ok_or_else(|| ReadError::Refused("the peer has no such layer".into()))?;
                let addr = u64::from(read.key.expert)
                    .checked_mul(manifest.record_stride)
                    .and_then(|at| at.checked_add(offset))
                    .and_then(|at| at.checked_add(region.base))
                    .ok_or_else(|| ReadError::Refused("an address beyond 64 bits".into()))?;
                state.plan.of_range(addr, region.rkey, read.bytes(), limits);
                Ok(None)
            }
            (Memory::Regions(_), None) => unreachable!("v2 READs know their layer"),
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
            if lane.seen_bytes.swap(seen, Ordering::Relaxed) != seen {
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
        if state.layers.values().any(asked) {
            self.waits.fetch_add(1, Ordering::Relaxed);
        }
        let lanes = state.opened.iter().flat_map(|o| &o.lanes);
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

    /// The control thread: opens a session, starts the lanes, and attends to the connection.
    fn live(self: &Arc<Self>) -> Result<Infallible, String> {
        let limit = later(Instant::now(), self.config.connect_timeout);
        let keep = |stream: &TcpStream| {
            let mut state = lock(&self.state);
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            state.socket = Some(stream.try_clone().map_err(|e| e.to_string())?);
            Ok(())
        };
        // What the device said while nobody listened is history: the port is looked at next.
        let context = self.config.local().context();
        while context
            .async_event(Duration::ZERO)
            .map_err(|e| e.to_string())?
            .is_some()
        {}
        let session = session::open(&self.config, limit, &keep)?;
        let Session {
            control,
            content,
            memory,
            queues,
            peer_rail,
            member,
        } = session;
        let now = self.rail.now_ms();
        let lanes = queues
            .into_iter()
            .map(|queue| {
                Ok(Lane {
                    queue: RwLock::new(Some(queue)),
                    wake: Wake::new().map_err(|e| format!("no descriptor for a lane: {e}"))?,
                    outstanding_bytes: AtomicU64::new(0),
                    seen_bytes: AtomicU64::new(0),
                    moved_at_ms: AtomicU64::new(now),
                })
            })
            .collect::<Result<Vec<_>, String>>()?;
        let opened = Arc::new(Opened {
            content,
            epoch: match &control {
                ControlStream::V2(connection) => connection.welcome().epoch,
                ControlStream::V1(_) => 0,
            },
            lanes,
            memory,
        });
        for index in 0..opened.lanes.len() {
            self.live_threads.fetch_add(1, Ordering::AcqRel);
            let spawned = std::thread::Builder::new()
                .name(format!("verbs-lane-{index}"))
                .spawn({
                    let (attempt, opened) = (self.clone(), opened.clone());
                    move || {
                        let _leave = Leave(&attempt);
                        attempt.run_lane(&opened, index);
                    }
                });
            if let Err(e) = spawned {
                self.live_threads.fetch_sub(1, Ordering::AcqRel);
                return Err(format!("no thread for a queue pair: {e}"));
            }
        }
        {
            let mut state = lock(&self.state);
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            state.opened = Some(opened.clone());
            state.member = member;
            if let ControlStream::V2(connection) = &control {
                state.layers = self.rail.layers_of(run_of(connection));
            }
            tracing::debug!(rail = %self.config.local().name(), peer = %peer_rail, "paired");
            self.rail.push(RailEvent::Ready(content));
        }
        self.attend(control, &opened)
    }

    /// Answers what comes on the control connection, asks for layers, and watches the device.
    fn attend(&self, mut control: ControlStream, opened: &Opened) -> Result<Infallible, String> {
        let context = self.config.local().context().clone();
        let nap = Timespec {
            tv_sec: 0,
            tv_nsec: NAP.as_nanos() as i64,
        };
        loop {
            if let Some(error) = &lock(&self.state).error {
                return Err(error.clone());
            }
            while let Some(event) = context
                .async_event(Duration::ZERO)
                .map_err(|e| e.to_string())?
            {
                self.note_device_event(event)?;
            }
            if let ControlStream::V2(connection) = &mut control {
                self.send_reports(connection)?;
                self.load_layers(connection)?;
            }
            let mut fds = [
                PollFd::from_borrowed_fd(control.stream().as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(context.event_fd(), PollFlags::IN),
            ];
            if poll(&mut fds, Some(&nap)).is_err() {
                continue; // interrupted
            }
            let said_something = !fds[0].revents().is_empty();
            if !fds[1].revents().is_empty() {
                self.wake.clear();
            }
            if said_something {
                match &mut control {
                    ControlStream::V2(connection) => {
                        connection
                            .take_notice(later(Instant::now(), ASK_TIME))
                            .map_err(|e| e.to_string())?;
                        if ContentTag::of(connection.welcome()) != opened.content
                            || connection.welcome().epoch != opened.epoch
                        {
                            return Err("the peer loaded its store again".into());
                        }
                    }
                    // v1 says nothing more: this is the end.
                    ControlStream::V1(_) => return Err("the peer hung up".into()),
                }
            }
        }
    }

    fn note_device_event(&self, event: AsyncEvent) -> Result<(), String> {
        match event {
            AsyncEvent::PortDown { port } if port == self.config.local().port() => {
                Err("the port lost its link".into())
            }
            AsyncEvent::DeviceFatal => Err("the device failed".into()),
            AsyncEvent::QpFatal { qpn } => Err(format!("queue pair {qpn} failed")),
            other => {
                tracing::debug!(rail = %self.config.local().name(), "{other:?}");
                Ok(())
            }
        }
    }

    fn send_reports(&self, connection: &mut Connection) -> Result<(), String> {
        loop {
            let Some(report) = lock(&self.state).reports.pop_front() else {
                return Ok(());
            };
            let limit = later(Instant::now(), ASK_TIME);
            connection
                .tell(FrameKind::ChecksumReport, &report.encode(), limit)
                .map_err(|e| e.to_string())?;
        }
    }

    /// Asks where the wanted layers lie, one after the other; what waits for each goes on.
    fn load_layers(&self, connection: &mut Connection) -> Result<(), String> {
        loop {
            let Some(layer) = lock(&self.state).wanted.pop_front() else {
                return Ok(());
            };
            let request = CatalogueRequest {
                layer,
                sections: SECTION_SEGMENTS,
            };
            let before = *connection.welcome();
            let answer = connection.ask(
                FrameKind::Catalogue,
                &request.encode(),
                FrameKind::CatalogueReply,
                later(Instant::now(), ASK_TIME),
            );
            if *connection.welcome() != before {
                return Err("the peer loaded its store again".into());
            }
            let slot = match answer {
                Ok(blob) => match codec::decode_layer(&blob) {
                    Ok(got) if got.layer == layer => {
                        let got = Arc::new(got);
                        self.rail.note_layer(run_of(connection), &got);
                        LayerSlot::Known(got)
                    }
                    Ok(_) => LayerSlot::Unusable("the peer described another layer".into()),
                    Err(why) => LayerSlot::Unusable(format!("the peer's catalogue: {why}")),
                },
                // A refusal that may pass concerns the READs that wait, not the next ones.
                Err(AskError::Refused(frame)) if frame.retryable => {
                    let slot = lock(&self.state).layers.remove(&layer);
                    if let Some(LayerSlot::Asked(parked)) = slot {
                        for read in parked {
                            let why = ReadError::Unavailable(frame.message.clone());
                            self.rail.complete(read, Err(why));
                        }
                    }
                    continue;
                }
                Err(AskError::Refused(frame)) => LayerSlot::Unusable(frame.message),
                Err(e) => return Err(e.to_string()),
            };
            let mut state = lock(&self.state);
            if let Some(LayerSlot::Asked(parked)) = state.layers.insert(layer, slot) {
                state.backlog.extend(parked);
            }
            drop(state);
            self.rail.notifier.notify();
        }
    }

    /// The lane's thread: takes completions, fills padding, compares checksums.
    fn run_lane(&self, opened: &Opened, index: usize) {
        let lane = &opened.lanes[index];
        let spin = self.config.options.spin;
        let mut done = Vec::new();
        let mut flush_until = None;
        loop {
            let (down, quiesced) = lane
                .with_queue(|queue| {
                    queue.poll(&mut done);
                    (queue.is_down(), queue.is_quiesced())
                })
                .expect("this thread alone takes it out");
            let busy = !done.is_empty();
            for read in done.drain(..) {
                let bytes = read.range.len() as u64;
                self.conclude(opened, read);
                lane.outstanding_bytes.fetch_sub(bytes, Ordering::Relaxed);
                lane.moved_at_ms
                    .store(self.rail.now_ms(), Ordering::Relaxed);
            }
            if down {
                let cause = lane.with_queue(ReadQueue::root_cause).flatten();
                self.fail(describe(cause));
            }
            if self.failing.load(Ordering::Acquire) {
                let until = *flush_until.get_or_insert_with(|| Instant::now() + FLUSH_TIME);
                if quiesced || Instant::now() >= until {
                    break;
                }
            }
            if busy {
                continue;
            }
            let nap = match flush_until {
                Some(_) => Duration::from_millis(5),
                None => NAP,
            };
            let waited = lane
                .with_queue(|queue| queue.wait(nap, spin, Some(lane.wake.as_fd())))
                .expect("this thread alone takes it out");
            lane.wake.clear();
            if let Err(e) = waited {
                self.fail(e.to_string());
            }
        }
        let queue = lane
            .queue
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // Destroys the queue pair: whatever it still held cannot be written to any more.
        if let Some(queue) = queue {
            let closed = queue.close(Duration::ZERO);
            for read in closed.done {
                self.conclude(opened, read);
            }
            for token in closed.lost {
                tracing::error!(key = %token.key, "memory of a READ is lost: its queue pair could not be destroyed");
            }
        }
    }

    /// The end of a READ.
    fn conclude(&self, opened: &Opened, done: ReadDone<Token>) {
        let ReadDone {
            mut token,
            mut range,
            result,
        } = done;
        if result.is_err() {
            // What became of the rail is told once, with its cause.
            self.rail
                .complete(token.join(range), Err(ReadError::Flushed));
            return;
        }
        if let Some((layer, position)) = token.peer.take() {
            plan::fill_rest(&mut range, &layer, position);
        }
        self.rail
            .landed
            .fetch_add(range.len() as u64, Ordering::Relaxed);
        let read = token.join(range);
        let start = Instant::now();
        let checked = match &opened.memory {
            Memory::Layers { manifest, .. } => {
                session::check_v1_header(&read, manifest).map_err(ReadError::WrongRecord)
            }
            Memory::Regions(_) => read.check_chunks(0, read.bytes()).map_err(|bad| {
                self.report(&read, bad.chunk, opened.epoch);
                ReadError::Checksum(bad)
            }),
        };
        let landed = checked.map(|()| Landed {
            verified: read.verify,
            verify_time: match read.verify {
                true => start.elapsed(),
                false => Duration::ZERO,
            },
        });
        self.rail.complete(read, landed);
    }

    /// Has the peer told, so that it looks at its files now.
    fn report(&self, read: &Read, chunk: u32, epoch: u32) {
        // Not under the lock of a READ that is concluded while it is posted: see `post_now`.
        if let Ok(mut state) = self.state.try_lock() {
            if state.reports.len() < REPORTS_MAX {
                state.reports.push_back(ChecksumReport {
                    key: read.key,
                    chunk,
                    epoch,
                });
            }
        }
        self.wake.wake();
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

/// What tells one state of the peer's store from another, where layers lie included.
fn run_of(connection: &Connection) -> (u64, u32) {
    let welcome = connection.welcome();
    (welcome.instance_id, welcome.epoch)
}

/// Why queue pairs fail, in words of the network.
fn describe(cause: Option<CompletionError>) -> String {
    let Some(cause) = cause else {
        return "the queue pair failed".into();
    };
    match cause.status {
        CompletionStatus::RemoteAccess => {
            "the peer withdrew its memory: its store changed, or it goes down".into()
        }
        CompletionStatus::RetryExceeded => {
            "the peer does not answer: a link is down, or the peer is gone".into()
        }
        _ => format!("a READ failed: {cause}"),
    }
}
