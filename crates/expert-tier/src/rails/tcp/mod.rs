//! The TCP rail: one or several connections to one peer, as v2 frames or in the frozen v1 protocol.
//!
//! Each connection (lane) has a thread that sits in `recv`: it receives straight into the slots,
//! compares checksums while the bytes are in the cache, and notices a hang-up at once. Requests
//! are written by the driver thread; they are small and the window bounds their number.
//!
//! *Memory rule*: a READ is owned by its lane's queue from `post` on. The lane's thread gives every
//! READ back, the last ones when it ends, and writes nowhere after that.

mod v1;
mod v2;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use expert_arena::RecvFlags;
use expert_store::catalogue::CHUNK_BYTES;
use expert_wire::auth::Token;
use expert_wire::client::{Outcome, Protocol};
use expert_wire::frame::{self, FrameKind};
use expert_wire::limits;
use expert_wire::message::{ReadRequest, Role, Welcome};
use expert_wire::v1 as wire_v1;
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::socket;
use crate::cpu::{WorkMeter, WorkSum};
use crate::engine::later;
use crate::notify::Notifier;
use crate::rail::{
    Capabilities, Completion, ContentTag, Landed, Rail, RailEvent, RailKind, Read, ReadError,
};
use crate::spin::{SOON_BYTES, spin};
use crate::sync::lock;
pub(crate) use v1::{check_v1_header, v1_tag};
use v2::LaneV2;

/// Bytes of one `recv`, which waits for all of them: progress is seen in such steps, so that a slow
/// link (64 KiB per second and stream) does not look like a dead one.
const PIECE_BYTES: usize = 64 << 10;

/// How a TCP rail is set up.
#[derive(Debug, Clone)]
pub(crate) struct TcpConfig {
    pub(crate) addr: String,
    pub(crate) streams: u32,
    pub(crate) protocol: Protocol,
    /// Whether the peer turned out to speak v1 when the tier connected.
    pub(crate) v1: bool,
    pub(crate) client_id: u64,
    pub(crate) token: Option<Token>,
    pub(crate) connect_timeout: Duration,
    pub(crate) stall: Duration,
    /// Preference among the tier's rails.
    pub(crate) rank: u8,
    /// Largest READ that will be posted.
    pub(crate) read_bytes: u64,
    /// How long a connection looks for a small answer before it sleeps.
    pub(crate) spin: Duration,
}

/// See the module.
pub(crate) struct TcpRail {
    name: String,
    config: TcpConfig,
    shared: Arc<RailShared>,
    attempt: Option<Arc<Attempt>>,
}

/// What lanes of all attempts share with the driver.
struct RailShared {
    events: Mutex<Vec<RailEvent>>,
    notifier: Arc<Notifier>,
    progress: AtomicU64,
    cpu: WorkSum,
    start: Instant,
}

impl RailShared {
    fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    fn push(&self, event: RailEvent) {
        self.push_quietly(event);
        self.notifier.notify();
    }

    /// Who calls this sees to it that somebody looks.
    fn push_quietly(&self, event: RailEvent) {
        lock(&self.events).push(event);
    }
}

/// One set of connections: made, used, and torn down as a whole.
struct Attempt {
    rail: Arc<RailShared>,
    lanes: Vec<Lane>,
    state: Mutex<AttemptState>,
    live_threads: AtomicUsize,
    /// Tells one attempt from another where the peer has no identity of its own (v1).
    number: u64,
}

struct AttemptState {
    ready: usize,
    up: bool,
    error: Option<String>,
    /// What the peer serves now, and the epoch to ask under.
    current: Option<Serving>,
}

/// What a peer serves: the content, and the run and epoch of the peer that say how new that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Serving {
    content: ContentTag,
    instance_id: u64,
    epoch: u32,
}

impl Serving {
    fn of(welcome: &Welcome) -> Self {
        Self {
            content: ContentTag::of(welcome),
            instance_id: welcome.instance_id,
            epoch: welcome.epoch,
        }
    }
}

