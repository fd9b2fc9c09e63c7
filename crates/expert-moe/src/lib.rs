//! A consumer of expert records: a mixture-of-experts block, computed on the CPU straight from leased memory.
//!
//! ```text
//! hidden states ─► norm ─► router ─► top-k ─► experts held ─► gate, up, SiLU, down ─► weighted sum ─► hash
//!                                                └─ Streamed: leases of an ExpertStreamer, no copy
//!                                                └─ Resident: all records, read once from a store
//! ```
//!
//! Start with [`Forward`], over [`Streamed`] or [`Resident`] experts; [`gate`] runs one, counts what was fetched, and
//! says what does not add up. Hidden states, norms and routers come from a seed: only the experts are a model's.
//!
//! *Determinism*: one thread, sums in a fixed order. Two runs on one machine give the same hash exactly if every weight
//! that was read had the same bits, however the records came. Between machines hashes may differ, because the
//! exponential is that of the system's mathematics library.
//!
//! Not here: attention, quantised weights, speed beyond what a demonstration needs, printing.
#![forbid(unsafe_code)]

mod error;
mod experts;
mod forward;
pub mod gate;
mod math;
mod projections;
mod random;
mod reuse;

pub use error::MoeError;
pub use experts::{Expert, Experts, Resident, Streamed};
pub use forward::{Forward, Spec, Use};
pub use reuse::expected_misses;
