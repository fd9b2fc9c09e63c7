//! Numbers as Prometheus text, and the small HTTP server that shows them.
//!
//! * [`Page`] collects samples and renders the text format 0.0.4.
//! * [`Durations`] counts durations from several threads; [`Buckets`] is what a histogram shows.
//! * [`http::Server`] answers `GET` with what a closure returns.
//!
//! Not here: which numbers there are. Who has them renders them: `expert_peer` a peer's,
//! `expert_tier::metrics` a client's.
//!
//! *Threads*: a [`Durations`] may be shared; a server has one thread, which ends when it is dropped.
#![forbid(unsafe_code)]

mod durations;
pub mod http;
mod page;
mod table;

pub use durations::{Buckets, Durations};
pub use page::{CONTENT_TYPE, Page, Samples};
pub use table::differences;
