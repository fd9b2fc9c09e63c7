//! The work of a driver: the engine and its rails under one lock, and a turn of all of them.
//!
//! Whoever has brought something takes the lock if it is free and does the turn: the thread that
//! submits posts its READs, the one that received the last byte commits the record and wakes who waits
//! for it. Nobody waits for the lock but the driver's own thread: who finds it taken says that there is
//! more to do, and who holds it looks again after giving it back.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

use super::{Command, Control, Outcome, SHUTDOWN_MAX, Shared, Waker};
use crate::cpu::WorkClock;
use crate::engine::{Action, Engine, Handle, until};
use crate::notify::Work;
use crate::rail::{Rail, RailEvent, RailId};
use crate::sync::lock;

/// Processor times are read no more often than this: often enough for a label, far too seldom to be
/// seen in what they tell.
const CPU_SAMPLE: Duration = Duration::from_micros(500);

/// Turns of a thread that has something else to do; the driver's own goes on from there.
const TURNS_MAX: usize = 4;

/// How often the end of a rail's teardown is looked for: the rail may have no thread to tell it.
const QUIESCE_POLL: Duration = Duration::from_millis(5);

/// What a driver owns. Its thread takes it out when it ends: then there is nothing to do any more.
pub(super) struct Run {
    cpu: WorkClock,
    /// Last reading of the clock, and when it was read.
    cpu_noted: Option<Instant>,
    engine: Engine,
    /// Dropped before the tickets' memory: rails give it back.
    rails: Vec<Box<dyn Rail>>,
    tickets: HashMap<Handle, Arc<Shared>>,
    quiescing: Vec<RailId>,
    events: Vec<RailEvent>,
    /// Revision of the engine at the last publication.
    published: u64,
    /// Until when the driver's thread sleeps at the latest; `None` where it does not sleep, or for ever.
    wakes_at: Option<Instant>,
    sleeps: bool,
    /// To be called without the lock.
    wakers: Vec<Waker>,
}

/// Who does a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// The driver's own thread.
    Driver,
    /// A rail's thread, which holds no lock: it may wake anybody.
    Rail,
    /// A caller, who may hold any: what calls back is left to the driver's thread.
    Caller,
}

impl Run {
    /// To be made by the driver's thread, whose clock it reads.
    pub(super) fn new(engine: Engine, rails: Vec<Box<dyn Rail>>) -> Self {
        Self {
            cpu: WorkClock::of_this_thread(),
            cpu_noted: None,
            engine,
            rails,
            tickets: HashMap::new(),
            quiescing: Vec::new(),
            events: Vec::new(),
            published: 0,
            wakes_at: None,
            sleeps: false,
            wakers: Vec::new(),
        }
    }

    fn note_cpu(&mut self, now: Instant, who: Who) {
        if self
            .cpu_noted
            .is_some_and(|at| now.saturating_duration_since(at) < CPU_SAMPLE)
        {
            return;
        }
        let own = match who {
            Who::Driver => Some(self.cpu.time()),
            Who::Rail | Who::Caller => self.cpu.time_from_elsewhere(),
        };
        if let Some(own) = own {
            self.cpu_noted = Some(now);
            let (engine, rails) = (&mut self.engine, &self.rails);
            engine.note_cpu(own, |rail| rails[rail.0].cpu_time());
        }
    }

