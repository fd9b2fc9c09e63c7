//! The lines of the documentation that a reader copies, run as they stand on two machines.
//!
//! * [`Page`] takes the marked blocks out of a Markdown file.
//! * [`Machine`] runs one side's blocks in order, as one terminal would.
//! * [`walk`] runs a page on two machines; a line that fails, or that shows something else than the page says, is an
//!   error with its place in the page.
//! * [`Namespaces`] are two machines of one kernel, without root.
//!
//! Marks are words behind `sh` in a fence's first line: `peer`, `client`, or both; `serve` for a block that runs on; and
//! the [`WAYS`] that it is for, all where none is named. ` ```text shown ` below a block is part of what it prints. In a
//! line with `# change` the test changes the value, as a reader would, and nothing else. `sudo` and `scp` have stand-ins.

mod machine;
mod namespaces;
mod page;

pub use machine::{Machine, Walked, walk};
pub use namespaces::Namespaces;
pub use page::{Block, Page, Side, WAYS};
