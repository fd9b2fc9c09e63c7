//! The driver: the engine and the rails, and one thread that keeps their time and waits for all of
//! them on one event descriptor.
//!
//! *Threads*: callers talk to it through [`Driver::submit`] and a [`Ticket`]; rails' helper threads
//! through the notifier. What they bring they work on themselves where nobody else is at it (see
//! `run`), so that no READ waits for the driver's thread to be woken. *Cleanup*: dropping the driver
//! fails what is open, drops the rails (which give their memory back), and joins the thread, in that
//! order, with a deadline.

mod run;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::{Class, EngineConfig};
use crate::coverage::Holding;
use crate::engine::{Engine, Finished, Order, Refused, until};
use crate::notify::{Notifier, Work};
use crate::rail::{ContentTag, Rail, RailId};
use crate::spin::{SOON_BYTES, spin};
use crate::stats::TierStats;
use crate::sync::lock;
use run::{Run, Who};

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

/// Called once when a request ends, by the driver's thread or a rail's: it must not block.
pub(crate) type Waker = Box<dyn FnOnce() + Send>;

impl Shared {
    /// The first end counts. Gives back whom to call, without any lock.
    #[must_use]
    fn resolve(&self, outcome: Outcome) -> Option<Waker> {
        let mut progress = lock(&self.progress);
        let Progress::UnderWay(waker) = &mut *progress else {
            return None;
        };
        let waker = waker.take();
        *progress = Progress::Ended(outcome);
        drop(progress);
        self.done.notify_all();
        waker
    }
}

/// A request under way.
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    control: Arc<Control>,
    /// How long [`Ticket::wait`] looks before it sleeps.
    spin: Duration,
}

impl Ticket {
    /// Waits for the end. The engine ends every request by its deadline; `grace` beyond it guards
    /// against a driver that does not run.
    pub(crate) fn wait(&self, until_then: Instant, grace: Duration) -> Outcome {
        let limit = until_then + grace;
        spin(self.spin, || self.is_done());
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
    /// `None` before the driver's thread has made it, and when it has ended.
    run: Mutex<Option<Box<Run>>>,
    /// Something came while another thread was at work: it looks again.
    pending: AtomicBool,
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
                if let Some(wake) = ticket.resolve(Outcome::ShutDown) {
                    wake();
                }
            }
        }
    }

    /// Tells all who watch that there is no driver any more.
    fn stopped(&self) {
        let mut snapshot = lock(&self.snapshot);
        snapshot.healthy = false;
        snapshot.stopped = true;
        drop(snapshot);
        self.changed.notify_all();
        self.contents_changed.notify_all();
    }
}

/// See the module.
pub(crate) struct Driver {
    control: Arc<Control>,
    spin: Duration,
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
        let spin = config.spin;
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
            run: Mutex::new(None),
            pending: AtomicBool::new(false),
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
        let work: Arc<dyn Work> = control.clone();
        control.notifier.set_work(Arc::downgrade(&work));
        let (end, ended) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(format!("{name}-driver"))
            .spawn({
                let control = control.clone();
                move || {
                    let at_end = End(&control);
                    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
                    engine.set_machine(cpus as u32, Instant::now);
                    *lock(&control.run) = Some(Box::new(Run::new(engine, rails)));
                    control.drive();
                    drop(at_end);
                    drop(end);
                }
            })?;
        Ok(Self {
            control,
            spin,
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
        let bytes: u64 = orders.iter().map(Order::bytes).sum();
        lock(&self.control.commands).push_back(Command::Submit {
            orders,
            class,
            deadline,
            ticket: shared.clone(),
        });
        self.control.work_as(Who::Caller);
        // Nobody takes commands any more: also where the driver ended just now.
        if lock(&self.control.snapshot).stopped {
            self.control.refuse_commands();
        }
        Ticket {
            shared,
            control: self.control.clone(),
            spin: match bytes <= SOON_BYTES {
                true => self.spin,
                false => Duration::ZERO,
            },
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

/// The end of the driver's thread, by a panic, too: what it owns goes, and nobody waits for it.
struct End<'a>(&'a Control);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let run = lock(&self.0.run).take();
        if let Some(mut run) = run {
            // After a panic of its own nothing is asked of the rails but to go.
            if !std::thread::panicking() {
                run.stop(self.0);
            }
            run.end(self.0);
        }
    }
}
