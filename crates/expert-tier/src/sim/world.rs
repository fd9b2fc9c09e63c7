//! One run: the driver's loop on a virtual clock, the client, and in `oracle` what must hold.

mod oracle;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{
    ArenaBuilder, ArenaError, ExpertArena, ForeignMemory, Landing, Lease, Poison, Residency, SlotId,
};
use expert_wire::Key;

use super::contents::{Contents, EXPERTS, Source, tag, version};
use super::plan::{Fault, Plan};
use super::trace::Trace;
use super::{SimConfig, SimReport, TICK};
use crate::config::Verify;
use crate::engine::{Action, Engine, Handle, Order};
use crate::mock::rng::SplitMix;
use crate::mock::{MockRail, ReadFault};
use crate::rail::{Rail, RailEvent, RailId};
use crate::seen::{Run, Seen};
use oracle::check_bytes;

/// Rounds after which a run is taken for one that turns in circles: the busiest seen take a tenth.
const ROUNDS_MAX: u64 = 200_000;

/// After the last fault, the time until every rail is back: the longest back-off with its jitter,
/// a connection, and what the last fault did to READs then posted.
const RECOVERY: Duration = Duration::from_secs(5);

/// Time for the last batch, which nothing disturbs.
const CALM: Duration = Duration::from_secs(120);

/// A record that is in a slot, and what its bytes must be.
#[derive(Debug, Clone, Copy)]
struct Resident {
    key: Key,
    version: usize,
}

struct Held {
    lease: Lease,
    what: Resident,
    release_at: Instant,
}

struct Open {
    keys: Vec<Key>,
    /// Whether the checksums of each are to be compared.
    verify: Vec<bool>,
    version: usize,
    run: Run,
    deadline: Instant,
    cancel_at: Option<Instant>,
    is_cancelled: bool,
    /// The last one, which nothing disturbs.
    is_calm: bool,
}

pub(super) struct World {
    rng: SplitMix,
    plan: Plan,
    began: Instant,
    now: Instant,
    engine: Engine,
    rails: Vec<MockRail>,
    quiescing: Vec<RailId>,
    arena: Arc<ExpertArena>,
    open: BTreeMap<Handle, Open>,
    held: Vec<Held>,
    /// As a tier remembers what was compared.
    seen: Seen,
    /// The oracle's own memory of that: everything that was ever committed compared.
    compared: HashSet<(Run, Key)>,
    /// Slots that a READ put wrong bytes into, since their present record began to land.
    damaged: HashSet<SlotId>,
    /// Nobody holds them; they may be leased again, or their slots be reused.
    cached: Vec<(Residency, Resident)>,
    next_submit: usize,
    next_fault: usize,
    calm_at: Instant,
    is_calm: bool,
    /// A rail was left out in this round: the next one comes soon.
    is_behind: bool,
    events: Vec<RailEvent>,
    trace: Trace,
    report: SimReport,
}

type Checked = Result<(), String>;

