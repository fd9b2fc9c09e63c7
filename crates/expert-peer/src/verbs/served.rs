//! A store that is readable over verbs: its registered memory, and the queue pairs that lead there.
//!
//! *Invariant*: memory is deregistered before the queue pairs of its clients are destroyed, and
//! unmapped last. A READ then fails at once with an access error; one to a queue pair that is gone
//! would be repeated until its retries are used up. Nothing here waits for a connection's thread.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use expert_wire::verbs::Region;

use super::fabric::{Published, Responder};

pub(crate) struct Served {
    // Dropping goes through `withdraw`, whatever the order of the fields.
    publication: Mutex<Option<Box<dyn Published>>>,
    /// What is registered now, by rail: read without waiting for a registration that ends.
    regions: Mutex<Vec<Arc<[Region]>>>,
    queue_pairs: Mutex<QueuePairs>,
    mapping: String,
    is_mapped: bool,
    bytes: u64,
}

/// Queue pairs by connection.
struct QueuePairs {
    is_closing: bool,
    next: u64,
    open: HashMap<u64, Opened>,
}

struct Opened {
    is_v1: bool,
    _queue_pairs: Vec<CountedQp>,
}

/// A queue pair that is counted while it exists.
pub(crate) struct CountedQp {
    pub(crate) qp: Box<dyn Responder>,
    open: Arc<AtomicU64>,
}

impl CountedQp {
    pub(crate) fn new(qp: Box<dyn Responder>, open: Arc<AtomicU64>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self { qp, open }
    }
}

impl Drop for CountedQp {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The queue pairs of one connection: they end with it, unless the store was withdrawn before.
pub(crate) struct OpenedRail {
    served: Arc<Served>,
    id: u64,
}

impl OpenedRail {
    /// Whether its memory is being deregistered, or is.
    pub(crate) fn is_closing(&self) -> bool {
        self.served.is_closing()
    }
}

impl Drop for OpenedRail {
    fn drop(&mut self) {
        self.served.release(self.id);
    }
}

impl Served {
    /// `bytes` is the memory that it pins, counted once.
    pub(crate) fn new(publication: Box<dyn Published>, rails: usize, bytes: u64) -> Self {
        Self {
            regions: Mutex::new(
                (0..rails)
                    .map(|rail| publication.regions(rail).into())
                    .collect(),
            ),
            mapping: publication.mapping(),
            is_mapped: publication.is_mapped(),
            publication: Mutex::new(Some(publication)),
            queue_pairs: Mutex::new(QueuePairs {
                is_closing: false,
                next: 0,
                open: HashMap::new(),
            }),
            bytes,
        }
    }

    pub(crate) fn mapping(&self) -> &str {
        &self.mapping
    }

    /// Whether the page cache holds all that can be read.
    pub(crate) fn is_mapped(&self) -> bool {
        self.is_mapped
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What can be read over a rail now.
    pub(crate) fn regions(&self, rail: usize) -> Arc<[Region]> {
        let regions = lock(&self.regions);
        regions.get(rail).cloned().unwrap_or_default()
    }

    /// Whether registering has set the times of a file anew.
    pub(crate) fn touches(&self, file: u32) -> bool {
        lock(&self.publication)
            .as_ref()
            .is_some_and(|p| p.touches(file))
    }

    /// Keeps connected queue pairs for a connection; gives them back to nobody when the store is
    /// being withdrawn.
    pub(crate) fn keep(
        self: &Arc<Self>,
        is_v1: bool,
        queue_pairs: Vec<CountedQp>,
    ) -> Option<OpenedRail> {
        let mut table = self.table();
        if table.is_closing {
            drop(table);
            return None;
        }
        let id = table.next;
        table.next += 1;
        let opened = Opened {
            is_v1,
            _queue_pairs: queue_pairs,
        };
        table.open.insert(id, opened);
        Some(OpenedRail {
            served: self.clone(),
            id,
        })
    }

    fn release(&self, id: u64) {
        let mut table = self.table();
        // Later than the memory's deregistration, see the head of this file.
        if table.is_closing {
            return;
        }
        let opened = table.open.remove(&id);
        drop(table);
        drop(opened);
    }

    /// Connections that have queue pairs: v1 clients and all.
    pub(crate) fn clients(&self) -> (usize, usize) {
        let table = self.table();
        let v1 = table.open.values().filter(|o| o.is_v1).count();
        (v1, table.open.len())
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.table().is_closing
    }

    /// No new queue pairs from here on; those that are open stay until [`Self::withdraw`].
    pub(crate) fn close(&self) {
        self.table().is_closing = true;
    }

    /// Deregisters a file that changed: READs that need it fail at once.
    pub(crate) fn revoke(&self, file: u32) {
        for rail in lock(&self.regions).iter_mut() {
            if rail.iter().any(|r| r.file == file) {
                *rail = rail.iter().filter(|r| r.file != file).copied().collect();
            }
        }
        if let Some(publication) = lock(&self.publication).as_mut() {
            publication.revoke(file);
        }
    }

    /// Deregisters everything, then destroys all queue pairs, then unmaps.
    pub(crate) fn withdraw(&self) {
        self.close();
        let publication = lock(&self.publication).take();
        let publication = publication.map(|mut publication| {
            for rail in lock(&self.regions).iter_mut() {
                *rail = Arc::default();
            }
            publication.deregister();
            publication
        });
        let queue_pairs = std::mem::take(&mut self.table().open);
        drop(queue_pairs);
        drop(publication);
    }

    fn table(&self) -> MutexGuard<'_, QueuePairs> {
        lock(&self.queue_pairs)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served")
            .field("mapping", &self.mapping)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
