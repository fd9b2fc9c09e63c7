//! The gate: a forward pass over streamed experts, and whether what was moved is what was needed.

use std::sync::Arc;
use std::time::Duration;

use expert_arena::{ArenaBuilder, Poison};
use expert_store::Store;
use expert_store::info::StoreInfo;
use expert_tier::{ExpertStreamer, largest_image_bytes};

use crate::{Forward, MoeError, Resident, Spec, Streamed, Use, expected_misses};

/// What one run found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Hash of the output, see [`Forward::hash`].
    pub hash: u128,
    /// Passes through all layers.
    pub steps: u32,
    /// Records that were needed, over all layers and steps.
    pub needed: u64,
    /// The experts that each layer needed, step by step.
    pub uses: Vec<Use>,
    /// What was moved, where experts were streamed.
    pub moved: Option<Moved>,
}

/// What a streamer and its tier counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Records that the arena has room for.
    pub slots: u64,
    /// Needed records that were in memory.
    pub hits: u64,
    /// Needed records that were not.
    pub misses: u64,
    /// How many of them the routing makes certain.
    pub misses_certain: u64,
    /// Records fetched.
    pub fetched: u64,
    /// Misses times the bytes of a record.
    pub missed_bytes: u64,
    /// Bytes that the rails brought.
    pub transferred_bytes: u64,
    /// Records whose fetch failed.
    pub failed: u64,
    /// Records whose checksums were not compared.
    pub unverified: u64,
}

impl Moved {
    /// What does not add up; nothing where each record was really brought, whole and once for each miss.
    pub fn contradictions(&self, needed: u64) -> Vec<String> {
        let mut found = Vec::new();
        let mut check = |is_so: bool, text: String| {
            if !is_so {
                found.push(text);
            }
        };
        let Self { hits, misses, .. } = *self;
        check(
            hits + misses == needed,
            format!("{needed} records were needed, {hits} were found and {misses} missed"),
        );
        check(
            self.fetched == misses,
            format!("{misses} records missed, {} fetched", self.fetched),
        );
        check(
            self.transferred_bytes == self.missed_bytes,
            format!(
                "{} bytes transferred, {misses} misses make {} bytes of records",
                self.transferred_bytes, self.missed_bytes
            ),
        );
        check(
            misses >= self.misses_certain,
            format!(
                "{misses} records missed, but {} cannot have been among the {} in memory",
                self.misses_certain, self.slots
            ),
        );
        found
    }
}

/// An arena for a gate: room for what `layers` layers need at most at once, in slots that are full of NaN before a
/// record lands and again as soon as it is given up, so that a read at the wrong time cannot go unnoticed.
///
/// *Errors*: [`MoeError::Spec`] where that is no arena.
pub fn arena(info: &StoreInfo, spec: &Spec, layers: u32) -> Result<ArenaBuilder, MoeError> {
    let experts = |ranges: &[[u32; 2]]| ranges.iter().map(|[a, b]| (b - a) as usize).sum();
    let most = info.layers.iter().map(|l| experts(&l.experts)).max();
    let slots = spec.experts_at_once(most.unwrap_or(0));
    let slots = u32::try_from(slots)
        .ok()
        .and_then(|n| n.checked_mul(layers));
    let bytes = usize::try_from(largest_image_bytes(info)).unwrap_or(usize::MAX);
    match slots {
        Some(slots) if slots > 0 => Ok(ArenaBuilder::new()
            .slab(slots, bytes)
            .poison(Poison::Full)
            .poison_freed(true)),
        _ => Err(MoeError::Spec(format!(
            "an arena for {layers} layers of {} experts each at once",
            most.unwrap_or(0)
        ))),
    }
}

/// Hears of each step and the hash so far; an error ends the run.
pub type After<'a> = &'a mut dyn FnMut(u32, u128) -> Result<(), MoeError>;

/// Runs `steps` steps with all experts in memory.
///
/// *Errors*: as [`Resident::load`] and [`Forward::step`].
pub fn run_resident(
    store: &Store,
    spec: Spec,
    steps: u32,
    after: After<'_>,
) -> Result<Report, MoeError> {
    let mut forward = Forward::new(Resident::load(store)?, spec)?;
    run(&mut forward, steps, after)?;
    Ok(report(&forward, steps, None))
}

