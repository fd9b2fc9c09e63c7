//! Where a request's time went: what the rails did while it was open, told to the classifier.
//!
//! Each rail keeps sums over its whole life; a request remembers what they were when it came, so
//! that a READ costs a few additions, however many requests are open.

use std::time::{Duration, Instant};

use super::{Engine, Request};
use crate::attribution::{self, RailNumbers, RequestNumbers};
use crate::rail::RailId;
use crate::stats::RequestStats;

/// Sums of one rail's time.
#[derive(Debug, Default)]
pub(super) struct RailTime {
    busy: Span,
    idle: Span,
    cpu: Duration,
}

/// The time that something lasted, over all times that it did.
#[derive(Debug, Default)]
struct Span {
    sum: Duration,
    since: Option<Instant>,
}

impl Span {
    fn set(&mut self, on: bool, now: Instant) {
        match (on, self.since) {
            (true, None) => self.since = Some(now),
            (false, Some(since)) => {
                self.sum += now.saturating_duration_since(since);
                self.since = None;
            }
            _ => {}
        }
    }

    fn until(&self, now: Instant) -> Duration {
        let running = self.since.map(|since| now.saturating_duration_since(since));
        self.sum + running.unwrap_or_default()
    }
}

impl RailTime {
    pub(super) fn cpu_us(&self) -> u64 {
        self.cpu.as_micros() as u64
    }

    /// Something changed: whether READs are posted on the rail, and whether any waits anywhere.
    pub(super) fn set(&mut self, is_busy: bool, is_waited_for: bool, now: Instant) {
        self.busy.set(is_busy, now);
        self.idle.set(!is_busy && is_waited_for, now);
    }
}

/// A rail's sums when a request came, and what the rail did for it since.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    busy: Duration,
    idle: Duration,
    cpu: Duration,
    carried_bytes: u64,
    pub(super) bytes: u64,
}

/// What a request counts besides its records.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) marks: Vec<Mark>,
    driver_cpu: Duration,
    pub(super) verify_bytes: u64,
    pub(super) reads: u64,
    pub(super) refused_reads: u64,
    span: tracing::Span,
}

/// What the driver tells of the machine that it runs on.
#[derive(Debug)]
pub(super) struct Machine {
    cpus: u32,
    pub(super) clock: Option<fn() -> Instant>,
    driver_cpu: Duration,
    verify_best_bytes_per_s: u64,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            cpus: 1,
            clock: None,
            driver_cpu: Duration::ZERO,
            verify_best_bytes_per_s: 0,
        }
    }
}

impl Engine {
    /// Tells of the machine below; without it, processor times are 0 and so are those of checksums
    /// compared by the engine itself, as on a virtual clock.
    pub fn set_machine(&mut self, cpus: u32, clock: fn() -> Instant) {
        self.machine.cpus = cpus;
        self.machine.clock = Some(clock);
    }

    /// Time that threads ran or waited for a processor so far: the one that drives the engine, and
    /// each rail's own.
    pub fn note_cpu(&mut self, driver: Duration, rails: impl Fn(RailId) -> Duration) {
        self.machine.driver_cpu = driver;
        for (i, book) in self.rails.iter_mut().enumerate() {
            book.time.cpu = rails(RailId(i));
        }
    }

    /// Whether READs wait to be posted.
    fn is_backlogged(&self) -> bool {
        self.unposted_bytes.iter().sum::<u64>() > 0
            || self.retry_queues.iter().any(|queue| !queue.is_empty())
    }

    /// Called at the end of whatever may have changed what rails have to do.
    pub(super) fn note_times(&mut self, now: Instant) {
        let is_waited_for = self.is_backlogged();
        for book in &mut self.rails {
            book.time
                .set(book.outstanding_reads > 0, is_waited_for, now);
        }
    }

    pub(super) fn open_account(&self, now: Instant, bytes: u64, records: usize) -> Account {
        let marks = self.rails.iter().map(|book| Mark {
            busy: book.time.busy.until(now),
            idle: book.time.idle.until(now),
            cpu: book.time.cpu,
            carried_bytes: book.bytes,
            bytes: 0,
        });
        Account {
            marks: marks.collect(),
            driver_cpu: self.machine.driver_cpu,
            verify_bytes: 0,
            reads: 0,
            refused_reads: 0,
            span: tracing::debug_span!(
                "request",
                request = tracing::field::Empty,
                bytes,
                records,
                queued_us = tracing::field::Empty,
                wire_us = tracing::field::Empty,
                verify_us = tracing::field::Empty,
                limit = tracing::field::Empty,
            ),
        }
    }

    /// The last word on a request: its label, the histograms and the span.
    pub(super) fn close_account(
        &mut self,
        now: Instant,
        id: super::Handle,
        request: &Request,
        stats: &mut RequestStats,
    ) {
        let account = &request.account;
        let numbers = self.numbers(now, account, stats);
        stats.limit = attribution::classify(&numbers);
        stats.reads = account.reads;
        self.scratch = numbers.rails;
        self.limits.count(&stats.limit);
        self.times.queue.record(stats.queued);
        self.times.wire.record(stats.wire);
        self.times.verify.record(stats.verify);
        self.times.total.record(stats.total);
        let us = |time: Duration| time.as_micros() as u64;
        account.span.record("request", id.index);
        account.span.record("queued_us", us(stats.queued));
        account.span.record("wire_us", us(stats.wire));
        account.span.record("verify_us", us(stats.verify));
        account.span.record("limit", stats.limit.name());
        account
            .span
            .in_scope(|| tracing::debug!("request ended, limited by {}", stats.limit));
    }

    fn numbers(&mut self, now: Instant, account: &Account, stats: &RequestStats) -> RequestNumbers {
        // A sample of less says more of the clock.
        if stats.verify >= Duration::from_micros(200) {
            let rate = account.verify_bytes as f64 / stats.verify.as_secs_f64();
            let best = &mut self.machine.verify_best_bytes_per_s;
            *best = (*best).max(rate as u64);
        }
        let mut rails = std::mem::take(&mut self.scratch);
        rails.clear();
        for (i, (book, mark)) in self.rails.iter().zip(&account.marks).enumerate() {
            if self.is_outranked(i) {
                continue; // it had no part in this
            }
            let numbers = RailNumbers {
                bytes: mark.bytes,
                carried_bytes: book.bytes - mark.carried_bytes,
                busy: book.time.busy.until(now) - mark.busy,
                idle: book.time.idle.until(now) - mark.idle,
                cpu: book.time.cpu.saturating_sub(mark.cpu),
                best_bytes_per_s: book.best_bytes_per_s(),
                ..RailNumbers::new(book.kind, book.capabilities.lanes)
            };
            rails.push((i, numbers));
        }
        RequestNumbers {
            total: stats.total,
            queued: stats.queued,
            verify: stats.verify,
            verify_bytes: account.verify_bytes,
            verify_best_bytes_per_s: self.machine.verify_best_bytes_per_s,
            reads: account.reads,
            refused_reads: account.refused_reads,
            driver_cpu: self.machine.driver_cpu.saturating_sub(account.driver_cpu),
            cpus: self.machine.cpus,
            rails,
        }
    }
}
