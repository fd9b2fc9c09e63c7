//! What the arena got, for people and for logs.

use std::fmt;
use std::time::Duration;

/// The pages that back an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageKind {
    /// Pages of the system's page size.
    Plain,
    /// Plain pages, of which the kernel was asked to make huge ones of this size where it can.
    Transparent {
        /// Bytes of one huge page.
        page_bytes: usize,
    },
    /// Explicit huge pages from a pool.
    Explicit {
        /// Bytes of one huge page.
        page_bytes: usize,
    },
    /// Memory that someone else mapped.
    Foreign,
}

/// Whether the memory can be swapped out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockOutcome {
    /// Locked by `mlock`, or made of explicit huge pages, which never leave.
    Locked,
    /// Nobody asked.
    NotAsked,
    /// It was tried and failed, for this reason.
    Failed(String),
    /// Memory that someone else mapped; its owner knows.
    Foreign,
}

/// What the arena got; [`Display`](fmt::Display) shows it on one line.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ArenaReport {
    /// Bytes of all slots.
    pub total_bytes: usize,
    /// Bytes of the mapping, which is rounded up to whole pages.
    pub mapped_bytes: usize,
    /// Bytes of a page of the system.
    pub page_bytes: usize,
    /// The kind of pages.
    pub pages: PageKind,
    /// Bytes that are in huge pages now.
    pub huge_bytes: usize,
    /// Whether it is locked, or why not.
    pub lock: LockOutcome,
    /// The NUMA node it is bound to.
    pub numa_node: Option<u32>,
    /// Bytes that had to stay free on the machine; `None` where nothing was taken from it.
    pub reserve_bytes: Option<u64>,
    /// Time that mapping, binding and pre-faulting took.
    pub prefault: Duration,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "arena of {} bytes: ", self.total_bytes)?;
        match self.pages {
            PageKind::Plain => write!(f, "plain pages of {} bytes", self.page_bytes)?,
            PageKind::Transparent { page_bytes } => write!(
                f,
                "pages of {} bytes, {} bytes in transparent huge pages of {page_bytes}",
                self.page_bytes, self.huge_bytes
            )?,
            PageKind::Explicit { page_bytes } => write!(f, "huge pages of {page_bytes} bytes")?,
            PageKind::Foreign => f.write_str("foreign memory")?,
        }
        match &self.lock {
            LockOutcome::Locked => f.write_str(", locked")?,
            LockOutcome::NotAsked => f.write_str(", not locked")?,
            LockOutcome::Failed(reason) => write!(f, ", not locked ({reason})")?,
            LockOutcome::Foreign => {}
        }
        if let Some(node) = self.numa_node {
            write!(f, ", on NUMA node {node}")?;
        }
        write!(f, ", ready after {:.3} s", self.prefault.as_secs_f64())
    }
}
