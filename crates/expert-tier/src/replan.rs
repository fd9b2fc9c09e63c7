//! A second try for records whose content changed on the way: planned anew, from what is served now.
//!
//! *Invariant*: contents are never mixed within a record. The second try is a request like any
//! other, with orders of the new content and landings of its own; what the first one brought is
//! gone with its landing. Records of one batch may come from both contents: [`Record::content`]
//! tells which.

use std::time::{Duration, Instant};

use expert_arena::{SlotId, SlotState};
use expert_wire::Key;

use crate::config::Class;
use crate::core::{BatchResult, Core, Pending};
use crate::engine::until;
use crate::error::TierError;
use crate::record::Record;

/// Between two looks at slots that READs of the first try may still write to: short against the
/// time in which a rail gives them back, long against a look.
const LOOK: Duration = Duration::from_millis(2);

/// A record to fetch again: its place in the batch, its name and its slot.
type Member = (usize, Key, SlotId);

/// Fetches the records of a batch that ended with [`TierError::ContentChanged`] once more, each into
/// its slot, within what is left until `deadline`. Those that cannot be begun anew (the new content
/// has no such record, or is not the one insisted on, or the slot is too small or not free in time)
/// keep that error.
pub(crate) fn fetch_again(
    core: &Core,
    batch: &[(Key, SlotId)],
    deadline: Instant,
    result: &mut BatchResult,
) {
    let (records, stats) = result;
    let began = Instant::now();
    let mut waiting = changed(records, batch);
    if waiting.is_empty() || began >= deadline {
        return;
    }
    retain_known(core, deadline, &mut waiting);
    let mut under_way: Vec<(Vec<Member>, Duration, Pending)> = Vec::new();
    while !waiting.is_empty() {
        let is_free = |m: &Member| core.arena().slot_state(m.2) == Some(SlotState::Free);
        let (free, rest): (Vec<Member>, Vec<Member>) = waiting.into_iter().partition(is_free);
        waiting = rest;
        let now = Instant::now();
        let left = until(now, deadline);
        if left.is_zero() {
            break;
        }
        if !free.is_empty() {
            let batch: Vec<(Key, SlotId)> = free.iter().map(|m| (m.1, m.2)).collect();
            match core.submit(&batch, Class::Demand, Some(left)) {
                Ok(pending) => under_way.push((free, now - began, pending)),
                Err(why) => tracing::warn!("changed records are not fetched again: {why}"),
            }
        }
        if !waiting.is_empty() {
            std::thread::sleep(LOOK.min(left));
        }
    }
    let (before, mut count) = (stats.total, 0);
    for (members, after, pending) in under_way {
        let (again, more) = match pending.wait() {
            Ok(ended) => ended,
            Err(why) => {
                tracing::warn!("changed records are not fetched again: {why}");
                continue;
            }
        };
        count += again.len() as u64;
        for ((place, ..), mut record) in members.into_iter().zip(again) {
            if let Ok(record) = &mut record {
                record.took += before + after;
            }
            records[place] = record;
        }
        stats.bytes += more.bytes;
        stats.reads += more.reads;
        stats.retries += more.retries;
        stats.verify += more.verify;
        if more.total > before {
            stats.limit = more.limit;
        }
    }
    let took = began.elapsed();
    stats.wire += took;
    stats.total += took;
    if count > 0 {
        core.note_replanned(count);
        tracing::warn!("the content of {count} records changed under way: they were fetched again");
    }
}

fn changed(records: &[Result<Record, TierError>], batch: &[(Key, SlotId)]) -> Vec<Member> {
    let pairs = records.iter().zip(batch).enumerate();
    let changed = pairs.filter(|(_, (r, _))| matches!(r, Err(TierError::ContentChanged { .. })));
    changed
        .map(|(place, (_, &(key, slot)))| (place, key, slot))
        .collect()
}

/// Leaves out what the new content does not hold, or what does not fit its slot any more.
fn retain_known(core: &Core, deadline: Instant, members: &mut Vec<Member>) {
    let view = match core.current_view(deadline) {
        Ok(view) => view,
        Err(why) => {
            tracing::warn!("changed records are not fetched again: {why}");
            members.clear();
            return;
        }
    };
    members.retain(|&(_, key, slot)| match view.find(key, deadline) {
        Ok((layer, position)) => {
            let need = layer.class(position).image_bytes;
            core.arena().slot_bytes(slot.slab) as u64 >= need
        }
        Err(why) => {
            tracing::debug!("{key} is not fetched again: {why}");
            false
        }
    });
}
