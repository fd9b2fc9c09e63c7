//! What can be wrong with a trace.

use std::io;

use thiserror::Error;

/// Why a trace could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The system refused.
    #[error("line {line}: {source}")]
    Io {
        /// Number of the line, counted from 1.
        line: u64,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// A line that is not what the format says.
    #[error("line {line}: {why}")]
    Line {
        /// Number of the line, counted from 1.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// Not one line tells of a layer.
    #[error(
        "the trace has no rows; each line is like {{\"step\":0,\"layer\":3,\"experts\":[5,17]}}"
    )]
    Empty,
}