#[derive(Default)]
struct Lane {
    queue: Mutex<LaneQueue>,
    socket: Mutex<Option<Arc<TcpStream>>>,
    /// Frames not yet taken by the socket; also keeps writers from interleaving.
    unsent: Mutex<Vec<u8>>,
    outstanding_bytes: AtomicU64,
    /// Of the lane's thread, which alone takes this.
    meter: Mutex<Option<WorkMeter>>,
    /// Milliseconds since `RailShared::start` at the last byte, or at the first READ after a pause.
    moved_at_ms: AtomicU64,
}

#[derive(Default)]
struct LaneQueue {
    posted: VecDeque<(u64, Read)>,
    /// Id of the last READ posted.
    last_id: u64,
    closed: bool,
}

impl TcpRail {
    pub(crate) fn new(config: TcpConfig, notifier: Arc<Notifier>) -> Self {
        Self {
            name: format!("tcp:{}", config.addr),
            config,
            shared: Arc::new(RailShared {
                events: Mutex::new(Vec::new()),
                notifier,
                progress: AtomicU64::new(0),
                cpu: WorkSum::default(),
                start: Instant::now(),
            }),
            attempt: None,
        }
    }
}

impl Rail for TcpRail {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> RailKind {
        match self.config.v1 {
            true => RailKind::TcpV1,
            false => RailKind::Tcp,
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_max_bytes: u64::from(limits::READ_MAX_BYTES),
            whole_records: self.config.v1,
            lanes: self.config.streams,
            pieces: 1,
            stall: self.config.stall,
            rank: self.config.rank,
        }
    }

    fn post(&mut self, read: Read) -> Result<(), Box<Read>> {
        let Some(attempt) = &self.attempt else {
            return Err(Box::new(read));
        };
        let epoch = match lock(&attempt.state).current {
            Some(serving) if serving.content == read.content => serving.epoch,
            // The peer changed its store since the engine last looked.
            _ => {
                self.shared.push(RailEvent::Completion(Completion {
                    read,
                    result: Err(ReadError::ContentChanged),
                }));
                return Ok(());
            }
        };
        let lane = attempt
            .lanes
            .iter()
            .min_by_key(|l| l.outstanding_bytes.load(Ordering::Relaxed))
            .expect("a rail has at least one lane");
        let mut queue = lock(&lane.queue);
        // A READ that is not taken comes again; the bound keeps a stream of tiny ones within what
        // the peer must be ready for.
        if queue.closed || queue.posted.len() >= limits::READS_PER_STREAM_MAX as usize {
            return Err(Box::new(read));
        }
        // Id 0 belongs to what nobody asked for.
        queue.last_id += 1;
        let id = queue.last_id;
        let mut unsent = lock(&lane.unsent);
        if self.config.v1 {
            unsent.extend_from_slice(&wire_v1::encode_request(read.key));
        } else {
            let request = ReadRequest {
                key: read.key,
                epoch,
                bytes: read.bytes() as u32,
                offset: read.range.offset() as u64,
            };
            frame::push_frame(&mut unsent, FrameKind::Read, id, &request.encode());
        }
        let before = lane
            .outstanding_bytes
            .fetch_add(read.bytes(), Ordering::Relaxed);
        if before == 0 {
            lane.moved_at_ms
                .store(self.shared.now_ms(), Ordering::Relaxed);
        }
        queue.posted.push_back((id, read));
        drop(queue);
        lane.flush(&mut unsent);
        Ok(())
    }

