//! What the readers of a rail share with the driver.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use expert_store::Store;

use super::files::Files;
use super::mode::IoState;
use crate::cpu::WorkClock;
use crate::notify::Notifier;
use crate::rail::{Completion, Landed, RailEvent, Read, ReadError};
use crate::rails::local::read_plainly;
use crate::sync::lock;

/// READs that wait for a reader; the engine's window ends far below, and what is refused comes again.
const WAITING_MAX: usize = 4096;

/// See the module.
pub(super) struct Shared {
    pub(super) store: Arc<Store>,
    pub(super) files: Files,
    pub(super) io_bytes: usize,
    pub(super) state: Arc<IoState>,
    pub(super) progress: AtomicU64,
    queue: Mutex<Queue>,
    /// Grows with each quiesce; written with `queue` locked.
    round: AtomicU64,
    end: AtomicBool,
    seats: Vec<Seat>,
    events: Mutex<Vec<RailEvent>>,
    notifier: Arc<Notifier>,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<Read>,
    /// READs in readers' hands.
    held: usize,
    /// Readers that run.
    live: usize,
}

/// What is known of one reader.
struct Seat {
    waker: Notifier,
    has_room: AtomicBool,
    cpu_ns: AtomicU64,
}

impl Shared {
    pub(super) fn new(
        store: Arc<Store>,
        files: Files,
        io_bytes: usize,
        state: Arc<IoState>,
        readers: usize,
        notifier: Arc<Notifier>,
    ) -> std::io::Result<Self> {
        let seat = |_| {
            Ok(Seat {
                waker: Notifier::new()?,
                has_room: AtomicBool::new(true),
                cpu_ns: AtomicU64::new(0),
            })
        };
        Ok(Self {
            store,
            files,
            io_bytes,
            state,
            progress: AtomicU64::new(0),
            queue: Mutex::default(),
            round: AtomicU64::new(0),
            end: AtomicBool::new(false),
            seats: (0..readers).map(seat).collect::<std::io::Result<_>>()?,
            events: Mutex::default(),
            notifier,
        })
    }

    // The driver's side.

