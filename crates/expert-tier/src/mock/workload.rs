//! Fetches objects over mock rails, on either clock: the measurement behind `atlas-expert bench rails`.
//!
//! The engine is the one that tiers use. On the virtual clock it is driven by a loop without
//! delays, so the result is what policy, READ size and rates allow, and the same in every run. On
//! the real one a [`Driver`](crate) thread drives it, threads of the rails move the bytes, and the
//! result is what this machine does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, Poison, SlotId};
use expert_store::Dtype;
use expert_store::catalogue::{
    CHUNK_BYTES, Class, IMAGE_MAX_BYTES, Layer, Leaf, Records, Role, Stacking, Transform,
};
use expert_wire::Key;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::rng::SplitMix;
use super::{MockRail, MockSource, MockSpec, RealRail};
use crate::attribution::Limit;
use crate::config::EngineConfig;
use crate::driver::{Driver, Outcome};
use crate::engine::{Action, Engine, Finished, Order};
use crate::error::TierError;
use crate::notify::Notifier;
use crate::rail::{ContentTag, Rail, RailEvent, RailId};

const TAG: ContentTag = ContentTag {
    id: 1,
    instance: None,
};

/// Distance of two objects in their common buffer: prime, so that no two look alike at any offset.
const OBJECT_DISTANCE: usize = 4099;

/// Which clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Simulated time: a prediction.
    Virtual,
    /// This machine's time: a measurement.
    Real,
}

/// Objects of one size, in memory: what mock peers serve.
pub struct Objects {
    bytes: Vec<u8>,
    layer: Arc<Layer>,
    count: u32,
}

impl Objects {
    /// Random bytes, the same in every run. All objects share one buffer, each at another offset.
    ///
    /// *Errors*: [`TierError::Config`] for a size or count that no store may have.
    pub fn new(object_bytes: u64, count: u32) -> Result<Self, TierError> {
        if object_bytes == 0 || object_bytes > IMAGE_MAX_BYTES {
            return Err(TierError::Config(format!(
                "objects of {object_bytes} bytes: they have 1 to {IMAGE_MAX_BYTES}"
            )));
        }
        if count == 0 || count > 1 << 16 {
            return Err(TierError::Config(format!(
                "{count} objects: there are 1 to 65536"
            )));
        }
        let class = Class::layout(vec![Leaf {
            role: Role::Gate,
            leaf: "weight".into(),
            name: "l.{}".into(),
            stacking: Stacking::PerExpert,
            dtype: Dtype::from_name("U8").expect("in the table"),
            shape: vec![object_bytes],
            source_dim0: 0,
            image_offset: 0,
            bytes: object_bytes,
            transform: Transform::None,
        }])
        .map_err(TierError::Config)?;
        let image_bytes = class.image_bytes as usize;
        let size = image_bytes + count as usize * OBJECT_DISTANCE;
        let mut rng = SplitMix::new(0x0b1e_c750);
        let mut bytes = vec![0u8; size.next_multiple_of(8)];
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&rng.next().to_le_bytes());
        }
        let sums = (0..count as usize)
            .flat_map(|i| bytes[i * OBJECT_DISTANCE..][..image_bytes].chunks(CHUNK_BYTES as usize))
            .map(xxh3_64)
            .collect();
        let layer = Layer::new(
            0,
            0,
            count,
            0,
            vec![class],
            (0..count).collect(),
            vec![],
            Records::Remote,
            Some(sums),
            vec![],
        )
        .map_err(TierError::Config)?;
        Ok(Self {
            bytes,
            layer: Arc::new(layer),
            count,
        })
    }

    /// Bytes of one, as it lies in memory: a multiple of 256.
    pub fn image_bytes(&self) -> u64 {
        self.layer.image_bytes_max()
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The hash that a fetch of all of them ends with.
    pub fn digest(&self) -> u128 {
        let mut hash = Xxh3::new();
        for expert in 0..self.count {
            hash.update(self.object(expert));
        }
        hash.digest128()
    }

    fn object(&self, expert: u32) -> &[u8] {
        &self.bytes[expert as usize * OBJECT_DISTANCE..][..self.image_bytes() as usize]
    }
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects")
            .field("image_bytes", &self.image_bytes())
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

impl MockSource for Objects {
    fn record(&self, content: ContentTag, key: Key) -> Option<&[u8]> {
        let known = content == TAG && key.layer == 0 && key.expert < self.count;
        known.then(|| self.object(key.expert))
    }
}

/// How they are fetched.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The rails.
    pub rails: Vec<MockSpec>,
    /// Settings of the engine.
    pub engine: EngineConfig,
    /// Objects of one request.
    pub batch: u32,
    /// Whether checksums are compared.
    pub verify: bool,
    /// Which clock.
    pub clock: Clock,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Bytes fetched; those of the first batch, which is fetched once before to learn the rails'
    /// rates and to touch the memory, count once.
    pub bytes: u64,
    /// Time of the requests, one after the other.
    pub time: Duration,
    /// Hash of all objects, as they were committed.
    pub digest: u128,
    /// What limited the request that took longest.
    pub limit: Limit,
    /// Bytes by rail, the first fetch included.
    pub rail_bytes: Vec<u64>,
    /// Time in which checksums were compared, over all threads.
    pub verify: Duration,
    /// READs that came back.
    pub reads: u64,
}

