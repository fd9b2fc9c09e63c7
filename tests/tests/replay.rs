//! `atlas-expert synth-trace` and `replay`: rows, sizes, charts, wrong usage and bad data.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use serde_json::Value;
use tempfile::TempDir;

fn expert(command: &str, args: &[&str]) -> Output {
    let mut all: Vec<&dyn AsRef<OsStr>> = vec![&command];
    all.extend(args.iter().map(|a| a as &dyn AsRef<OsStr>));
    binary::expert(&all)
}

const SHAPE: [&str; 10] = [
    "--layers",
    "4",
    "--experts",
    "32",
    "--top-k",
    "4",
    "--steps",
    "100",
    "--seed",
    "3",
];
/// A record takes a millisecond of the link.
const MODEL: [&str; 6] = [
    "--record-bytes",
    "1000000",
    "--bandwidth-mb-s",
    "1000",
    "--compute-us",
    "500",
];

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// A trace that `synth-trace` made, in a folder of its own.
fn trace() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.jsonl");
    let made = expert("synth-trace", &[&SHAPE[..], &["-o", text(&path)]].concat()).succeeded();
    assert!(made.stdout.contains("1,600"), "{made:?}");
    (folder, path)
}

fn replay(trace: &Path, more: &[&str]) -> Output {
    expert("replay", &[&[text(trace)], &MODEL[..], more].concat())
}

fn report(trace: &Path, more: &[&str]) -> Value {
    replay(trace, &[more, &["--json"]].concat()).json()
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().expect("rows")
}

fn number(value: &Value, name: &str) -> f64 {
    value[name]
        .as_f64()
        .unwrap_or_else(|| panic!("{name} of {value}"))
}

#[test]
fn seed_makes_one_trace_with_the_lines_that_the_format_says() {
    let (folder, path) = trace();
    let trace = fs::read_to_string(&path).expect("the trace");
    let lines: Vec<Value> = trace
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), 1 + 4 * 100);
    let header = &lines[0];
    assert_eq!(header["format"], "atlas-routing-trace");
    assert_eq!(
        [
            &header["version"],
            &header["layers"],
            &header["experts"],
            &header["top_k"]
        ],
        [1, 4, 32, 4]
    );
    assert_eq!(
        (&lines[400]["step"], &lines[400]["layer"]),
        (&99.into(), &3.into())
    );
    assert_eq!(lines[400]["experts"].as_array().map(Vec::len), Some(4));

    let again = folder.path().join("again.jsonl");
    let args = [&SHAPE[..], &["--json", "-o", text(&again)]].concat();
    let made = expert("synth-trace", &args).json();
    assert_eq!((&made["rows"], &made["uses"]), (&400.into(), &1600.into()));
    assert_eq!(made["bytes"], trace.len());
    assert_eq!(fs::read_to_string(&again).expect("again"), trace);

    let output = expert("synth-trace", &[&SHAPE[..], &["-o", text(&path)]].concat());
    assert!(output.error(1).contains("exists already"), "{output:?}");
    let other = ["--seed", "4", "--replace", "-o", text(&again)];
    expert("synth-trace", &[&SHAPE[..8], &other].concat()).succeeded();
    assert_ne!(fs::read_to_string(&again).expect("another"), trace);
}

#[test]
fn each_combination_is_a_row_and_accounts_add_up() {
    let (_folder, path) = trace();
    let report = report(
        &path,
        &[
            "--slots",
            "16,64",
            "--eviction",
            "lru,slru",
            "--prefetch",
            "none,oracle,random:2",
        ],
    );
    assert_eq!(report["ok"], true);
    let rows = report["rows"].as_array().expect("rows");
    let names: Vec<String> = rows
        .iter()
        .map(|r| format!("{} {} {}", r["slots"], r["policy"], r["prefetch"]).replace('"', ""))
        .collect();
    assert_eq!(names.len(), 12);
    assert_eq!(names[0], "16 lru none");
    assert_eq!(names[11], "64 slru random:2");
    for row in rows {
        let [uses, hits, late, misses] =
            ["uses", "hits", "late", "misses"].map(|name| number(row, name));
        assert_eq!(uses, 1600.0);
        assert_eq!(hits + late + misses, uses, "{row}");
        let ahead = &row["prefetched"];
        assert_eq!(
            number(ahead, "useful") + number(ahead, "wasted"),
            number(ahead, "records")
        );
        let moved = (misses + number(ahead, "records")) * 1e6;
        assert_eq!(number(row, "bytes_moved"), moved);
        assert_eq!(number(row, "arena_bytes"), number(row, "slots") * 1e6);
        assert_eq!(row["layers"].as_array().map(Vec::len), Some(4));
        let stall = &row["stall_us"];
        // 500 us for each of four layers.
        assert!((number(row, "step_us") - number(stall, "mean") - 2000.0).abs() < 1e-6);
        if row["prefetch"] == "none" {
            assert!(
                number(row, "hit_rate") <= number(row, "optimal_hit_rate"),
                "{row}"
            );
            // The wire carries nothing but the misses.
            assert!(number(stall, "mean") * 100.0 >= misses * 1000.0, "{row}");
        }
    }
    let stall = |at: usize| number(&rows[at]["stall_us"], "mean");
    assert!(stall(1) < stall(0), "an oracle waits less than no prefetch");
    assert!(stall(6) < stall(0), "a larger arena waits less");
}

