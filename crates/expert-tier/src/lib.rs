//! The client's side: brings expert records from a peer, or from files, into an arena, and proves
//! that the bytes are the right ones.
//!
//! ```text
//! RdmaTier, UmaTier, PosixTier ─► core: keys → orders ─► driver thread ─► engine (sans-IO) ─► rails
//! ```
//!
//! Start with [`TierBuilder`] and [`ExpertTier`]. Those who add a way to move bytes start with
//! [`rail::Rail`]; those who change when bytes move, with [`engine::Engine`].
//!
//! *Threads*: tiers are `Send + Sync`; calls block up to their deadline. One driver thread per
//! tier owns engine and rails. *Cleanup*: dropping a tier cancels what is under way, gives every
//! READ's memory back, and ends its threads within seconds.
//!
//! Not here: device ordering (`stream` other than 0), printing, exit codes.
#![forbid(unsafe_code)]

pub mod attribution;
pub mod config;
mod control;
mod core;
pub mod coverage;
mod cpu;
mod driver;
pub mod engine;
pub mod env;
pub mod error;
pub mod eviction;
pub mod metrics;
pub mod mock;
pub mod model;
mod notify;
mod peers;
pub mod rail;
mod rails;
mod record;
mod replan;
pub mod replay;
mod seen;
pub mod sim;
mod spin;
pub mod stats;
pub mod streamer;
mod sync;
mod tier;
mod view;

pub use config::{Class, Deadline, EngineConfig, OnFailure, Policy, Verify};
pub use core::{BatchResult, Pending};
pub use error::TierError;
pub use eviction::{Eviction, EvictionPolicy};
pub use expert_wire::auth::Token;
pub use peers::{PeerLook, PeerRail, Sources};
pub use rails::uma::{IoMode, IoReport};
pub use rails::verbs::{RailSlot, RailsWanted, VerbsOptions};
pub use record::Record;
pub use streamer::{ExpertLease, ExpertStreamer, StreamerBuilder, Ticket};
pub use tier::{
    ExpertTier, PosixTier, RdmaTier, TierBuilder, TierKind, UmaTier, largest_image_bytes,
};