/// Fetches all objects, a batch at a time.
///
/// *Errors*: [`TierError::Config`] where there are no rails or too many, [`TierError::RailFailed`]
/// where an object did not arrive, and what memory and threads give.
pub fn fetch(objects: &Arc<Objects>, setup: &Setup) -> Result<Measured, TierError> {
    if setup.rails.is_empty() || setup.rails.len() > crate::engine::RAILS_MAX {
        return Err(TierError::Config(format!(
            "{} rails: there are 1 to {}",
            setup.rails.len(),
            crate::engine::RAILS_MAX
        )));
    }
    let batch = setup.batch.clamp(1, objects.count);
    let arena = make_arena(objects, batch)?;
    let mut bench = match setup.clock {
        Clock::Virtual => Bench::Virtual(Box::new(Simulated::new(objects, setup))),
        Clock::Real => Bench::Real(start_driver(objects, setup)?),
    };
    let patience = patience(objects, setup, batch);
    let first: Vec<u32> = (0..batch).collect();
    bench.fetch(make_orders(objects, &arena, setup, &first)?, patience)?;
    let mut hash = Xxh3::new();
    let mut measured = Measured {
        bytes: 0,
        time: Duration::ZERO,
        digest: 0,
        limit: Limit::Unknown,
        rail_bytes: Vec::new(),
        verify: Duration::ZERO,
        reads: 0,
    };
    let mut longest = Duration::ZERO;
    let experts: Vec<u32> = (0..objects.count).collect();
    for experts in experts.chunks(batch as usize) {
        let orders = make_orders(objects, &arena, setup, experts)?;
        let (finished, took) = bench.fetch(orders, patience)?;
        for (record, &expert) in finished.records.iter().zip(experts) {
            let committed = record.as_ref().map_err(|failure| TierError::RailFailed {
                key: Key::new(0, expert),
                why: format!("{failure:?}"),
            })?;
            hash.update(&committed.lease);
            measured.bytes += committed.lease.len() as u64;
        }
        if took >= longest {
            longest = took;
            measured.limit = finished.stats.limit;
        }
        measured.time += took;
        measured.verify += finished.stats.verify;
        measured.reads += finished.stats.reads;
    }
    measured.digest = hash.digest128();
    measured.rail_bytes = bench.rail_bytes();
    Ok(measured)
}

/// Far longer than it should take, and short enough to end.
fn patience(objects: &Objects, setup: &Setup, batch: u32) -> Duration {
    let slowest = setup.rails.iter().map(|r| r.bytes_per_s).min();
    let bytes = objects.image_bytes() * u64::from(batch);
    let slowest_s = bytes as f64 / slowest.unwrap_or(1).max(1) as f64;
    Duration::from_secs(60) + Duration::try_from_secs_f64(10.0 * slowest_s).unwrap_or_default()
}

pub(super) fn make_arena(objects: &Objects, slots: u32) -> Result<Arc<ExpertArena>, TierError> {
    let slot_bytes = objects.image_bytes() as usize;
    let all = slots as usize * slot_bytes.next_multiple_of(expert_arena::SLOT_ALIGN_BYTES);
    let memory = ForeignMemory::heap(all)?;
    let builder = ArenaBuilder::new().slab(slots, slot_bytes);
    Ok(Arc::new(
        builder.poison(Poison::Marks).foreign(memory).build()?,
    ))
}

pub(super) fn make_orders(
    objects: &Objects,
    arena: &Arc<ExpertArena>,
    setup: &Setup,
    experts: &[u32],
) -> Result<Vec<Order>, TierError> {
    let order = |(slot, &expert): (u32, &u32)| {
        let slot = SlotId { slab: 0, slot };
        Ok(Order {
            key: Key::new(0, expert),
            position: expert as usize,
            layer: objects.layer.clone(),
            content: TAG,
            landing: arena.begin_landing(slot, objects.image_bytes() as usize)?,
            verify: setup.verify,
        })
    };
    (0..).zip(experts).map(order).collect()
}

pub(super) fn make_rails(objects: &Arc<Objects>, setup: &Setup, now: Instant) -> Vec<MockRail> {
    let rail = |(i, spec): (usize, &MockSpec)| {
        let source: Arc<dyn MockSource> = objects.clone();
        let name = format!("mock{i}");
        MockRail::new(name, spec.clone(), source, TAG, i as u64, now)
    };
    setup.rails.iter().enumerate().map(rail).collect()
}

