//! A queue of READs: a queue pair, its completions, and the ranges that the device may write to meanwhile.

mod waiting;

use crate::completion::{Completion, CompletionChannel, CompletionStatus, Cq};
use crate::error::RdmaError;
use crate::in_flight::{CompletionError, MARKER, Outcome, PROBE, ReadDone, Table};
use crate::landing::LandingRegions;
use crate::leak::leaked;
use crate::mr::{LocalKey, RemoteKey};
use crate::path::{LocalEndpoint, Path, random_psn};
use crate::qp::{QpCapabilities, QueuePair, RemoteAccess};
use crate::read_chain::{LocalPart, ReadChain, RemoteRead, check_requests};
use crate::read_options::{PostRefused, ReadQueueOptions, Refusal, check_options};
use crate::wait::readable;
use expert_arena::LandingRange;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use waiting::WAIT_QUEUES_MAX;

/// How long `drop` waits for what is posted to be given back before it destroys the queue pair: a flush is local and
/// takes some milliseconds at most.
const DROP_DRAIN: Duration = Duration::from_millis(500);

/// The longest wait for that which anybody can ask for; it keeps the arithmetic of time in bounds.
const DRAIN_MAX: Duration = Duration::from_secs(3600);

/// The longest sleep while draining: a lost event costs this much.
const DRAIN_SLEEP: Duration = Duration::from_millis(5);

/// Completions taken with one call: a batch fits the stack and the first cache.
const BATCH: usize = 32;

/// A queue of READs into an arena. `T` is what its user wants back with each post.
///
/// *Invariant:* a range that is posted is owned by the queue until the completion of its last request was polled, or the
/// queue pair is destroyed; where that fails, the range is leaked and its memory never used again.
///
/// **Threads.** One may post while another polls. No lock is held while one sleeps in [`wait`](Self::wait); one thread
/// at a time waits. Steady use allocates nothing.
///
/// **Cleanup.** Drop moves the queue pair to the error state, takes what is given back for half a second, and destroys
/// the queue pair; the ranges that are left are dropped after that.
pub struct ReadQueue<T> {
    state: Mutex<State<T>>,
    /// Whether the completion queue owes an event.
    armed: AtomicBool,
    /// The table's count, for those who must not wait for a post that takes long.
    progress_bytes: AtomicU64,
    options: ReadQueueOptions,
    local: LocalEndpoint,
    max_message_bytes: u32,
    // Field order is drop order; `drop` has taken the queue pair before.
    qp: Option<QueuePair>,
    cq: Arc<Cq>,
    channel: Arc<CompletionChannel>,
    // Last: the regions go after the queue pair that wrote to them.
    landing: Arc<LandingRegions>,
}

struct State<T> {
    phase: Phase,
    table: Table<T>,
    /// Ended, and not handed out yet.
    ready: Vec<ReadDone<T>>,
    chain: ReadChain,
    /// How the probe ended, until it is asked for.
    probe: Option<CompletionStatus>,
    /// Whether the marker was posted; there is room for one.
    marked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Unconnected,
    Connected,
    /// Failed or quiescing; nothing is posted any more.
    Down,
}

impl<T: Send> ReadQueue<T> {
    /// A queue on the device of `landing`, in INIT, with a random PSN.
    ///
    /// # Errors
    ///
    /// [`RdmaError::LimitExceeded`] above the device's limits ([`ReadQueueOptions::limited_to`] avoids that);
    /// [`RdmaError::Create`], [`RdmaError::UnknownPort`], [`RdmaError::Transition`].
    pub fn new(landing: Arc<LandingRegions>, options: ReadQueueOptions) -> Result<Self, RdmaError> {
        let pd = landing.pd();
        let context = pd.context();
        check_options(context.name(), context.attributes(), &options)?;
        let port = context.port(options.port)?;
        let channel = CompletionChannel::new(context)?;
        // One more than the posts need: the marker of a chain that was posted in part.
        let requests = options.work_requests_max + 1;
        let cq = Cq::new(context, requests, Some(Arc::clone(&channel)))?;
        let capabilities = QpCapabilities {
            send_wr: requests,
            send_sge: options.sge_max,
            ..QpCapabilities::IDLE
        };
        let qp = QueuePair::create(pd, &cq, capabilities)?;
        qp.to_init(options.port, options.pkey_index, RemoteAccess::None)?;
        Ok(Self {
            state: Mutex::new(State {
                phase: Phase::Unconnected,
                table: Table::new(options.posts_max, options.work_requests_max as usize),
                ready: Vec::with_capacity(options.posts_max as usize),
                chain: ReadChain::with_capacity(
                    options.work_requests_max as usize,
                    options.sge_max as usize,
                ),
                probe: None,
                marked: false,
            }),
            armed: AtomicBool::new(false),
            progress_bytes: AtomicU64::new(0),
            options,
            local: LocalEndpoint {
                qpn: qp.number(),
                psn: random_psn(),
            },
            max_message_bytes: port.max_message_bytes,
            qp: Some(qp),
            cq,
            channel,
            landing,
        })
    }

