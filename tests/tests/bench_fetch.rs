//! `atlas-expert bench fetch`, and the bare pair that it is compared with.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    let mut all: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"bench", &"fetch"];
    all.extend(args.iter().map(|a| a as &dyn AsRef<std::ffi::OsStr>));
    binary::expert(&all)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn number(report: &Value, pointer: &str) -> f64 {
    let found = report.pointer(pointer).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{pointer} of {report}"))
}

/// Latencies are there and in order.
fn assert_in_order(report: &Value, of: &str) {
    let names = ["p50", "p90", "p99", "p999", "max"];
    let values = names.map(|name| number(report, &format!("/{of}/{name}")));
    assert!(values[0] > 0.0 && values.is_sorted(), "{of}: {report}");
}

#[test]
fn clients_fetch_what_they_were_told_to_and_every_record_is_compared() {
    let model = Model::bf16(Sizes::SMALL);
    let records = model.records();
    let peer = PeerProcess::start(&model.pack(), &[]);
    let report = bench(&[
        "--expert-peer",
        &peer.addr.to_string(),
        "--records",
        "50",
        "--batch",
        "4",
        "--depth",
        "2",
        "--clients",
        "3",
        "--json",
    ])
    .json();
    assert_eq!(report["records"], 150);
    assert_eq!(report["among"], records.len());
    assert_eq!(report["unverified"], 0);
    assert_eq!(report["verify_failures"], 0);
    let each = records.values().next().expect("a record").len();
    assert_eq!(report["bytes"], 150 * each);
    assert_in_order(&report, "request_us");
    assert_in_order(&report, "record_us");
    let (slowest, fastest) = (
        number(&report, "/slowest_client_gb_per_s"),
        number(&report, "/fastest_client_gb_per_s"),
    );
    assert!(0.0 < slowest && slowest <= fastest, "{report}");
    // What warmed up was fetched, and not counted.
    let carried: f64 = report["rails"].as_array().map_or(0.0, |rails| {
        rails.iter().map(|rail| number(rail, "/bytes")).sum()
    });
    assert_eq!(carried as usize, (50 + 8) * each);
    peer.signal(rustix::process::Signal::TERM);
    assert_eq!(peer.wait().code, Some(0));
}

#[test]
fn text_names_what_was_measured_and_that_checksums_were_off() {
    let model = Model::bf16(Sizes::SMALL);
    let store = model.pack();
    for backend in ["posix", "uma"] {
        let output = bench(&[
            "--expert-backend",
            backend,
            "--store",
            text(&store),
            "--records",
            "9",
            "--verify",
            "off",
        ])
        .succeeded();
        for part in [
            backend,
            "9 drawn from",
            "8 record(s) a request",
            "off, as asked",
            "p99.9",
        ] {
            assert!(output.stdout.contains(part), "{part}: {}", output.stdout);
        }
    }
}

#[test]
fn record_that_does_not_arrive_ends_it_with_an_error() {
    let model = Model::bf16(Sizes::SMALL);
    let store = model.index();
    for file in model.files() {
        fs::File::options()
            .write(true)
            .open(&file)
            .and_then(|f| f.set_len(4096))
            .expect("a shorter file");
    }
    let output = bench(&["--expert-backend", "posix", "--store", text(&store)]);
    output.error(1);
}

/// The bare pair's server; it ends when its standard input does.
struct Server(Child, String);

impl Server {
    fn start(file: &Path, transfer: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_bare_pair"))
            .args(["serve", text(file), "--transfer", transfer])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("bare_pair");
        let mut line = String::new();
        let out = child.stdout.take().expect("its output");
        BufReader::new(out).read_line(&mut line).expect("a line");
        let line: Value = serde_json::from_str(&line).expect("JSON");
        Self(
            child,
            line["listening"].as_str().expect("an address").to_owned(),
        )
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().expect("its end").success());
    }
}

fn bare(args: &[&str]) -> Output {
    binary::run(Command::new(env!("CARGO_BIN_EXE_bare_pair")).args(args))
}

#[test]
fn bare_pair_brings_the_files_bytes_either_way() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, other) = (folder.path().join("file"), folder.path().join("other"));
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 / 3) as u8).collect();
    fs::write(&file, &bytes).expect("written");
    fs::write(&other, vec![9; bytes.len()]).expect("written");
    let work = ["--record-bytes", "300000", "--among", "10"];
    for transfer in ["sendfile", "copy"] {
        let server = Server::start(&file, transfer);
        for (streams, batch) in [("1", "1"), ("2", "8"), ("3", "7")] {
            let mut args = vec!["read", &server.1, text(&file), "--records", "40"];
            args.extend(work);
            args.extend(["--streams", streams, "--batch", batch]);
            let report = bare(&args).json();
            assert_eq!(report["bytes"], 40 * 300_000);
            let p50 = number(&report, "/record_p50_us");
            assert!(
                0.0 < p50 && p50 <= number(&report, "/record_p99_us"),
                "{report}"
            );
        }
        // It does compare.
        let mut args = vec!["read", &server.1, text(&other)];
        args.extend(work);
        let output = bare(&args);
        assert_eq!(output.code, Some(2), "{output:?}");
        assert!(output.stderr.contains("differ"), "{output:?}");
        // What the file does not have is refused, and the server stays.
        let beyond = bare(&["read", &server.1, text(&file), "--among", "1"]);
        assert_eq!(beyond.code, Some(2), "{beyond:?}");
        server.end();
    }
    for from in ["memory", "file"] {
        let mut args = vec!["copy", text(&file), "--from", from, "--threads", "2"];
        args.extend(work);
        assert_eq!(bare(&args).json()["bytes"], 220 * 300_000);
    }
    let output = bare(&["copy", text(&file), "--batch", "0"]);
    assert_eq!(output.code, Some(2), "{output:?}");
}

#[test]
fn time_to_look_before_sleeping_is_taken_from_the_environment_and_has_a_limit() {
    let model = Model::bf16(Sizes::SMALL);
    let peer = PeerProcess::start(&model.pack(), &["--spin-us", "1000"]);
    let addr = peer.addr.to_string();
    let with = |us: &str| {
        let args: [&dyn AsRef<std::ffi::OsStr>; 8] = [
            &"bench",
            &"fetch",
            &"--expert-peer",
            &addr,
            &"--batch",
            &"1",
            &"--depth",
            &"1",
        ];
        let mut command = binary::command("atlas-expert", &args);
        binary::run(
            command
                .args(["--records", "50", "--json"])
                .env("ATLAS_EXPERT_SPIN_US", us),
        )
    };
    for us in ["0", "50", "1000"] {
        let report = with(us).json();
        assert_eq!(report["records"], 50, "{us}");
        assert_eq!(report["unverified"], 0, "{us}");
    }
    for us in ["1001", "-1", "soon"] {
        let output = with(us);
        let error = output.error(2);
        assert!(
            error.contains("ATLAS_EXPERT_SPIN_US") && error.contains(us),
            "{error}"
        );
    }
}
