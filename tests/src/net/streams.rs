//! What tests of the streamer share.

use std::sync::atomic::Ordering;

use expert_store::Key;
use expert_tier::{ExpertLease, ExpertStreamer, StreamerBuilder};

use super::model::Records;
use super::rig::Rig;

/// A streamer over a rig's backend, with that many slots.
pub fn streamer(rig: &Rig, slots: u32) -> ExpertStreamer {
    let tier = rig.tier(slots);
    StreamerBuilder::new().start(tier).expect("a streamer")
}

/// Panics unless each lease is byte for byte what it must be.
pub fn assert_right(leases: &[ExpertLease], records: &Records) {
    for lease in leases {
        assert!(lease[..] == records[&lease.key()][..], "{}", lease.key());
    }
}

/// Whether a record is in memory.
pub fn is_resident(streamer: &ExpertStreamer, key: Key) -> bool {
    let table = streamer.table(key.layer);
    table.is_some_and(|t| t.slots()[key.expert as usize].load(Ordering::Acquire) >= 0)
}
