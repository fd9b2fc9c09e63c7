//! The disk's rail: reads a store on this machine past the page cache, many reads at once.
//!
//! A few readers have an io_uring each. A READ becomes aligned reads into windows ([`plan`]); what arrives is copied
//! into the slot, and each chunk's checksum is compared while it is in the cache. The copy is what alignment costs:
//! records lie at any byte of a checkpoint, and behind a header of 256 bytes in a packed store.
//!
//! What is refused is done without, once and with a line in the log: direct reads become buffered ones per file, and
//! where there is no io_uring, readers use `pread` as [`LocalRail`](super::local::LocalRail) does.

mod files;
mod mode;
mod plan;
mod reader;
mod shared;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use expert_arena::FileQueue;
use expert_store::Store;

use crate::cpu::WorkClock;
use crate::notify::Notifier;
use crate::rail::{
    Capabilities, Completion, ContentTag, Rail, RailEvent, RailKind, Read, ReadError,
};
use crate::rails::disk_capabilities;
use files::Files;
pub(crate) use mode::IoState;
pub use mode::{IoMode, IoReport};
use reader::{Reader, Token};
use shared::Shared;

/// Bytes of one read of a file: half a READ, so that the first half is copied while the second is on its way.
const IO_BYTES: usize = 512 << 10;

/// Most reads under way at once: what disks have room for in one queue, and 74 MB of windows.
pub(crate) const DEPTH_MAX: u32 = 128;

/// Most readers without rings: beyond it a disk gains little, and each is a thread.
const PLAIN_READERS_MAX: u32 = 16;

/// How a rail over files is set up.
#[derive(Debug, Clone)]
pub(crate) struct UmaConfig {
    /// Readers, 1 to 64.
    pub(crate) threads: u32,
    /// Reads under way at once, of all readers together; 1 to [`DEPTH_MAX`].
    pub(crate) depth: u32,
    /// Preference among the tier's rails.
    pub(crate) rank: u8,
    /// Whether to read past the page cache.
    pub(crate) direct: bool,
    /// Whether to use io_uring.
    pub(crate) ring: bool,
}

/// See the module.
pub(crate) struct UmaRail {
    name: String,
    lanes: u32,
    rank: u8,
    content: ContentTag,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl UmaRail {
    /// Opens the store's files and starts the readers.
    ///
    /// *Errors*: no thread or no descriptor.
    pub(crate) fn new(
        store: Arc<Store>,
        content: ContentTag,
        config: &UmaConfig,
        notifier: Arc<Notifier>,
    ) -> io::Result<Self> {
        Self::with_queues(store, content, config, notifier, make_queues)
    }

    /// The same with rings of another origin.
    fn with_queues(
        store: Arc<Store>,
        content: ContentTag,
        config: &UmaConfig,
        notifier: Arc<Notifier>,
        make_queues: impl FnOnce(u32, u32) -> io::Result<Vec<FileQueue<Token>>>,
    ) -> io::Result<Self> {
        let depth = config.depth.clamp(1, DEPTH_MAX);
        let threads = config.threads.clamp(1, depth);
        let state = Arc::new(IoState::new(config.direct, config.ring));
        let mut queues = match config.ring {
            true => make_queues(threads, depth).unwrap_or_else(|e| {
                state.ring_refused(&e);
                Vec::new()
            }),
            false => Vec::new(),
        };
        // Without rings it takes a thread for each read under way.
        let readers = match queues.is_empty() {
            true => depth.min(PLAIN_READERS_MAX).max(threads),
            false => threads,
        };
        let direct = config.direct && !queues.is_empty();
        let files = Files::open(&store, direct, &state);
        let shared = Shared::new(store, files, IO_BYTES, state, readers as usize, notifier)?;
        let mut rail = Self {
            name: format!("uma:{}", shared.store.path().display()),
            lanes: readers,
            rank: config.rank,
            content,
            shared: Arc::new(shared),
            threads: Vec::new(),
        };
        queues.reverse();
        for index in 0..readers as usize {
            let (presence, shared) = (rail.shared.enter(), rail.shared.clone());
            let queue = queues.pop();
            let spawned = std::thread::Builder::new()
                .name(format!("uma-reader-{index}"))
                .spawn(move || {
                    // Last: the READs are back when it is gone.
                    let _presence = presence;
                    read_until_end(&shared, index, queue);
                })?;
            rail.threads.push(spawned);
        }
        Ok(rail)
    }

    /// How files are read, for those who ask while the rail works.
    pub(crate) fn state(&self) -> Arc<IoState> {
        self.shared.state.clone()
    }
}

/// A queue for each reader, each with its share of the depth.
fn make_queues(threads: u32, depth: u32) -> io::Result<Vec<FileQueue<Token>>> {
    let share = |i| depth / threads + u32::from(i < depth % threads);
    (0..threads)
        .map(|i| FileQueue::new(share(i), plan::window_bytes(IO_BYTES)))
        .collect()
}

fn read_until_end(shared: &Shared, index: usize, queue: Option<FileQueue<Token>>) {
    let clock = WorkClock::of_this_thread();
    if let Some(queue) = queue {
        match Reader::new(shared, index, &clock, queue).run() {
            Ok(()) => return,
            Err(e) => shared.state.ring_refused(&e),
        }
    }
    shared.read_plainly_until_end(index, &clock);
}

impl Rail for UmaRail {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> RailKind {
        RailKind::Uma
    }

    fn capabilities(&self) -> Capabilities {
        disk_capabilities(self.lanes, self.rank)
    }

    fn post(&mut self, read: Read) -> Result<(), Box<Read>> {
        if read.content != self.content {
            self.shared.push(RailEvent::Completion(Completion {
                read,
                result: Err(ReadError::ContentChanged),
            }));
            return Ok(());
        }
        self.shared.post(read)
    }

    fn poll(&mut self, sink: &mut Vec<RailEvent>) {
        self.shared.poll(sink);
    }

    fn progress_bytes(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    fn cpu_time(&self) -> Duration {
        self.shared.cpu_time()
    }

    fn io(&self) -> Option<IoReport> {
        Some(self.shared.state.report())
    }

    fn begin_probe(&mut self) {
        self.shared.push(match self.shared.is_live() {
            true => RailEvent::Ready(self.content),
            false => RailEvent::ProbeFailed("no reader's thread is left".into()),
        });
    }

    fn begin_quiesce(&mut self) {
        self.shared.begin_quiesce();
    }

    fn is_quiesced(&self) -> bool {
        self.shared.is_quiesced()
    }
}

impl Drop for UmaRail {
    fn drop(&mut self) {
        self.shared.end();
        // Windows under reads of a dead disk take a moment to be given up; nobody waits for that, as no slot is
        // written to by anyone but the readers, and they are told.
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}