    pub(super) fn post(&self, read: Read) -> Result<(), Box<Read>> {
        let mut queue = lock(&self.queue);
        if queue.live == 0 || queue.reads.len() >= WAITING_MAX {
            return Err(Box::new(read));
        }
        queue.reads.push_back(read);
        drop(queue);
        // One that sleeps and has room; the others look before they sleep, or when a window is free.
        for seat in &self.seats {
            if seat.has_room.load(Ordering::SeqCst) && seat.waker.notify() {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn push(&self, event: RailEvent) {
        lock(&self.events).push(event);
        self.notifier.notify();
    }

    pub(super) fn poll(&self, sink: &mut Vec<RailEvent>) {
        sink.append(&mut lock(&self.events));
    }

    pub(super) fn is_live(&self) -> bool {
        lock(&self.queue).live > 0
    }

    pub(super) fn begin_quiesce(&self) {
        let mut queue = lock(&self.queue);
        self.round.fetch_add(1, Ordering::SeqCst);
        let flushed = std::mem::take(&mut queue.reads);
        queue.held += flushed.len();
        drop(queue);
        for read in flushed {
            self.complete(read, Err(ReadError::Flushed));
        }
        self.wake_all();
    }

    pub(super) fn is_quiesced(&self) -> bool {
        let queue = lock(&self.queue);
        // What came back and was not polled is not back yet.
        queue.reads.is_empty() && queue.held == 0 && lock(&self.events).is_empty()
    }

    /// Nobody polls any more: what comes back is dropped.
    pub(super) fn end(&self) {
        self.end.store(true, Ordering::SeqCst);
        self.begin_quiesce();
        lock(&self.events).clear();
    }

    pub(super) fn cpu_time(&self) -> Duration {
        let sum = self.seats.iter().map(|s| s.cpu_ns.load(Ordering::Relaxed));
        Duration::from_nanos(sum.sum())
    }

    fn wake_all(&self) {
        for seat in &self.seats {
            seat.waker.notify();
        }
    }

    // The readers' side.

    pub(super) fn has_ended(&self) -> bool {
        self.end.load(Ordering::SeqCst)
    }

    pub(super) fn round(&self) -> u64 {
        self.round.load(Ordering::SeqCst)
    }

    /// The next READ, and the round it belongs to.
    pub(super) fn take(&self) -> Option<(Read, u64)> {
        let mut queue = lock(&self.queue);
        let read = queue.reads.pop_front()?;
        queue.held += 1;
        Some((read, self.round.load(Ordering::SeqCst)))
    }

    /// Gives a READ to another reader.
    pub(super) fn put_back(&self, read: Read) {
        let mut queue = lock(&self.queue);
        queue.held -= 1;
        queue.reads.push_front(read);
        drop(queue);
        self.wake_all();
    }

    pub(super) fn complete(&self, read: Read, result: Result<Landed, ReadError>) {
        match self.has_ended() {
            true => drop(read),
            false => self.push(RailEvent::Completion(Completion { read, result })),
        }
        // After the event: who sees that nothing is held finds it.
        lock(&self.queue).held -= 1;
    }

    pub(super) fn note_cpu(&self, reader: usize, clock: &WorkClock) {
        let ns = u64::try_from(clock.time().as_nanos()).unwrap_or(u64::MAX);
        self.seats[reader].cpu_ns.store(ns, Ordering::Relaxed);
    }

    /// Announces that a reader will sleep; it looks for news once more and then waits, or cancels.
    pub(super) fn prepare_sleep(&self, reader: usize, has_room: bool) -> &Notifier {
        let seat = &self.seats[reader];
        seat.has_room.store(has_room, Ordering::SeqCst);
        seat.waker.prepare();
        &seat.waker
    }

    /// Whether there is something to do for a reader whose oldest READ is of that round.
    pub(super) fn has_news(&self, has_room: bool, oldest: Option<u64>) -> bool {
        self.has_ended()
            || oldest.is_some_and(|round| round != self.round())
            || (has_room && !lock(&self.queue).reads.is_empty())
    }

    /// Reads without a ring until the rail ends.
    pub(super) fn read_plainly_until_end(&self, reader: usize, clock: &WorkClock) {
        while !self.has_ended() {
            if let Some((read, _)) = self.take() {
                let mut held = Held {
                    shared: self,
                    read: Some(read),
                };
                let read = held.read.as_mut().expect("just put there");
                let result = read_plainly(&self.store, read, &self.progress);
                self.note_cpu(reader, clock);
                held.finish(result);
                continue;
            }
            let waker = self.prepare_sleep(reader, true);
            match self.has_news(true, None) {
                true => waker.cancel(),
                false => waker.wait(None),
            }
        }
    }

    pub(super) fn enter(self: &Arc<Self>) -> Presence {
        lock(&self.queue).live += 1;
        Presence(self.clone())
    }
}

/// A READ in the hands of a reader without a ring; comes back after a panic, too.
struct Held<'a> {
    shared: &'a Shared,
    read: Option<Read>,
}

impl Held<'_> {
    fn finish(&mut self, result: Result<Landed, ReadError>) {
        if let Some(read) = self.read.take() {
            self.shared.complete(read, result);
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.finish(Err(ReadError::Flushed));
    }
}

/// A reader that runs; one that ends although the rail does not takes the rail down.
pub(super) struct Presence(Arc<Shared>);

impl Drop for Presence {
    fn drop(&mut self) {
        lock(&self.0.queue).live -= 1;
        if !self.0.has_ended() {
            let why = "a reader's thread ended unexpectedly".to_owned();
            self.0.push(RailEvent::Down(why));
        }
    }
}
