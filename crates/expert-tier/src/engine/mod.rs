//! The fetch engine: which READ goes on which rail when, and what its end means. Sans-IO: it opens
//! nothing, blocks on nothing and takes `now` as an argument, so that the same code runs under a
//! simulated clock.
//!
//! ```text
//! submit ─► records queue at their home rails ─► next_post ─► (rail) ─► handle: Completion
//!                         ▲                                                │
//!                         └──────── retried ranges ◄───────────────────────┤ failed
//!                                                    verified, retired ◄───┘
//!                                                          └─► commit ─► poll_finished
//! ```
//!
//! *Invariant* (commit rule): a slot becomes readable through [`Landing::commit`] alone, which the
//! arena grants only when every byte was split off, verified and given back. A record that fails
//! drops its [`Landing`]; the slot stays quarantined until the last READ posted for it came back.
//!
//! Files: `request` is what goes in and comes out, `admit` takes it in, `assign` picks the next READ,
//! `share` says how much of the work a rail should take, `complete` takes in a READ's end and `end`
//! a record's and a request's; [`health`] is the rail state machine, `pace` how fast a rail is,
//! `account` where a request's time went, `table` keeps records and requests, `guards` is what the
//! simulation may switch off; this one ties them together.

mod account;
mod admit;
mod assign;
mod complete;
mod end;
mod guards;
pub mod health;
mod pace;
mod request;
mod share;
mod table;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{Landing, LandingRange};
use expert_store::catalogue::Layer;
use expert_wire::Key;

use account::{Account, Machine};

use crate::attribution::{LimitCounts, RailNumbers};
use crate::config::{Class, EngineConfig, OnFailure};
use crate::coverage::{Holding, Holdings};
use crate::rail::{Capabilities, ContentTag, RailEvent, RailId, RailKind, Read, ReadId};
use crate::stats::{Percentiles, RequestStats, RequestTimes, TierStats};
#[doc(hidden)]
pub use guards::Guards;
use health::{RailBook, RailState};
pub use request::{Action, Committed, Failure, Finished, Order, Refused};
pub use table::Handle;
use table::Table;

#[derive(Debug)]
struct Record {
    request: Handle,
    class: Class,
    index: usize,
    key: Key,
    position: usize,
    layer: Arc<Layer>,
    content: ContentTag,
    verify: bool,
    landing: Landing,
    /// Ranges that came back without their bytes.
    retries: Vec<LandingRange>,
    /// In a queue of a rail.
    queued: bool,
    in_retry_queue: bool,
    landed_bytes: u64,
    attempts_failed: u32,
    /// Rails that refused it or brought wrong bytes, as bits: others go first.
    refused_by: u64,
    /// A rail went down with READs of it posted.
    was_flushed: bool,
    verified: bool,
    /// Rails that READs of it were posted on, as bits.
    touched: u64,
}

#[derive(Debug)]
struct Request {
    deadline: Instant,
    bytes: u64,
    open: usize,
    results: Vec<Option<Result<Committed, Failure>>>,
    members: Vec<Handle>,
    submitted: Instant,
    first_post: Option<Instant>,
    stats: RequestStats,
    account: Account,
}

#[derive(Debug, Default)]
struct Counters {
    requests: u64,
    records: u64,
    bytes: u64,
    failed: u64,
    verify_failures: u64,
    unverified: u64,
    fallbacks: u64,
    takeovers: u64,
    backpressure: u64,
    commits_refused: u64,
}

/// See the module.
pub struct Engine {
    config: EngineConfig,
    rails: Vec<RailBook>,
    records: Table<Record>,
    requests: Table<Request>,
    /// Records that have ranges to post again, by class, as the rails' queues.
    retry_queues: [VecDeque<Handle>; Class::ALL.len()],
    finished: VecDeque<Finished>,
    actions: VecDeque<Action>,
    inflight_bytes: u64,
    /// Bytes in the rails' queues, by class: of records under way, not yet split off.
    unposted_bytes: [u64; Class::ALL.len()],
    /// When a rail that stood back would have been done: then it is asked again at the latest.
    look_again: Option<Instant>,
    machine: Machine,
    limits: LimitCounts,
    times: RequestTimes,
    /// Memory for the numbers of a request that ends.
    scratch: Vec<(usize, RailNumbers)>,
    /// Records that ended while they were in a queue, since the last sweep; at least as many.
    ended_in_queues: usize,
    /// Rails of the first rank.
    preferred: Vec<usize>,
    /// What is known of contents that are part of others, or have a part of their records.
    holdings: Holdings,
    /// What the tier fetches: it stays so while a rail serves it.
    current: Option<ContentTag>,
    /// Rank of the rails that READs went to last.
    active_rank: Option<u8>,
    /// Rail that is asked first next time.
    turn: usize,
    jitter: u64,
    counters: Counters,
    /// Open records that a rail refused or got wrong.
    refused_open: usize,
    guards: Guards,
}

