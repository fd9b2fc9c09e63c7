//! The driver: one thread that owns the clock, the engine and the rails, and waits for all of them
//! on one event descriptor.
//!
//! *Threads*: callers talk to it through [`Driver::submit`] and a [`Ticket`]; rails' helper threads
//! through the notifier. *Cleanup*: dropping the driver fails what is open, drops the rails (which
//! give their memory back), and joins the thread, in that order, with a deadline.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::{Class, EngineConfig};
use crate::coverage::Holding;
use crate::cpu::WorkClock;
use crate::engine::{Action, Engine, Finished, Handle, Order, Refused, until};
use crate::notify::Notifier;
use crate::rail::{ContentTag, Rail, RailEvent, RailId};
use crate::stats::TierStats;
use crate::sync::lock;

/// Processor times are read no more often than this: often enough for a label, far too seldom to be
/// seen in what they tell.
const CPU_SAMPLE: Duration = Duration::from_micros(500);

/// How long dropping a driver may take before it leaves the thread behind.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);

enum Command {
    Submit {
        orders: Vec<Order>,
        class: Class,
        deadline: Instant,
        ticket: Arc<Shared>,
    },
    Cancel(Arc<Shared>),
    Promote(Arc<Shared>, Class),
    Learn(ContentTag, Holding),
    Shutdown,
}

/// What the ticket's holder waits for.
pub(crate) enum Outcome {
    Finished(Finished),
    Refused(Refused),
    ShutDown,
}

struct Shared {
    progress: Mutex<Progress>,
    done: Condvar,
}

enum Progress {
    UnderWay(Option<Waker>),
    Ended(Outcome),
    Taken,
}

/// Called once when a request ends, by the driver's thread: it must not block.
pub(crate) type Waker = Box<dyn FnOnce() + Send>;

impl Shared {
    /// The first end counts.
    fn resolve(&self, outcome: Outcome) {
        let mut progress = lock(&self.progress);
        let Progress::UnderWay(waker) = &mut *progress else {
            return;
        };
        let waker = waker.take();
        *progress = Progress::Ended(outcome);
        drop(progress);
        self.done.notify_all();
        if let Some(wake) = waker {
            wake();
        }
    }
}

/// A request under way.
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    control: Arc<Control>,
}

