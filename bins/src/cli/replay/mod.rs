//! `replay`: what an arena of a given size does for a given routing, on a virtual clock or in earnest.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use expert_tier::Eviction;
use expert_tier::replay::{self, Link, Optimal, Prefetch, Setup, Target, Trace};

use super::UsageError;
use super::args::{parse_bytes, parse_rate};
use super::output;
use super::source::SourceArgs;

mod plot;
mod real;
mod report;

use real::Real;
use report::{Report, Row, Smallest};

/// Replay a routing trace against an arena, on a virtual clock: hit rate, stalls, and how large the arena has to be
///
/// A trace tells which experts each layer of each step uses, a line of JSON for each; docs/sizing.md describes it, and
/// `synth-trace` makes one up. Nothing is fetched, and the same numbers always give the same result, but with --real:
/// then records come from a peer or a store, and time is the clock's. Each combination of slots, eviction policy and
/// prefetch rule is a row.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Trace, JSON lines
    trace: PathBuf,
    /// Records that the arena has room for; default: sizes from a twentieth of the used records to all
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    slots: Vec<u32>,
    /// What is given up when the arena is full: lru, slru (segmented LRU), or slru:PERCENT protected
    #[arg(long, value_name = "NAME[,NAME…]", value_delimiter = ',', default_value = "lru", value_parser = parse_policy)]
    eviction: Vec<Eviction>,
    /// What is fetched for the next layer while one computes: none, oracle (what it will use), repeat (what it used in
    /// the step before), random:N (N by chance)
    #[arg(long, value_name = "RULE[,RULE…]", value_delimiter = ',', default_value = "none", value_parser = parse_prefetch)]
    prefetch: Vec<Prefetch>,
    #[command(flatten)]
    model: ModelArgs,
    /// Fetch records in earnest, from what --expert-backend and its flags name
    #[arg(long, conflicts_with_all = ["target_hit_rate", "target_stall_us", "record_bytes", "bandwidth_mb_s"])]
    real: bool,
    /// Longest wait for one layer, milliseconds (with --real)
    #[arg(long, value_name = "MS", default_value_t = 10_000, requires = "real", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    deadline_ms: u64,
    #[command(flatten)]
    source: SourceArgs,
    /// Find the smallest arena with that share of hits, from 0 to 1
    #[arg(long, value_name = "R", value_parser = parse_share, conflicts_with = "target_stall_us")]
    target_hit_rate: Option<f64>,
    /// Find the smallest arena in which a step waits no longer than that on average, microseconds
    #[arg(long, value_name = "US", value_parser = parse_us)]
    target_stall_us: Option<f64>,
    /// Draw hit rate and stall over the size of the arena into an SVG file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What is modelled besides the arena.
#[derive(Debug, clap::Args)]
struct ModelArgs {
    /// Size of a record (`inspect` tells it): bytes, or with KiB, MiB, GiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, required_unless_present = "real")]
    record_bytes: Option<u64>,
    /// Rate of the link in MB/s (10^6 bytes), as `fetch` measures it
    #[arg(long, value_name = "R", value_parser = parse_rate, required_unless_present = "real")]
    bandwidth_mb_s: Option<f64>,
    /// Time from a READ's post to its first byte, microseconds
    #[arg(long, value_name = "US", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    latency_us: u64,
    /// Time that a layer computes once its experts are there, microseconds: a step's time on a machine that holds the
    /// whole model, by its MoE layers
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    compute_us: u64,
    /// Steps at the beginning that fill the arena and are not counted: what a server does for hours, without its start
    #[arg(long, value_name = "N", default_value_t = 0)]
    warm_up_steps: u32,
    /// Of random:N
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
}

/// Shares of the records that are used, for arenas that nobody named.
const PERCENTS: [u64; 8] = [5, 10, 20, 30, 40, 60, 80, 100];