    fn poll(&mut self, sink: &mut Vec<RailEvent>) {
        sink.append(&mut lock(&self.shared.events));
        if let Some(attempt) = &self.attempt {
            let stall_ms = u64::try_from(self.config.stall.as_millis()).unwrap_or(u64::MAX);
            for (i, lane) in attempt.lanes.iter().enumerate() {
                let mut unsent = lock(&lane.unsent);
                if !unsent.is_empty() {
                    lane.flush(&mut unsent);
                }
                drop(unsent);
                // The engine judges the rail as a whole; one dead connection beside a busy one is
                // seen here.
                let moved_at = lane.moved_at_ms.load(Ordering::Relaxed);
                if lock(&attempt.state).error.is_none()
                    && lane.outstanding_bytes.load(Ordering::Relaxed) > 0
                    && self.shared.now_ms().saturating_sub(moved_at) >= stall_ms
                {
                    let why = format!("stream {i}: no byte for {:?}", self.config.stall);
                    sink.push(RailEvent::Stalled(why));
                }
            }
        }
    }

    fn progress_bytes(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    fn cpu_time(&self) -> Duration {
        self.shared.cpu.time()
    }

    fn begin_probe(&mut self) {
        let lanes = self.config.streams.max(1) as usize;
        let attempt = Arc::new(Attempt {
            rail: self.shared.clone(),
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            state: Mutex::new(AttemptState {
                ready: 0,
                up: false,
                error: None,
                current: None,
            }),
            live_threads: AtomicUsize::new(lanes),
            number: rand::random(),
        });
        for lane in 0..lanes {
            let spawned = std::thread::Builder::new()
                .name(format!("tcp-lane-{lane}"))
                .spawn({
                    let (attempt, config) = (attempt.clone(), self.config.clone());
                    move || attempt.run_lane(lane, &config)
                });
            if let Err(e) = spawned {
                attempt.fail(format!("no thread for a connection: {e}"));
                attempt.leave();
            }
        }
        self.attempt = Some(attempt);
    }

    fn begin_quiesce(&mut self) {
        if let Some(attempt) = &self.attempt {
            attempt.fail("stopped".into());
        }
    }

    fn is_quiesced(&self) -> bool {
        self.attempt
            .as_ref()
            .is_none_or(|a| a.live_threads.load(Ordering::Acquire) == 0)
    }
}

impl Drop for TcpRail {
    /// Lanes that still run own their READs and give them back to nobody; the arena frees the slots.
    fn drop(&mut self) {
        self.begin_quiesce();
    }
}

impl Lane {
    /// Sends what the socket takes now; the rest stays for the next poll.
    fn flush(&self, unsent: &mut Vec<u8>) {
        let Some(socket) = lock(&self.socket).clone() else {
            return;
        };
        while !unsent.is_empty() {
            match rustix::net::send(&*socket, unsent, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => {
                    unsent.drain(..n);
                }
                Err(Errno::INTR) => {}
                // A full buffer empties; a broken connection wakes the lane's thread.
                Err(_) => return,
            }
        }
    }
}

/// Ends a lane when its thread does.
struct Leave<'a> {
    attempt: &'a Attempt,
    index: usize,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.attempt.close(self.index);
    }
}

/// Why a lane ends.
type LaneEnd = String;

impl Attempt {
    fn run_lane(&self, index: usize, config: &TcpConfig) {
        // Runs when this thread ends, by a panic, too: then the rail goes down like any other and
        // the READ in hand drops its range.
        let _leave = Leave {
            attempt: self,
            index,
        };
        *lock(&self.lanes[index].meter) = Some(WorkMeter::of_this_thread());
        let why = match self.serve(index, config) {
            Ok(never) => match never {},
            Err(why) => why,
        };
        self.fail(why);
    }

    /// The end of a lane's thread.
    fn close(&self, index: usize) {
        self.fail("a connection's thread ended unexpectedly".into());
        // After `closed` is set under the lock no READ can get in any more.
        let mut queue = lock(&self.lanes[index].queue);
        queue.closed = true;
        let rest = std::mem::take(&mut queue.posted);
        drop(queue);
        for (_, read) in rest {
            self.complete(index, read, Err(ReadError::Flushed));
        }
        self.rail.notifier.notify();
        if let Some(mut meter) = lock(&self.lanes[index].meter).take() {
            meter.tell(&self.rail.cpu);
        }
        self.leave();
    }