impl Ticket {
    /// Waits for the end. The engine ends every request by its deadline; `grace` beyond it guards
    /// against a driver that does not run.
    pub(crate) fn wait(&self, until_then: Instant, grace: Duration) -> Outcome {
        let limit = until_then + grace;
        let mut progress = lock(&self.shared.progress);
        loop {
            if !matches!(*progress, Progress::UnderWay(_)) {
                return match std::mem::replace(&mut *progress, Progress::Taken) {
                    Progress::Ended(outcome) => outcome,
                    _ => Outcome::ShutDown,
                };
            }
            let now = Instant::now();
            if now >= limit {
                return Outcome::ShutDown;
            }
            progress = self
                .shared
                .done
                .wait_timeout(progress, until(now, limit))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Whether the end has come.
    pub(crate) fn is_done(&self) -> bool {
        !matches!(*lock(&self.shared.progress), Progress::UnderWay(_))
    }

    /// Has `waker` called at the end, at once if that has come.
    pub(crate) fn on_end(&self, waker: Waker) {
        match &mut *lock(&self.shared.progress) {
            Progress::UnderWay(place) => {
                *place = Some(waker);
                return;
            }
            Progress::Ended(_) | Progress::Taken => {}
        }
        waker();
    }

    /// Makes the request more urgent.
    pub(crate) fn promote(&self, class: Class) {
        let shared = self.shared.clone();
        self.control.push(Command::Promote(shared, class));
    }

    /// Gives the request up; [`Ticket::wait`] then returns soon.
    pub(crate) fn cancel(&self) {
        self.control.push(Command::Cancel(self.shared.clone()));
    }
}

impl Drop for Ticket {
    /// Nobody waits any more: the request is given up, its slots return when the rails are done.
    fn drop(&mut self) {
        if !self.is_done() {
            self.cancel();
        }
    }
}

struct Control {
    commands: Mutex<VecDeque<Command>>,
    notifier: Arc<Notifier>,
    snapshot: Mutex<Snapshot>,
    changed: Condvar,
    /// The contents in the snapshot are others than before.
    contents_changed: Condvar,
}

#[derive(Clone)]
struct Snapshot {
    stats: TierStats,
    healthy: bool,
    settled: bool,
    preferred: bool,
    content: Option<ContentTag>,
    /// What working rails serve, and how often that changed.
    contents: Vec<(RailId, ContentTag)>,
    contents_run: u64,
    /// Grows with every change of a rail's state or content.
    run: u64,
    rails: String,
    stopped: bool,
}

impl Control {
    fn push(&self, command: Command) {
        lock(&self.commands).push_back(command);
        self.notifier.notify();
    }

    fn refuse_commands(&self) {
        let rest: Vec<Command> = lock(&self.commands).drain(..).collect();
        for command in rest {
            if let Command::Submit { ticket, .. } = command {
                ticket.resolve(Outcome::ShutDown);
            }
        }
    }
}

/// See the module.
pub(crate) struct Driver {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
    /// Tells when the thread is done; in a lock only because receivers cannot be shared.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Driver {
    pub(crate) fn start(
        name: &str,
        config: EngineConfig,
        rails: Vec<Box<dyn Rail>>,
        notifier: Arc<Notifier>,
    ) -> std::io::Result<Self> {
        Self::start_knowing(name, config, rails, Vec::new(), notifier)
    }

    /// The same where it is known already what some contents are part of.
    pub(crate) fn start_knowing(
        name: &str,
        config: EngineConfig,
        rails: Vec<Box<dyn Rail>>,
        holdings: Vec<(ContentTag, Holding)>,
        notifier: Arc<Notifier>,
    ) -> std::io::Result<Self> {
        let mut engine = Engine::new(
            config,
            rails
                .iter()
                .map(|r| (r.name().to_owned(), r.kind(), r.capabilities())),
            rand::random(),
            Instant::now(),
        );
        for (content, holding) in holdings {
            engine.learn(Instant::now(), content, holding);
        }
        let control = Arc::new(Control {
            commands: Mutex::new(VecDeque::new()),
            notifier,
            snapshot: Mutex::new(Snapshot {
                stats: engine.stats(),
                healthy: false,
                settled: false,
                preferred: false,
                content: None,
                contents: Vec::new(),
                contents_run: 0,
                run: 0,
                rails: engine.describe_rails(),
                stopped: false,
            }),
            changed: Condvar::new(),
            contents_changed: Condvar::new(),
        });
        let (end, ended) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(format!("{name}-driver"))
            .spawn({
                let control = control.clone();
                move || {
                    let mut run = Run {
                        cpu: WorkClock::of_this_thread(),
                        cpu_noted: None,
                        engine,
                        rails,
                        control,
                        tickets: HashMap::new(),
                        quiescing: Vec::new(),
                        events: Vec::new(),
                        published: 0,
                    };
                    run.run();
                    drop(run);
                    drop(end);
                }
            })?;
        Ok(Self {
            control,
            thread: Some(thread),
            ended: Mutex::new(ended),
        })
    }

    /// Hands a request over; never blocks.
    pub(crate) fn submit(&self, orders: Vec<Order>, class: Class, deadline: Instant) -> Ticket {
        let shared = Arc::new(Shared {
            progress: Mutex::new(Progress::UnderWay(None)),
            done: Condvar::new(),
        });
        self.control.push(Command::Submit {
            orders,
            class,
            deadline,
            ticket: shared.clone(),
        });
        // Nobody takes commands any more: also where the driver ended just now.
        if lock(&self.control.snapshot).stopped {
            self.control.refuse_commands();
        }
        Ticket {
            shared,
            control: self.control.clone(),
        }
    }

    /// Waits until a rail works and each preferred one was tried, or `limit` has come and any
    /// works; the state of the rails otherwise.
    pub(crate) fn wait_healthy(&self, limit: Instant) -> Result<(), String> {
        let mut snapshot = lock(&self.control.snapshot);
        loop {
            if snapshot.healthy && snapshot.settled {
                return Ok(());
            }
            let now = Instant::now();
            if now >= limit || snapshot.stopped {
                if snapshot.healthy {
                    return Ok(());
                }
                return Err(snapshot.rails.clone());
            }
            snapshot = self
                .control
                .changed
                .wait_timeout(snapshot, until(now, limit))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Whether a rail of the first rank works.
    pub(crate) fn is_preferred(&self) -> bool {
        lock(&self.control.snapshot).preferred
    }

    /// State of the rails, for people.
    pub(crate) fn describe(&self) -> String {
        lock(&self.control.snapshot).rails.clone()
    }

    pub(crate) fn is_healthy(&self) -> bool {
        lock(&self.control.snapshot).healthy
    }

    pub(crate) fn stats(&self) -> TierStats {
        lock(&self.control.snapshot).stats.clone()
    }

    /// Grows with every change of a rail's state or content.
    pub(crate) fn run(&self) -> u64 {
        lock(&self.control.snapshot).run
    }

    /// For those who watch what the rails serve.
    pub(crate) fn contents(&self) -> Contents {
        Contents(self.control.clone())
    }

    /// Content of the first rail that works, or that worked last.
    pub(crate) fn content(&self) -> Option<ContentTag> {
        lock(&self.control.snapshot).content
    }
}

/// What the rails serve, for a thread that watches it and tells what it is; does not keep the driver
/// alive.
#[derive(Clone)]
pub(crate) struct Contents(Arc<Control>);

impl Contents {
    /// Tells what a content is part of.
    pub(crate) fn learn(&self, content: ContentTag, holding: Holding) {
        self.0.push(Command::Learn(content, holding));
    }

    /// Waits until working rails serve other contents than at `run`, or `limit` has come, or
    /// [`Contents::wake`] was called; what they serve then, and its `run`. `None` once `end` is set or
    /// the driver is gone.
    pub(crate) fn wait_change(
        &self,
        run: u64,
        limit: Instant,
        end: &AtomicBool,
    ) -> Option<(Vec<(RailId, ContentTag)>, u64)> {
        let mut snapshot = lock(&self.0.snapshot);
        loop {
            if end.load(Ordering::SeqCst) || snapshot.stopped {
                return None;
            }
            let now = Instant::now();
            if snapshot.contents_run != run || now >= limit {
                return Some((snapshot.contents.clone(), snapshot.contents_run));
            }
            snapshot = self
                .0
                .contents_changed
                .wait_timeout(snapshot, until(now, limit))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Wakes those who wait, so that they see their end.
    pub(crate) fn wake(&self) {
        drop(lock(&self.0.snapshot));
        self.0.contents_changed.notify_all();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.control.push(Command::Shutdown);
        // A rail that cannot be stopped must not hold the process: then the thread stays behind
        // with everything that it owns, memory included.
        let ended = lock(&self.ended).recv_timeout(SHUTDOWN_MAX);
        match ended {
            Err(mpsc::RecvTimeoutError::Timeout) => {
                tracing::error!("driver did not stop within {SHUTDOWN_MAX:?}; it is left behind");
            }
            _ => {
                if let Some(thread) = self.thread.take() {
                    if thread.join().is_err() {
                        tracing::error!("driver thread panicked");
                    }
                }
            }
        }
    }
}

struct Run {
    cpu: WorkClock,
    /// When processor times were read last.
    cpu_noted: Option<Instant>,
    engine: Engine,
    /// Dropped before the tickets' memory: rails give it back.
    rails: Vec<Box<dyn Rail>>,
    control: Arc<Control>,
    tickets: HashMap<Handle, Arc<Shared>>,
    quiescing: Vec<RailId>,
    events: Vec<RailEvent>,
    /// Revision of the engine at the last publication.
    published: u64,
}

impl Run {
    fn run(&mut self) {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        self.engine.set_machine(cpus as u32, Instant::now);
        loop {
            let now = Instant::now();
            self.note_cpu(now);
            if self.take_commands(now) {
                break;
            }
            let busy = self.turn(now);
            if busy {
                continue;
            }
            if self.engine.revision() != self.published {
                self.publish();
            }
            // Announce the sleep, look once more, then sleep: nothing that arrives in between is
            // slept over.
            self.control.notifier.prepare();
            let now = Instant::now();
            if !lock(&self.control.commands).is_empty() || self.turn(now) {
                self.control.notifier.cancel();
                continue;
            }
            let timeout = self.engine.next_timeout().map(|t| until(Instant::now(), t));
            // While a rail is being quiesced its end is polled: it may have no thread to notify.
            let timeout = match self.quiescing.is_empty() {
                true => timeout,
                false => Some(
                    timeout
                        .unwrap_or(Duration::MAX)
                        .min(Duration::from_millis(5)),
                ),
            };
            self.control.notifier.wait(timeout);
        }
        self.stop();
    }

    fn note_cpu(&mut self, now: Instant) {
        if self.cpu_noted.is_some_and(|at| now - at < CPU_SAMPLE) {
            return;
        }
        self.cpu_noted = Some(now);
        let (engine, rails) = (&mut self.engine, &self.rails);
        engine.note_cpu(self.cpu.time(), |rail| rails[rail.0].cpu_time());
    }

    /// Takes what callers want; true when it is the end.
    fn take_commands(&mut self, now: Instant) -> bool {
        loop {
            let command = lock(&self.control.commands).pop_front();
            match command {
                None => return false,
                Some(Command::Shutdown) => return true,
                Some(Command::Submit {
                    orders,
                    class,
                    deadline,
                    ticket,
                }) => match self.engine.submit_as(now, deadline, class, orders) {
                    Ok(handle) => {
                        self.tickets.insert(handle, ticket);
                    }
                    Err((orders, refused)) => {
                        drop(orders); // gives the slots back
                        ticket.resolve(Outcome::Refused(refused));
                    }
                },
                Some(Command::Cancel(ticket)) => {
                    if let Some(handle) = self.handle_of(&ticket) {
                        self.engine.cancel(now, handle);
                    }
                }
                Some(Command::Promote(ticket, class)) => {
                    if let Some(handle) = self.handle_of(&ticket) {
                        self.engine.promote(now, handle, class);
                    }
                }
                Some(Command::Learn(content, holding)) => self.engine.learn(now, content, holding),
            }
        }
    }

    fn handle_of(&self, ticket: &Arc<Shared>) -> Option<Handle> {
        let mut tickets = self.tickets.iter();
        let (handle, _) = tickets.find(|(_, t)| Arc::ptr_eq(t, ticket))?;
        Some(*handle)
    }

    /// One round of everything; true when something happened.
    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        for i in 0..self.rails.len() {
            self.rails[i].poll(&mut self.events);
            for event in self.events.drain(..) {
                busy = true;
                self.engine.handle(now, RailId(i), event);
            }
        }
        self.quiescing.retain(|&rail| {
            let quiesced = self.rails[rail.0].is_quiesced();
            if quiesced {
                busy = true;
                self.engine.handle_quiesced(now, rail);
            }
            !quiesced
        });
        let rails = &self.rails;
        self.engine
            .handle_time(now, |rail| rails[rail.0].progress_bytes());
        while let Some(action) = self.engine.poll_action() {
            busy = true;
            match action {
                Action::Quiesce(rail) => {
                    self.rails[rail.0].begin_quiesce();
                    self.quiescing.push(rail);
                }
                Action::Probe(rail) => self.rails[rail.0].begin_probe(),
            }
        }
        // A rail that refuses a READ is left alone for this round.
        let mut refusals = 0;
        while refusals <= self.rails.len() {
            let Some((rail, read)) = self.engine.next_post(now) else {
                break;
            };
            match self.rails[rail.0].post(read) {
                Ok(()) => busy = true,
                Err(read) => {
                    refusals += 1;
                    self.engine.handle_post_refused(rail, *read);
                }
            }
        }
        if self.engine.has_finished() {
            busy = true;
            // The holders may read the statistics as soon as they are woken.
            self.publish();
        }
        while let Some(finished) = self.engine.poll_finished() {
            if let Some(ticket) = self.tickets.remove(&finished.request) {
                ticket.resolve(Outcome::Finished(finished));
            }
        }
        busy
    }

    fn publish(&mut self) {
        self.published = self.engine.revision();
        let mut snapshot = lock(&self.control.snapshot);
        snapshot.stats = self.engine.stats();
        for (stats, rail) in snapshot.stats.rails.iter_mut().zip(&self.rails) {
            stats.io = rail.io();
            stats.registered_bytes = rail.registered_bytes();
        }
        snapshot.healthy = self.engine.is_healthy();
        snapshot.settled = self.engine.is_settled();
        snapshot.preferred = self.engine.is_preferred_up();
        snapshot.content = self.engine.content();
        let is_other = !self.engine.contents().eq(snapshot.contents.iter().copied());
        if is_other {
            snapshot.contents = self.engine.contents().collect();
            snapshot.contents_run += 1;
        }
        snapshot.run = self.engine.rails_revision();
        snapshot.rails = self.engine.describe_rails();
        drop(snapshot);
        self.control.changed.notify_all();
        if is_other {
            self.control.contents_changed.notify_all();
        }
    }

    fn stop(&mut self) {
        for rail in &mut self.rails {
            rail.begin_quiesce();
        }
        let limit = Instant::now() + SHUTDOWN_MAX / 2;
        while self.rails.iter().any(|r| !r.is_quiesced()) && Instant::now() < limit {
            for rail in &mut self.rails {
                rail.poll(&mut self.events);
            }
            self.events.clear(); // completions: their ranges free the slots
            self.control.notifier.prepare();
            self.control.notifier.wait(Some(Duration::from_millis(5)));
        }
    }
}

impl Drop for Run {
    /// The end, by a panic, too: nobody waits for a driver that is gone.
    fn drop(&mut self) {
        let mut snapshot = lock(&self.control.snapshot);
        snapshot.healthy = false;
        snapshot.stopped = true;
        drop(snapshot);
        for (_, ticket) in self.tickets.drain() {
            ticket.resolve(Outcome::ShutDown);
        }
        self.control.refuse_commands();
        self.control.changed.notify_all();
        self.control.contents_changed.notify_all();
    }
}
