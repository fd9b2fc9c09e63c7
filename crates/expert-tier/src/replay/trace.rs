//! The trace format, JSON lines; `docs/sizing.md` describes it for people who record traces.

use std::io::{self, BufRead, Read, Write};

use expert_wire::limits::{EXPERTS_MAX, LAYERS_MAX};
use serde::{Deserialize, Serialize};

use super::error::TraceError;

/// Value of the header's `format`.
pub const FORMAT: &str = "atlas-routing-trace";
/// The one version there is.
const VERSION: u64 = 1;
/// Longest line with its newline; a layer that names a thousand experts has 5 KB.
pub const LINE_MAX_BYTES: usize = 64 << 10;
/// Expert uses of one trace: 139,000 steps of 60 layers with 8 experts. What is kept of a trace
/// takes four bytes a use.
pub const USES_MAX: usize = 1 << 26;
/// Rows of one trace.
pub const ROWS_MAX: usize = 1 << 24;
/// Layers times experts: a hundred layers of 65,000 are 6.5 million.
pub const RECORDS_MAX: u64 = 1 << 24;

/// What a trace says of itself in its first line. All of it is optional; what is given is checked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// MoE layers: a row's `layer` is below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
    /// Routed experts of a layer: a row's `experts` are below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<u32>,
    /// Most experts that a row names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Where the trace comes from, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// One layer of one step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Number of the step; ascending, gaps are allowed.
    pub step: u64,
    /// Dense index of the MoE layer; ascending within a step.
    pub layer: u32,
    /// The experts that the router chose, each once.
    pub experts: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
struct FirstLine {
    format: String,
    version: u64,
    #[serde(flatten)]
    header: Header,
}

/// Writes the first line of a trace.
///
/// *Errors*: those of the writer.
pub fn write_header(out: &mut impl Write, header: &Header) -> io::Result<()> {
    let first = FirstLine {
        format: FORMAT.to_owned(),
        version: VERSION,
        header: header.clone(),
    };
    write_line(out, &first)
}

/// Writes one row.
///
/// *Errors*: those of the writer.
pub fn write_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    write_line(out, row)
}

fn write_line(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")
}

/// Reads a trace row by row, in bounded memory.
#[derive(Debug)]
pub struct TraceReader<R> {
    lines: Lines<R>,
    header: Header,
    /// The first line, where it was a row.
    first: Option<Row>,
    checks: Checks,
}

impl<R: BufRead> TraceReader<R> {
    /// Reads the header, if there is one.
    ///
    /// *Errors*: the first line is neither a header nor a row, or cannot be read.
    pub fn new(input: R) -> Result<Self, TraceError> {
        let mut lines = Lines {
            input,
            number: 0,
            text: Vec::new(),
        };
        let (mut header, mut first) = (Header::default(), None);
        if lines.next()? {
            match lines.header()? {
                Some(found) => header = found,
                None => first = Some(lines.row()?),
            }
        }
        Ok(Self {
            lines,
            header,
            first,
            checks: Checks::default(),
        })
    }

    /// What the trace says of itself.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The next row, `None` at the end.
    ///
    /// *Errors*: [`TraceError`] with the number of the line and what is wrong with it; nothing
    /// after it can be relied on.
    pub fn next_row(&mut self) -> Result<Option<Row>, TraceError> {
        let row = match self.first.take() {
            Some(row) => row,
            None if !self.lines.next()? => return Ok(None),
            None => self.lines.row()?,
        };
        match self.checks.check(&self.header, &row) {
            Ok(()) => Ok(Some(row)),
            Err(why) => Err(self.lines.wrong(why)),
        }
    }
}