    /// The first failure decides what is told, and ends all lanes.
    fn fail(&self, why: String) {
        let mut state = lock(&self.state);
        if state.error.is_some() {
            return;
        }
        state.error = Some(why.clone());
        let up = state.up;
        drop(state);
        if up {
            self.rail.push(RailEvent::Down(why));
        }
        for lane in &self.lanes {
            if let Some(socket) = lock(&lane.socket).as_ref() {
                // Wakes the lane's thread out of `recv`; fails only where that has happened.
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }

    fn leave(&self) {
        if self.live_threads.fetch_sub(1, Ordering::AcqRel) == 1 {
            let state = lock(&self.state);
            if !state.up {
                let why = state.error.clone().unwrap_or_default();
                drop(state);
                self.rail.push(RailEvent::ProbeFailed(why));
            }
            self.rail.notifier.notify();
        }
    }

    /// A READ's end, told by its lane's thread, which holds no lock: what follows from it is done here.
    fn end_read(&self, lane: usize, read: Read, result: Result<Landed, ReadError>) {
        self.complete(lane, read, result);
        self.rail.notifier.work();
    }

    fn complete(&self, lane: usize, read: Read, result: Result<Landed, ReadError>) {
        // An answer without bytes is a sign of life, too.
        let own = &self.lanes[lane];
        own.moved_at_ms.store(self.rail.now_ms(), Ordering::Relaxed);
        if let Some(meter) = &mut *lock(&own.meter) {
            meter.tell_now_and_then(&self.rail.cpu);
        }
        own.outstanding_bytes
            .fetch_sub(read.bytes(), Ordering::Relaxed);
        self.rail
            .push_quietly(RailEvent::Completion(Completion { read, result }));
    }

    fn serve(&self, index: usize, config: &TcpConfig) -> Result<Infallible, LaneEnd> {
        let protocol = match config.v1 {
            true => Protocol::V1,
            false => config.protocol,
        };
        let limit = later(Instant::now(), config.connect_timeout);
        let (stream, outcome) = socket::connect(
            &config.addr,
            config.client_id,
            Role::Stream,
            protocol,
            config.token.as_ref(),
            limit,
        )
        .map_err(|e| e.to_string())?;
        let stream = Arc::new(stream);
        *lock(&self.lanes[index].socket) = Some(stream.clone());
        match outcome {
            Outcome::V2(welcome) if !config.v1 => {
                if u64::from(welcome.read_max_bytes) < config.read_bytes {
                    return Err(format!(
                        "the peer answers READs of at most {} bytes, this client asks for {}; set a smaller READ size",
                        welcome.read_max_bytes, config.read_bytes
                    ));
                }
                self.ready(Serving::of(&welcome))?;
                LaneV2::new(self, index, &stream, welcome, config.spin).serve()
            }
            Outcome::V1(manifest) if config.v1 => {
                self.ready(Serving {
                    content: v1_tag(&manifest, self.number),
                    instance_id: self.number,
                    epoch: 0,
                })?;
                self.serve_v1(index, &stream, &manifest)
            }
            _ => Err("the peer speaks another protocol version than when the tier connected; connect anew".into()),
        }
    }

    /// Looks for what is soon to come on a connection.
    fn look(&self, lane: usize, stream: &TcpStream, time: Duration) {
        let awaited = self.lanes[lane].outstanding_bytes.load(Ordering::Relaxed);
        if awaited == 0 || awaited > SOON_BYTES {
            return;
        }
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        spin(time, || {
            let got = rustix::net::recv(stream, &mut [0u8; 1], flags);
            // An error is the next call's to tell.
            !matches!(got, Err(Errno::AGAIN | Errno::INTR))
        });
    }

    fn ready(&self, serving: Serving) -> Result<(), LaneEnd> {
        let mut state = lock(&self.state);
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        if *state.current.get_or_insert(serving) != serving {
            return Err("the peer changed while its connections were made".into());
        }
        state.ready += 1;
        if state.ready == self.lanes.len() {
            state.up = true;
            // Under the lock: a change of content that another lane notices comes after this.
            self.rail.push(RailEvent::Ready(serving.content));
        }
        Ok(())
    }

    fn content_changed(&self, welcome: &Welcome) {
        let mut state = lock(&self.state);
        let new = Serving::of(welcome);
        // Each lane gets the notice; one that was busy may read an old one after another lane read
        // a newer one.
        let is_news = state
            .current
            .is_none_or(|old| old.instance_id != new.instance_id || old.epoch < new.epoch);
        if is_news {
            tracing::info!(epoch = new.epoch, "the peer's store changed");
            state.current = Some(new);
            if state.up {
                self.rail.push(RailEvent::Ready(new.content));
            }
        }
    }

    fn next_posted(&self, lane: usize, id: Option<u64>) -> Result<Read, LaneEnd> {
        let mut queue = lock(&self.lanes[lane].queue);
        match queue.posted.front() {
            Some((front, _)) if id.is_none_or(|id| id == *front) => {
                Ok(queue.posted.pop_front().expect("seen above").1)
            }
            Some((front, _)) => Err(format!(
                "the peer answered READ {} while {front} was next",
                id.unwrap_or_default()
            )),
            None => Err("the peer answered a READ that was not posted".into()),
        }
    }

    fn progress(&self, lane: usize, bytes: usize) {
        self.rail
            .progress
            .fetch_add(bytes as u64, Ordering::Relaxed);
        self.lanes[lane]
            .moved_at_ms
            .store(self.rail.now_ms(), Ordering::Relaxed);
    }

    /// Receives all bytes of a READ, chunk by chunk, and compares checksums while they are in the
    /// cache. With `tail`, surplus bytes of the last system call go there; returns their number.
    #[allow(clippy::type_complexity)] // two results of different blame: the READ's and the lane's
    fn receive(
        &self,
        lane: usize,
        stream: &TcpStream,
        read: &mut Read,
        mut tail: Option<&mut [u8]>,
    ) -> Result<(Result<Landed, ReadError>, usize), LaneEnd> {
        let total = read.range.len();
        let mut at = 0;
        let mut surplus = 0;
        let mut verify_time = Duration::ZERO;
        let mut bad = None;
        while at < total {
            let chunk_end = (at + CHUNK_BYTES as usize).min(total);
            let chunk_start = at;
            while at < chunk_end {
                let want = (chunk_end - at).min(PIECE_BYTES);
                let got = match tail.as_deref_mut().filter(|_| at + want == total) {
                    Some(tail) => read
                        .range
                        .recv_vectored_tail(stream.as_fd(), at, want, tail),
                    None => read
                        .range
                        .recv(stream.as_fd(), at, want, RecvFlags::WAIT_ALL),
                };
                match got {
                    Ok(0) => {
                        return Err(
                            "the peer closed the connection in the middle of a record".into()
                        );
                    }
                    Ok(n) => {
                        let landed = n.min(want);
                        surplus = n - landed;
                        at += landed;
                        self.progress(lane, landed);
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(format!("receiving failed: {e}")),
                }
            }
            if read.verify && bad.is_none() {
                let start = Instant::now();
                bad = read
                    .check_chunks(chunk_start as u64, (chunk_end - chunk_start) as u64)
                    .err();
                verify_time += start.elapsed();
            }
        }
        let landed = match bad {
            Some(bad) => Err(ReadError::Checksum(bad)),
            None => Ok(Landed {
                verified: read.verify,
                verify_time,
            }),
        };
        Ok((landed, surplus))
    }
}

fn recv_exact(mut stream: &TcpStream, buffer: &mut [u8]) -> Result<(), LaneEnd> {
    use std::io::Read as _;
    stream.read_exact(buffer).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => "the peer closed the connection".to_owned(),
        _ => format!("connection lost: {e}"),
    })
}
