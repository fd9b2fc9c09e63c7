//! Tests between two guests: they run in the client's, and drive the peer's through its agent.
//! `make kernel-test` runs them.

mod smoke;
