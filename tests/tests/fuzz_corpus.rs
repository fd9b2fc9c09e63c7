//! The fuzz targets' inputs on the compiler that everything else is built with: what the fuzzer
//! starts from (`fuzz/corpus`), and what it once found (`fuzz/regressions`).
//!
//! `make fuzz-smoke` runs the same functions on inputs that it makes up.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use expert_wire::auth::Token;
use expert_wire::client::{Handshake, Outcome, Protocol};
use expert_wire::message::Role;
use expert_wire::server::{Event, ServerSession};

// Included and not linked: the package of the targets needs libFuzzer, which is C++.
#[path = "../../fuzz/src/lib.rs"]
#[allow(unreachable_pub, reason = "it is the root of a library elsewhere")]
mod fuzz;

fn fuzz_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

/// Names of what lies in a directory, none if there is no directory.
fn names(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().into_string().expect("a name in UTF-8"))
        .collect()
}

#[test]
fn every_checked_in_input_keeps_every_promise() {
    let mut failed = Vec::new();
    let mut inputs = 0;
    for folder in ["corpus", "regressions"] {
        for (target, _) in fuzz::TARGETS {
            let dir = fuzz_dir().join(folder).join(target);
            for name in names(&dir) {
                let input = fs::read(dir.join(&name)).expect("an input");
                assert!(input.len() <= fuzz::INPUT_MAX_BYTES, "{name} is cut");
                inputs += 1;
                let run = || fuzz::run(target, &input);
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    failed.push(format!("{folder}/{target}/{name}"));
                }
            }
        }
    }
    println!("{inputs} inputs");
    assert!(failed.is_empty(), "broken by {failed:#?}");
}

#[test]
fn every_target_has_inputs_and_every_input_has_a_target() {
    let targets: BTreeSet<String> = fuzz::TARGETS.iter().map(|(n, _)| (*n).to_owned()).collect();
    assert_eq!(names(&fuzz_dir().join("corpus")), targets);
    for target in &targets {
        let dir = fuzz_dir().join("corpus").join(target);
        assert!(!names(&dir).is_empty(), "{target} has no inputs");
    }
    assert!(names(&fuzz_dir().join("regressions")).is_subset(&targets));
    let programs = names(&fuzz_dir().join("fuzz_targets"));
    let wanted: BTreeSet<String> = targets.iter().map(|t| format!("{t}.rs")).collect();
    assert_eq!(programs, wanted);
}

/// The fuzzer cannot guess a proof: it starts behind the handshake only with a seed that has one.
#[test]
fn seed_of_a_session_with_a_token_gets_past_the_handshake() {
    let seed = |target: &str| fs::read(fuzz_dir().join("corpus").join(target).join("token"));
    let token = Token::from_text(fuzz::TOKEN.to_vec()).expect("a token");
    let [client_nonce, server_nonce] = fuzz::NONCES;
    let said = seed("wire_server").expect("a seed");
    let mut server = ServerSession::with_token(7, &token, server_nonce);
    // After the choices and the cuts.
    assert_eq!(server.feed(&said[5..]), said.len() - 5);
    assert!(matches!(server.poll_event(), Some(Event::Hello(_))));
    let heard = seed("wire_client").expect("a seed");
    let mut rest = &heard[1..];
    let mut client = Handshake::new(7, Role::Stream, Protocol::V2).with_token(&token, client_nonce);
    let mut outcome = None;
    while client.wants() > 0 {
        let (now, later) = rest.split_at(client.wants());
        rest = later;
        outcome = client.handle(now).expect("a handshake");
    }
    assert!(matches!(outcome, Some(Outcome::V2(_))));
}

#[test]
fn limits_of_the_script_are_those_that_the_targets_state() {
    let script = fs::read_to_string(fuzz_dir().join("../scripts/fuzz-smoke")).expect("the script");
    let value = |name: &str| -> usize {
        let line = script.lines().find_map(|line| line.strip_prefix(name));
        let value = line.unwrap_or_else(|| panic!("no {name}"));
        value.parse().expect("a number")
    };
    assert_eq!(value("input_max_bytes="), fuzz::INPUT_MAX_BYTES);
    assert_eq!(
        value("allocation_max_mb=") << 20,
        fuzz::ALLOCATION_MAX_BYTES
    );
}
