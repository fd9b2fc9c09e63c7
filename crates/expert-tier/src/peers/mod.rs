//! Several sources of one model: peers that each hold a part, replicas, a store on this machine.
//!
//! ```text
//! connect ── asks every source ──► group by whole ──► Union: which source has which record
//!    └── one engine, rails of all sources                    ▲
//! watch ◄── what the rails serve ── driver                   │ joins, leaves
//!    └── asks whoever serves something new ──────────────────┘
//! ```
//!
//! *Invariant*: a source takes part only when it was proven: its layers make its content id, and those
//! of a part, with the identities of the records that it lacks, make the ids of the whole. What it
//! then delivers is compared chunk by chunk, as ever.
//!
//! Files: `sources` what a caller names, `union` who has what, `connect` the first meeting, `look` what
//! a peer says of itself, for people, `rails` the rails of all sources, `watch` what comes later.

mod connect;
mod look;
mod rails;
mod sources;
mod union;
mod watch;

pub use look::{PeerLook, PeerRail};
pub use sources::Sources;
pub(crate) use union::Union;
pub(crate) use watch::Watch;
