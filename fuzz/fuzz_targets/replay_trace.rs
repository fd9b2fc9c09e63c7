#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| atlas_expert_fuzz::run("replay_trace", input));
