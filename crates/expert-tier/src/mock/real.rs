//! The mock device on the real clock: one thread per rail that is its wire.
//!
//! ```text
//! driver: post, begin_quiesce … ─► commands ─► device thread (MockRail) ─► events ─► driver: poll
//! ```
//!
//! The schedule is absolute: the device knows to the nanosecond when each READ starts and lands,
//! counted from when it was posted and from the end of the READ before. A thread that wakes up late
//! finds more that has landed; nothing adds up. No lock is held while bytes are moved.
//!
//! Sleeps are no finer than [`TICK`] and the end of the next READ: what arrived meanwhile is
//! written in one go.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::MockRail;
use crate::cpu::WorkClock;
use crate::notify::Notifier;
use crate::rail::{Capabilities, Completion, Rail, RailEvent, RailKind, Read, ReadError};
use crate::sync::lock;

/// How often bytes of a READ that is on the wire are written: a fraction of what a window lasts,
/// and long against a wake-up.
const TICK: Duration = Duration::from_millis(1);

/// A [`MockRail`] with a thread that moves it, for drivers on the real clock.
pub struct RealRail {
    name: String,
    capabilities: Capabilities,
    depth: usize,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Makes things go wrong on a [`RealRail`] that a driver owns.
#[derive(Clone)]
pub struct Control(Arc<Shared>);

type Change = Box<dyn FnOnce(&mut MockRail) + Send>;

enum Command {
    Post(Read, Instant),
    Probe,
    Quiesce,
    Change(Change),
}

#[derive(Default)]
struct Inbox {
    commands: VecDeque<Command>,
    end: bool,
}

struct Shared {
    inbox: Mutex<Inbox>,
    work: Condvar,
    events: Mutex<Vec<RailEvent>>,
    notifier: Arc<Notifier>,
    progress_bytes: AtomicU64,
    cpu_ns: AtomicU64,
    /// Posted and not handed back by `poll`.
    in_flight: AtomicUsize,
    quiesces_begun: AtomicU64,
    quiesces_done: AtomicU64,
}

impl RealRail {
    /// Starts the device's thread, which wakes the driver through `notifier`.
    ///
    /// *Errors*: no thread can be started.
    pub(crate) fn start(mut rail: MockRail, notifier: Arc<Notifier>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            work: Condvar::new(),
            events: Mutex::default(),
            notifier,
            progress_bytes: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            quiesces_begun: AtomicU64::new(0),
            quiesces_done: AtomicU64::new(0),
        });
        rail.clock = Some(Instant::now);
        let (name, capabilities) = (rail.name().to_owned(), rail.capabilities());
        let depth = rail.spec.depth;
        let device = Device {
            rail,
            shared: shared.clone(),
            cpu: None,
            events: Vec::new(),
            quiesces_begun: 0,
        };
        let thread = std::thread::Builder::new()
            .name(name.clone())
            .spawn(move || device.run())?;
        Ok(Self {
            name,
            capabilities,
            depth,
            shared,
            thread: Some(thread),
        })
    }

    /// For tests: what makes this rail fail, later.
    pub fn control(&self) -> Control {
        Control(self.shared.clone())
    }
}

impl fmt::Debug for RealRail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RealRail")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// Changes the device, at its time of the moment in which it gets to it: a stall, a cut.
    pub fn change(&self, change: impl FnOnce(&mut MockRail) + Send + 'static) {
        self.0.command(Command::Change(Box::new(change)));
    }
}

impl Shared {
    fn command(&self, command: Command) {
        lock(&self.inbox).commands.push_back(command);
        self.work.notify_one();
    }
}

impl Rail for RealRail {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> RailKind {
        RailKind::Mock
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn post(&mut self, read: Read) -> Result<(), Box<Read>> {
        if self.shared.in_flight.load(Ordering::Relaxed) >= self.depth {
            return Err(Box::new(read));
        }
        self.shared.in_flight.fetch_add(1, Ordering::Relaxed);
        self.shared.command(Command::Post(read, Instant::now()));
        Ok(())
    }

    fn poll(&mut self, sink: &mut Vec<RailEvent>) {
        let mut events = lock(&self.shared.events);
        let completed = events
            .iter()
            .filter(|e| matches!(e, RailEvent::Completion(_)))
            .count();
        self.shared
            .in_flight
            .fetch_sub(completed, Ordering::Relaxed);
        sink.append(&mut events);
    }

