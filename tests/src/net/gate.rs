//! A forward pass from streamed experts, and from the same ones read without the store: their hashes must agree.

use std::sync::Arc;

use expert_moe::gate::{self, Report};
use expert_moe::{Expert, Experts, Forward, MoeError, Spec};
use expert_store::catalogue::Class;
use expert_store::info::StoreInfo;
use expert_store::{Key, Store};
use expert_tier::{ExpertTier, StreamerBuilder, TierBuilder};

use super::SLACK;
use super::model::{Records, Sizes};
use super::rig::Rig;

/// Eight tokens that need nearly all of the six experts of each of four layers: two layers' records never stay.
pub const SPEC: Spec = Spec {
    tokens: 8,
    top_k: 4,
    seed: 5,
};

/// The same for `atlas-expert gate`, in a machine that may have little memory to spare.
pub const FLAGS: [&str; 8] = [
    "--tokens",
    "8",
    "--top-k",
    "4",
    "--seed",
    "5",
    "--reserve-gb",
    "0",
];

/// What [`SPEC`] is made for: 24 records of 317,184 bytes.
pub const SIZES: Sizes = Sizes {
    layers: 4,
    experts: 6,
    hidden: 264,
    inter: 200,
    seed: 3,
};

/// The same for a machine that emulates its processor: 24 records of 196,608 bytes.
pub const SIZES_SMALL: Sizes = Sizes {
    hidden: 256,
    inter: 128,
    ..SIZES
};

/// Passes through all layers.
pub const STEPS: u32 = 3;

/// Says nothing after each step.
pub fn quiet(_: u32, _: u128) -> Result<(), MoeError> {
    Ok(())
}

/// The run of a rig's backend, through an arena of two layers.
pub fn run_over(rig: &Rig, builder: TierBuilder) -> Report {
    let arena = gate::arena(rig.store.info(), &SPEC, 2).expect("an arena");
    // A busy machine may have little to spare.
    let arena = arena.reserve_bytes(Some(0)).build().expect("memory");
    let tier = rig.connect(builder, Arc::new(arena)).expect("a tier");
    run_tier(tier)
}

/// The same of a tier with an arena of [`gate::arena`].
pub fn run_tier(tier: Box<dyn ExpertTier>) -> Report {
    let streamer = StreamerBuilder::new().start(tier);
    let streamer = streamer.expect("a streamer");
    gate::run_streamed(&streamer, SPEC, STEPS, SLACK, &mut quiet).expect("a run")
}

/// The hash of records that some other program read.
pub fn hash_of_records(store: &Store, records: &Records) -> u128 {
    let mut forward = Forward::new(Apart { store, records }, SPEC).expect("a model");
    for _ in 0..STEPS {
        forward.step().expect("a step");
    }
    forward.hash()
}

/// Panics unless each record was fetched each time that it was needed, once, and nothing else was.
pub fn assert_all_was_fetched(report: &Report, record_bytes: u64) {
    let moved = report.moved.expect("experts were streamed");
    assert_eq!(moved.contradictions(report.needed), [""; 0]);
    assert_eq!((moved.hits, moved.misses), (0, report.needed), "{moved:?}");
    assert_eq!(moved.misses_certain, report.needed, "{moved:?}");
    assert_eq!(moved.transferred_bytes, report.needed * record_bytes);
    assert_eq!((moved.failed, moved.unverified), (0, 0), "{moved:?}");
}

/// Records that are not the store's; what they are made of it says.
struct Apart<'a> {
    store: &'a Store,
    records: &'a Records,
}

impl Experts for Apart<'_> {
    fn info(&self) -> StoreInfo {
        self.store.info().clone()
    }

    fn class(&self, key: Key) -> Result<Class, MoeError> {
        let (layer, position) = self.store.locate(key)?;
        Ok(layer.class(position).clone())
    }

    fn hold(
        &mut self,
        layer: u32,
        experts: &[u32],
        work: &mut dyn FnMut(&[Expert<'_>]) -> Result<(), MoeError>,
    ) -> Result<(), MoeError> {
        let classes = experts.iter().map(|&e| self.class(Key::new(layer, e)));
        let classes = classes.collect::<Result<Vec<Class>, _>>()?;
        let held: Vec<Expert<'_>> = experts
            .iter()
            .zip(&classes)
            .map(|(&expert, class)| {
                let key = Key::new(layer, expert);
                let image = &self.records[&key];
                Expert { key, class, image }
            })
            .collect();
        work(&held)
    }
}
