//! The link of the model: one first-in-first-out wire with a window.

use std::collections::VecDeque;
use std::time::Duration;

use crate::config::EngineConfig;

/// The way from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Rate, at least 1.
    pub bytes_per_s: u64,
    /// From a READ's post to its first byte on an idle link.
    pub latency: Duration,
    /// Bytes posted at a time; one READ may always be.
    pub window_bytes: u64,
    /// Bytes of one READ; the last one of a record may be shorter.
    pub read_bytes: u64,
}

impl Link {
    /// A link on which READs are posted as the fetch engine does by default: what the link carries
    /// in 20 ms, but no more than 4 MiB and no less than two READs.
    pub fn new(bytes_per_s: u64, latency: Duration) -> Self {
        let engine = EngineConfig::default();
        let horizon_bytes = bytes_per_s / 50;
        Self {
            bytes_per_s,
            latency,
            window_bytes: horizon_bytes.clamp(2 * engine.read_bytes, engine.window_bytes),
            read_bytes: engine.read_bytes,
        }
    }
}

/// Why a record is on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Demand = 0,
    Prefetch = 1,
}

/// A record that is not posted to its end.
#[derive(Debug)]
struct Load {
    slot: u32,
    left_bytes: u64,
}

#[derive(Debug)]
struct Posted {
    done_us: f64,
    bytes: u64,
    class: Class,
    slot: u32,
    is_last: bool,
}

#[derive(Debug)]
pub(super) struct Wire {
    now_us: f64,
    /// When the wire has carried all that is posted.
    free_at_us: f64,
    us_per_byte: f64,
    latency_us: f64,
    window_bytes: u64,
    read_bytes: u64,
    /// By class.
    loads: [VecDeque<Load>; 2],
    posted: VecDeque<Posted>,
    /// By class.
    posted_bytes: [u64; 2],
}

impl Wire {
    pub(super) fn new(link: &Link) -> Self {
        Self {
            now_us: 0.0,
            free_at_us: 0.0,
            us_per_byte: 1e6 / link.bytes_per_s as f64,
            latency_us: micros(link.latency),
            window_bytes: link.window_bytes,
            read_bytes: link.read_bytes,
            loads: Default::default(),
            posted: VecDeque::new(),
            posted_bytes: [0; 2],
        }
    }

    pub(super) fn now_us(&self) -> f64 {
        self.now_us
    }

    /// Asks for a record; [`post`](Self::post) then posts what has room.
    pub(super) fn start(&mut self, class: Class, slot: u32, bytes: u64) {
        self.loads[class as usize].push_back(Load {
            slot,
            left_bytes: bytes,
        });
    }

    /// A prefetch that is under way is demanded now: what is left of it goes with the demands.
    pub(super) fn promote(&mut self, slot: u32) {
        let prefetches = &mut self.loads[Class::Prefetch as usize];
        let at = prefetches.iter().position(|load| load.slot == slot);
        if let Some(load) = at.and_then(|at| prefetches.remove(at)) {
            self.loads[Class::Demand as usize].push_back(load);
        }
    }

    /// Posts what has room, demands first.
    pub(super) fn post(&mut self) {
        for class in [Class::Demand, Class::Prefetch] {
            while let Some(load) = self.loads[class as usize].front_mut() {
                let bytes = load.left_bytes.min(self.read_bytes);
                let slot = load.slot;
                if !self.has_room(class, bytes) {
                    return;
                }
                let loads = &mut self.loads[class as usize];
                let is_last = match loads.front_mut() {
                    Some(load) if load.left_bytes > bytes => {
                        load.left_bytes -= bytes;
                        false
                    }
                    _ => {
                        loads.pop_front();
                        true
                    }
                };
                let first_byte_us = self.free_at_us.max(self.now_us + self.latency_us);
                self.free_at_us = first_byte_us + bytes as f64 * self.us_per_byte;
                self.posted_bytes[class as usize] += bytes;
                self.posted.push_back(Posted {
                    done_us: self.free_at_us,
                    bytes,
                    class,
                    slot,
                    is_last,
                });
            }
        }
    }