impl World {
    pub(super) fn new(seed: u64, config: &SimConfig) -> Self {
        let mut rng = SplitMix::new(seed);
        let plan = Plan::draw(&mut rng);
        let now = Instant::now(); // only differences count
        let rails: Vec<MockRail> = plan
            .rails
            .iter()
            .enumerate()
            .map(|(i, spec)| {
                let peer = plan.peer_of[i];
                let content = tag(plan.versions[peer]);
                let name = format!("rail{i}@peer{peer}");
                let seed = rng.next();
                let mut rail =
                    MockRail::new(name, spec.clone(), Arc::new(Source), content, seed, now);
                rail.set_guards(config.guards);
                rail
            })
            .collect();
        let named = rails
            .iter()
            .map(|r| (r.name().to_owned(), r.kind(), r.capabilities()));
        let mut engine = Engine::new(plan.engine.clone(), named, rng.next(), now);
        engine.set_guards(config.guards);
        let over = plan.faults.iter().map(|(at, f)| *at + f.lasts());
        let quiet = over.chain(plan.submits.last().copied()).max();
        let mut trace = Trace::new(config.trace);
        trace.note(Duration::ZERO, format_args!("{plan:?}"));
        Self {
            arena: make_arena(&plan),
            calm_at: now + sum_of_delays(&plan) + quiet.unwrap_or_default() + RECOVERY,
            rng,
            plan,
            began: now,
            now,
            engine,
            rails,
            quiescing: Vec::new(),
            open: BTreeMap::new(),
            held: Vec::new(),
            seen: Seen::default(),
            compared: HashSet::new(),
            damaged: HashSet::new(),
            cached: Vec::new(),
            next_submit: 0,
            next_fault: 0,
            is_calm: false,
            is_behind: false,
            events: Vec::new(),
            trace,
            report: SimReport::default(),
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.now - self.began
    }

    pub(super) fn into_report(self) -> SimReport {
        SimReport {
            simulated: self.elapsed(),
            trace_hash: self.trace.hash,
            trace: self.trace.lines.unwrap_or_default(),
            ..self.report
        }
    }

    pub(super) fn run(&mut self) -> Checked {
        for _ in 0..ROUNDS_MAX {
            self.round()?;
            if self.is_calm && self.open.is_empty() && self.held.is_empty() {
                return self.finish();
            }
            self.sleep();
        }
        Err(format!("no end after {ROUNDS_MAX} rounds"))
    }

    /// To the next moment at which something is due; a driver wakes up a little later at times.
    fn sleep(&mut self) {
        let rails = self.rails.iter().filter_map(MockRail::next_event);
        let requests = self.open.values().filter_map(|o| o.cancel_at);
        let next = rails
            .chain(self.engine.next_timeout())
            .chain(requests)
            .chain(self.held.iter().map(|h| h.release_at))
            .chain(self.submit_at())
            .chain(self.fault_at())
            .min()
            .unwrap_or(self.now);
        let step = Duration::from_micros(1);
        let mut then = next.max(self.now + step);
        if std::mem::take(&mut self.is_behind) {
            then = then.min(self.now + Duration::from_micros(200));
        }
        if self.rng.percent(25) {
            then += Duration::from_micros(self.rng.below(TICK.as_micros() as u64 / 2));
        }
        self.now = then;
    }

    fn submit_at(&self) -> Option<Instant> {
        match self.plan.submits.get(self.next_submit) {
            Some(after) => Some(self.began + *after),
            None => (!self.is_calm).then_some(self.calm_at),
        }
    }

    fn fault_at(&self) -> Option<Instant> {
        let (after, _) = self.plan.faults.get(self.next_fault)?;
        Some(self.began + *after)
    }

    fn round(&mut self) -> Checked {
        for rail in &mut self.rails {
            rail.advance(self.now);
        }
        while self.fault_at().is_some_and(|at| at <= self.now) {
            let (_, fault) = self.plan.faults[self.next_fault];
            self.next_fault += 1;
            self.apply(fault);
        }
        self.write_strays();
        self.poll_rails();
        self.act_as_client()?;
        self.drive()?;
        self.check_round()
    }

    fn apply(&mut self, fault: Fault) {
        note(self, format_args!("fault {fault:?}"));
        *self.report.faults.entry(fault.kind()).or_default() += 1;
        match fault {
            Fault::Disconnect { rail, for_ } => self.rails[rail].disconnect(for_),
            Fault::Stall { rail, for_ } => self.rails[rail].stall(for_),
            Fault::Read { rail, fault } => self.rails[rail].arm(fault),
            Fault::SlowPeer { peer, factor, for_ } => {
                for rail in self.rails_of(peer) {
                    self.rails[rail].slow_down(factor, for_);
                }
            }
            Fault::Content { peer, version } => {
                for rail in self.rails_of(peer) {
                    self.rails[rail].switch_content(tag(version));
                }
            }
        }
    }

    fn rails_of(&self, peer: usize) -> Vec<usize> {
        (0..self.rails.len())
            .filter(|&rail| self.plan.peer_of[rail] == peer)
            .collect()
    }

    fn write_strays(&mut self) {
        let mut leases: Vec<&mut Lease> = self.held.iter_mut().map(|h| &mut h.lease).collect();
        let mut written = 0;
        for rail in &mut self.rails {
            written += rail.write_strays(&mut leases);
        }
        if written > 0 {
            note(
                self,
                format_args!("{written} READs land after they were given back"),
            );
        }
    }

    fn poll_rails(&mut self) {
        for rail in 0..self.rails.len() {
            if self.rng.percent(6) {
                self.is_behind = true;
                continue;
            }
            self.poll_rail(rail);
        }
    }

    fn poll_rail(&mut self, rail: usize) {
        let mut events = std::mem::take(&mut self.events);
        self.rails[rail].poll(&mut events);
        for event in events.drain(..) {
            match &event {
                RailEvent::Completion(c) => {
                    note(
                        self,
                        format_args!(
                            "rail{rail} {} at {}+{} of {}: {:?}",
                            c.read.key,
                            c.read.range.offset(),
                            c.read.bytes(),
                            c.read.range.slot(),
                            c.result
                        ),
                    );
                    self.report.reads += 1;
                    self.report.retries += u64::from(c.result.is_err());
                }
                other => note(self, format_args!("rail{rail} {other:?}")),
            }
            self.engine.handle(self.now, RailId(rail), event);
        }
        self.events = events;
    }

    /// What a driver does in one turn, after polling.
    fn drive(&mut self) -> Checked {
        let (engine, rails, now) = (&mut self.engine, &mut self.rails, self.now);
        self.quiescing.retain(|&rail| {
            let quiesced = rails[rail.0].is_quiesced();
            if quiesced {
                engine.handle_quiesced(now, rail);
            }
            !quiesced
        });
        engine.handle_time(now, |rail| rails[rail.0].progress_bytes());
        while let Some(action) = self.engine.poll_action() {
            note(self, format_args!("{action:?}"));
            match action {
                Action::Quiesce(rail) => {
                    self.rails[rail.0].begin_quiesce();
                    self.quiescing.push(rail);
                }
                Action::Probe(rail) => self.rails[rail.0].begin_probe(),
            }
        }
        let (rails, damaged, mut posted) = (&mut self.rails, &mut self.damaged, Vec::new());
        self.engine.post_all(self.now, |rail, read| {
            let what = (read.key, read.range.offset(), read.bytes());
            let slot = read.range.slot();
            let fault = rails[rail.0].next_fault();
            rails[rail.0].post(read)?;
            if fault.is_some_and(ReadFault::is_damage) {
                damaged.insert(slot);
            }
            posted.push((rail, what));
            Ok(())
        });
        for (rail, (key, offset, bytes)) in posted {
            note(
                self,
                format_args!("post {key} at {offset}+{bytes} on rail{}", rail.0),
            );
        }
        while let Some(finished) = self.engine.poll_finished() {
            self.check_finished(finished)?;
        }
        Ok(())
    }

    fn act_as_client(&mut self) -> Checked {
        let now = self.now;
        while let Some(i) = self.held.iter().position(|h| h.release_at <= now) {
            let held = self.held.swap_remove(i);
            self.release(held)?;
        }
        for (&request, open) in &mut self.open {
            if open.cancel_at.is_some_and(|at| at <= now) {
                open.cancel_at = None;
                open.is_cancelled = true;
                self.trace
                    .note(now - self.began, format_args!("cancel {request:?}"));
                self.engine.cancel(now, request);
            }
        }
        while self.submit_at().is_some_and(|at| at <= self.now) {
            let is_calm = self.next_submit >= self.plan.submits.len();
            self.is_calm |= is_calm;
            self.next_submit += 1;
            if is_calm {
                for rail in &mut self.rails {
                    rail.disarm();
                }
                // It finds slots that nobody holds.
                while let Some(held) = self.held.pop() {
                    self.release(held)?;
                }
            }
            self.submit(is_calm)?;
            self.lease_cached()?;
        }
        Ok(())
    }

    fn submit(&mut self, is_calm: bool) -> Checked {
        // As the tier does: plan for what the rails serve now.
        let content = match (self.engine.content(), is_calm) {
            (Some(content), false) => content,
            (Some(content), true) if self.engine.is_healthy() => content,
            (None, false) => tag(0),
            _ => return Err(format!("no rail is up: {}", self.engine.describe_rails())),
        };
        let count = self.rng.between(1, 6);
        let run = (content, self.engine.rails_revision());
        let (mut keys, mut verify) = (Vec::new(), Vec::new());
        let mut orders = Vec::new();
        for _ in 0..count {
            let key = Key::new(*self.rng.pick(&self.plan.layers), self.draw_expert());
            let Some(landing) = self.make_room(Contents::all().image_bytes(key.layer))? else {
                break;
            };
            self.damaged.remove(&landing.slot());
            keys.push(key);
            verify.push(match self.plan.verify {
                Verify::Always => true,
                Verify::First => !self.seen.contains(run, key),
                Verify::Off => false,
            });
            orders.push(Order {
                key,
                position: key.expert as usize,
                layer: Contents::all().layer(version(content), key.layer).clone(),
                content,
                landing,
                verify: *verify.last().expect("just pushed"),
            });
        }
        self.check_verify(&keys, &verify, run)?;
        let time = match is_calm {
            true => CALM,
            false => self.rng.duration(20_000, 5_000_000),
        };
        let cancel_at = (!is_calm && self.rng.percent(20))
            .then(|| self.now + self.rng.duration(1, time.as_micros() as u64));
        let deadline = self.now + time;
        match self.engine.submit(self.now, deadline, orders) {
            Ok(request) => {
                note(
                    self,
                    format_args!("submit {request:?} {keys:?} of content {}", content.id),
                );
                let open = Open {
                    keys,
                    verify,
                    version: version(content),
                    run,
                    deadline,
                    cancel_at,
                    is_cancelled: false,
                    is_calm,
                };
                self.open.insert(request, open);
                Ok(())
            }
            Err((orders, refused)) => {
                note(self, format_args!("{refused:?}"));
                self.report.refused += 1;
                drop(orders);
                match refused.inflight {
                    0 => Err("the only request was refused".into()),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Favours few experts, so that duplicates are common.
    fn draw_expert(&mut self) -> u32 {
        let among = *self.rng.pick(&[2, u64::from(EXPERTS)]);
        self.rng.below(among) as u32
    }

    /// A slot for an image: a free one, or that of a record which nobody holds.
    fn make_room(&mut self, image_bytes: usize) -> Result<Option<Landing>, String> {
        match self.arena.acquire(image_bytes) {
            Ok(landing) => return Ok(Some(landing)),
            Err(ArenaError::NoFreeSlot { .. }) => {}
            Err(other) => return Err(other.to_string()),
        }
        if self.cached.is_empty() {
            return Ok(None);
        }
        let victim = self.rng.index(self.cached.len());
        let (residency, _) = self.cached.swap_remove(victim);
        let landing = match self.rng.percent(50) {
            true => self.arena.begin_landing(residency.slot(), image_bytes),
            false => match self.arena.evict(&residency) {
                Ok(true) => self.arena.acquire(image_bytes),
                Ok(false) => return Err(format!("{residency} is read by nobody known")),
                Err(other) => Err(other),
            },
        };
        if self.arena.lease(&residency).is_ok() {
            return Err(format!("{residency} is stale and was leased all the same"));
        }
        landing.map(Some).map_err(|e| e.to_string())
    }

    fn lease_cached(&mut self) -> Checked {
        if self.cached.is_empty() || self.rng.percent(50) {
            return Ok(());
        }
        let (residency, what) = self.cached.swap_remove(self.rng.index(self.cached.len()));
        let lease = self.arena.lease(&residency).map_err(|e| e.to_string())?;
        check_bytes(&lease, what, "when it was leased again")?;
        self.hold(lease, what);
        Ok(())
    }

    fn hold(&mut self, lease: Lease, what: Resident) {
        let time = self.rng.duration(100, 3_000_000);
        self.held.push(Held {
            lease,
            what,
            release_at: self.now + time,
        });
    }

    fn release(&mut self, held: Held) -> Checked {
        check_bytes(&held.lease, held.what, "while it was leased")?;
        let residency = held.lease.residency();
        drop(held.lease);
        if self.rng.percent(30) {
            let freed = self.arena.evict(&residency).map_err(|e| e.to_string())?;
            return match freed {
                true => Ok(()),
                false => Err(format!("{residency} is read by nobody known")),
            };
        }
        self.cached.push((residency, held.what));
        Ok(())
    }

    /// Everything has ended: what is left over?
    fn finish(&mut self) -> Checked {
        while let Some((residency, what)) = self.cached.pop() {
            let lease = self.arena.lease(&residency).map_err(|e| e.to_string())?;
            check_bytes(&lease, what, "while it was cached")?;
        }
        for rail in &mut self.rails {
            rail.begin_quiesce();
        }
        let limit = self.now + Duration::from_secs(1);
        while self.rails.iter().any(|r| !r.is_quiesced()) {
            if self.now > limit {
                return Err("a rail cannot be quiesced".into());
            }
            self.now += TICK;
            for rail in 0..self.rails.len() {
                self.rails[rail].advance(self.now);
                self.poll_rail(rail);
            }
        }
        let arena = self.arena.stats();
        if arena.landing + arena.quarantined + arena.leases + arena.outstanding_ranges > 0 {
            return Err(format!("slots are left over: {arena:?}"));
        }
        self.check_counters()
    }
}

fn note(world: &mut World, what: std::fmt::Arguments<'_>) {
    world.trace.note(world.now - world.began, what);
}

fn make_arena(plan: &Plan) -> Arc<ExpertArena> {
    let sizes = plan.layers.iter().map(|&l| Contents::all().image_bytes(l));
    let slot_bytes = sizes.max().expect("one layer at least");
    let all = plan.slots as usize * slot_bytes.next_multiple_of(expert_arena::SLOT_ALIGN_BYTES);
    let memory = ForeignMemory::heap(all).expect("some megabytes");
    let builder = ArenaBuilder::new().slab(plan.slots, slot_bytes);
    // Full poison would take longer than everything else.
    let builder = builder.poison(Poison::Marks).foreign(memory);
    Arc::new(builder.build().expect("a sound layout"))
}

/// Delays of one rail add up.
fn sum_of_delays(plan: &Plan) -> Duration {
    let delays = plan.faults.iter().filter(|(_, f)| {
        let late = matches!(f, Fault::Read { fault, .. } if matches!(fault, ReadFault::Late(_)));
        late || matches!(f, Fault::Stall { .. })
    });
    delays.map(|(_, f)| f.lasts()).sum()
}