/// Runs it; exit code 1 where no arena meets the target.
///
/// *Errors*: a trace that cannot be read, an arena that is too small for one layer, a plot that cannot be written.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(flag) = args.source.place_given().filter(|_| !args.real) {
        return Err(UsageError(format!(
            "{flag} says where records come from, and none are fetched; add --real, or drop it"
        ))
        .into());
    }
    let trace = read(&args.trace)?;
    let combinations: Vec<(Eviction, Prefetch)> = args
        .eviction
        .iter()
        .flat_map(|&policy| args.prefetch.iter().map(move |&rule| (policy, rule)))
        .collect();
    let target = match (args.target_hit_rate, args.target_stall_us) {
        (Some(share), _) => Some(Target::HitRate(share)),
        (_, Some(us)) => Some(Target::StallUs(us)),
        _ => None,
    };
    let slots = match args.slots.is_empty() {
        false => args.slots.clone(),
        // Whoever asks for a size alone gets it alone.
        true if target.is_some() && args.plot.is_none() => Vec::new(),
        true => default_slots(&trace),
    };
    let optimal = Optimal::new(&trace, args.model.warm_up_steps);
    let mut against = match args.real {
        true => Against::Tier(Real::new(args)?),
        false => Against::Model(Modelled::of(&args.model)),
    };
    let mut rows = Vec::new();
    for &slots in &slots {
        let best = optimal.hit_rate(slots);
        for &(policy, rule) in &combinations {
            let done = match &mut against {
                Against::Tier(real) => real.replay(&trace, slots, policy, rule)?,
                Against::Model(model) => {
                    replay::replay(&trace, &setup(args, model, slots, policy, rule))?
                }
            };
            rows.push(Row::new(
                slots,
                policy,
                rule,
                against.record_bytes(),
                best,
                done,
            ));
        }
    }
    let mut sized = Vec::new();
    if let Some(target) = target {
        for &(policy, rule) in &combinations {
            let Against::Model(model) = &against else {
                break; // clap refuses both
            };
            let found = replay::smallest(&trace, &setup(args, model, 1, policy, rule), target)?;
            sized.push(Smallest::new(policy, rule, model.record_bytes, found));
        }
    }
    let is_met = target.is_none() || sized.iter().any(Smallest::is_met);
    let report = Report::new(args, &against, &trace, rows, target, sized, is_met);
    if let Some(path) = &args.plot {
        std::fs::write(path, plot::draw(&report.title(), &report.rows))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&report.text())?,
    }
    if is_met {
        return Ok(ExitCode::SUCCESS);
    }
    output::print_error(
        &"no arena meets the target, not even one with room for all records: first uses always miss; \
          a longer --warm-up-steps leaves fewer of them, a faster link makes them shorter",
    );
    Ok(ExitCode::FAILURE)
}

fn read(path: &Path) -> anyhow::Result<Trace> {
    let name = || path.display().to_string();
    let file = File::open(path).with_context(name)?;
    Trace::read(BufReader::with_capacity(1 << 17, file)).with_context(name)
}

/// What is modelled, with all of its numbers.
struct Modelled {
    record_bytes: u64,
    link: Link,
}

impl Modelled {
    fn of(model: &ModelArgs) -> Self {
        // clap asks for both where nothing is fetched.
        let bytes_per_s = (model.bandwidth_mb_s.unwrap_or(0.0) * 1e6) as u64;
        Self {
            record_bytes: model.record_bytes.unwrap_or(0),
            link: Link::new(bytes_per_s, Duration::from_micros(model.latency_us)),
        }
    }
}

/// What a trace is replayed against.
enum Against<'a> {
    Model(Modelled),
    Tier(Real<'a>),
}

impl Against<'_> {
    /// Of the largest record.
    fn record_bytes(&self) -> u64 {
        match self {
            Self::Model(model) => model.record_bytes,
            Self::Tier(real) => real.record_bytes(),
        }
    }
}

fn setup(
    args: &Args,
    model: &Modelled,
    slots: u32,
    eviction: Eviction,
    prefetch: Prefetch,
) -> Setup {
    Setup {
        slots,
        eviction,
        prefetch,
        record_bytes: model.record_bytes,
        link: model.link,
        compute: Duration::from_micros(args.model.compute_us),
        warm_up_steps: args.model.warm_up_steps,
        seed: args.model.seed,
    }
}

fn default_slots(trace: &Trace) -> Vec<u32> {
    let used = u64::from(trace.distinct_records());
    let least = trace.widest().max(1);
    let of_percent = |percent: u64| ((used * percent / 100) as u32).max(least);
    let mut slots: Vec<u32> = PERCENTS.into_iter().map(of_percent).collect();
    slots.dedup();
    slots
}

fn parse_policy(text: &str) -> Result<Eviction, String> {
    text.parse::<Eviction>().map_err(|e| e.to_string())
}

fn parse_prefetch(text: &str) -> Result<Prefetch, String> {
    text.parse::<Prefetch>().map_err(|e| e.to_string())
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a hit rate is a number from 0 to 1".into()),
    }
}

fn parse_us(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(us) if (0.0..=1e12).contains(&us) => Ok(us),
        _ => Err("a time is a number from 0 to 10^12, in microseconds".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_times_are_numbers_in_range() {
        assert_eq!(parse_share("0.9"), Ok(0.9));
        assert_eq!(parse_us("1500"), Ok(1500.0));
        for bad in ["", "-0.1", "1.1", "nan", "90%"] {
            assert!(parse_share(bad).is_err(), "{bad}");
        }
        for bad in ["", "-1", "inf", "nan", "5ms"] {
            assert!(parse_us(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn default_sizes_ascend_from_what_one_layer_needs_to_all_records() {
        let line = r#"{"step":0,"layer":0,"experts":[0,1,2,3,4,5,6,7,8,9]}"#;
        let second = r#"{"step":1,"layer":0,"experts":[10,11,12,13,14,15,16,17,18,19]}"#;
        let trace = Trace::read(format!("{line}\n{second}").as_bytes()).expect("a trace");
        assert_eq!(default_slots(&trace), [10, 12, 16, 20]);
    }
}
