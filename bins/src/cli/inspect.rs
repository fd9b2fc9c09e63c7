//! `inspect`: what a store or a checkpoint holds.

use std::path::PathBuf;
use std::process::ExitCode;

use expert_store::catalogue::{Records, StackClass};
use expert_store::info::{LayerInfo, StoreInfo, StoreKind, hex128};
use expert_store::{Class, Container, Layer, OpenOptions, Store, Whole};
use serde::Serialize;

use super::args::{self, MovedArgs, SelectArgs, StackArgs};
use super::output::{self, grouped, human_bytes, ranges_text};

/// Show what a store or a checkpoint holds; only headers are read
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Store, checkpoint folder or GGUF file
    path: PathBuf,
    #[command(flatten)]
    stack: StackArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    moved: MovedArgs,
    /// List the tensors of a record, too
    #[arg(long)]
    leaves: bool,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Runs it.
///
/// *Errors*: the path is no sound store or checkpoint.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let options = OpenOptions {
        checkpoint_override: args.moved.checkpoint.clone(),
        ..args.stack.open_options(&args.select)?
    };
    let store = args::open(&args.path, &options)?;
    let all = Inspection::of(&store);
    match args.json {
        true => output::print_json(&all)?,
        false => output::print(&text(&store, &all, args.leaves))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The store's description, and what a person wants to know beyond it.
#[derive(Serialize)]
struct Inspection<'a> {
    path: String,
    kind: StoreKind,
    stack: &'a str,
    class: StackClass,
    container: Container,
    generation: u64,
    content_id: &'a Option<String>,
    layout_id: &'a str,
    payload_digest: Option<String>,
    records: u64,
    payload_bytes: u64,
    image_bytes: u64,
    dtypes: Vec<String>,
    files: usize,
    warnings: &'a [String],
    whole: Option<WholeInspection<'a>>,
    layers: Vec<LayerInspection<'a>>,
}

/// What the store is a part of.
#[derive(Serialize)]
struct WholeInspection<'a> {
    content_id: &'a str,
    layout_id: &'a str,
    records: u64,
    layers: &'a [LayerInfo],
}

impl<'a> WholeInspection<'a> {
    fn of(whole: &'a Whole) -> Self {
        let ranges = whole.layers.iter().flat_map(|l| &l.experts);
        Self {
            content_id: &whole.content_id,
            layout_id: &whole.layout_id,
            records: ranges.map(|[first, end]| u64::from(end - first)).sum(),
            layers: &whole.layers,
        }
    }
}

#[derive(Serialize)]
struct LayerInspection<'a> {
    #[serde(flatten)]
    info: &'a LayerInfo,
    records: u64,
    payload_bytes: u64,
    stride_bytes: Option<u64>,
    checksums: bool,
    dtypes: Vec<String>,
    classes: &'a [Class],
}

impl<'a> Inspection<'a> {
    fn of(store: &'a Store) -> Self {
        let info: &StoreInfo = store.info();
        let layers: Vec<LayerInspection<'a>> = store
            .catalogue()
            .layers
            .iter()
            .zip(&info.layers)
            .map(|(layer, info)| LayerInspection::of(layer, info))
            .collect();
        Self {
            path: store.path().display().to_string(),
            kind: info.kind,
            stack: &info.stack,
            class: info.class,
            container: info.container,
            generation: info.generation,
            content_id: &info.content_id,
            layout_id: &info.layout_id,
            payload_digest: store.recorded_payload_digest().map(hex128),
            records: store.catalogue().record_count(),
            payload_bytes: layers.iter().map(|l| l.payload_bytes).sum(),
            image_bytes: store.catalogue().image_bytes(),
            dtypes: distinct(layers.iter().flat_map(|l| l.dtypes.iter().cloned())),
            files: store.files().len(),
            warnings: store.warnings(),
            whole: info.whole.as_ref().map(WholeInspection::of),
            layers,
        }
    }
}

impl<'a> LayerInspection<'a> {
    fn of(layer: &'a Layer, info: &'a LayerInfo) -> Self {
        let payload = |position| layer.class(position).payload_bytes();
        let leaves = layer.classes.iter().flat_map(|c| &c.leaves);
        Self {
            info,
            records: layer.experts.len() as u64,
            payload_bytes: (0..layer.experts.len()).map(payload).sum(),
            stride_bytes: match layer.records {
                Records::Packed { stride, .. } => Some(stride),
                _ => None,
            },
            checksums: layer.checksums.is_some(),
            dtypes: distinct(leaves.map(|l| l.dtype.to_string())),
            classes: &layer.classes,
        }
    }

