//! Tests between two guests: they run in the client's, and drive the peer's through its agent.
//! `make kernel-test` runs them.

mod auth;
mod churn;
mod faults;
mod gate;
mod peer;
mod quickstart;
mod reload;
mod scaling;
mod smoke;
mod takeover;
mod timeouts;
mod wire;
