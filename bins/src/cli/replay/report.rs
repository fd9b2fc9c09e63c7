//! What `replay` tells people and programs.

use expert_tier::Eviction;
use expert_tier::replay::{self, Prefetch, Sizing, Target, Trace};
use serde::Serialize;

use super::{Against, Args};
use crate::cli::output::{self, grouped, human_bytes};

#[derive(Serialize)]
pub(super) struct Report {
    ok: bool,
    trace: TraceFacts,
    /// Where records came from; `None` for the model.
    backend: Option<&'static str>,
    record_bytes: u64,
    /// What was modelled.
    link: Option<LinkFacts>,
    compute_us: u64,
    pub(super) rows: Vec<Row>,
    target: Option<TargetFacts>,
}

#[derive(Serialize)]
struct LinkFacts {
    bandwidth_mb_per_s: f64,
    latency_us: u64,
    window_bytes: u64,
    read_bytes: u64,
}

#[derive(Serialize)]
struct TraceFacts {
    path: String,
    layers: u32,
    experts: u32,
    steps: u32,
    uses: u64,
    /// Records that are used at all.
    records: u32,
    /// Most experts of one layer of one step.
    widest: u32,
    warm_up_steps: u32,
    /// Uses after the warm-up of records that were not used before.
    first_uses: u64,
    /// Uses after the warm-up.
    counted_uses: u64,
}

/// One combination of arena, policy and rule.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) slots: u32,
    arena_bytes: u64,
    pub(super) policy: String,
    pub(super) prefetch: String,
    /// What no policy without prefetch surpasses.
    pub(super) optimal_hit_rate: f64,
    #[serde(flatten)]
    pub(super) replayed: replay::Report,
}

impl Row {
    pub(super) fn new(
        slots: u32,
        policy: Eviction,
        prefetch: Prefetch,
        record_bytes: u64,
        optimal_hit_rate: f64,
        replayed: replay::Report,
    ) -> Self {
        Self {
            slots,
            arena_bytes: u64::from(slots) * record_bytes,
            policy: policy.to_string(),
            prefetch: prefetch.to_string(),
            optimal_hit_rate,
            replayed,
        }
    }
}

#[derive(Serialize)]
struct TargetFacts {
    hit_rate: Option<f64>,
    stall_us: Option<f64>,
    arenas: Vec<Smallest>,
}

/// The smallest arena for one policy and rule.
#[derive(Serialize)]
pub(super) struct Smallest {
    policy: String,
    prefetch: String,
    /// `None` where no arena is large enough.
    slots: Option<u32>,
    arena_bytes: Option<u64>,
    /// Whether no smaller arena does; otherwise it is known that one slot less does not.
    is_least: bool,
    hit_rate: f64,
    stall_us: replay::Stall,
}

impl Smallest {
    pub(super) fn new(
        policy: Eviction,
        prefetch: Prefetch,
        record_bytes: u64,
        found: Sizing,
    ) -> Self {
        Self {
            policy: policy.to_string(),
            prefetch: prefetch.to_string(),
            slots: found.slots,
            arena_bytes: found.slots.map(|slots| u64::from(slots) * record_bytes),
            is_least: found.is_least,
            hit_rate: found.report.hit_rate,
            stall_us: found.report.stall_us,
        }
    }

    pub(super) fn is_met(&self) -> bool {
        self.slots.is_some()
    }
}

impl Report {
    pub(super) fn new(
        args: &Args,
        against: &Against<'_>,
        trace: &Trace,
        rows: Vec<Row>,
        target: Option<Target>,
        arenas: Vec<Smallest>,
        is_met: bool,
    ) -> Self {
        let model = &args.model;
        let (backend, link) = match against {
            Against::Tier(real) => (Some(real.backend()), None),
            Against::Model(modelled) => (
                None,
                Some(LinkFacts {
                    bandwidth_mb_per_s: modelled.link.bytes_per_s as f64 / 1e6,
                    latency_us: model.latency_us,
                    window_bytes: modelled.link.window_bytes,
                    read_bytes: modelled.link.read_bytes,
                }),
            ),
        };
        Self {
            ok: is_met,
            trace: TraceFacts {
                path: args.trace.display().to_string(),
                layers: trace.layers(),
                experts: trace.experts(),
                steps: trace.steps(),
                uses: trace.uses(),
                records: trace.distinct_records(),
                widest: trace.widest(),
                warm_up_steps: model.warm_up_steps,
                first_uses: trace.first_uses(model.warm_up_steps),
                counted_uses: trace.uses_after(model.warm_up_steps),
            },
            backend,
            record_bytes: against.record_bytes(),
            link,
            compute_us: model.compute_us,
            rows,
            target: target.map(|target| TargetFacts {
                hit_rate: match target {
                    Target::HitRate(share) => Some(share),
                    Target::StallUs(_) => None,
                },
                stall_us: match target {
                    Target::StallUs(us) => Some(us),
                    Target::HitRate(_) => None,
                },
                arenas,
            }),
        }
    }

