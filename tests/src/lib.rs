//! What the end-to-end tests share: the fixtures and what must come out of them, the built
//! binaries, and ways to look at files that share no code with the store.
//!
//! * [`fixtures`] finds the checkpoints under `tests/fixtures` and reads the oracle's answers.
//! * [`binary`] runs what `cargo build --bins` made and reports exit code and output.
//! * [`killed`] kills programs at random moments of their work.
//! * [`guest`] is for tests inside the guests of `make kernel-test`: the other guest, rails, figures.
//! * [`tensors`] reads safetensors (with the `safetensors` crate) and GGUF (with a parser of its own).
//! * [`walkthrough`] runs the lines of the documentation on two machines.
//! * [`tree`] remembers a folder byte for byte; [`failures`] runs many cases and reports all that failed.
//!
//! Not here: anything that only one file of tests needs.
#![forbid(unsafe_code)]

pub mod binary;
pub mod failures;
pub mod fixtures;
pub mod guest;
pub mod killed;
pub mod net;
pub mod tensors;
pub mod tree;
pub mod walkthrough;