#[test]
fn replay_is_the_same_each_time() {
    let (_folder, path) = trace();
    let args = ["--eviction", "slru:60", "--prefetch", "random:3,repeat"];
    assert_eq!(report(&path, &args), report(&path, &args));
    let seeds = ["0", "1"].map(|seed| {
        let args = ["--slots", "30", "--prefetch", "random:3", "--seed", seed];
        report(&path, &args)["rows"][0]["prefetched"].clone()
    });
    assert_ne!(seeds[0], seeds[1]);
}

#[test]
fn size_for_a_target_meets_it_and_one_slot_less_does_not() {
    let (_folder, path) = trace();
    let is_met = |flag: &str, row: &Value| match flag {
        "--target-hit-rate" => number(row, "hit_rate") >= 0.6,
        _ => number(&row["stall_us"], "mean") <= 5000.0,
    };
    for (flag, target) in [("--target-hit-rate", "0.6"), ("--target-stall-us", "5000")] {
        let found = report(&path, &[flag, target]);
        assert_eq!(found["rows"].as_array().map(Vec::len), Some(0));
        let arena = &found["target"]["arenas"][0];
        assert_eq!(arena["is_least"], true);
        let slots = arena["slots"].as_u64().expect("reached");
        assert_eq!(number(arena, "arena_bytes"), slots as f64 * 1e6);
        let both = report(&path, &["--slots", &format!("{slots},{}", slots - 1)]);
        assert!(is_met(flag, &both["rows"][0]), "{both}");
        assert!(!is_met(flag, &both["rows"][1]), "{both}");
    }
}

#[test]
fn target_out_of_reach_is_told_and_exits_with_1() {
    let (_folder, path) = trace();
    let output = replay(&path, &["--target-hit-rate", "1"]);
    assert!(
        output.error(1).contains("no arena meets the target"),
        "{output:?}"
    );
    assert!(
        output.stdout.contains("not with all records in the arena"),
        "{output:?}"
    );
    // Without the cold start there is one.
    let warm = report(&path, &["--target-hit-rate", "1", "--warm-up-steps", "99"]);
    assert_eq!(warm["ok"], true);
}

#[test]
fn table_and_chart_are_for_people() {
    let (folder, path) = trace();
    let chart = folder.path().join("replay.svg");
    let combinations = ["--eviction", "lru,slru", "--prefetch", "none,oracle"];
    let plot = ["--plot", text(&chart)];
    let output = replay(&path, &[&combinations[..], &plot].concat()).succeeded();
    for part in [
        "100 steps, 1,600 uses",
        "hits",
        "best",
        "slru",
        "oracle",
        "p99",
        "first uses",
    ] {
        assert!(output.stdout.contains(part), "{part}: {}", output.stdout);
    }
    // Rows of the table: sizes from a twentieth to all, four combinations each.
    let rows = output.stdout.lines().filter(|l| l.contains("lru ")).count();
    assert_eq!(rows, 8 * 4, "{}", output.stdout);
    let svg = fs::read_to_string(&chart).expect("the chart");
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    assert_eq!(svg.matches("<circle").count(), 2 * rows);
    assert!(svg.contains("slru, oracle") && svg.contains("best without prefetch"));

    let nowhere = folder.path().join("none/replay.svg");
    let output = replay(&path, &["--slots", "20", "--plot", text(&nowhere)]);
    assert!(output.error(1).contains("none/replay.svg"), "{output:?}");
    let only = replay(&path, &["--target-hit-rate", "0.5"]).succeeded();
    assert!(only.stdout.contains("no smaller arena does") && !only.stdout.contains("best:"));
}