/// Runs `steps` steps over a new streamer; `time` is for the experts of one layer.
///
/// *Errors*: as [`Forward::step`]. What was moved and does not add up is no error here: see
/// [`Moved::contradictions`].
pub fn run_streamed(
    streamer: &ExpertStreamer,
    spec: Spec,
    steps: u32,
    time: Duration,
    after: After<'_>,
) -> Result<Report, MoeError> {
    let mut forward = Forward::new(Streamed::new(streamer, time), spec)?;
    run(&mut forward, steps, after)?;
    let (streamed, tier) = (streamer.stats(), streamer.tier().stats());
    let arena: &Arc<_> = streamer.arena();
    let slots = (0..arena.num_slabs())
        .map(|slab| arena.slots(slab))
        .sum::<u32>();
    let certain = expected_misses(forward.uses(), slots as usize);
    let moved = Moved {
        slots: slots.into(),
        hits: streamed.hits,
        misses: streamed.misses,
        misses_certain: *certain.start(),
        fetched: streamed.fetched,
        missed_bytes: forward.experts().missed_bytes(),
        transferred_bytes: tier.rails.iter().map(|rail| rail.bytes).sum(),
        failed: tier.failed,
        unverified: tier.unverified,
    };
    Ok(report(&forward, steps, Some(moved)))
}

fn run<E: crate::Experts>(
    forward: &mut Forward<E>,
    steps: u32,
    after: After<'_>,
) -> Result<(), MoeError> {
    for step in 1..=steps {
        forward.step()?;
        after(step, forward.hash())?;
    }
    Ok(())
}

fn report<E: crate::Experts>(forward: &Forward<E>, steps: u32, moved: Option<Moved>) -> Report {
    Report {
        hash: forward.hash(),
        steps,
        needed: forward.uses().iter().map(|u| u.experts.len() as u64).sum(),
        uses: forward.uses().to_vec(),
        moved,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten records needed, four of them in memory already, each of 100 bytes.
    const SOUND: Moved = Moved {
        slots: 5,
        hits: 4,
        misses: 6,
        misses_certain: 5,
        fetched: 6,
        missed_bytes: 600,
        transferred_bytes: 600,
        failed: 0,
        unverified: 0,
    };

    #[test]
    fn run_that_adds_up_has_no_contradictions() {
        assert_eq!(SOUND.contradictions(10), [""; 0]);
    }

    #[test]
    fn each_way_not_to_have_fetched_what_was_computed_with_is_named() {
        let cases = [
            // Records from somewhere else: bytes that no rail brought.
            (
                Moved {
                    transferred_bytes: 500,
                    ..SOUND
                },
                "500 bytes transferred",
            ),
            (
                Moved {
                    fetched: 5,
                    ..SOUND
                },
                "6 records missed, 5 fetched",
            ),
            (Moved { hits: 3, ..SOUND }, "10 records were needed"),
            // Found in memory more often than memory allows.
            (
                Moved {
                    misses_certain: 7,
                    ..SOUND
                },
                "7 cannot have been",
            ),
        ];
        for (moved, text) in cases {
            let found = moved.contradictions(10);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].contains(text), "{found:?}");
        }
    }

    #[test]
    fn arena_has_room_for_what_the_layers_need_at_once() {
        let info = |experts| StoreInfo {
            kind: expert_store::info::StoreKind::Packed,
            stack: "layers".into(),
            class: expert_store::catalogue::StackClass::Trunk,
            container: expert_store::Container::Safetensors,
            generation: 1,
            content_id: None,
            whole: None,
            layout_id: String::new(),
            layers: vec![expert_store::info::LayerInfo {
                layer: 0,
                model_layer: 0,
                num_experts: 64,
                identity_experts: 0,
                experts: vec![[0, experts]],
                image_bytes_max: 4096,
                id: String::new(),
            }],
        };
        let spec = Spec {
            tokens: 3,
            top_k: 4,
            seed: 0,
        };
        let slots = |experts, layers| {
            let arena = arena(&info(experts), &spec, layers).map(|a| a.reserve_bytes(Some(0)));
            arena.map(|a| a.build().unwrap().slots(0))
        };
        assert_eq!(slots(64, 2).unwrap(), 24);
        assert_eq!(slots(5, 2).unwrap(), 10);
        assert!(matches!(slots(5, 0), Err(MoeError::Spec(_))));
        assert!(matches!(slots(5, u32::MAX), Err(MoeError::Spec(_))));
    }
}
