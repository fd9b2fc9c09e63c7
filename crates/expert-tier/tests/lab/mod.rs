//! Mock rails under an engine, on a virtual clock: what a driver does, without a thread and without waiting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, SlotId, SlotState};
use expert_store::Key;
use expert_tier::EngineConfig;
use expert_tier::engine::{Action, Committed, Engine, Failure, Finished, Handle, Order, Refused};
use expert_tier::mock::{MockRail, MockSource, MockSpec};
use expert_tier::rail::{ContentTag, Rail, RailEvent, RailId};

use super::common::{Catalogue, TAG};

const EXPERTS: u32 = 32;

/// Nobody is in a hurry, and everything has an end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Rounds of the clock after which nothing more is expected.
const ROUNDS_MAX: u32 = 1_000_000;

pub(crate) fn slot(slot: u32) -> SlotId {
    SlotId { slab: 0, slot }
}

/// A READ as it was posted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Posted {
    pub(crate) expert: u32,
    pub(crate) offset: u64,
}

/// See the module.
pub(crate) struct Lab {
    pub(crate) engine: Engine,
    pub(crate) rails: Vec<MockRail>,
    pub(crate) catalogue: Arc<Catalogue>,
    pub(crate) arena: Arc<ExpertArena>,
    pub(crate) now: Instant,
    /// What orders ask for.
    pub(crate) content: ContentTag,
    pub(crate) verify: bool,
    /// In the order of posting.
    pub(crate) posted: Vec<Posted>,
    quiescing: Vec<RailId>,
    finished: Vec<Finished>,
}

/// A door to the records for mock rails.
struct Served(Arc<Catalogue>);

impl MockSource for Served {
    fn record(&self, content: ContentTag, key: Key) -> Option<&[u8]> {
        (key.layer == 0 && key.expert < EXPERTS).then(|| self.0.image(content, key.expert))
    }
}

impl Lab {
    /// Rails that are up, to peers that serve records of `record_bytes`.
    pub(crate) fn new(specs: Vec<MockSpec>, config: EngineConfig, record_bytes: u64) -> Self {
        let catalogue = Arc::new(Catalogue::new(EXPERTS, record_bytes));
        let now = Instant::now(); // only differences count
        let source: Arc<dyn MockSource> = Arc::new(Served(catalogue.clone()));
        let rails: Vec<MockRail> = (0..)
            .zip(specs)
            .map(|(i, spec)| MockRail::new(format!("rail{i}"), spec, source.clone(), TAG, i, now))
            .collect();
        let named = rails
            .iter()
            .map(|r| (r.name().to_owned(), r.kind(), r.capabilities()));
        let engine = Engine::new(config, named, 1, now);
        let slot_bytes = catalogue.image_bytes().next_multiple_of(4096);
        let memory = ForeignMemory::heap(EXPERTS as usize * slot_bytes).expect("memory");
        let arena = ArenaBuilder::new()
            .slab(EXPERTS, slot_bytes)
            .foreign(memory)
            .build();
        let mut lab = Self {
            engine,
            rails,
            catalogue,
            arena: Arc::new(arena.expect("a sound layout")),
            now,
            content: TAG,
            verify: true,
            posted: Vec::new(),
            quiescing: Vec::new(),
            finished: Vec::new(),
        };
        lab.run_until("the rails are up", |lab| {
            lab.engine.stats().rails.iter().all(|r| r.state == "up")
        });
        lab
    }

    pub(crate) fn image_bytes(&self) -> u64 {
        self.catalogue.image_bytes() as u64
    }

    /// Experts into slots from 0 on.
    pub(crate) fn submit(&mut self, experts: &[u32]) -> Handle {
        self.submit_within(experts, PATIENCE)
    }

    pub(crate) fn submit_within(&mut self, experts: &[u32], time: Duration) -> Handle {
        let batch: Vec<(u32, u32)> = experts.iter().copied().zip(0..).collect();
        self.submit_into(&batch, time)
    }

    /// Experts and their slots.
    pub(crate) fn submit_into(&mut self, batch: &[(u32, u32)], time: Duration) -> Handle {
        self.try_submit_into(batch, time).expect("admitted")
    }

    pub(crate) fn try_submit_into(
        &mut self,
        batch: &[(u32, u32)],
        time: Duration,
    ) -> Result<Handle, Refused> {
        let layer = &self.catalogue.layers[0];
        let bytes = self.catalogue.image_bytes();
        let order = |&(expert, place): &(u32, u32)| Order {
            key: Key::new(0, expert),
            position: expert as usize,
            layer: layer.clone(),
            content: self.content,
            landing: self
                .arena
                .begin_landing(slot(place), bytes)
                .expect("a free slot"),
            verify: self.verify,
        };
        let orders = batch.iter().map(order).collect();
        let submitted = self.engine.submit(self.now, self.now + time, orders);
        submitted.map_err(|(_, refused)| refused)
    }

