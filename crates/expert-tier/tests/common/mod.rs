//! What the tests and the benchmark of the engine share: records to fetch, and [`Hand`], an engine with
//! rails that do what they are told at once.

#![allow(dead_code, reason = "each user takes a part")]

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

/// The content that is served where a test says nothing else.
pub(crate) const TAG: ContentTag = ContentTag {
    id: 7,
    instance: None,
};

/// Between two completions: a fast network's, so that the engine sees rates and plans with them.
const STEP: Duration = Duration::from_micros(20);

/// Distance of two images in the common buffer: prime, so that no two look alike at any offset.
const IMAGE_DISTANCE: usize = 1009;

/// What is fetched: layers of experts, all records of one size; no two experts have the same bytes,
/// nor have two contents.
pub(crate) struct Catalogue {
    pub(crate) layers: Vec<Arc<Layer>>,
    experts: u32,
    image_bytes: usize,
    bytes: Vec<u8>,
}

impl Catalogue {
    /// `records` of them, 1000 to a layer, of `record_bytes` each.
    pub(crate) fn new(records: u32, record_bytes: u64) -> Self {
        let experts = records.min(1000);
        let class = class(record_bytes);
        let image_bytes = class.image_bytes as usize;
        // Twice as many windows as experts: see `image`.
        let mut random = Numbers(0x00c0_ffee);
        let bytes = image_bytes + 2 * experts as usize * IMAGE_DISTANCE;
        let mut catalogue = Self {
            layers: Vec::new(),
            experts,
            image_bytes,
            bytes: std::iter::repeat_with(|| random.next().to_le_bytes())
                .take(bytes.div_ceil(8))
                .flatten()
                .collect(),
        };
        let sums: Vec<u64> = (0..experts)
            .flat_map(|expert| catalogue.image(TAG, expert).chunks(CHUNK_BYTES as usize))
            .map(xxh3_64)
            .collect();
        let layer = |layer| {
            let made = Layer::new(
                layer,
                layer,
                experts,
                0,
                vec![class.clone()],
                (0..experts).collect(),
                vec![],
                Records::Remote,
                Some(sums.clone()),
                vec![],
            );
            Arc::new(made.expect("a sound layer"))
        };
        catalogue.layers = (0..records.div_ceil(experts)).map(layer).collect();
        catalogue
    }

    /// Bytes of each record's image.
    pub(crate) fn image_bytes(&self) -> usize {
        self.image_bytes
    }

    /// The image of an expert's record; layers do not differ.
    pub(crate) fn image(&self, content: ContentTag, expert: u32) -> &[u8] {
        let window = match content == TAG {
            true => expert,
            false => self.experts + expert,
        };
        &self.bytes[window as usize * IMAGE_DISTANCE..][..self.image_bytes]
    }

    /// The record of a number; every number has one.
    pub(crate) fn key(&self, number: u64) -> Key {
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
pub(crate) struct Hand {
    pub(crate) engine: Engine,
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
    pub(crate) fn new(
        rails: usize,
        config: EngineConfig,
        catalogue: &Arc<Catalogue>,
        slots: u32,
        verify: bool,
    ) -> Self {
        let now = Instant::now();
        let image_bytes = catalogue.image_bytes();
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
            pieces: 1,
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
    pub(crate) fn orders(&self, keys: impl IntoIterator<Item = Key>) -> Vec<Order> {
        let order = |(slot, key): (u32, Key)| {
            let layer = &self.catalogue.layers[key.layer as usize];
            let slot = SlotId { slab: 0, slot };
            let bytes = self.catalogue.image_bytes();
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

    pub(crate) fn submit(&mut self, orders: Vec<Order>) {
        let deadline = self.now + Duration::from_secs(60);
        let submitted = self.engine.submit(self.now, deadline, orders);
        submitted.expect("admitted");
    }

    /// Posts what the windows allow; the number of READs.
    pub(crate) fn post(&mut self) -> u64 {
        let before = self.held.len();
        while let Some(posted) = self.engine.next_post(self.now) {
            self.held.push(posted);
        }
        (self.held.len() - before) as u64
    }

    /// Lets everything that is posted land, one READ after the other; with its bytes, where they
    /// are compared.
    pub(crate) fn land(&mut self) {
        while let Some((rail, mut read)) = self.held.pop() {
            if self.verify {
                let from = read.range.offset();
                let image = self.catalogue.image(TAG, read.key.expert);
                read.range.write(0, &image[from..from + read.range.len()]);
            }
            self.now += STEP;
            let result = Ok(Landed::default());
            let completion = Completion { read, result };
            self.engine
                .handle(self.now, rail, RailEvent::Completion(completion));
        }
    }

    /// What a driver does between two rounds.
    pub(crate) fn tick(&mut self) {
        // Something moved since the last time, on every rail.
        self.rounds += 1;
        let progress = self.rounds;
        self.engine.handle_time(self.now, |_| progress);
        while self.engine.poll_action().is_some() {}
        std::hint::black_box(self.engine.next_timeout());
    }

    /// Until nothing is left to post; the number of READs.
    pub(crate) fn run(&mut self) -> u64 {
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

    pub(crate) fn finished(&mut self) -> Finished {
        let finished = self.engine.poll_finished().expect("the request ended");
        assert!(finished.is_complete(), "{finished:?}");
        finished
    }
}

/// Numbers that look random and are the same in every run (splitmix64).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
