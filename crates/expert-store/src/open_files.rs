//! The process's limit on open files: a checkpoint may have more shards than it allows.

use std::path::Path;

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::StoreError;

/// Descriptors left to everything else in the process: threads, sockets, what is opened by and by.
const SPARE: u64 = 64;

/// Raises the soft limit on open files to the hard one and returns what it is then (`u64::MAX`:
/// there is none).
///
/// Whoever serves many connections calls it at the start; opening a store with many files calls it
/// by itself. Not for processes that use `select(2)`.
pub fn raise_open_files_limit() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let before = limit.current;
        limit.current = limit.maximum;
        if setrlimit(Resource::Nofile, limit).is_err() {
            limit.current = before;
        }
    }
    limit.current.unwrap_or(u64::MAX)
}

/// Makes sure that `count` more files can be opened, for what lies at `path`.
///
/// *Errors*: [`StoreError::OpenFiles`] where even the hard limit is too low.
pub(crate) fn make_room(path: &Path, count: usize) -> Result<(), StoreError> {
    let soft = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let need = (count as u64).saturating_add(SPARE);
    // Counting what is open takes a while for a server; a limit that is far off needs no count.
    if need.saturating_mul(4) <= soft {
        return Ok(());
    }
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |fds| fds.count() as u64);
    let need = need.saturating_add(open);
    if need <= soft {
        return Ok(());
    }
    let limit = raise_open_files_limit();
    if need <= limit {
        return Ok(());
    }
    Err(StoreError::OpenFiles {
        path: path.to_owned(),
        count,
        need,
        limit,
    })
}