    /// Lets time pass until something is so.
    pub(crate) fn run_until(&mut self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        for _ in 0..ROUNDS_MAX {
            self.round();
            if is_so(self) {
                return;
            }
            self.sleep(None);
        }
        panic!("never: {what}; {}", self.engine.describe_rails());
    }

    pub(crate) fn run_for(&mut self, time: Duration) {
        let limit = self.now + time;
        while self.now < limit {
            self.round();
            self.sleep(Some(limit));
        }
    }

    pub(crate) fn until_finished(&mut self, request: Handle) -> Finished {
        let is_it = |finished: &Finished| finished.request == request;
        self.run_until("the request ends", |lab| lab.finished.iter().any(is_it));
        let at = self.finished.iter().position(is_it).expect("just seen");
        self.finished.remove(at)
    }

    pub(crate) fn until_right(&mut self, request: Handle, experts: &[u32]) {
        let finished = self.until_finished(request);
        assert_eq!(finished.records.len(), experts.len());
        for (record, &expert) in finished.records.iter().zip(experts) {
            self.assert_right(record, expert);
        }
    }

    pub(crate) fn fetch(&mut self, experts: &[u32]) -> Finished {
        let request = self.submit(experts);
        self.until_finished(request)
    }

    pub(crate) fn fetch_right(&mut self, experts: &[u32]) {
        let request = self.submit(experts);
        self.until_right(request, experts);
    }

    /// Panics unless a record is byte for byte what it must be.
    pub(crate) fn assert_right(&self, record: &Result<Committed, Failure>, expert: u32) {
        let committed = record.as_ref().expect("committed");
        let image = self.catalogue.image(self.content, expert);
        assert!(
            committed.lease[..] == *image,
            "expert {expert} has wrong bytes"
        );
        assert_eq!(committed.verified, self.verify);
    }

    /// Bytes by rail.
    pub(crate) fn carried(&self) -> Vec<u64> {
        let rails = self.engine.stats().rails;
        rails.iter().map(|r| r.bytes).collect()
    }

    pub(crate) fn slot_state(&self, place: u32) -> SlotState {
        self.arena.slot_state(slot(place)).expect("a slot")
    }

    /// Whether nothing can be written to any slot.
    pub(crate) fn is_settled(&self) -> bool {
        let arena = self.arena.stats();
        arena.landing + arena.quarantined + arena.outstanding_ranges == 0
    }

    pub(crate) fn assert_settled(&self) {
        assert!(self.is_settled(), "{:?}", self.arena.stats());
        assert_eq!(self.engine.open_requests(), 0);
    }

    fn round(&mut self) {
        let (engine, now) = (&mut self.engine, self.now);
        let mut events: Vec<RailEvent> = Vec::new();
        for (i, rail) in self.rails.iter_mut().enumerate() {
            rail.advance(now);
            rail.poll(&mut events);
            for event in events.drain(..) {
                engine.handle(now, RailId(i), event);
            }
        }
        let rails = &mut self.rails;
        self.quiescing.retain(|&rail| {
            let quiesced = rails[rail.0].is_quiesced();
            if quiesced {
                engine.handle_quiesced(now, rail);
            }
            !quiesced
        });
        engine.handle_time(now, |rail| rails[rail.0].progress_bytes());
        while let Some(action) = engine.poll_action() {
            match action {
                Action::Quiesce(rail) => {
                    rails[rail.0].begin_quiesce();
                    self.quiescing.push(rail);
                }
                Action::Probe(rail) => rails[rail.0].begin_probe(),
            }
        }
        let posted = &mut self.posted;
        engine.post_all(now, |rail, read| {
            let (expert, offset) = (read.key.expert, read.range.offset() as u64);
            rails[rail.0].post(read)?;
            posted.push(Posted { expert, offset });
            Ok(())
        });
        self.finished
            .extend(std::iter::from_fn(|| engine.poll_finished()));
    }

    /// To the next moment at which something is due.
    fn sleep(&mut self, limit: Option<Instant>) {
        let rails = self.rails.iter().filter_map(MockRail::next_event);
        let next = rails.chain(self.engine.next_timeout()).chain(limit).min();
        let step = Duration::from_micros(1);
        self.now = next.unwrap_or(self.now).max(self.now + step);
    }
}
