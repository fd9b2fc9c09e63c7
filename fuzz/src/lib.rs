//! What the fuzz targets do with an input, apart from the fuzzer that makes the inputs.
//!
//! Each target is a function that takes any bytes and panics when a promise of the code under it
//! is broken: not only "no crash", but that what was accepted keeps its meaning when it is written
//! and read again, lies inside its files, and does not depend on how its bytes were cut.
//!
//! * [`TARGETS`] names them; `fuzz_targets/` hands each to libFuzzer, and `tests/tests/fuzz_corpus.rs`
//!   includes this file and runs the checked-in inputs through it on a stable compiler.
//! * `wire`: frames, messages and the two session state machines. `store`: what a store directory
//!   and a peer say of a store. `checkpoint`: the headers of models. `trace`: routing traces.
//!
//! *Memory*: an input of at most [`INPUT_MAX_BYTES`] may make no single allocation above
//! [`ALLOCATION_MAX_BYTES`]; `scripts/fuzz-smoke` has the fuzzer watch it.
#![forbid(unsafe_code)]

mod checkpoint;
mod store;
mod trace;
mod wire;

/// Longest input that the fuzzer makes, bytes.
pub const INPUT_MAX_BYTES: usize = 64 << 10;

/// Largest single allocation for such an input, bytes. A reader's tables are a few times its
/// input (the widest entry, a tensor of a GGUF file, takes 24 bytes there and about 300 in memory),
/// its fixed buffers below 1 MiB.
pub const ALLOCATION_MAX_BYTES: usize = 32 << 20;

/// Token of the sessions that have one, and the nonces of client and server: the seeds have proofs
/// made with them, which the fuzzer could not guess.
pub const TOKEN: &[u8] = b"a token of the fuzz targets";
/// See [`TOKEN`].
pub const NONCES: [[u8; 32]; 2] = [[1; 32], [2; 32]];

/// A target: its name, which is that of its folder in `corpus`, and what it does.
pub type Target = (&'static str, fn(&[u8]));

/// Every target, in order of name.
pub const TARGETS: &[Target] = &[
    ("checkpoint_config", checkpoint::config),
    ("checkpoint_gguf", checkpoint::gguf),
    ("checkpoint_index", checkpoint::index),
    ("checkpoint_safetensors", checkpoint::safetensors),
    ("replay_trace", trace::replay_trace),
    ("store_info", store::info),
    ("store_layer_blob", store::layer_blob),
    ("store_manifest", store::manifest),
    ("wire_client", wire::client),
    ("wire_frames", wire::frames),
    ("wire_greeting", wire::greeting),
    ("wire_messages", wire::messages),
    ("wire_server", wire::server),
];

/// Runs one input through the target of that name.
///
/// Panics when a promise is broken, or when there is no such target.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|(n, _)| *n == name);
    let (_, body) = target.unwrap_or_else(|| panic!("there is no fuzz target {name:?}"));
    body(&input[..input.len().min(INPUT_MAX_BYTES)]);
}