    /// Takes what callers want; true when it is the end, which only the driver's thread can bring about.
    fn take_commands(&mut self, control: &Control, now: Instant, who: Who) -> bool {
        loop {
            let mut commands = lock(&control.commands);
            if matches!(commands.front(), Some(Command::Shutdown)) && who != Who::Driver {
                return true;
            }
            let command = commands.pop_front();
            drop(commands);
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
                        self.resolve(&ticket, Outcome::Refused(refused));
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

    fn resolve(&mut self, ticket: &Shared, outcome: Outcome) {
        self.wakers.extend(ticket.resolve(outcome));
    }

    /// One round of everything; true when something happened. Rails are told to begin and to stop by
    /// the driver's thread alone: that may take a while.
    fn turn(&mut self, control: &Control, now: Instant, who: Who) -> bool {
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
        if who == Who::Driver {
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
        }
        let rails = &mut self.rails;
        busy |= self
            .engine
            .post_all(now, |rail, read| rails[rail.0].post(read));
        if self.engine.has_finished() {
            busy = true;
            // The holders may read the statistics as soon as they are woken.
            self.publish(control);
        }
        while let Some(finished) = self.engine.poll_finished() {
            if let Some(ticket) = self.tickets.remove(&finished.request) {
                self.resolve(&ticket, Outcome::Finished(finished));
            }
        }
        busy
    }

    fn publish(&mut self, control: &Control) {
        self.published = self.engine.revision();
        let mut snapshot = lock(&control.snapshot);
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
        control.changed.notify_all();
        if is_other {
            control.contents_changed.notify_all();
        }
    }

    /// Whether the driver's thread, which sleeps, has something to do before it would wake.
    fn needs_driver(&self) -> bool {
        let earlier = match (self.engine.next_timeout(), self.wakes_at) {
            (Some(timeout), Some(wakes_at)) => timeout < wakes_at,
            (timeout, None) => timeout.is_some(),
            (None, _) => false,
        };
        self.sleeps
            && (earlier || self.engine.has_actions() || self.engine.revision() != self.published)
    }

    pub(super) fn stop(&mut self, control: &Control) {
        for rail in &mut self.rails {
            rail.begin_quiesce();
        }
        let limit = Instant::now() + SHUTDOWN_MAX / 2;
        while self.rails.iter().any(|r| !r.is_quiesced()) && Instant::now() < limit {
            for rail in &mut self.rails {
                rail.poll(&mut self.events);
            }
            self.events.clear(); // completions: their ranges free the slots
            control.notifier.prepare();
            control.notifier.wait(Some(QUIESCE_POLL));
        }
    }

    /// Nobody waits for a driver that is gone.
    pub(super) fn end(self, control: &Control) {
        let Self {
            rails,
            engine,
            mut tickets,
            wakers,
            ..
        } = self;
        drop(rails);
        drop(engine);
        control.stopped();
        for (_, ticket) in tickets.drain() {
            if let Some(wake) = ticket.resolve(Outcome::ShutDown) {
                wake();
            }
        }
        wakers.into_iter().for_each(|wake| wake());
        control.refuse_commands();
    }
}

/// Wakes the driver's thread, so that it ends, where a turn of another thread does not.
struct Unfinished<'a>(&'a Control);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.notifier.notify();
        }
    }
}

impl Control {
    /// The driver's thread: until there is a command to end.
    pub(super) fn drive(&self) {
        loop {
            self.pending.store(false, Ordering::SeqCst);
            // One who panicked with it leaves an engine that nobody can trust.
            let Ok(mut place) = self.run.lock() else {
                tracing::error!(
                    "a thread panicked in the middle of the driver's work: the driver ends"
                );
                return;
            };
            let Some(run) = place.as_mut() else { return };
            run.sleeps = false;
            let now = Instant::now();
            run.note_cpu(now, Who::Driver);
            if run.take_commands(self, now, Who::Driver) {
                return;
            }
            let mut busy = run.turn(self, now, Who::Driver);
            let mut timeout = None;
            if !busy {
                if run.engine.revision() != run.published {
                    run.publish(self);
                }
                // Announce the sleep, look once more, then sleep: nothing that arrives in between is
                // slept over.
                self.notifier.prepare();
                let now = Instant::now();
                busy = !lock(&self.commands).is_empty() || run.turn(self, now, Who::Driver);
                timeout = run.engine.next_timeout();
                if !run.quiescing.is_empty() {
                    let poll = now + QUIESCE_POLL;
                    timeout = Some(timeout.map_or(poll, |t| t.min(poll)));
                }
                run.sleeps = !busy;
                run.wakes_at = timeout;
            }
            let wakers = std::mem::take(&mut run.wakers);
            drop(place);
            busy |= !wakers.is_empty();
            wakers.into_iter().for_each(|wake| wake());
            if busy || self.pending.load(Ordering::SeqCst) {
                self.notifier.cancel();
                continue;
            }
            self.notifier
                .wait(timeout.map(|t| until(Instant::now(), t)));
        }
    }

    /// Another thread has brought something: it does what follows, if nobody else is at it.
    pub(super) fn work_as(&self, who: Who) {
        self.pending.store(true, Ordering::SeqCst);
        let _unfinished = Unfinished(self);
        while self.pending.load(Ordering::SeqCst) {
            let mut place = match self.run.try_lock() {
                Ok(place) => place,
                // Who holds it looks again.
                Err(TryLockError::WouldBlock) => return,
                Err(TryLockError::Poisoned(_)) => {
                    self.notifier.notify();
                    return;
                }
            };
            let Some(run) = place.as_mut() else { return };
            let mut wakes = false;
            let mut turns = 0;
            loop {
                self.pending.store(false, Ordering::SeqCst);
                let now = Instant::now();
                run.note_cpu(now, who);
                wakes |= run.take_commands(self, now, who);
                turns += 1;
                if !run.turn(self, now, who) {
                    break;
                }
                if turns == TURNS_MAX {
                    wakes = true;
                    break;
                }
            }
            let mut wakers = Vec::new();
            match who {
                Who::Caller => wakes |= !run.wakers.is_empty(),
                Who::Driver | Who::Rail => wakers = std::mem::take(&mut run.wakers),
            }
            wakes |= run.needs_driver();
            drop(place);
            wakers.into_iter().for_each(|wake| wake());
            if wakes {
                self.notifier.notify();
                return;
            }
        }
    }
}

impl Work for Control {
    fn work(&self) {
        self.work_as(Who::Rail);
    }
}
