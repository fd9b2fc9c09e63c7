//! One line per event: hashed always, so that two runs can be compared, and kept when asked.

use std::fmt::{self, Write};
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

#[derive(Debug, Default)]
pub(super) struct Trace {
    pub(super) hash: u64,
    pub(super) lines: Option<Vec<String>>,
    scratch: String,
}

impl Trace {
    pub(super) fn new(keep: bool) -> Self {
        Self {
            lines: keep.then(Vec::new),
            ..Self::default()
        }
    }

    pub(super) fn note(&mut self, at: Duration, what: fmt::Arguments<'_>) {
        self.scratch.clear();
        let seconds = at.as_secs_f64();
        // A String takes everything.
        let _ = write!(self.scratch, "{seconds:12.6} {what}");
        self.hash = xxh3_64_with_seed(self.scratch.as_bytes(), self.hash);
        if let Some(lines) = &mut self.lines {
            lines.push(self.scratch.clone());
        }
    }
}
