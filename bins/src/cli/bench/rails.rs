//! `bench rails`: what more rails bring, predicted on a virtual clock or measured on the real one.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use expert_store::info::hex128;
use expert_tier::attribution::Limit;
use expert_tier::mock::workload::{Clock, Measured, Objects, Setup, fetch};
use expert_tier::mock::{MockSpec, Verifies};
use expert_tier::model::{self, Shape};
use expert_tier::{EngineConfig, Policy};
use serde::{Serialize, Serializer};

use super::plot;
use crate::cli::args::{parse_bytes, parse_rate};
use crate::cli::output::{self, grouped, human_bytes};

/// Fetch objects over simulated rails: what would one more card bring, and what does this machine reach?
///
/// The fetch engine is the one that `fetch` uses; rails are simulated devices of a given rate, and bytes are
/// moved and hashed. On the virtual clock the result is a prediction (the same in every run: policy, READ size and
/// rates decide, processors cost nothing); on the real one it is measured. Each row begins with one fetch that is
/// not counted.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Numbers of rails, a row each
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_value = "1,2,3,4,8", value_parser = clap::value_parser!(u16).range(1..=64))]
    rails: Vec<u16>,
    /// Rate of a rail in MB/s (10^6 bytes); of several, rail i has the i-th, and they repeat
    #[arg(long, value_name = "R[,R…]", value_delimiter = ',', default_value = "125", value_parser = parse_rate)]
    per_rail_mb_s: Vec<f64>,
    /// Size of an object: bytes, or with KiB, MiB, GiB
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = parse_bytes)]
    object_bytes: u64,
    /// Size of a READ; rounded down to chunks of 256 KiB
    #[arg(long, value_name = "BYTES", default_value = "4MiB", value_parser = parse_bytes)]
    read_bytes: u64,
    /// Bytes in flight per rail; default: 4 MiB, or two READs where that is more
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    window_bytes: Option<u64>,
    /// How READs are spread over rails
    #[arg(long, value_enum, default_value = "home-steal")]
    policy: PolicyArg,
    /// Objects fetched per row
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=65536))]
    objects: u32,
    /// Objects asked for at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Time from a READ's post to its first byte, microseconds
    #[arg(long, value_name = "US", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    latency_us: u64,
    /// Simulated time, or this machine's
    #[arg(long, value_enum, default_value = "virtual")]
    clock: ClockArg,
    /// Compare the checksum of each chunk
    #[arg(long, value_enum, default_value = "on")]
    checksums: Switch,
    /// Who compares: the rail as bytes arrive (as for TCP), or the engine when a READ is back (as for a network card)
    #[arg(long, value_enum, default_value = "rail")]
    checksums_by: By,
    /// Measure each row that many times, rows in turn, and report the median
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Draw the rows into an SVG file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum PolicyArg {
    /// Home rail by expert, idle rails take what is not posted
    HomeSteal,
    /// Home rail only
    ExpertMod,
    /// READs get smaller towards the end, so that all rails end together
    Split,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum ClockArg {
    Virtual,
    Real,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum By {
    Engine,
    Rail,
}

#[derive(Serialize)]
struct Report {
    ok: bool,
    clock: ClockArg,
    policy: PolicyArg,
    object_bytes: u64,
    read_bytes: u64,
    objects: u32,
    batch: u32,
    checksums: bool,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    rails: u16,
    per_rail_mb_per_s: Rates,
    aggregate_mb_per_s: f64,
    balanced_mb_per_s: f64,
    theoretical_mb_per_s: f64,
    /// Against one rail: the row of one where there is one, else the rate of the first rail.
    speedup: f64,
    limit: Limit,
    limit_text: String,
    bytes: u64,
    digest: String,
    seconds: f64,
    verify_seconds: f64,
    rail_bytes: Vec<u64>,
}

/// One number where all are equal.
struct Rates(Vec<f64>);

impl Rates {
    fn one(&self) -> Option<f64> {
        let first = *self.0.first()?;
        self.0.iter().all(|r| *r == first).then_some(first)
    }
}

impl Serialize for Rates {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.one() {
            Some(one) => one.serialize(serializer),
            None => self.0.serialize(serializer),
        }
    }
}

/// Runs it; exit code 1 where the bytes of a row are not those of the source.
///
/// *Errors*: wrong usage, a fetch that failed, a plot that cannot be written.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let objects = Arc::new(Objects::new(args.object_bytes, args.objects)?);
    let want = objects.digest();
    let setups: Vec<Setup> = args.rails.iter().map(|&n| setup(args, n)).collect();
    // Rows in turn, so that a busy minute of the machine does not fall on one of them alone.
    let mut rounds: Vec<Vec<Measured>> = setups.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (setup, measured) in setups.iter().zip(&mut rounds) {
            let done = fetch(&objects, setup)
                .with_context(|| format!("fetching over {} rails", setup.rails.len()))?;
            measured.push(done);
        }
    }
    let is_right = rounds.iter().flatten().all(|m| m.digest == want);
    let mut rows: Vec<Row> = setups
        .iter()
        .zip(rounds)
        .map(|(setup, measured)| row(&objects, setup, measured))
        .collect();
    let alone = rows.iter().find(|r| r.rails == 1);
    let one = alone.map_or(args.per_rail_mb_s[0], |r| r.aggregate_mb_per_s);
    for row in &mut rows {
        row.speedup = row.aggregate_mb_per_s / one;
    }
    let report = Report {
        ok: is_right,
        clock: args.clock,
        policy: args.policy,
        object_bytes: args.object_bytes,
        read_bytes: setups[0].engine.read_bytes,
        objects: args.objects,
        batch: args.batch.min(args.objects),
        checksums: args.checksums == Switch::On,
        rows,
    };
    if let Some(path) = &args.plot {
        let svg = plot::draw(&title(&report), &points(&report));
        std::fs::write(path, svg).with_context(|| format!("writing {}", path.display()))?;
    }
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&text(&report))?,
    }
    if is_right {
        return Ok(ExitCode::SUCCESS);
    }
    output::print_error(&format!(
        "wrong bytes were committed: not every row has the digest of the source, {}",
        hex128(want)
    ));
    Ok(ExitCode::FAILURE)
}

