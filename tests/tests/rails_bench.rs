//! `atlas-expert bench rails`: rows, digests, wrong usage.

use atlas_expert_tests::binary;
use serde_json::Value;

fn rails(args: &[&str]) -> binary::Output {
    let mut all: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"bench", &"rails"];
    all.extend(args.iter().map(|a| a as &dyn AsRef<std::ffi::OsStr>));
    binary::expert(&all)
}

fn rows(args: &[&str]) -> Vec<Value> {
    let mut args = args.to_vec();
    args.push("--json");
    let report = rails(&args).json();
    assert_eq!(report["ok"], true);
    report["rows"].as_array().expect("rows").clone()
}

fn number(row: &Value, name: &str) -> f64 {
    row[name]
        .as_f64()
        .unwrap_or_else(|| panic!("{name} of {row}"))
}

#[test]
fn default_rows_are_near_the_balanced_bound_with_one_digest() {
    let rows = rows(&[]);
    let counts: Vec<&Value> = rows.iter().map(|r| &r["rails"]).collect();
    assert_eq!(counts, [1, 2, 3, 4, 8]);
    for row in &rows {
        let aggregate = number(row, "aggregate_mb_per_s");
        let balanced = number(row, "balanced_mb_per_s");
        assert!(aggregate > 0.95 * balanced, "{row}");
        assert!(
            balanced <= number(row, "theoretical_mb_per_s") * 1.0001,
            "{row}"
        );
        assert_eq!(row["per_rail_mb_per_s"], 125.0);
        assert_eq!(row["digest"], rows[0]["digest"]);
        assert_eq!(row["bytes"], 4 * (64 << 20));
        assert_eq!(row["limit"], "network-slowest-rail", "{row}");
    }
    assert!((number(&rows[4], "speedup") - 8.0).abs() < 0.3);
    // Sixteen pieces over three rails: six on one of them.
    assert!((number(&rows[2], "balanced_mb_per_s") - 333.3).abs() < 0.1);
}

#[test]
fn split_has_no_dip_at_three_rails() {
    let rows = rows(&["--policy", "split", "--rails", "3"]);
    let share = number(&rows[0], "aggregate_mb_per_s") / number(&rows[0], "theoretical_mb_per_s");
    assert!(share >= 0.95, "{share}");
}

#[test]
fn unequal_rails_add_up() {
    let rows = rows(&["--rails", "2", "--per-rail-mb-s", "100,25"]);
    assert_eq!(
        rows[0]["per_rail_mb_per_s"],
        serde_json::json!([100.0, 25.0])
    );
    let aggregate = number(&rows[0], "aggregate_mb_per_s");
    assert!(aggregate >= 0.93 * 125.0, "{aggregate}");
}

#[test]
fn home_alone_leaves_the_other_rail_idle_and_is_labelled_so() {
    let rows = rows(&["--policy", "expert-mod", "--rails", "2"]);
    assert_eq!(rows[0]["limit"], "network-rail-idle");
}

#[test]
fn prediction_is_the_same_each_time() {
    let args = ["--object-bytes", "5000001", "--per-rail-mb-s", "90,35"];
    assert_eq!(rows(&args), rows(&args));
}

#[test]
fn real_clock_moves_the_same_bytes() {
    let real = [
        "--clock",
        "real",
        "--rails",
        "1,2",
        "--per-rail-mb-s",
        "400",
        "--object-bytes",
        "8MiB",
        "--objects",
        "2",
        "--batch",
        "2",
    ];
    let measured = rows(&real);
    let mut predicted = real;
    predicted[1] = "virtual";
    let predicted = rows(&predicted);
    for (measured, predicted) in measured.iter().zip(&predicted) {
        assert_eq!(measured["digest"], predicted["digest"]);
        assert_eq!(measured["bytes"], predicted["bytes"]);
        // It cannot be faster than its rails; how much slower is the machine's.
        let aggregate = number(measured, "aggregate_mb_per_s");
        assert!(
            aggregate < 1.001 * number(measured, "theoretical_mb_per_s"),
            "{measured}"
        );
    }
}

#[test]
fn wrong_flags_exit_with_2() {
    let cases: [&[&str]; 9] = [
        &["--rails", "0"],
        &["--rails", "65"],
        &["--rails", ""],
        &["--per-rail-mb-s", "-1"],
        &["--per-rail-mb-s", "nan"],
        &["--object-bytes", "0"],
        &["--object-bytes", "64MB"],
        &["--policy", "fastest"],
        &["--clock", "wall"],
    ];
    for case in cases {
        let output = rails(case);
        assert_eq!(output.code, Some(2), "{case:?}: {output:?}");
        assert!(!output.stderr.contains("panicked"), "{case:?}: {output:?}");
    }
}

#[test]
fn table_and_chart_are_for_people() {
    let folder = tempfile::tempdir().expect("a folder");
    let chart = folder.path().join("rails.svg");
    let chart_text = chart.to_str().expect("a plain path");
    let output = rails(&["--rails", "1,2", "--plot", chart_text]).succeeded();
    for part in [
        "rails",
        "balanced",
        "limited by",
        "network, slowest rail",
        "the same in all rows",
    ] {
        assert!(output.stdout.contains(part), "{part}: {}", output.stdout);
    }
    let svg = std::fs::read_to_string(&chart).expect("the chart");
    assert!(svg.starts_with("<svg ") && svg.matches("<circle").count() == 2);
    let nowhere = folder.path().join("none/rails.svg");
    let output = rails(&["--rails", "1", "--plot", nowhere.to_str().expect("a path")]);
    assert!(output.error(1).contains("none/rails.svg"), "{output:?}");
}