/// Most rails of one tier: a record remembers in one word which of them it used.
pub const RAILS_MAX: usize = 64;

impl Engine {
    /// An engine over rails in the order of configuration; each is probed at once.
    pub fn new(
        config: EngineConfig,
        rails: impl IntoIterator<Item = (String, RailKind, Capabilities)>,
        jitter_seed: u64,
        now: Instant,
    ) -> Self {
        let rails: Vec<RailBook> = rails
            .into_iter()
            .map(|(name, kind, caps)| RailBook::new(name, kind, caps, &config, now))
            .collect();
        assert!(
            !rails.is_empty() && rails.len() <= RAILS_MAX,
            "1 to 64 rails"
        );
        let first = rails.iter().map(|b| b.capabilities.rank).min();
        let preferred = (0..rails.len())
            .filter(|&i| Some(rails[i].capabilities.rank) == first)
            .collect();
        Self {
            config,
            rails,
            records: Table::new(),
            requests: Table::new(),
            retry_queues: Default::default(),
            finished: VecDeque::new(),
            actions: VecDeque::new(),
            inflight_bytes: 0,
            unposted_bytes: [0; Class::ALL.len()],
            look_again: None,
            machine: Machine::default(),
            limits: LimitCounts::default(),
            times: RequestTimes::default(),
            scratch: Vec::new(),
            ended_in_queues: 0,
            preferred,
            holdings: Holdings::default(),
            current: None,
            active_rank: None,
            turn: 0,
            jitter: jitter_seed,
            counters: Counters::default(),
            refused_open: 0,
            guards: Guards::ON,
        }
    }

    /// Switches rules off, for the simulation's negative controls.
    #[doc(hidden)]
    pub fn set_guards(&mut self, guards: Guards) {
        self.guards = guards;
    }

    /// Tells what a content is part of: its records then count as those of the whole.
    pub fn learn(&mut self, now: Instant, content: ContentTag, holding: Holding) {
        self.holdings.insert(content, holding);
        for i in 0..self.rails.len() {
            self.look_up_holding(i);
        }
        self.check_content(now);
        self.check_rank();
    }

    fn look_up_holding(&mut self, rail: usize) {
        if let Some(content) = self.rails[rail].content {
            let holding = self.holdings.find(content);
            self.rails[rail].set_holding(holding);
        }
    }

    /// A rail could not take a READ right now: it goes back to the front.
    pub fn handle_post_refused(&mut self, rail: RailId, read: Read) {
        let now = read.posted_at;
        self.rails[rail.0].unposted(read.bytes(), read.class);
        self.requeue(read);
        self.note_times(now);
    }

    /// Takes in what a rail told.
    pub fn handle(&mut self, now: Instant, rail: RailId, event: RailEvent) {
        match event {
            RailEvent::Completion(completion) => self.handle_completion(now, rail, completion),
            RailEvent::Ready(content) => {
                // A rail that was told to stop since is not ready.
                let book = &mut self.rails[rail.0];
                if matches!(book.state, RailState::Probing | RailState::Up) {
                    book.ready(content);
                    self.look_up_holding(rail.0);
                    self.check_content(now);
                    self.check_rank();
                }
            }
            RailEvent::ProbeFailed(why) => {
                let jitter = self.next_jitter();
                let book = &mut self.rails[rail.0];
                if book.state == RailState::Probing {
                    book.errors.probes_failed += 1;
                    if book.trouble != why {
                        tracing::warn!(rail = %book.name, "rail does not come up: {why}");
                    }
                    book.trouble = why.clone();
                    book.quarantine(now, &self.config, jitter);
                    if self.config.on_failure == OnFailure::FailFast {
                        self.fail_users(now, rail, &why);
                    }
                }
            }
            RailEvent::Down(why) => {
                self.take_down(now, rail, why);
            }
            RailEvent::Stalled(why) => self.take_down_stalled(now, rail, why),
        }
        self.note_times(now);
    }

    /// A rail that was told to quiesce is quiesced.
    pub fn handle_quiesced(&mut self, now: Instant, rail: RailId) {
        let jitter = self.next_jitter();
        let book = &mut self.rails[rail.0];
        if book.state == RailState::Suspect {
            book.quarantine(now, &self.config, jitter);
        }
    }