    pub(super) fn title(&self) -> String {
        format!(
            "{} layers of {} experts, records of {}, {}, {} us of compute a layer",
            self.trace.layers,
            self.trace.experts,
            human_bytes(self.record_bytes),
            match (&self.link, self.backend) {
                (Some(link), _) => format!("{} MB/s", link.bandwidth_mb_per_s),
                (None, backend) => backend.unwrap_or_default().to_owned(),
            },
            self.compute_us
        )
    }

    pub(super) fn text(&self) -> String {
        let mut out = self.facts();
        if !self.rows.is_empty() {
            out.push('\n');
            out.push_str(&self.table());
            out.push_str(
                "best: no policy hits more without prefetch. Stalls are per step, in microseconds.\n",
            );
        }
        if let Some(target) = &self.target {
            out.push('\n');
            out.push_str(&target_text(target));
        }
        out
    }

    fn facts(&self) -> String {
        let trace = &self.trace;
        let first_uses = trace.first_uses as f64 / trace.counted_uses.max(1) as f64;
        output::pairs(&[
            ("trace", trace.path.clone()),
            (
                "routing",
                format!(
                    "{} layers of {} experts, {} steps, {} uses of {} records",
                    trace.layers,
                    trace.experts,
                    grouped(u64::from(trace.steps)),
                    grouped(trace.uses),
                    grouped(u64::from(trace.records))
                ),
            ),
            (
                "records",
                format!(
                    "{} each, {} all that are used",
                    human_bytes(self.record_bytes),
                    human_bytes(self.record_bytes.saturating_mul(u64::from(trace.records))),
                ),
            ),
            (
                "counted",
                format!(
                    "{} uses after {} steps of warm-up; {} of them are first uses, which miss in any arena",
                    grouped(trace.counted_uses),
                    grouped(u64::from(trace.warm_up_steps)),
                    percent(first_uses)
                ),
            ),
            (
                "link",
                match (&self.link, self.backend) {
                    (Some(link), _) => format!(
                        "{} MB/s, {} us; READs of {}, {} posted at most",
                        link.bandwidth_mb_per_s,
                        link.latency_us,
                        human_bytes(link.read_bytes),
                        human_bytes(link.window_bytes)
                    ),
                    (None, backend) => format!("{}, in earnest", backend.unwrap_or_default()),
                },
            ),
            (
                "compute",
                format!("{} us a layer", grouped(self.compute_us)),
            ),
        ])
    }

    fn table(&self) -> String {
        let header = [
            "slots", "arena", "policy", "prefetch", "hits", "best", "by layer", "moved", "stall",
            "p50", "p99", "steps/s", "ahead", "used", "late",
        ];
        let cells = |row: &Row| {
            let done = &row.replayed;
            let ahead = &done.prefetched;
            vec![
                grouped(u64::from(row.slots)),
                human_bytes(row.arena_bytes),
                row.policy.clone(),
                row.prefetch.clone(),
                percent(done.hit_rate),
                percent(row.optimal_hit_rate),
                by_layer(done),
                human_bytes(done.bytes_moved),
                whole(done.stall_us.mean),
                whole(done.stall_us.p50),
                whole(done.stall_us.p99),
                format!("{:.1}", done.steps_per_s),
                grouped(ahead.records),
                match ahead.records {
                    0 => "0".to_owned(),
                    all => percent(ahead.useful as f64 / all as f64),
                },
                grouped(done.late),
            ]
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(cells).collect();
        output::table(&header, &rows)
    }
}

fn target_text(target: &TargetFacts) -> String {
    let wanted = match (target.hit_rate, target.stall_us) {
        (Some(share), _) => format!("at least {} of hits", percent(share)),
        (_, Some(us)) => format!("a mean stall of at most {} us", whole(us)),
        _ => String::new(),
    };
    let header = [
        "policy", "prefetch", "slots", "arena", "hits", "stall", "p99", "smaller",
    ];
    let cells = |sized: &Smallest| {
        vec![
            sized.policy.clone(),
            sized.prefetch.clone(),
            match sized.slots {
                Some(slots) => grouped(u64::from(slots)),
                None => "none".to_owned(),
            },
            sized.arena_bytes.map_or("-".to_owned(), human_bytes),
            percent(sized.hit_rate),
            whole(sized.stall_us.mean),
            whole(sized.stall_us.p99),
            match (sized.slots, sized.is_least) {
                (None, _) => "not with all records in the arena",
                (_, true) => "no smaller arena does",
                _ => "one slot less does not",
            }
            .to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = target.arenas.iter().map(cells).collect();
    format!(
        "smallest arenas with {wanted}:\n\n{}",
        output::table(&header, &rows)
    )
}

/// The worst and the best layer.
fn by_layer(done: &replay::Report) -> String {
    let rates = || done.layers.iter().map(|layer| layer.hit_rate);
    match done.layers.is_empty() {
        true => "-".to_owned(),
        false => format!(
            "{:.0} to {:.0} %",
            100.0 * rates().fold(1.0, f64::min),
            100.0 * rates().fold(0.0, f64::max)
        ),
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn whole(us: f64) -> String {
    grouped(us.round() as u64)
}
