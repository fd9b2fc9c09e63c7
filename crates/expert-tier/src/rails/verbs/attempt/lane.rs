//! A lane: a queue pair, and the thread that takes its completions.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use atlas_rdma::{CompletionError, CompletionStatus, ReadDone, ReadQueue};
use expert_store::Layer;
use expert_wire::message::ChecksumReport;

use super::post::{Posted, Scratch};
use super::shared::Token;
use super::{Attempt, NAP, Opened};
use crate::notify::Wake;
use crate::rail::{Landed, Read, ReadError};
use crate::rails::verbs::session::{self, Memory};
use crate::rails::verbs::{POSTS_MAX, plan};
use crate::sync::lock;

/// How long a flush may take before the queue pair is destroyed. It is local and takes under 2 ms;
/// emulated machines take longer.
const FLUSH_TIME: Duration = Duration::from_millis(500);
/// Checksum reports that wait to be sent; more say nothing new.
const REPORTS_MAX: usize = 16;

pub(super) struct Lane {
    /// Taken out by the lane's thread alone, when it ends.
    pub(super) queue: RwLock<Option<ReadQueue<Token>>>,
    pub(super) wake: Wake,
    pub(super) outstanding_bytes: AtomicU64,
    /// Bytes of READs under way that were seen to arrive, for the stall detector.
    pub(super) seen_bytes: AtomicU64,
    pub(super) moved_at_ms: AtomicU64,
    /// READs for the lane's thread to post, where the driver does not do it.
    inbox: Mutex<VecDeque<Inbound>>,
    /// Whether a thread is in the call that posts.
    pub(super) is_posting: AtomicBool,
}

/// A READ that is to be posted, and where its record lies in the peer's catalogue (v2).
pub(super) struct Inbound {
    pub(super) read: Read,
    pub(super) layer: Option<Arc<Layer>>,
}

impl Lane {
    pub(super) fn new(queue: ReadQueue<Token>, wake: Wake, now_ms: u64) -> Self {
        Self {
            queue: RwLock::new(Some(queue)),
            wake,
            outstanding_bytes: AtomicU64::new(0),
            seen_bytes: AtomicU64::new(0),
            moved_at_ms: AtomicU64::new(now_ms),
            inbox: Mutex::default(),
            is_posting: AtomicBool::new(false),
        }
    }

    /// Leaves a READ to the lane's thread. Under the attempt's lock and while it has not failed: the
    /// thread empties the inbox a last time after that.
    pub(super) fn hand_over(&self, inbound: Inbound) -> Posted {
        let mut inbox = lock(&self.inbox);
        if inbox.len() >= POSTS_MAX as usize {
            return Posted::Refused(Box::new(inbound.read));
        }
        inbox.push_back(inbound);
        drop(inbox);
        self.wake.wake();
        Posted::Taken
    }

    pub(super) fn with_queue<R>(&self, f: impl FnOnce(&ReadQueue<Token>) -> R) -> Option<R> {
        let queue = self.queue.read().unwrap_or_else(PoisonError::into_inner);
        queue.as_ref().map(f)
    }
}

impl Attempt {
    /// The lane's thread: takes completions, fills padding, compares checksums, and posts what the
    /// driver leaves to it.
    pub(super) fn run_lane(&self, opened: &Opened, index: usize) {
        let lane = &opened.lanes[index];
        let spin = self.config.options.spin;
        let mut done = Vec::new();
        let mut scratch = Scratch::default();
        let mut flush_until = None;
        loop {
            let (down, quiesced) = lane
                .with_queue(|queue| {
                    queue.poll(&mut done);
                    (queue.is_down(), queue.is_quiesced())
                })
                .expect("this thread alone takes it out");
            let mut busy = !done.is_empty();
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
                for inbound in lock(&lane.inbox).drain(..) {
                    self.rail.complete(inbound.read, Err(ReadError::Flushed));
                }
                let until = *flush_until.get_or_insert_with(|| Instant::now() + FLUSH_TIME);
                if quiesced || Instant::now() >= until {
                    break;
                }
            } else {
                // One at a time: it may be done when the call returns.
                busy |= self.post_one(&mut scratch, opened, lane);
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

    /// Posts what is first in the lane's inbox; whether that made a difference.
    fn post_one(&self, scratch: &mut Scratch, opened: &Opened, lane: &Lane) -> bool {
        let Some(Inbound { read, layer }) = lock(&lane.inbox).pop_front() else {
            return false;
        };
        let bytes = read.bytes();
        match self.post_on(scratch, opened, lane, read, layer.clone()) {
            Posted::Taken => {}
            Posted::Ended => {
                lane.outstanding_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
            Posted::Refused(read) => {
                // Something is posted, whose end makes room, or the queue is down.
                let read = *read;
                lock(&lane.inbox).push_front(Inbound { read, layer });
                return false;
            }
            Posted::Broken(read, why) => {
                let read = *read;
                lock(&lane.inbox).push_front(Inbound { read, layer });
                self.fail(why);
            }
        }
        true
    }

    /// The end of a READ.
    pub(super) fn conclude(&self, opened: &Opened, done: ReadDone<Token>) {
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