    /// Does what time demands: deadlines, stalls, probes. `progress` gives each rail's
    /// [`crate::rail::Rail::progress_bytes`].
    pub fn handle_time(&mut self, now: Instant, progress: impl Fn(RailId) -> u64) {
        for i in 0..self.rails.len() {
            if self.rails[i].is_stalled(progress(RailId(i)), now) {
                let why = format!(
                    "no byte for {:?} with {} READs posted",
                    self.rails[i].capabilities.stall, self.rails[i].outstanding_reads
                );
                self.take_down_stalled(now, RailId(i), why);
            }
            if let RailState::Quarantined { retry_at } = self.rails[i].state {
                if now >= retry_at {
                    self.rails[i].set_state(RailState::Probing);
                    self.actions.push_back(Action::Probe(RailId(i)));
                }
            }
        }
        let expired: Vec<Handle> = self
            .requests
            .iter()
            .filter(|(_, r)| now >= r.deadline)
            .map(|(h, _)| h)
            .collect();
        for request in expired {
            let why = self.describe_rails();
            self.fail_request(now, request, &Failure::Deadline(why));
        }
        self.look_again = self.look_again.filter(|at| *at > now);
        self.note_times(now);
    }

    /// The earliest moment at which [`Engine::handle_time`] has work to do.
    pub fn next_timeout(&self) -> Option<Instant> {
        let requests = self.requests.iter().map(|(_, r)| r.deadline);
        let rails = self.rails.iter().flat_map(|b| {
            let retry = match b.state {
                RailState::Quarantined { retry_at } => Some(retry_at),
                _ => None,
            };
            retry.into_iter().chain(b.stall_at())
        });
        requests.chain(rails).chain(self.look_again).min()
    }

    /// What the driver has to do, one at a time.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether [`Engine::poll_action`] has something.
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// A request that ended, one at a time.
    pub fn poll_finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    /// Whether at least one rail works.
    pub fn is_healthy(&self) -> bool {
        self.rails.iter().any(RailBook::is_up)
    }

    /// What the tier fetches: what it did before while a rail serves that, else the content of the
    /// first rail that works, else of the first that ever did.
    pub fn content(&self) -> Option<ContentTag> {
        let up = || self.rails.iter().filter(|b| b.is_up());
        match self.current {
            Some(current) if up().any(|b| b.serves() == Some(current)) => Some(current),
            _ => up().chain(&self.rails).find_map(RailBook::serves),
        }
    }

    /// Contents that working rails serve on their own account: of which [`Engine::learn`] told
    /// nothing, and which are not what the tier fetches.
    pub fn strange_contents(&self) -> impl Iterator<Item = (RailId, ContentTag)> {
        let current = self.content();
        self.rails.iter().enumerate().filter_map(move |(i, book)| {
            let own = book.content.filter(|_| book.is_up())?;
            let is_strange = Some(own) != current && !self.holdings.knows(own);
            is_strange.then_some((RailId(i), own))
        })
    }

    /// What working rails say that they serve.
    pub fn contents(&self) -> impl Iterator<Item = (RailId, ContentTag)> {
        let up = self.rails.iter().enumerate().filter(|(_, b)| b.is_up());
        up.filter_map(|(i, book)| Some((RailId(i), book.content?)))
    }

    /// Changes whenever a request ends or a rail changes state or content.
    pub fn revision(&self) -> u64 {
        self.counters.requests + self.counters.backpressure + self.rails_revision()
    }

    /// Changes whenever a rail changes state or content.
    pub fn rails_revision(&self) -> u64 {
        self.rails.iter().map(RailBook::revision).sum()
    }

    /// Whether [`Engine::poll_finished`] has something.
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// State of the rails that are not up, for people.
    pub fn describe_rails(&self) -> String {
        let mut text = String::new();
        for book in &self.rails {
            if !text.is_empty() {
                text.push_str("; ");
            }
            match book.is_up() {
                true => text.push_str(&format!(
                    "{} is up, {} bytes in flight",
                    book.name, book.outstanding_bytes
                )),
                false => text.push_str(&format!("{} is not up: {}", book.name, book.trouble)),
            }
        }
        text
    }

    /// Records that the engine took for complete and the arena did not: a bug, when not 0.
    #[doc(hidden)]
    pub fn commits_refused(&self) -> u64 {
        self.counters.commits_refused
    }

