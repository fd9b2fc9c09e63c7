//! The bound: the fewest records that any eviction policy fetches.

use std::collections::BinaryHeap;

use super::run::share;
use super::trace::Trace;

/// Belady's algorithm over a trace: what is needed again last is given up first.
///
/// Without prefetch no policy has more hits. With prefetch hits can be more, because records come
/// before they are asked for; no fewer of them are moved, though. After a warm-up the arena is
/// taken to hold the records that are needed soonest: nothing better can be there, and no policy
/// may have got that far, so the bound is one, and less tight. *Source*: L. A. Belady, "A study
/// of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966; here
/// a request is for all experts of a layer at once, and none of them is given up for another.
#[derive(Debug)]
pub struct Optimal<'a> {
    trace: &'a Trace,
    /// By use: the next row that uses the same record, [`NEVER`] for none.
    next_row: Vec<u32>,
    /// The first row that is counted, and its first use.
    first: (usize, usize),
}

const NEVER: u32 = u32::MAX;

impl<'a> Optimal<'a> {
    /// Looks at the trace once, for any number of slots; the first steps are not counted.
    pub fn new(trace: &'a Trace, warm_up_steps: u32) -> Self {
        let mut next_row = vec![NEVER; trace.uses() as usize];
        let mut next_of = vec![NEVER; trace.records() as usize];
        let mut end = next_row.len();
        for index in (0..trace.row_count()).rev() {
            let records = trace.row(index).records;
            let begin = end - records.len();
            for (next, &record) in next_row[begin..end].iter_mut().zip(records) {
                *next = std::mem::replace(&mut next_of[record as usize], index as u32);
            }
            end = begin;
        }
        let mut first = (0, 0);
        while first.0 < trace.row_count() && trace.row(first.0).step < warm_up_steps {
            first.1 += trace.row(first.0).records.len();
            first.0 += 1;
        }
        Self {
            trace,
            next_row,
            first,
        }
    }

    /// Fewest records fetched with that many slots, of which there are at least
    /// [`Trace::widest`].
    pub fn misses(&self, slots: u32) -> u64 {
        let mut misses = 0;
        let mut held = 0;
        // By record: the next row that uses it, while it is held.
        let mut due = vec![None; self.trace.records() as usize];
        // Next uses of held records; an entry counts while it says what `due` says.
        let mut latest = BinaryHeap::new();
        let mut kept = Vec::new();
        let (first_row, mut begin) = self.first;
        let rows = first_row..self.trace.row_count();
        if first_row > 0 {
            let soonest = rows.clone().flat_map(|index| {
                let records = self.trace.row(index).records.iter();
                records.map(move |&record| (index as u32, record))
            });
            for (index, record) in soonest {
                if held < slots && due[record as usize].is_none() {
                    due[record as usize] = Some(index);
                    latest.push((index, record));
                    held += 1;
                }
            }
        }
        for index in rows {
            let records = self.trace.row(index).records;
            let next_rows = &self.next_row[begin..begin + records.len()];
            begin += records.len();
            for (&record, &next) in records.iter().zip(next_rows) {
                if due[record as usize].replace(next).is_none() {
                    misses += 1;
                    held += 1;
                }
                latest.push((next, record));
            }
            while held > slots {
                let Some((next, record)) = latest.pop() else {
                    break;
                };
                if due[record as usize] != Some(next) {
                    continue;
                }
                if records.contains(&record) {
                    kept.push((next, record));
                    continue;
                }
                due[record as usize] = None;
                held -= 1;
            }
            latest.extend(kept.drain(..));
            // Each hit leaves an entry behind that no longer counts.
            if latest.len() > 4 * held as usize + 1024 {
                latest.retain(|&(next, record): &(u32, u32)| due[record as usize] == Some(next));
            }
        }
        misses
    }

    /// The best hit rate with that many slots and no prefetch.
    pub fn hit_rate(&self, slots: u32) -> f64 {
        let uses = self.trace.uses() - self.first.1 as u64;
        share(uses - self.misses(slots), uses)
    }
}