#[test]
fn wrong_usage_exits_with_2() {
    let (_folder, path) = trace();
    let cases: [(&[&str], &str); 13] = [
        (
            &["--slots", "3"],
            "an arena of 3 slots cannot hold the 4 experts of one layer at once; use at least 4",
        ),
        (&["--slots", "0"], "--slots"),
        (&["--eviction", "fifo"], "use lru, slru, or slru:PERCENT"),
        (
            &["--eviction", "slru:100"],
            "use lru, slru, or slru:PERCENT",
        ),
        (&["--prefetch", "random:0"], "random:N"),
        (&["--bandwidth-mb-s", "0"], "a rate is a number from 0.001"),
        (&["--record-bytes", "0"], "a size is 1 byte to 16 GiB"),
        (&["--compute-us", "-1"], "-1"),
        (
            &["--target-hit-rate", "1.5"],
            "a hit rate is a number from 0 to 1",
        ),
        (&["--target-stall-us", "nan"], "a time is a number"),
        (
            &["--target-hit-rate", "0.5", "--target-stall-us", "5"],
            "cannot be used with",
        ),
        (
            &["--warm-up-steps", "100"],
            "a warm-up of 100 steps leaves nothing to count",
        ),
        (&["--expert"], "unexpected argument"),
    ];
    for (flags, want) in cases {
        let mut args = vec![text(&path)];
        // A flag given twice is another mistake.
        for pair in MODEL.chunks(2).filter(|pair| !flags.contains(&pair[0])) {
            args.extend(pair);
        }
        args.extend(flags);
        let output = expert("replay", &args);
        assert_eq!(output.code, Some(2), "{flags:?}: {output:?}");
        assert!(output.stderr.contains(want), "{flags:?}: {output:?}");
        assert!(!output.stderr.contains("panicked"), "{flags:?}: {output:?}");
    }
    let cases: [(&[&str], &str); 5] = [
        (&["--top-k", "33"], "33 experts per token: it is 1 to 32"),
        (&["--zipf", "nan"], "zipf NaN"),
        (&["--reuse", "2"], "reuse 2: it is a number from 0 to 1"),
        (&["--steps", "0"], "0 steps"),
        (&["--steps", "4000000000"], "a trace has at most"),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("t");
    for (flags, want) in cases {
        let mut args = vec!["-o", text(&out)];
        for pair in SHAPE.chunks(2).filter(|pair| !flags.contains(&pair[0])) {
            args.extend(pair);
        }
        args.extend(flags);
        let output = expert("synth-trace", &args);
        assert!(output.error(2).contains(want), "{flags:?}: {output:?}");
        assert_eq!(fs::read_dir(&folder).expect("the folder").count(), 0);
    }
}

#[test]
fn bad_data_exits_with_1_and_names_file_and_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bad.jsonl");
    let header = r#"{"format":"atlas-routing-trace","version":1,"layers":2,"experts":8}"#;
    let row = |step: u32, layer: u32, experts: &str| {
        format!("{{\"step\":{step},\"layer\":{layer},\"experts\":{experts}}}")
    };
    let cases = [
        (
            row(0, 2, "[1]"),
            "line 2: layer 2, the header says 2 layers",
        ),
        (
            row(0, 0, "[8]"),
            "line 2: expert 8, the header says 8 experts",
        ),
        (row(0, 0, "[1,2,1]"), "line 2: expert 1 twice"),
        (
            format!("{}\n{}", row(1, 0, "[1]"), row(0, 1, "[1]")),
            "line 3: step 0 after step 1",
        ),
        (
            format!("{}\n{}", row(1, 1, "[1]"), row(1, 0, "[1]")),
            "line 3: layer 0 after layer 1",
        ),
        ("oops".to_owned(), "line 2: expected value, column 1"),
        (" ".repeat(70_000), "line 2: longer than 65536 bytes"),
        (String::new(), "the trace has no rows"),
    ];
    for (rows, want) in cases {
        fs::write(&path, format!("{header}\n{rows}\n")).expect("a file");
        let output = replay(&path, &["--slots", "8"]);
        let error = output.error(1);
        assert!(
            error.contains("bad.jsonl: ") && error.contains(want),
            "{error}"
        );
    }
    let output = replay(&folder.path().join("none"), &[]);
    assert!(output.error(1).contains("No such file"), "{output:?}");
    let output = replay(folder.path(), &[]);
    assert!(
        output.error(1).contains("line 1: Is a directory"),
        "{output:?}"
    );
}