    /// Whether a prefetch that begins now would be posted at once.
    pub(super) fn has_room_for_prefetch(&self, record_bytes: u64) -> bool {
        self.loads.iter().all(VecDeque::is_empty)
            && self.has_room(Class::Prefetch, record_bytes.min(self.read_bytes))
    }

    fn has_room(&self, class: Class, bytes: u64) -> bool {
        let within = |posted: u64, most: u64| posted == 0 || posted.saturating_add(bytes) <= most;
        let [demanded, prefetched] = self.posted_bytes;
        let half = self.window_bytes / 2;
        within(demanded + prefetched, self.window_bytes)
            && (class == Class::Demand || within(prefetched, half))
    }

    /// When the next READ is complete.
    pub(super) fn next_done_us(&self) -> Option<f64> {
        Some(self.posted.front()?.done_us)
    }

    /// Goes on to the completion of the next READ; the slot whose record it completes, if it does.
    pub(super) fn complete(&mut self) -> Option<u32> {
        let read = self.posted.pop_front()?;
        self.now_us = self.now_us.max(read.done_us);
        self.posted_bytes[read.class as usize] -= read.bytes;
        read.is_last.then_some(read.slot)
    }

    /// Goes on to a time, up to which all completions were taken.
    pub(super) fn go_to(&mut self, time_us: f64) {
        self.now_us = self.now_us.max(time_us);
    }
}

/// A duration as the model counts.
pub(super) fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte takes a microsecond; READs of 10 bytes, 40 of them posted at most.
    fn wire() -> Wire {
        Wire::new(&Link {
            bytes_per_s: 1_000_000,
            latency: Duration::from_micros(5),
            window_bytes: 40,
            read_bytes: 10,
        })
    }

    /// Slots in the order in which their records are complete, with the times.
    fn drain(wire: &mut Wire) -> Vec<(u32, f64)> {
        let mut done = Vec::new();
        loop {
            wire.post();
            if wire.next_done_us().is_none() {
                return done;
            }
            if let Some(slot) = wire.complete() {
                done.push((slot, wire.now_us()));
            }
        }
    }

    #[test]
    fn record_takes_a_latency_and_its_bytes_and_the_next_follows_at_once() {
        let mut wire = wire();
        wire.start(Class::Demand, 1, 25);
        wire.start(Class::Demand, 2, 100);
        assert_eq!(drain(&mut wire), [(1, 30.0), (2, 130.0)]);
    }

    #[test]
    fn small_window_waits_a_latency_between_reads() {
        let mut wire = wire();
        wire.window_bytes = 1;
        wire.start(Class::Demand, 1, 30);
        assert_eq!(drain(&mut wire), [(1, 45.0)]);
    }

    #[test]
    fn demand_waits_for_half_a_window_and_no_more() {
        let mut wire = wire();
        wire.start(Class::Prefetch, 1, 1000);
        wire.post();
        assert_eq!(wire.posted_bytes, [0, 20]);
        assert!(!wire.has_room_for_prefetch(1000));
        wire.start(Class::Demand, 2, 30);
        // 20 bytes in front, then its own 30, then the other 980.
        assert_eq!(drain(&mut wire), [(2, 55.0), (1, 1035.0)]);
    }

    #[test]
    fn prefetch_that_is_demanded_goes_before_others() {
        let mut wire = wire();
        wire.start(Class::Prefetch, 1, 100);
        wire.start(Class::Prefetch, 2, 100);
        wire.post();
        wire.promote(2);
        let order: Vec<u32> = drain(&mut wire).into_iter().map(|(slot, _)| slot).collect();
        assert_eq!(order, [2, 1]);
        // What is posted to its end cannot go faster.
        wire.promote(2);
        assert_eq!(wire.next_done_us(), None);
    }
}
