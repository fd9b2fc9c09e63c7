//! What outlives an attempt: events for the driver, and what is known of the peer's catalogue.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use expert_store::Layer;
use expert_wire::Key;

use super::LayerSlot;
use crate::config::Class;
use crate::notify::Notifier;
use crate::rail::{Completion, ContentTag, Landed, RailEvent, Read, ReadError, ReadId};
use crate::sync::lock;

/// So many posts in a row that were over when the call returned are no chance: a READ that ends just then
/// makes one of them look so.
const EAGER_POSTS: u32 = 3;

/// What threads of all attempts share with the driver.
pub(in crate::rails::verbs) struct RailShared {
    events: Mutex<Vec<RailEvent>>,
    pub(super) notifier: Arc<Notifier>,
    pub(super) landed: AtomicU64,
    /// Posts in a row that were carried out before the call returned.
    eager_posts: AtomicU32,
    start: Instant,
    /// Layers of the peer's catalogue, for as long as it is the same run and epoch of the peer.
    known: Mutex<KnownLayers>,
}

#[derive(Default)]
struct KnownLayers {
    run: Option<(u64, u32)>,
    layers: HashMap<u32, Arc<Layer>>,
}

impl RailShared {
    pub(in crate::rails::verbs) fn new(notifier: Arc<Notifier>) -> Self {
        Self {
            events: Mutex::new(Vec::new()),
            notifier,
            landed: AtomicU64::new(0),
            eager_posts: AtomicU32::new(0),
            start: Instant::now(),
            known: Mutex::default(),
        }
    }

    pub(in crate::rails::verbs) fn take_events(&self, sink: &mut Vec<RailEvent>) {
        sink.append(&mut lock(&self.events));
    }

    pub(in crate::rails::verbs) fn landed_bytes(&self) -> u64 {
        self.landed.load(Ordering::Relaxed)
    }

    /// Whether the device carries READs out in the call that posts them.
    pub(super) fn is_eager(&self) -> bool {
        self.eager_posts.load(Ordering::Relaxed) >= EAGER_POSTS
    }

    /// Notes whether one was.
    pub(super) fn note_post(&self, was_eager: bool) {
        match was_eager {
            true => self.eager_posts.fetch_add(1, Ordering::Relaxed),
            false => self.eager_posts.swap(0, Ordering::Relaxed),
        };
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// What is known already of the layers of this run and epoch of the peer.
    pub(super) fn layers_of(&self, run: (u64, u32)) -> HashMap<u32, LayerSlot> {
        let mut known = lock(&self.known);
        if known.run != Some(run) {
            known.run = Some(run);
            known.layers.clear();
        }
        let slots = known.layers.iter();
        slots
            .map(|(&layer, known)| (layer, LayerSlot::Known(known.clone())))
            .collect()
    }

    pub(super) fn note_layer(&self, run: (u64, u32), layer: &Arc<Layer>) {
        let mut known = lock(&self.known);
        if known.run == Some(run) {
            known.layers.insert(layer.layer, layer.clone());
        }
    }

    pub(in crate::rails::verbs) fn push(&self, event: RailEvent) {
        lock(&self.events).push(event);
        self.notifier.notify();
    }

    pub(super) fn complete(&self, read: Read, result: Result<Landed, ReadError>) {
        self.push(RailEvent::Completion(Completion { read, result }));
    }
}

/// A READ without its range, while the range is with a queue.
pub(in crate::rails::verbs) struct Token {
    id: ReadId,
    pub(super) key: Key,
    position: usize,
    layer: Arc<Layer>,
    content: ContentTag,
    verify: bool,
    class: Class,
    posted_at: Instant,
    /// Layer and position in the peer's catalogue; `None` for v1.
    pub(super) peer: Option<(Arc<Layer>, usize)>,
}

impl Token {
    pub(super) fn split(
        read: Read,
        peer: Option<(Arc<Layer>, usize)>,
    ) -> (Self, expert_arena::LandingRange) {
        let token = Self {
            id: read.id,
            key: read.key,
            position: read.position,
            layer: read.layer,
            content: read.content,
            verify: read.verify,
            class: read.class,
            posted_at: read.posted_at,
            peer,
        };
        (token, read.range)
    }

    pub(super) fn join(self, range: expert_arena::LandingRange) -> Read {
        Read {
            id: self.id,
            key: self.key,
            position: self.position,
            layer: self.layer,
            content: self.content,
            range,
            verify: self.verify,
            class: self.class,
            posted_at: self.posted_at,
        }
    }
}
