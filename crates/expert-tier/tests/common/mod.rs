//! An engine with rails that do what they are told at once: for what the engine itself costs.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each user takes a part; nothing of it is public"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, Poison, SlotId};
use expert_store::catalogue::{
    CHUNK_BYTES, Class, Layer, Leaf, Records, Role, Stacking, Transform,
};
use expert_store::{Dtype, Key};
use expert_tier::EngineConfig;
use expert_tier::engine::{Engine, Finished, Order};
use expert_tier::rail::{
    Capabilities, Completion, ContentTag, Landed, RailEvent, RailId, RailKind, Read,
};
use xxhash_rust::xxh3::xxh3_64;

const TAG: ContentTag = ContentTag {
    id: 7,
    instance: None,
};

/// Between two completions: a fast network's, so that the engine sees rates and plans with them.
const STEP: Duration = Duration::from_micros(20);

/// What is fetched: layers of experts, each record of that many chunks, all with the same bytes.
pub struct Catalogue {
    pub layers: Vec<Arc<Layer>>,
    experts: u32,
    image: Vec<u8>,
}

impl Catalogue {
    /// `records` of them, 1000 to a layer.
    pub fn new(records: u32, chunks: u64) -> Self {
        let bytes = chunks * CHUNK_BYTES;
        let image: Vec<u8> = (0..bytes).map(|at| (at ^ (at >> 8)) as u8).collect();
        let sums: Vec<u64> = image.chunks(CHUNK_BYTES as usize).map(xxh3_64).collect();
        let experts = records.min(1000);
        let layer = |layer| {
            let made = Layer::new(
                layer,
                layer,
                experts,
                0,
                vec![class(bytes)],
                (0..experts).collect(),
                vec![],
                Records::Remote,
                Some(sums.repeat(experts as usize)),
                vec![],
            );
            Arc::new(made.expect("a sound layer"))
        };
        Self {
            layers: (0..records.div_ceil(experts)).map(layer).collect(),
            experts,
            image,
        }
    }

    /// The record of a number; every number has one.
    pub fn key(&self, number: u64) -> Key {
        let layer = number / u64::from(self.experts) % self.layers.len() as u64;
        Key::new(layer as u32, (number % u64::from(self.experts)) as u32)
    }
}

fn class(bytes: u64) -> Class {
    Class::layout(vec![Leaf {
        role: Role::Gate,
        leaf: "weight".into(),
        name: "l.{}".into(),
        stacking: Stacking::PerExpert,
        dtype: Dtype::from_name("U8").expect("in the table"),
        shape: vec![bytes],
        source_dim0: 0,
        image_offset: 0,
        bytes,
        transform: Transform::None,
    }])
    .expect("a sound class")
}

/// See the module.
pub struct Hand {
    pub engine: Engine,
    catalogue: Arc<Catalogue>,
    arena: Arc<ExpertArena>,
    verify: bool,
    now: Instant,
    rounds: u64,
    /// READs that the rails hold, with room for all that there can be.
    held: Vec<(RailId, Read)>,
}

impl Hand {
    /// Rails that are up, and slots for `slots` records at a time.
    pub fn new(
        rails: usize,
        config: EngineConfig,
        catalogue: &Arc<Catalogue>,
        slots: u32,
        verify: bool,
    ) -> Self {
        let now = Instant::now();
        let image_bytes = catalogue.image.len();
        let memory = ForeignMemory::heap(slots as usize * image_bytes).expect("memory");
        // Full poison, the default with debug assertions, would be all that is seen.
        let arena = ArenaBuilder::new()
            .slab(slots, image_bytes)
            .poison(Poison::Marks)
            .foreign(memory)
            .build()
            .expect("a sound layout");
        let capabilities = Capabilities {
            read_max_bytes: 1 << 30,
            whole_records: false,
            lanes: 1,
            stall: Duration::from_secs(1),
            rank: 0,
        };
        let named = (0..rails).map(|i| (format!("rail{i}"), RailKind::Mock, capabilities.clone()));
        let mut engine = Engine::new(config, named, 1, now);
        engine.handle_time(now, |_| 0);
        while engine.poll_action().is_some() {}
        for rail in 0..rails {
            engine.handle(now, RailId(rail), RailEvent::Ready(TAG));
        }
        let reads = slots as usize * image_bytes.div_ceil(CHUNK_BYTES as usize);
        Self {
            engine,
            catalogue: catalogue.clone(),
            arena: Arc::new(arena),
            verify,
            now,
            rounds: 0,
            held: Vec::with_capacity(reads),
        }
    }

    /// Orders for these records, in slots from 0 on; what a caller prepares.
    pub fn orders(&self, keys: impl IntoIterator<Item = Key>) -> Vec<Order> {
        let order = |(slot, key): (u32, Key)| {
            let layer = &self.catalogue.layers[key.layer as usize];
            let slot = SlotId { slab: 0, slot };
            let bytes = self.catalogue.image.len();
            Order {
                key,
                position: layer.position(key.expert).expect("held"),
                layer: layer.clone(),
                content: TAG,
                landing: self.arena.begin_landing(slot, bytes).expect("a free slot"),
                verify: self.verify,
            }
        };
        (0..).zip(keys).map(order).collect()
    }

    pub fn submit(&mut self, orders: Vec<Order>) {
        let deadline = self.now + Duration::from_secs(60);
        let submitted = self.engine.submit(self.now, deadline, orders);
        submitted.expect("admitted");
    }

    /// Posts what the windows allow; the number of READs.
    pub fn post(&mut self) -> u64 {
        let before = self.held.len();
        while let Some(posted) = self.engine.next_post(self.now) {
            self.held.push(posted);
        }
        (self.held.len() - before) as u64
    }

    /// Lets everything that is posted land, one READ after the other; with its bytes, where they
    /// are compared.
    pub fn land(&mut self) {
        while let Some((rail, mut read)) = self.held.pop() {
            if self.verify {
                let from = read.range.offset();
                let bytes = &self.catalogue.image[from..from + read.range.len()];
                read.range.write(0, bytes);
            }
            self.now += STEP;
            let result = Ok(Landed::default());
            let completion = Completion { read, result };
            self.engine
                .handle(self.now, rail, RailEvent::Completion(completion));
        }
    }

    /// What a driver does between two rounds.
    pub fn tick(&mut self) {
        // Something moved since the last time, on every rail.
        self.rounds += 1;
        let progress = self.rounds;
        self.engine.handle_time(self.now, |_| progress);
        while self.engine.poll_action().is_some() {}
        std::hint::black_box(self.engine.next_timeout());
    }

    /// Until nothing is left to post; the number of READs.
    pub fn run(&mut self) -> u64 {
        let mut reads = 0;
        loop {
            let posted = self.post();
            if posted == 0 {
                return reads;
            }
            reads += posted;
            self.land();
            self.tick();
        }
    }

    pub fn finished(&mut self) -> Finished {
        let finished = self.engine.poll_finished().expect("the request ended");
        assert!(finished.is_complete(), "{finished:?}");
        finished
    }
}