fn setup(args: &Args, rails: u16) -> Setup {
    let spec = |rate_mb_per_s: &f64| {
        let mut spec = MockSpec::steady((rate_mb_per_s * 1e6) as u64);
        spec.latency = Duration::from_micros(args.latency_us);
        spec.verifies = match args.checksums_by {
            By::Engine => Verifies::Engine,
            By::Rail => Verifies::Rail,
        };
        // One READ may take longer than any stall, where rails are slow and READs large.
        spec.capabilities.stall = Duration::from_secs(3600);
        spec
    };
    const CHUNK: u64 = expert_store::catalogue::CHUNK_BYTES;
    let read_bytes = (args.read_bytes / CHUNK).max(1) * CHUNK;
    let rates = args.per_rail_mb_s.iter().cycle();
    Setup {
        rails: rates.take(usize::from(rails)).map(spec).collect(),
        engine: EngineConfig {
            policy: match args.policy {
                PolicyArg::HomeSteal => Policy::HomeSteal,
                PolicyArg::ExpertMod => Policy::ExpertMod,
                PolicyArg::Split => Policy::Split,
            },
            read_bytes,
            window_bytes: args
                .window_bytes
                .unwrap_or((4 << 20).max(read_bytes.saturating_mul(2))),
            inflight_max_bytes: u64::MAX,
            ..EngineConfig::default()
        },
        batch: args.batch,
        verify: args.checksums == Switch::On,
        clock: match args.clock {
            ClockArg::Virtual => Clock::Virtual,
            ClockArg::Real => Clock::Real,
        },
    }
}