    /// The numbers so far.
    pub fn stats(&self) -> TierStats {
        TierStats {
            rails: self.rails.iter().map(RailBook::stats).collect(),
            requests: self.counters.requests,
            records: self.counters.records,
            bytes: self.counters.bytes,
            failed: self.counters.failed,
            verify_failures: self.counters.verify_failures,
            unverified: self.counters.unverified,
            fallbacks: self.counters.fallbacks,
            takeovers: self.counters.takeovers,
            peers_refused: 0,
            backpressure: self.counters.backpressure,
            replanned: 0, // above the engine
            limits: self.limits,
            queue: Percentiles::from(&self.times.queue),
            wire: Percentiles::from(&self.times.wire),
            verify: Percentiles::from(&self.times.verify),
            total: Percentiles::from(&self.times.total),
            times: self.times.clone(),
        }
    }

    /// Whether the rail was not down already.
    fn take_down(&mut self, now: Instant, rail: RailId, why: String) -> bool {
        let is_news = self.rails[rail.0].down(why.clone());
        if is_news {
            self.actions.push_back(Action::Quiesce(rail));
            if self.config.on_failure == OnFailure::FailFast {
                self.fail_users(now, rail, &why);
            }
            self.check_content(now);
            self.check_rank();
        }
        is_news
    }

    /// Notes when rails of another rank take over, and says so.
    fn check_rank(&mut self) {
        let up = self.rails.iter().filter(|b| b.is_up());
        let Some(book) = up.min_by_key(|b| b.capabilities.rank) else {
            return; // nobody works: whoever comes first takes over
        };
        let rank = book.capabilities.rank;
        match self.active_rank.replace(rank) {
            Some(before) if before < rank => {
                self.counters.takeovers += 1;
                tracing::warn!(rail = %book.name, "no preferred rail works: this one takes over");
            }
            Some(before) if before > rank => {
                tracing::info!(rail = %book.name, "a preferred rail works again and takes over");
            }
            _ => {}
        }
    }

    /// Whether a rail of the first rank works.
    pub fn is_preferred_up(&self) -> bool {
        self.preferred.iter().any(|&i| self.rails[i].is_up())
    }

    /// Whether each rail of the first rank came up or failed to, once.
    pub fn is_settled(&self) -> bool {
        self.preferred.iter().all(|&i| {
            let book = &self.rails[i];
            book.is_up() || book.errors.probes_failed + book.errors.downs > 0
        })
    }

    fn take_down_stalled(&mut self, now: Instant, rail: RailId, why: String) {
        if self.take_down(now, rail, why) {
            self.rails[rail.0].stalled();
        }
    }

    /// Fails every request that used a rail or waits for it.
    fn fail_users(&mut self, now: Instant, rail: RailId, why: &str) {
        let users: Vec<Handle> = self
            .records
            .iter()
            .filter(|(_, r)| {
                r.touched & (1 << rail.0) != 0 || self.home(r.key, r.content) == rail.0
            })
            .map(|(_, r)| r.request)
            .collect();
        for request in users {
            let why = format!("{}: {why}", self.rails[rail.0].name);
            self.fail_request(now, request, &Failure::RailFailed(why));
        }
    }

    /// Whether a working rail serves a content; also while none works, because then nothing is
    /// known and the deadline bounds the wait.
    fn is_served(&self, content: ContentTag) -> bool {
        let mut up = self.rails.iter().filter(|b| b.is_up()).peekable();
        up.peek().is_none() || up.any(|b| b.serves() == Some(content))
    }

    fn check_served(&mut self, now: Instant, record: Handle) {
        if self
            .records
            .get(record)
            .is_some_and(|r| !self.is_served(r.content))
        {
            self.fail_record(now, record, Failure::ContentChanged);
        }
    }

    /// Fails the records of a content that no working rail serves any more.
    fn check_content(&mut self, now: Instant) {
        self.current = self.content();
        let orphans: Vec<Handle> = self
            .records
            .iter()
            .filter(|(_, r)| !self.is_served(r.content))
            .map(|(h, _)| h)
            .collect();
        for record in orphans {
            self.fail_record(now, record, Failure::ContentChanged);
        }
    }

    fn next_jitter(&mut self) -> f64 {
        // splitmix64: enough to keep clients apart, and the same in every run of one seed.
        self.jitter = self.jitter.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.jitter;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Requests that have not ended.
    pub fn open_requests(&self) -> usize {
        self.requests.iter().count()
    }
}

/// A moment after another; "never" is a century, which every clock can hold.
pub(crate) fn later(now: Instant, wait: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 86_400);
    now + wait.min(CENTURY)
}

/// Time left until a moment, for waits that take a duration.
pub(crate) fn until(now: Instant, then: Instant) -> Duration {
    then.saturating_duration_since(now)
}