    /// This end, for the other one.
    pub fn local(&self) -> LocalEndpoint {
        self.local
    }

    /// What it was made for.
    pub fn options(&self) -> &ReadQueueOptions {
        &self.options
    }

    /// The regions that it reads into.
    pub fn landing(&self) -> &Arc<LandingRegions> {
        &self.landing
    }

    /// Largest message of its port, bytes.
    pub fn max_message_bytes(&self) -> u32 {
        self.max_message_bytes
    }

    /// Connects the queue: to RTR, then to RTS. The path's `local_psn` is replaced by the queue's own.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Transition`] says which attribute exceeds which limit.
    pub fn connect(&self, path: &Path) -> Result<(), RdmaError> {
        let path = Path {
            local_psn: self.local.psn,
            ..path.clone()
        };
        self.qp().to_rtr(&path)?;
        self.qp().to_rts(&path)?;
        let mut state = self.lock();
        if state.phase == Phase::Unconnected {
            state.phase = Phase::Connected;
        }
        Ok(())
    }

    /// Posts READs into one range, with one call to the device. Each request reads one contiguous remote range into
    /// the next `part_count` of `parts`. The range is the queue's until [`poll`](Self::poll) gives it back.
    ///
    /// The post ends with the completion of its last request; others ask for one every 256 KiB, for
    /// [`progress_bytes`](Self::progress_bytes).
    ///
    /// # Errors
    ///
    /// Token and range come back with the reason. Where the device took only some requests, the post is taken: it ends
    /// as flushed, and the queue is down.
    pub fn post(
        &self,
        token: T,
        range: LandingRange,
        requests: &[RemoteRead],
        parts: &[LocalPart],
    ) -> Result<(), PostRefused<T>> {
        let refuse = |token, range, why| Err(PostRefused { token, range, why });
        let lkey = match self.check(&range, requests, parts) {
            Ok(lkey) => lkey,
            Err(reason) => return refuse(token, range, Refusal::Invalid(reason)),
        };
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.phase != Phase::Connected {
            return refuse(token, range, Refusal::Down);
        }
        // What ended and was not handed out yet has a place of its own, which is as large as the table.
        let unclaimed = state.table.len() + state.ready.len();
        if !state.table.has_room(requests.len()) || unclaimed >= self.options.posts_max as usize {
            return refuse(token, range, Refusal::Full);
        }
        let start = range.as_mut_ptr();
        let id = state.table.insert(token, range, requests.len());
        let first = state.chain.build(id, start, lkey, requests, parts);
        // SAFETY: the chain was built for these requests, and nothing touches it during the call. Each part lies inside
        // the range (checked), the range inside a region of the queue's own domain (its lkey was found), whose memory
        // is registered for as long as `landing` lives. The table owns the range until the completion of its last
        // request was polled, or the queue pair was destroyed, or for ever; nobody else writes to it meanwhile.
        let posted = unsafe { self.qp().post_send(first) };
        let Err((errno, bad)) = posted else {
            return Ok(());
        };
        // A provider that does not say how far it came may have taken all.
        let went_out = state.chain.index_of(bad).unwrap_or(requests.len());
        if went_out == 0 {
            let (token, range) = state.table.withdraw(id);
            return refuse(token, range, Refusal::Failed(errno));
        }
        state.table.cut(id, went_out);
        state.table.set_root(CompletionStatus::PostFailed(errno));
        state.phase = Phase::Down;
        drop(guard);
        tracing::warn!(
            "{}: {went_out} of {} requests were posted on queue pair {}, then: {}; the queue is taken down",
            self.device(),
            requests.len(),
            self.local.qpn,
            crate::error::os(errno)
        );
        self.to_error();
        Ok(())
    }