/// A trace and a model of its shape, served by nobody: 2 layers of 16 experts.
fn trace_and_model() -> (TempDir, PathBuf, Model) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.jsonl");
    let shape = [
        "--layers",
        "2",
        "--experts",
        "16",
        "--top-k",
        "3",
        "--steps",
        "60",
        "--seed",
        "5",
    ];
    expert("synth-trace", &[&shape[..], &["-o", text(&path)]].concat()).succeeded();
    (folder, path, Model::bf16(Sizes::TINY))
}

#[test]
fn real_replay_hits_as_often_as_the_model_says() {
    let (_folder, path, model) = trace_and_model();
    let store = model.pack();
    let flags = [
        "--slots",
        "8,32",
        "--warm-up-steps",
        "10",
        "--compute-us",
        "0",
    ];
    let modelled = [
        &flags[..],
        &["--record-bytes", "12288", "--bandwidth-mb-s", "1000"],
    ]
    .concat();
    let modelled = expert(
        "replay",
        &[&[text(&path)], &modelled[..], &["--json"]].concat(),
    )
    .json();
    let real = [
        "--real",
        "--expert-backend",
        "posix",
        "--store",
        text(&store),
        "--json",
    ];
    let real = expert("replay", &[&[text(&path)], &flags[..], &real[..]].concat()).json();
    assert_eq!(
        (real["backend"].as_str(), &real["link"]),
        (Some("posix"), &Value::Null)
    );
    assert_eq!(real["record_bytes"], 12288);
    let (small, whole) = (0, 1);
    // Records of one layer land in any order, so the least recently used of them may be another.
    let hits = [&real, &modelled].map(|report| number(&rows(report)[small], "hits"));
    assert!((hits[0] - hits[1]).abs() < 0.1 * hits[1], "{hits:?}");
    for (real, modelled) in [(&rows(&real)[whole], &rows(&modelled)[whole])] {
        for name in [
            "slots",
            "uses",
            "hits",
            "misses",
            "bytes_moved",
            "optimal_hit_rate",
            "layers",
        ] {
            assert_eq!(real[name], modelled[name], "{name}");
        }
        assert!(number(real, "step_us") > 0.0);
    }
}

#[test]
fn real_replay_prefetches_from_a_peer() {
    let (_folder, path, model) = trace_and_model();
    let peer = PeerProcess::start(&model.index(), &[]);
    let addr = peer.addr.to_string();
    let flags = [
        "--real",
        "--expert-peer",
        &addr,
        "--slots",
        "12",
        "--compute-us",
        "3000",
        "--prefetch",
        "oracle,random:4",
        "--json",
    ];
    let report = expert("replay", &[&[text(&path)], &flags[..]].concat()).json();
    for row in rows(&report) {
        assert_eq!(number(row, "uses"), 360.0);
        let parts = ["hits", "late", "misses"].map(|name| number(row, name));
        assert_eq!(parts.iter().sum::<f64>(), 360.0);
        assert!(number(&row["prefetched"], "useful") > 0.0, "{row}");
    }
}

#[test]
fn real_replay_refuses_what_does_not_fit() {
    let (_folder, path, model) = trace_and_model();
    let (_other, larger) = trace();
    let store = model.index();
    let real = |trace: &Path, more: &[&str]| {
        let place = [
            "--real",
            "--expert-backend",
            "posix",
            "--store",
            text(&store),
        ];
        expert(
            "replay",
            &[&[text(trace)], &place[..], &["--compute-us", "1"], more].concat(),
        )
    };
    let output = real(&larger, &["--slots", "20"]);
    let text_of = output.error(2);
    assert!(
        text_of.contains("the trace is of 4 layers with 32 experts, the store has 2 with 16"),
        "{text_of}"
    );
    let output = real(&path, &["--slots", "2"]);
    assert!(
        output
            .error(1)
            .contains("3 records asked for at once, there are 2 slots"),
        "{output:?}"
    );
    let output = real(&path, &["--bandwidth-mb-s", "5"]);
    assert!(
        output.error(2).contains("cannot be used with"),
        "{output:?}"
    );
    let output = replay(&path, &["--store", text(&store)]);
    assert!(
        output.error(2).contains("add --real, or drop it"),
        "{output:?}"
    );
}