/// Lines that are not blank, none longer than [`LINE_MAX_BYTES`].
#[derive(Debug)]
struct Lines<R> {
    input: R,
    number: u64,
    text: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// Reads the next line; `false` at the end.
    fn next(&mut self) -> Result<bool, TraceError> {
        loop {
            self.text.clear();
            self.number += 1;
            let most = LINE_MAX_BYTES as u64 + 1;
            let mut line = (&mut self.input).take(most);
            let read = line
                .read_until(b'\n', &mut self.text)
                .map_err(|source| TraceError::Io {
                    line: self.number,
                    source,
                })?;
            if read == 0 {
                return Ok(false);
            }
            if self.text.len() > LINE_MAX_BYTES {
                return Err(self.wrong(format!(
                    "longer than {LINE_MAX_BYTES} bytes; a line tells of one layer of one step"
                )));
            }
            if !self.text.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    /// The line as a header, `None` where it is something else.
    fn header(&self) -> Result<Option<Header>, TraceError> {
        #[derive(Deserialize)]
        struct Marks {
            format: Option<serde_json::Value>,
        }
        let is_header =
            serde_json::from_slice::<Marks>(&self.text).is_ok_and(|marks| marks.format.is_some());
        if !is_header {
            return Ok(None);
        }
        let FirstLine {
            format,
            version,
            header,
        } = self.parse()?;
        if format != FORMAT {
            return Err(self.wrong(format!("format is {format:?}, not {FORMAT:?}")));
        }
        if version != VERSION {
            return Err(self.wrong(format!(
                "version {version} of the format, this program reads version {VERSION}"
            )));
        }
        match header.why_not() {
            None => Ok(Some(header)),
            Some(why) => Err(self.wrong(why)),
        }
    }

    fn row(&self) -> Result<Row, TraceError> {
        self.parse()
    }

    fn parse<T: for<'de> Deserialize<'de>>(&self) -> Result<T, TraceError> {
        serde_json::from_slice(&self.text).map_err(|e| {
            // Its own line number is always 1 here, and ours is another.
            let text = e.to_string();
            let place = format!(" at line {} column {}", e.line(), e.column());
            match text.strip_suffix(&place) {
                Some(what) => self.wrong(format!("{what}, column {}", e.column())),
                None => self.wrong(text),
            }
        })
    }

    fn wrong(&self, why: String) -> TraceError {
        TraceError::Line {
            line: self.number,
            why,
        }
    }
}

impl Header {
    fn why_not(&self) -> Option<String> {
        let within = |name: &str, value: Option<u32>, max: u32| match value {
            Some(n) if n == 0 || n > max => Some(format!("{name} is {n}, it is 1 to {max}")),
            _ => None,
        };
        within("layers", self.layers, LAYERS_MAX)
            .or_else(|| within("experts", self.experts, EXPERTS_MAX))
            .or_else(|| within("top_k", self.top_k, self.experts.unwrap_or(EXPERTS_MAX)))
    }
}

/// What holds between rows.
#[derive(Debug, Default)]
struct Checks {
    last: Option<(u64, u32)>,
    rows: usize,
    uses: usize,
    /// By expert, number of the last row that named it.
    named: Vec<u64>,
    layers: u32,
    experts: u32,
}

impl Checks {
    fn check(&mut self, header: &Header, row: &Row) -> Result<(), String> {
        let Row {
            step,
            layer,
            experts,
        } = row;
        let layers = header.layers.unwrap_or(LAYERS_MAX);
        if *layer >= layers {
            return Err(match header.layers {
                Some(_) => format!("layer {layer}, the header says {layers} layers"),
                None => format!("layer {layer}, the limit is {layers} layers"),
            });
        }
        if let Some((last_step, last_layer)) = self.last {
            if *step < last_step {
                return Err(format!("step {step} after step {last_step}: steps ascend"));
            }
            if *step == last_step && *layer <= last_layer {
                return Err(format!(
                    "layer {layer} after layer {last_layer} of step {step}: layers ascend within a step"
                ));
            }
        }
        self.last = Some((*step, *layer));
        if let Some(top_k) = header.top_k {
            if experts.len() > top_k as usize {
                return Err(format!(
                    "{} experts, the header says top_k {top_k}",
                    experts.len()
                ));
            }
        }
        self.rows += 1;
        for &expert in experts {
            self.name(header, expert)?;
        }
        self.layers = self.layers.max(layer + 1);
        self.uses += experts.len();
        let records = u64::from(header.layers.unwrap_or(self.layers))
            * u64::from(header.experts.unwrap_or(self.experts));
        let within = [
            (self.rows as u64, ROWS_MAX as u64, "rows"),
            (self.uses as u64, USES_MAX as u64, "expert uses"),
            (records, RECORDS_MAX, "records (layers times experts)"),
        ];
        match within.iter().find(|(count, max, _)| count > max) {
            Some((_, max, what)) => Err(format!(
                "more than {max} {what}; replay a part of the trace"
            )),
            None => Ok(()),
        }
    }

    fn name(&mut self, header: &Header, expert: u32) -> Result<(), String> {
        let experts = header.experts.unwrap_or(EXPERTS_MAX);
        if expert >= experts {
            return Err(match header.experts {
                Some(_) => format!("expert {expert}, the header says {experts} experts"),
                None => format!("expert {expert}, the limit is {experts} experts"),
            });
        }
        if expert >= self.experts {
            self.experts = expert + 1;
            self.named.resize(self.experts as usize, 0);
        }
        let last = &mut self.named[expert as usize];
        if *last == self.rows as u64 {
            return Err(format!("expert {expert} twice"));
        }
        *last = self.rows as u64;
        Ok(())
    }
}

/// A whole trace in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    layers: u32,
    experts: u32,
    steps: u32,
    widest: u32,
    distinct: u32,
    rows: Vec<Span>,
    /// Records, `layer * experts + expert`.
    uses: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    /// Counted without gaps.
    step: u32,
    layer: u32,
    /// Of its uses; they begin where those of the row before end.
    end: u32,
}

/// A row of a [`Trace`].
#[derive(Debug, Clone, Copy)]
pub(super) struct RowView<'a> {
    pub(super) step: u32,
    pub(super) layer: u32,
    pub(super) records: &'a [u32],
}