    /// READs one byte into memory of its own, to show that the path carries READs: call it after
    /// [`connect`](Self::connect), before anything is posted.
    ///
    /// # Errors
    ///
    /// [`RdmaError::Probe`] says how it ended, or that it did not within `limit`. The queue is of no use then: drop it.
    pub fn probe(
        &self,
        remote_addr: u64,
        rkey: RemoteKey,
        limit: Duration,
    ) -> Result<(), RdmaError> {
        let deadline = Instant::now() + limit.min(Duration::from_secs(3600));
        let failed = |why: String| RdmaError::Probe {
            device: self.device().to_owned(),
            why,
        };
        let (target, lkey) = self.landing.scratch();
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.phase != Phase::Connected || state.table.len() > 0 {
            return Err(failed("the queue is not connected, or in use".into()));
        }
        let first = state.chain.build_probe(target, lkey, remote_addr, rkey);
        // SAFETY: one request with one local byte, of the scratch region that `landing` keeps registered and mapped for
        // longer than the queue pair lives, and that nobody reads.
        let posted = unsafe { self.qp().post_send(first) };
        drop(guard);
        posted.map_err(|(errno, _)| failed(crate::error::os(errno).to_string()))?;
        loop {
            let mut state = self.lock();
            self.harvest(&mut state);
            if let Some(status) = state.probe.take() {
                return match status {
                    CompletionStatus::Success => Ok(()),
                    status => Err(failed(status.to_string())),
                };
            }
            if let Some(root) = state.table.root() {
                return Err(failed(root.to_string()));
            }
            drop(state);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(format!("no answer within {limit:?}")));
            }
            self.arm()?;
            let mut state = self.lock();
            self.harvest(&mut state);
            if state.probe.is_some() {
                continue;
            }
            drop(state);
            let _ = readable(&[self.channel.fd()], Some(left.min(DRAIN_SLEEP)));
            if self.channel.take_events() > 0 {
                self.armed.store(false, Ordering::Release);
            }
        }
    }

    /// Bytes that completions have shown to have arrived, of posts under way, too: evidence that the queue gets on.
    /// They are counted when the queue is polled. It waits for nobody.
    pub fn progress_bytes(&self) -> u64 {
        self.progress_bytes.load(Ordering::Relaxed)
    }

    /// Takes note of what has completed, for [`progress_bytes`](Self::progress_bytes); [`poll`](Self::poll) hands it out.
    pub fn look(&self) {
        let mut state = self.lock();
        let failed = self.harvest(&mut state);
        drop(state);
        if failed {
            self.to_error();
        }
    }

    /// Moves all posts that have ended to `sink`, in the order in which they ended. It never waits.
    pub fn poll(&self, sink: &mut Vec<ReadDone<T>>) {
        let mut state = self.lock();
        let failed = self.harvest(&mut state);
        sink.append(&mut state.ready);
        drop(state);
        if failed {
            self.to_error();
        }
    }

    /// Takes the queue down: nothing is posted any more, and everything that is posted is given back as flushed, if it
    /// was not done before. Also for a queue that has failed.
    pub fn begin_quiesce(&self) {
        self.lock().phase = Phase::Down;
        self.to_error();
    }

    /// Whether the queue is down and everything that was posted was handed out by [`poll`](Self::poll).
    pub fn is_quiesced(&self) -> bool {
        let state = self.lock();
        state.phase == Phase::Down && state.table.len() + state.ready.len() == 0
    }

    /// Whether the queue has failed or was taken down.
    pub fn is_down(&self) -> bool {
        self.lock().phase == Phase::Down
    }

    /// Count of posts that were not handed out yet.
    pub fn outstanding(&self) -> usize {
        let state = self.lock();
        state.table.len() + state.ready.len()
    }

    /// What took the queue down: the first failure that was not a flush.
    pub fn root_cause(&self) -> Option<CompletionError> {
        self.lock().table.root()
    }

    /// Completions that no post was waiting for; 0 unless a device misbehaves.
    pub fn stale_completions(&self) -> u64 {
        self.lock().table.stale()
    }

    /// Takes the queue down, waits up to `drain` for what is posted, and destroys the queue pair.
    pub fn close(mut self, drain: Duration) -> Closed<T> {
        self.shut_down(drain)
    }

    fn check(
        &self,
        range: &LandingRange,
        requests: &[RemoteRead],
        parts: &[LocalPart],
    ) -> Result<LocalKey, &'static str> {
        if !Arc::ptr_eq(range.arena(), self.landing.arena()) {
            return Err("the range is of another arena than the queue's");
        }
        if requests.len() > self.options.work_requests_max as usize {
            return Err("more requests than the queue holds");
        }
        check_requests(
            range.len(),
            requests,
            parts,
            self.options.sge_max,
            self.max_message_bytes,
        )?;
        // A range lies in one slot, and a slot in one region.
        let lkey = self.landing.lkey_for(range.arena_offset(), range.len());
        lkey.ok_or("the range is not registered")
    }
}