    fn progress_bytes(&self) -> u64 {
        self.shared.progress_bytes.load(Ordering::Relaxed)
    }

    fn cpu_time(&self) -> Duration {
        Duration::from_nanos(self.shared.cpu_ns.load(Ordering::Relaxed))
    }

    fn begin_probe(&mut self) {
        self.shared.command(Command::Probe);
    }

    fn begin_quiesce(&mut self) {
        self.shared.quiesces_begun.fetch_add(1, Ordering::Relaxed);
        self.shared.command(Command::Quiesce);
    }

    fn is_quiesced(&self) -> bool {
        // Acquire: what the device wrote before it said so is seen by whoever asks.
        let done = self.shared.quiesces_done.load(Ordering::Acquire);
        done == self.shared.quiesces_begun.load(Ordering::Relaxed)
            && self.shared.in_flight.load(Ordering::Relaxed) == 0
    }
}

impl Drop for RealRail {
    /// When the thread is gone nothing writes any more; READs that are left go with it.
    fn drop(&mut self) {
        lock(&self.shared.inbox).end = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                tracing::error!(rail = %self.name, "the mock device's thread panicked");
            }
        }
    }
}

/// What the thread owns.
struct Device {
    rail: MockRail,
    shared: Arc<Shared>,
    cpu: Option<WorkClock>,
    events: Vec<RailEvent>,
    quiesces_begun: u64,
}

impl Device {
    fn run(mut self) {
        self.cpu = Some(WorkClock::of_this_thread());
        let mut commands = VecDeque::new();
        while self.wait(&mut commands) {
            for command in commands.drain(..) {
                self.obey(command);
            }
            self.rail.advance(Instant::now());
            self.rail.write_early();
            self.tell();
        }
    }

    /// Until there is something to do; false at the end.
    fn wait(&mut self, commands: &mut VecDeque<Command>) -> bool {
        let next = self.next_event();
        let mut inbox = lock(&self.shared.inbox);
        loop {
            if inbox.end {
                return false;
            }
            if !inbox.commands.is_empty() {
                std::mem::swap(&mut inbox.commands, commands);
                return true;
            }
            let now = Instant::now();
            inbox = match next {
                Some(at) if at <= now => return true,
                Some(at) => {
                    let waited = self.shared.work.wait_timeout(inbox, at - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let waited = self.shared.work.wait(inbox);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    fn next_event(&self) -> Option<Instant> {
        let early = self
            .rail
            .next_chunk()
            .map(|at| at.max(self.rail.now + TICK));
        self.rail.next_event().into_iter().chain(early).min()
    }

    fn obey(&mut self, command: Command) {
        if let Command::Post(read, at) = command {
            if let Err(read) = self.rail.post_at(read, at) {
                // It was posted before the driver knew that the rail is down.
                self.events.push(RailEvent::Completion(Completion {
                    read: *read,
                    result: Err(ReadError::Flushed),
                }));
            }
            return;
        }
        self.rail.advance(Instant::now());
        match command {
            Command::Post(..) => {}
            Command::Probe => self.rail.begin_probe(),
            Command::Quiesce => {
                self.quiesces_begun += 1;
                self.rail.begin_quiesce();
            }
            Command::Change(change) => change(&mut self.rail),
        }
    }

    fn tell(&mut self) {
        let shared = &self.shared;
        let progress_bytes = self.rail.progress_bytes();
        shared
            .progress_bytes
            .store(progress_bytes, Ordering::Relaxed);
        let cpu = self.cpu.as_ref().map_or(Duration::ZERO, WorkClock::time);
        let cpu = cpu.as_nanos() as u64;
        shared.cpu_ns.store(cpu, Ordering::Relaxed);
        self.rail.poll(&mut self.events);
        let is_news = !self.events.is_empty();
        if is_news {
            lock(&shared.events).append(&mut self.events);
        }
        // After the last event: who sees this and nothing in flight has seen all of them.
        let is_quiet = self.rail.is_quiesced();
        let was = shared.quiesces_done.load(Ordering::Relaxed);
        if is_quiet && was != self.quiesces_begun {
            shared
                .quiesces_done
                .store(self.quiesces_begun, Ordering::Release);
        }
        if is_news || (is_quiet && was != self.quiesces_begun) {
            // As a connection's thread does: no lock is held here.
            shared.notifier.work();
        }
    }
}
