//! What an arena of a given size would do for a given routing: traces, made-up or recorded, are
//! replayed on a virtual clock.
//!
//! ```text
//! file ─► TraceReader ─┐
//! seed ─► SynthTrace  ─┴► Trace ─► replay(Setup) ─► Report: hits, bytes, stalls, prefetch
//!                           ├────► Optimal: the hit rate that no eviction can beat
//!                           └────► smallest(Target): slots that are enough
//! ```
//!
//! Start with [`Trace`] and [`replay`](replay()). Everything here is pure: no clock, no randomness
//! but a seed, and the same result in every run and on every machine.
//!
//! *The model.* A step (one token of one stream, or one of a batch) visits the MoE layers in order.
//! A layer first waits until all of its experts are in the arena, that is its stall; then it
//! computes for a fixed time, while the link prefetches. What the layer uses stays until it is done.
//! The link is one first-in-first-out wire: a READ's first byte comes a latency after it was
//! posted, no more than a window is posted, and what is posted cannot be recalled. READs of demanded
//! records go first; prefetches have at most half of the window (one READ where that is more), so
//! a layer never waits for more than that in front of its own.
//!
//! [`drive`] does the same in earnest: a streamer fetches, and time is the clock's.
//!
//! *Not here*: rails, failures, checksums, the processor's share of moving bytes (`sim`, `mock` and
//! `model` have those), and printing.

mod cache;
mod error;
mod optimal;
mod prefetch;
mod real;
mod run;
mod size;
mod synth;
#[cfg(test)]
mod tests;
mod trace;
mod wire;
mod zipf;

pub use error::TraceError;
pub use optimal::Optimal;
pub use prefetch::Prefetch;
pub use real::{Drive, drive};
pub use run::{LayerHits, Prefetched, Report, Setup, Stall, replay};
pub use size::{Sizing, Target, smallest};
pub use synth::SynthTrace;
pub use trace::{
    FORMAT, Header, LINE_MAX_BYTES, RECORDS_MAX, ROWS_MAX, Row, Trace, TraceReader, USES_MAX,
    write_header, write_row,
};
pub use wire::Link;
