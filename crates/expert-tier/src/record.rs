//! A fetched record: a lease on its slot together with what its bytes mean.

use std::sync::Arc;
use std::time::Duration;

use expert_arena::{Lease, Residency};
use expert_store::catalogue::{Class, Layer, Leaf};
use expert_wire::Key;

use crate::rail::ContentTag;

/// A record in memory. Its slot is not reused while this lives.
///
/// *Shapes and units*: the bytes are the record image of `docs/store.md`: leaves in canonical
/// order, each at a multiple of 256, zeros between. For a v1 peer it is the record as stored.
#[derive(Debug, Clone)]
pub struct Record {
    pub(crate) key: Key,
    pub(crate) lease: Lease,
    pub(crate) layer: Arc<Layer>,
    pub(crate) position: usize,
    pub(crate) content: ContentTag,
    pub(crate) verified: bool,
    pub(crate) took: Duration,
}

impl Record {
    /// Its name.
    pub fn key(&self) -> Key {
        self.key
    }

    /// The record image.
    pub fn bytes(&self) -> &[u8] {
        &self.lease
    }

    /// The leaves of the image.
    pub fn class(&self) -> &Class {
        self.layer.class(self.position)
    }

    /// One leaf and its bytes, by its index in [`Record::class`].
    pub fn leaf(&self, index: usize) -> Option<(&Leaf, &[u8])> {
        let leaf = self.class().leaves.get(index)?;
        let start = leaf.image_offset as usize;
        Some((leaf, &self.bytes()[start..start + leaf.bytes as usize]))
    }

    /// Whether its checksums were compared at this fetch.
    pub fn is_verified(&self) -> bool {
        self.verified
    }

    /// Time from the request's submission to this record's commit.
    pub fn took(&self) -> Duration {
        self.took
    }

    /// Layout and checksums of its layer.
    pub fn layer(&self) -> &Arc<Layer> {
        &self.layer
    }

    /// What it belongs to: equal for records of one content, and for no others.
    pub fn content(&self) -> ContentTag {
        self.content
    }

    /// The lease below.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Names slot and generation: [`expert_arena::ExpertArena::lease`] gives the bytes again as
    /// long as the slot was not reused, and refuses afterwards.
    pub fn residency(&self) -> Residency {
        self.lease.residency()
    }
}
