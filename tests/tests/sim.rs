//! `atlas-expert sim`: no rule is broken while all are in force, and each one that is switched off is missed.

use std::ffi::OsStr;

use atlas_expert_tests::binary;
use serde_json::Value;

fn sim(args: &[&str]) -> binary::Output {
    let mut all: Vec<&dyn AsRef<OsStr>> = vec![&"sim"];
    all.extend(args.iter().map(|a| a as &dyn AsRef<OsStr>));
    binary::expert(&all)
}

#[test]
fn no_rule_is_broken_and_everything_happened() {
    let report = sim(&["--seeds", "300", "--json"]).json();
    assert_eq!(
        (&report["ok"], &report["seeds"]),
        (&true.into(), &300.into())
    );
    assert_eq!(
        (&report["failing_seeds"], &report["failure"]),
        (&0.into(), &Value::Null)
    );
    let faults = report["faults"].as_object().expect("faults by kind");
    assert_eq!(faults.len(), 8, "{report}");
    for name in [
        "requests",
        "refused",
        "records",
        "failed",
        "unverified",
        "damaged",
        "retries",
    ] {
        assert!(report[name].as_u64() > Some(0), "{name} of {report}");
    }
}

#[test]
fn each_rule_that_is_switched_off_is_missed_with_exit_code_1_and_a_seed_that_replays() {
    for guard in ["epoch", "memory-rule", "commit-rule", "verify", "content"] {
        let output = sim(&["--seeds", "200", "--guard-off", guard, "--json"]);
        assert_eq!(output.code, Some(1), "{guard}: {output:?}");
        let report: Value = serde_json::from_str(&output.stdout).expect("JSON");
        assert_eq!(report["ok"], false);
        let failure = &report["failure"];
        let seed = failure["seed"].as_u64().expect("a seed").to_string();
        let violation = failure["violation"].as_str().expect("a text");
        let replay = failure["replay"].as_str().expect("a command");
        assert_eq!(
            replay,
            format!("atlas-expert sim --seed {seed} --guard-off {guard}")
        );
        let again = sim(&["--seed", &seed, "--guard-off", guard]);
        assert_eq!(again.code, Some(1), "{guard}");
        assert!(again.stdout.contains(violation), "{guard}: {violation}");
        // With the rule in force the same seed is sound.
        sim(&["--seed", &seed]).succeeded();
    }
}

#[test]
fn rule_of_no_such_name_is_wrong_usage() {
    let output = sim(&["--guard-off", "gravity"]);
    assert!(output.error(2).contains("gravity"), "{output:?}");
}
