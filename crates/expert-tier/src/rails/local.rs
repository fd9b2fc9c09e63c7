//! The local rail: reads a store on this machine with `pread`, on a few threads. The plain oracle
//! of the other rails.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use expert_store::catalogue::CHUNK_BYTES;
use expert_store::{Piece, Store, StoreError};

use crate::cpu::WorkClock;
use crate::notify::Notifier;
use crate::rail::{
    Capabilities, Completion, ContentTag, Landed, Rail, RailEvent, RailKind, Read, ReadError,
};
use crate::rails::disk_capabilities;
use crate::sync::lock;

/// See the module.
pub(crate) struct LocalRail {
    name: String,
    lanes: u32,
    rank: u8,
    content: ContentTag,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    store: Arc<Store>,
    queue: Mutex<Queue>,
    work: Condvar,
    events: Mutex<Vec<RailEvent>>,
    notifier: Arc<Notifier>,
    progress: AtomicU64,
    /// Processor time of each reader, nanoseconds.
    cpu_ns: Vec<AtomicU64>,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<Read>,
    busy: usize,
    end: bool,
}

impl LocalRail {
    pub(crate) fn new(
        store: Arc<Store>,
        content: ContentTag,
        threads: u32,
        rank: u8,
        notifier: Arc<Notifier>,
    ) -> io::Result<Self> {
        let lanes = threads.max(1);
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            events: Mutex::default(),
            notifier,
            progress: AtomicU64::new(0),
            cpu_ns: (0..lanes).map(|_| AtomicU64::new(0)).collect(),
            store,
        });
        let mut rail = Self {
            name: format!("local:{}", shared.store.path().display()),
            lanes,
            rank,
            content,
            shared: shared.clone(),
            threads: Vec::new(),
        };
        for i in 0..rail.lanes {
            let shared = shared.clone();
            rail.threads.push(
                std::thread::Builder::new()
                    .name(format!("local-reader-{i}"))
                    .spawn(move || shared.read_until_end(i as usize))?,
            );
        }
        Ok(rail)
    }
}

impl Rail for LocalRail {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> RailKind {
        RailKind::Local
    }

    fn capabilities(&self) -> Capabilities {
        disk_capabilities(self.lanes, self.rank)
    }

    fn post(&mut self, read: Read) -> Result<(), Box<Read>> {
        if read.content != self.content {
            self.shared.complete(read, Err(ReadError::ContentChanged));
            return Ok(());
        }
        lock(&self.shared.queue).reads.push_back(read);
        self.shared.work.notify_one();
        Ok(())
    }

    fn poll(&mut self, sink: &mut Vec<RailEvent>) {
        sink.append(&mut lock(&self.shared.events));
    }

    fn progress_bytes(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    fn cpu_time(&self) -> Duration {
        let sum = self
            .shared
            .cpu_ns
            .iter()
            .map(|ns| ns.load(Ordering::Relaxed));
        Duration::from_nanos(sum.sum())
    }

    fn begin_probe(&mut self) {
        lock(&self.shared.events).push(RailEvent::Ready(self.content));
        self.shared.notifier.notify();
    }

    fn begin_quiesce(&mut self) {
        let flushed = std::mem::take(&mut lock(&self.shared.queue).reads);
        for read in flushed {
            self.shared.complete(read, Err(ReadError::Flushed));
        }
    }

    fn is_quiesced(&self) -> bool {
        let queue = lock(&self.shared.queue);
        queue.reads.is_empty() && queue.busy == 0
    }
}

impl Drop for LocalRail {
    fn drop(&mut self) {
        self.begin_quiesce();
        lock(&self.shared.queue).end = true;
        self.shared.work.notify_all();
        // A reader that hangs in a dead disk keeps its READ, and so its slot; it is not waited for.
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}

/// A reader at work; ends with it, by a panic, too.
struct Busy<'a>(&'a Shared);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        lock(&self.0.queue).busy -= 1;
    }
}

impl Shared {
    fn read_until_end(&self, reader: usize) {
        let clock = WorkClock::of_this_thread();
        let mut queue = lock(&self.queue);
        loop {
            if let Some(mut read) = queue.reads.pop_front() {
                queue.busy += 1;
                drop(queue);
                let busy = Busy(self);
                let result = read_plainly(&self.store, &mut read, &self.progress);
                let ns = u64::try_from(clock.time().as_nanos()).unwrap_or(u64::MAX);
                self.cpu_ns[reader].store(ns, Ordering::Relaxed);
                self.complete(read, result);
                drop(busy);
                queue = lock(&self.queue);
            } else if queue.end {
                return;
            } else {
                queue = self
                    .work
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn complete(&self, read: Read, result: Result<Landed, ReadError>) {
        lock(&self.events).push(RailEvent::Completion(Completion { read, result }));
        self.notifier.notify();
    }
}

/// Does a READ with `pread`, chunk by chunk, each compared while it is in the cache. `progress` counts what arrives.
pub(crate) fn read_plainly(
    store: &Store,
    read: &mut Read,
    progress: &AtomicU64,
) -> Result<Landed, ReadError> {
    let total = read.range.len();
    let mut verify_time = Duration::ZERO;
    let mut at = 0;
    while at < total {
        let bytes = (CHUNK_BYTES as usize).min(total - at);
        read_chunk(store, read, at, bytes)?;
        progress.fetch_add(bytes as u64, Ordering::Relaxed);
        if read.verify {
            let start = Instant::now();
            read.check_chunks(at as u64, bytes as u64)
                .map_err(ReadError::Checksum)?;
            verify_time += start.elapsed();
        }
        at += bytes;
    }
    Ok(Landed {
        verified: read.verify,
        verify_time,
    })
}

fn read_chunk(store: &Store, read: &mut Read, at: usize, bytes: usize) -> Result<(), ReadError> {
    let image_at = (read.range.offset() + at) as u64;
    let mut to = at;
    let mut failed: Option<ReadError> = None;
    let key = read.key;
    let range = &mut read.range;
    let planned = store.for_each_piece(key, image_at, bytes as u64, &mut |piece| {
        if failed.is_some() {
            return;
        }
        match piece {
            Piece::Zeros { bytes } => {
                range.fill_zero(to, bytes as usize);
                to += bytes as usize;
            }
            Piece::File {
                file,
                offset,
                bytes,
            } => {
                let file = &store.files()[file as usize];
                let end = to + bytes as usize;
                let mut from = offset;
                while to < end {
                    match range.pread(file.file.as_fd(), to, end - to, from) {
                        Ok(0) => {
                            failed = Some(ReadError::Unavailable(format!(
                                "{} ends at {from}: it was truncated",
                                file.path.display()
                            )));
                            return;
                        }
                        Ok(n) => {
                            to += n;
                            from += n as u64;
                        }
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                        Err(e) => {
                            failed = Some(ReadError::Unavailable(format!(
                                "reading {}: {e}",
                                file.path.display()
                            )));
                            return;
                        }
                    }
                }
            }
        }
    });
    match (planned, failed) {
        (Err(e @ StoreError::Io { .. }), _) => Err(ReadError::Unavailable(e.to_string())),
        (Err(e), _) => Err(ReadError::Refused(e.to_string())),
        (Ok(()), Some(error)) => Err(error),
        (Ok(()), None) => Ok(()),
    }
}
