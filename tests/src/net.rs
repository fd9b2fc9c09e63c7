//! What the tests of peer and tier share: models small enough to fetch whole, what their records must be, and
//! other sides that misbehave to order.
//!
//! * [`model`] makes checkpoints and reads from their files, with none of the store's code, what each record holds.
//! * [`rig`] puts one behind a backend; [`contract`] is what every backend has to do; [`no_rdma`] what client and peer
//!   do where there are no verbs.
//! * [`gate`] computes a forward pass from what comes, whose hash tells whether each weight is right.
//! * [`parts`] is a model in parts and replicas, [`streams`] what tests of the streamer share.
//! * [`fake`] is a peer with faults, [`proxy`] a network with faults, [`process`] a peer that is a process of its
//!   own, [`raw`] a client that sends what it likes.
//!
//! Everything listens on 127.0.0.1 only, and ends what it started when it is dropped.

pub mod contract;
mod contract_list;
pub mod fake;
pub mod gate;
pub mod model;
pub mod no_rdma;
pub mod pages;
pub mod parts;
pub mod process;
pub mod proxy;
pub mod raw;
pub mod rig;
pub mod streams;

use std::time::{Duration, Instant};

/// Longest time that anything may take which normally takes milliseconds: the machine may be busy.
pub const SLACK: Duration = Duration::from_secs(20);

/// Waits until something is so.
///
/// Panics with `what` where it is not within [`SLACK`].
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + SLACK;
    while !is_so() {
        assert!(Instant::now() < limit, "not within {SLACK:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Numbers that look random and are the same in every run of one seed (splitmix64).
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end as u64) as usize
    }

    /// That many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next_u64() as u8).collect()
    }
}