fn start_driver(objects: &Arc<Objects>, setup: &Setup) -> Result<Driver, TierError> {
    let no_resources = |e: std::io::Error| {
        TierError::Config(format!("no thread or descriptor for the rails: {e}"))
    };
    let notifier = Arc::new(Notifier::new().map_err(no_resources)?);
    let mut rails: Vec<Box<dyn Rail>> = Vec::new();
    for rail in make_rails(objects, setup, Instant::now()) {
        let rail = RealRail::start(rail, notifier.clone()).map_err(no_resources)?;
        rails.push(Box::new(rail));
    }
    let driver =
        Driver::start("bench", setup.engine.clone(), rails, notifier).map_err(no_resources)?;
    // All of them: a rail that comes up in the middle is another measurement.
    let limit = Instant::now() + Duration::from_secs(30);
    while driver.stats().rails.iter().any(|r| r.state != "up") {
        if Instant::now() > limit {
            let why = "mock rails did not come up within 30 s".to_owned();
            return Err(TierError::Config(why));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(driver)
}

enum Bench {
    Virtual(Box<Simulated>),
    Real(Driver),
}

impl Bench {
    fn fetch(
        &mut self,
        orders: Vec<Order>,
        patience: Duration,
    ) -> Result<(Finished, Duration), TierError> {
        match self {
            Self::Virtual(simulated) => simulated.fetch(orders, patience),
            Self::Real(driver) => {
                let began = Instant::now();
                let deadline = began + patience;
                let ticket = driver.submit(orders, crate::Class::Demand, deadline);
                match ticket.wait(deadline, Duration::from_secs(5)) {
                    Outcome::Finished(finished) => Ok((finished, began.elapsed())),
                    Outcome::Refused(refused) => Err(TierError::Backpressure {
                        asked: refused.asked,
                        inflight: refused.inflight,
                        limit: refused.limit,
                    }),
                    Outcome::ShutDown => Err(TierError::ShutDown),
                }
            }
        }
    }

    fn rail_bytes(&self) -> Vec<u64> {
        let stats = match self {
            Self::Virtual(simulated) => simulated.engine.stats(),
            Self::Real(driver) => driver.stats(),
        };
        stats.rails.iter().map(|r| r.bytes).collect()
    }
}

/// An engine and rails on a clock that jumps from event to event.
struct Simulated {
    engine: Engine,
    rails: Vec<MockRail>,
    quiescing: Vec<RailId>,
    events: Vec<RailEvent>,
    now: Instant,
}

impl Simulated {
    fn new(objects: &Arc<Objects>, setup: &Setup) -> Self {
        let now = Instant::now(); // only differences count
        let rails = make_rails(objects, setup, now);
        let named = rails
            .iter()
            .map(|r| (r.name().to_owned(), r.kind(), r.capabilities()));
        let engine = Engine::new(setup.engine.clone(), named, 1, now);
        let mut simulated = Self {
            engine,
            rails,
            quiescing: Vec::new(),
            events: Vec::new(),
            now,
        };
        let connected = simulated.rails.iter().map(|r| r.spec.connect).max();
        let limit = now + connected.unwrap_or_default();
        simulated.turn();
        while simulated.now < limit && simulated.step() {}
        simulated
    }

    fn fetch(
        &mut self,
        orders: Vec<Order>,
        patience: Duration,
    ) -> Result<(Finished, Duration), TierError> {
        let began = self.now;
        let submitted = self.engine.submit(began, began + patience, orders);
        submitted.map_err(|(_, refused)| TierError::Backpressure {
            asked: refused.asked,
            inflight: refused.inflight,
            limit: refused.limit,
        })?;
        loop {
            self.turn();
            if let Some(finished) = self.engine.poll_finished() {
                return Ok((finished, self.now - began));
            }
            if !self.step() {
                return Err(TierError::ShutDown); // nothing is to come, and the request is open
            }
        }
    }

    /// To the next event.
    fn step(&mut self) -> bool {
        let rails = self.rails.iter().filter_map(MockRail::next_event);
        let Some(next) = rails.chain(self.engine.next_timeout()).min() else {
            return false;
        };
        self.now = self.now.max(next);
        self.turn();
        true
    }

    /// What a driver does in one turn.
    fn turn(&mut self) {
        let (engine, now) = (&mut self.engine, self.now);
        for (i, rail) in self.rails.iter_mut().enumerate() {
            rail.advance(now);
            rail.poll(&mut self.events);
            for event in self.events.drain(..) {
                engine.handle(now, RailId(i), event);
            }
        }
        let rails = &mut self.rails;
        self.quiescing.retain(|&rail| {
            let is_quiesced = rails[rail.0].is_quiesced();
            if is_quiesced {
                engine.handle_quiesced(now, rail);
            }
            !is_quiesced
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
        engine.post_all(now, |rail, read| rails[rail.0].post(read));
    }
}