/// The median of its rounds, beside what the model says.
fn row(objects: &Objects, setup: &Setup, mut rounds: Vec<Measured>) -> Row {
    rounds.sort_by_key(|m| m.time);
    let measured = rounds.swap_remove(rounds.len() / 2);
    let rates: Vec<u64> = setup.rails.iter().map(|r| r.bytes_per_s).collect();
    let mb_per_s = |bytes: u64, seconds: f64| bytes as f64 / seconds / 1e6;
    let seconds = measured.time.as_secs_f64();
    Row {
        rails: rates.len() as u16,
        per_rail_mb_per_s: Rates(rates.iter().map(|r| *r as f64 / 1e6).collect()),
        aggregate_mb_per_s: mb_per_s(measured.bytes, seconds),
        balanced_mb_per_s: mb_per_s(measured.bytes, balanced_s(objects, setup, &rates)),
        theoretical_mb_per_s: model::theoretical_bytes_per_s(&rates) as f64 / 1e6,
        speedup: 0.0,
        limit: measured.limit,
        limit_text: measured.limit.to_string(),
        bytes: measured.bytes,
        digest: hex128(measured.digest),
        seconds,
        verify_seconds: measured.verify.as_secs_f64(),
        rail_bytes: measured.rail_bytes,
    }
}

/// Shortest time for all batches, one after the other; the last may be smaller.
fn balanced_s(objects: &Objects, setup: &Setup, rates: &[u64]) -> f64 {
    let shape = |objects_of_batch: u32| Shape {
        object_bytes: objects.image_bytes(),
        objects: u64::from(objects_of_batch),
        read_bytes: setup.engine.read_bytes,
    };
    let seconds = |n: u32| match n {
        0 => 0.0,
        n => model::balanced_time(rates, &shape(n)).map_or(f64::INFINITY, |t| t.as_secs_f64()),
    };
    let batch = setup.batch.min(objects.count());
    f64::from(objects.count() / batch) * seconds(batch) + seconds(objects.count() % batch)
}

fn title(report: &Report) -> String {
    let clock = match report.clock {
        ClockArg::Virtual => "predicted",
        ClockArg::Real => "measured",
    };
    format!(
        "{clock}: objects of {}, READs of {}, {} at a time",
        human_bytes(report.object_bytes),
        human_bytes(report.read_bytes),
        report.batch
    )
}

fn points(report: &Report) -> Vec<plot::Point> {
    let point = |row: &Row| plot::Point {
        rails: row.rails,
        aggregate: row.aggregate_mb_per_s,
        balanced: row.balanced_mb_per_s,
        theoretical: row.theoretical_mb_per_s,
    };
    report.rows.iter().map(point).collect()
}

fn text(report: &Report) -> String {
    let header = [
        "rails",
        "MB/s a rail",
        "aggregate",
        "balanced",
        "theoretical",
        "of balanced",
        "speedup",
        "limited by",
    ];
    let cells = |row: &Row| {
        vec![
            row.rails.to_string(),
            match row.per_rail_mb_per_s.one() {
                Some(one) => format!("{one}"),
                None => {
                    let rates: Vec<String> =
                        row.per_rail_mb_per_s.0.iter().map(f64::to_string).collect();
                    rates.join(",")
                }
            },
            format!("{:.1}", row.aggregate_mb_per_s),
            format!("{:.1}", row.balanced_mb_per_s),
            format!("{:.1}", row.theoretical_mb_per_s),
            format!(
                "{:.1} %",
                100.0 * row.aggregate_mb_per_s / row.balanced_mb_per_s
            ),
            format!("{:.2}", row.speedup),
            row.limit_text.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = report.rows.iter().map(cells).collect();
    let first = &report.rows[0];
    let mut out = format!("{}; rates in MB/s\n\n", title(report));
    out.push_str(&output::table(&header, &rows));
    out.push('\n');
    out.push_str(&output::pairs(&[
        (
            "bytes a row",
            format!("{} ({})", grouped(first.bytes), human_bytes(first.bytes)),
        ),
        (
            "digest",
            match report.ok {
                true => format!("{}, the same in all rows and at the source", first.digest),
                false => "WRONG".to_owned(),
            },
        ),
    ]));
    out
}
