//! `sim`: seeded fault simulation of the fetch engine.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Context;
use clap::builder::PossibleValuesParser;
use expert_tier::engine::Guards;
use expert_tier::sim::{self, SimConfig, SimFailure, SimReport};
use serde::Serialize;

use super::output::{self, grouped, human_bytes};

/// Simulate a client, peers and failing rails, thousands of times; a seed that breaks a rule is printed
///
/// No network and no store is used: everything happens in memory, on a virtual clock. The same seed always
/// gives the same run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run seeds 0 to N-1
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Replay this seed alone, and print each event with its virtual time
    #[arg(long, value_name = "S", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Switch one rule off, to see that the simulation notices
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Guards::NAMES))]
    guard_off: Option<String>,
    /// Count the failing seeds instead of stopping at the first
    #[arg(long)]
    keep_going: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Seeds are independent; two cores are what every machine has.
const THREADS: usize = 2;

#[derive(Serialize)]
struct Summary {
    ok: bool,
    seeds: u64,
    failing_seeds: u64,
    seconds: f64,
    seeds_per_s: f64,
    simulated_s: f64,
    #[serde(flatten)]
    report: SimReport,
    failure: Option<Failing>,
}

#[derive(Serialize)]
struct Failing {
    seed: u64,
    at_s: f64,
    violation: String,
    replay: String,
}

/// Runs it; exit code 1 where a rule was broken.
///
/// *Errors*: standard output cannot be written.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let guards = match &args.guard_off {
        Some(name) => Guards::without(name).context("--guard-off: no such guard")?,
        None => Guards::ON,
    };
    let config = SimConfig {
        guards,
        trace: args.seed.is_some(),
    };
    let began = Instant::now();
    let done = match args.seed {
        Some(seed) => replay(seed, &config, args.json)?,
        None => run_all(args.seeds, &config, args.keep_going),
    };
    let seconds = began.elapsed().as_secs_f64();
    let summary = Summary {
        ok: done.failure.is_none(),
        seeds: done.seeds,
        failing_seeds: done.failing_seeds,
        seconds,
        seeds_per_s: done.seeds as f64 / seconds.max(f64::MIN_POSITIVE),
        simulated_s: done.report.simulated.as_secs_f64(),
        report: done.report,
        failure: done.failure.map(|f| describe(&f, args)),
    };
    match args.json {
        true => output::print_json(&summary)?,
        false => output::print(&text(&summary))?,
    }
    Ok(match summary.ok {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

#[derive(Default)]
struct Done {
    seeds: u64,
    failing_seeds: u64,
    report: SimReport,
    /// Of the lowest seed that failed.
    failure: Option<SimFailure>,
}

impl Done {
    fn add(&mut self, result: Result<SimReport, SimFailure>) {
        self.seeds += 1;
        match result {
            Ok(report) => self.report.add(&report),
            Err(failure) => {
                self.failing_seeds += 1;
                if self.failure.as_ref().is_none_or(|f| failure.seed < f.seed) {
                    self.failure = Some(failure);
                }
            }
        }
    }
}

fn replay(seed: u64, config: &SimConfig, json: bool) -> anyhow::Result<Done> {
    let mut result = sim::run(seed, config);
    let trace = match &mut result {
        Ok(report) => &mut report.trace,
        Err(failure) => &mut failure.trace,
    };
    if !json {
        trace.push(String::new());
        output::print(&trace.join("\n"))?;
    }
    let mut done = Done::default();
    done.add(result);
    Ok(done)
}

/// Seeds are handed out in order, so the lowest failing one is always found.
fn run_all(seeds: u64, config: &SimConfig, keep_going: bool) -> Done {
    let next = AtomicU64::new(0);
    let done = Mutex::new(Done::default());
    let lock = || done.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while keep_going || lock().failure.is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        break;
                    }
                    let result = sim::run(seed, config);
                    lock().add(result);
                }
            });
        }
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn describe(failure: &SimFailure, args: &Args) -> Failing {
    let guard = match &args.guard_off {
        Some(name) => format!(" --guard-off {name}"),
        None => String::new(),
    };
    Failing {
        seed: failure.seed,
        at_s: failure.at.as_secs_f64(),
        violation: failure.violation.clone(),
        replay: format!("atlas-expert sim --seed {}{guard}", failure.seed),
    }
}

fn text(summary: &Summary) -> String {
    let report = &summary.report;
    let mut pairs = vec![
        (
            "seeds",
            format!(
                "{} in {:.2} s, {:.0} per second, {} s simulated",
                grouped(summary.seeds),
                summary.seconds,
                summary.seeds_per_s,
                grouped(summary.simulated_s as u64)
            ),
        ),
        (
            "requests",
            format!(
                "{} ended, {} refused with back-pressure",
                grouped(report.requests),
                grouped(report.refused)
            ),
        ),
        (
            "records",
            format!(
                "{} committed and compared ({}), {} failed for a reason",
                grouped(report.records),
                human_bytes(report.bytes),
                grouped(report.failed)
            ),
        ),
        (
            "unverified",
            format!(
                "{} of them as the policy has it, {} with damage that nobody looked for",
                grouped(report.unverified),
                grouped(report.damaged)
            ),
        ),
        (
            "READs",
            format!(
                "{}, {} of them without their bytes",
                grouped(report.reads),
                grouped(report.retries)
            ),
        ),
    ];
    for (kind, count) in &report.faults {
        pairs.push((kind, grouped(*count)));
    }
    let result = match &summary.failure {
        None => "no rule was broken".to_owned(),
        Some(f) => format!(
            "BROKEN in {} of these seeds; seed {} at {:.6} s: {}",
            grouped(summary.failing_seeds),
            f.seed,
            f.at_s,
            f.violation
        ),
    };
    pairs.push(("result", result));
    if let Some(f) = &summary.failure {
        pairs.push(("replay", f.replay.clone()));
    }
    output::pairs(&pairs)
}