impl Trace {
    /// Reads a trace to its end.
    ///
    /// *Errors*: as [`TraceReader::next_row`]; a trace without rows.
    pub fn read(input: impl BufRead) -> Result<Self, TraceError> {
        let mut reader = TraceReader::new(input)?;
        let mut trace = Self {
            layers: 0,
            experts: 0,
            steps: 0,
            widest: 0,
            distinct: 0,
            rows: Vec::new(),
            uses: Vec::new(),
        };
        let mut last_step = None;
        while let Some(row) = reader.next_row()? {
            if last_step.replace(row.step) != Some(row.step) {
                trace.steps += 1;
            }
            trace.widest = trace.widest.max(row.experts.len() as u32);
            trace.uses.extend(row.experts);
            trace.rows.push(Span {
                step: trace.steps - 1,
                layer: row.layer,
                end: trace.uses.len() as u32,
            });
        }
        let (header, checks) = (&reader.header, &reader.checks);
        trace.layers = header.layers.unwrap_or(checks.layers);
        trace.experts = header.experts.unwrap_or(checks.experts);
        match trace.rows.is_empty() {
            true => Err(TraceError::Empty),
            false => Ok(trace.numbered()),
        }
    }

    /// Turns experts into records, now that the number of experts is known.
    fn numbered(mut self) -> Self {
        let mut seen = vec![false; self.records() as usize];
        let mut begin = 0;
        for span in &self.rows {
            for used in &mut self.uses[begin..span.end as usize] {
                *used += span.layer * self.experts;
                self.distinct += u32::from(!std::mem::replace(&mut seen[*used as usize], true));
            }
            begin = span.end as usize;
        }
        self
    }

    /// MoE layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Routed experts of a layer.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    /// Steps, gaps in their numbers not counted.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Layers of all steps.
    pub fn layer_visits(&self) -> u64 {
        self.rows.len() as u64
    }

    /// Experts of all layers of all steps.
    pub fn uses(&self) -> u64 {
        self.uses.len() as u64
    }

    /// Most experts that one layer of one step uses: the least number of slots that can do.
    pub fn widest(&self) -> u32 {
        self.widest
    }

    /// Records that are used at all.
    pub fn distinct_records(&self) -> u32 {
        self.distinct
    }

    /// Uses after that many steps.
    pub fn uses_after(&self, warm_up_steps: u32) -> u64 {
        let before = self.rows.partition_point(|span| span.step < warm_up_steps);
        let uses = match before {
            0 => 0,
            _ => self.rows[before - 1].end,
        };
        self.uses() - u64::from(uses)
    }

    /// Uses after that many steps of records that were not used before: they miss in an arena of any
    /// size, unless a prefetch guesses them.
    pub fn first_uses(&self, warm_up_steps: u32) -> u64 {
        let mut seen = vec![false; self.records() as usize];
        let mut count = 0;
        for row in (0..self.rows.len()).map(|index| self.row(index)) {
            for &record in row.records {
                let is_first = !std::mem::replace(&mut seen[record as usize], true);
                count += u64::from(is_first && row.step >= warm_up_steps);
            }
        }
        count
    }

    /// Layers times experts.
    pub fn records(&self) -> u32 {
        self.layers * self.experts
    }

    pub(super) fn row_count(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn row(&self, index: usize) -> RowView<'_> {
        let begin = match index {
            0 => 0,
            _ => self.rows[index - 1].end as usize,
        };
        let span = self.rows[index];
        RowView {
            step: span.step,
            layer: span.layer,
            records: &self.uses[begin..span.end as usize],
        }
    }
}