    /// What layers of one row of the table have in common.
    fn row(&self) -> Vec<String> {
        let identity = match self.info.identity_experts {
            0 => String::new(),
            n => format!(" (+{n} zero)"),
        };
        let image = self.info.image_bytes_max;
        vec![
            format!("{}{identity}", self.info.num_experts),
            ranges_text(&self.info.experts),
            format!("{} ({})", grouped(image), human_bytes(image)),
            self.stride_bytes.map_or_else(|| "-".to_owned(), grouped),
            self.dtypes.join(" "),
        ]
    }

    /// Per class and leaf, without the layer's number.
    fn leaf_rows(&self) -> Vec<Vec<String>> {
        let number = format!(".{}.", self.info.model_layer);
        let leaves = self.classes.iter().enumerate();
        leaves
            .flat_map(|(class, c)| c.leaves.iter().map(move |l| (class, l)))
            .map(|(class, leaf)| {
                let shape: Vec<String> = leaf.shape.iter().map(u64::to_string).collect();
                vec![
                    class.to_string(),
                    leaf.name.replacen(&number, ".N.", 1),
                    leaf.dtype.to_string(),
                    format!("[{}]", shape.join(", ")),
                    grouped(leaf.bytes),
                ]
            })
            .collect()
    }
}

fn text(store: &Store, all: &Inspection<'_>, leaves: bool) -> String {
    let none = || "none".to_owned();
    let id = all.content_id.clone();
    let mut pairs = vec![
        ("path", all.path.clone()),
        (
            "kind",
            format!("{}, {}", word(&all.kind), word(&all.container)),
        ),
        ("stack", format!("{} ({})", all.stack, word(&all.class))),
        ("layers", all.layers.len().to_string()),
        ("records", grouped(all.records)),
        (
            "total",
            format!(
                "{} ({} bytes of weights)",
                human_bytes(all.payload_bytes),
                grouped(all.payload_bytes)
            ),
        ),
        ("dtypes", all.dtypes.join(" ")),
        ("files", store.files().len().to_string()),
        ("generation", all.generation.to_string()),
        (
            "content id",
            id.unwrap_or_else(|| "none: no checksums".to_owned()),
        ),
        ("layout id", all.layout_id.to_owned()),
        (
            "payload-digest",
            all.payload_digest.clone().unwrap_or_else(none),
        ),
    ];
    if let Some(whole) = &all.whole {
        let records = grouped(whole.records);
        pairs.push((
            "part of",
            format!("{} ({records} records)", whole.content_id),
        ));
    }
    let mut out = output::pairs(&pairs);
    out.push('\n');
    out.push_str(&layer_table(&all.layers));
    if leaves {
        out.push('\n');
        out.push_str(&leaf_tables(&all.layers));
    }
    out
}

/// A row for each run of layers that are alike.
fn layer_table(layers: &[LayerInspection<'_>]) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for group in layers.chunk_by(|a, b| a.info.layer + 1 == b.info.layer && a.row() == b.row()) {
        let (first, last) = (&group[0], &group[group.len() - 1]);
        let mut row = vec![
            span(first.info.layer, last.info.layer),
            span(first.info.model_layer, last.info.model_layer),
        ];
        row.extend(first.row());
        rows.push(row);
    }
    output::table(
        &[
            "layer",
            "model layer",
            "experts",
            "held",
            "record bytes",
            "stride",
            "dtypes",
        ],
        &rows,
    )
}

/// The tensors of a record, once for each run of layers that have the same.
fn leaf_tables(layers: &[LayerInspection<'_>]) -> String {
    let header = ["class", "tensor", "dtype", "shape", "bytes"];
    let mut out = String::new();
    for group in layers.chunk_by(|a, b| a.leaf_rows() == b.leaf_rows()) {
        let (first, last) = (&group[0], &group[group.len() - 1]);
        let span = span(first.info.layer, last.info.layer);
        out.push_str(&format!("layer {span}:\n"));
        out.push_str(&output::table(&header, &first.leaf_rows()));
    }
    out
}

/// Inclusive, as people count: `3` or `3 to 60`.
fn span(first: u32, last: u32) -> String {
    match first == last {
        true => first.to_string(),
        false => format!("{first} to {last}"),
    }
}

/// The word that JSON has for it, too.
fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => "?".to_owned(),
    }
}

fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut out: Vec<String> = names.collect();
    out.sort_unstable();
    out.dedup();
    out
}