impl<T> ReadQueue<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn qp(&self) -> &QueuePair {
        self.qp.as_ref().expect("only closing takes it")
    }

    fn device(&self) -> &str {
        self.landing.pd().context().name()
    }

    /// Asks for an event, unless one is owed already.
    fn arm(&self) -> Result<(), RdmaError> {
        if self.armed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.cq
            .arm()
            .inspect_err(|_| self.armed.store(false, Ordering::Release))
    }

    /// Takes what has completed; `true` when the queue has just failed and its queue pair is to be moved to ERR.
    fn harvest(&self, state: &mut State<T>) -> bool {
        let mut batch = [Completion::empty(); BATCH];
        loop {
            let count = match self.cq.poll_raw(&mut batch) {
                Ok(count) => count,
                Err(errno) => {
                    state.table.set_root(CompletionStatus::QueueBroken(errno));
                    break;
                }
            };
            for completion in &batch[..count] {
                if completion.wr_id() == MARKER {
                    while let Some(done) = state.table.end_cut() {
                        state.ready.push(done);
                    }
                    continue;
                }
                let status = completion.status();
                if completion.wr_id() == PROBE {
                    state.probe = Some(status);
                    continue;
                }
                let outcome =
                    state
                        .table
                        .complete(completion.wr_id(), status, completion.vendor_err());
                if let Outcome::Ended(done) = outcome {
                    state.ready.push(done);
                }
            }
            if count < BATCH {
                break;
            }
        }
        let progress_bytes = state.table.progress_bytes();
        self.progress_bytes.store(progress_bytes, Ordering::Relaxed);
        let failed = state.phase != Phase::Down && state.table.root().is_some();
        if failed {
            state.phase = Phase::Down;
        }
        failed
    }

    /// Moves the queue pair to ERR, and asks for a sign where a chain was posted in part.
    fn to_error(&self) {
        if let Err(error) = self.qp().to_error() {
            tracing::warn!("{error}");
            return;
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.marked || !state.table.has_cut() {
            return;
        }
        state.marked = true;
        let marker = state.chain.build_marker();
        // SAFETY: the chain is one request without any local range.
        if let Err((errno, _)) = unsafe { self.qp().post_send(marker) } {
            tracing::warn!(
                "{}: no marker on queue pair {}: {}; what is posted is given back when it is closed",
                self.device(),
                self.local.qpn,
                crate::error::os(errno)
            );
        }
    }

    fn shut_down(&mut self, drain: Duration) -> Closed<T> {
        let mut closed = Closed {
            done: Vec::new(),
            lost: Vec::new(),
        };
        if self.qp.is_none() {
            return closed;
        }
        self.lock().phase = Phase::Down;
        let deadline = Instant::now() + drain.min(DRAIN_MAX);
        if !self.drained() {
            self.to_error();
            while !self.drained() {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                // Without an event, the sleep just ends later.
                let _ = self.arm();
                if self.drained() {
                    break;
                }
                let _ = readable(&[self.channel.fd()], Some(left.min(DRAIN_SLEEP)));
                if self.channel.take_events() > 0 {
                    self.armed.store(false, Ordering::Release);
                }
            }
        }
        let destroyed = self.qp.take().map_or(Ok(()), QueuePair::destroy);
        let mut guard = self.lock();
        let state = &mut *guard;
        closed.done.append(&mut state.ready);
        while let Some(done) = state.table.take_any() {
            match destroyed {
                Ok(()) => closed.done.push(done),
                Err(errno) => {
                    leaked(self.device(), "a range under a queue pair", errno);
                    done.range.leak();
                    closed.lost.push(done.token);
                }
            }
        }
        drop(guard);
        closed
    }

    /// Whether the device has given back everything.
    fn drained(&self) -> bool {
        let mut state = self.lock();
        self.harvest(&mut state);
        state.table.len() == 0
    }
}

/// What was left on a queue when it was closed.
#[derive(Debug)]
pub struct Closed<T> {
    /// Posts that ended, or that the device let go of when the queue pair was destroyed.
    pub done: Vec<ReadDone<T>>,
    /// What the other posts were posted with: destroying the queue pair failed, so their ranges are leaked.
    pub lost: Vec<T>,
}

impl<T> Drop for ReadQueue<T> {
    fn drop(&mut self) {
        drop(self.shut_down(DROP_DRAIN));
    }
}

impl<T> fmt::Debug for ReadQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadQueue")
            .field("device", &self.device())
            .field("local", &self.local)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

// A queue is shared by the thread that posts and the one that polls.
const _: () = {
    const fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<ReadQueue<u64>>();
};
