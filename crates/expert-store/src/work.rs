//! The one loop that reads records: many threads, bounded memory, quiet on the page cache.
//!
//! The records of a catalogue, in order of layer and expert, are cut into blocks of at most 1 MiB
//! of image (4 chunks). Each worker takes a free buffer, *then* the next block; it reads, hashes and
//! does its own part (compare, write elsewhere). Finished blocks are handed on in order, by whichever
//! worker finds the next one ready: that feeds sequential hashes such as the payload digest
//! without a second read. Because a block in flight always has its buffer, the next one in order
//! never waits for memory, and the pool of buffers is all the memory there is, whatever the size of
//! a record.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

use crate::catalogue::{CHUNK_BYTES, Catalogue, Class, Layer};
use crate::open_files::make_room;
use crate::pieces;
use crate::progress::{NoProgress, Progress};
use crate::quiet::QuietFile;
use crate::stamp::FileStamp;
use crate::store::StoreFile;
use crate::{Key, Store, StoreError};

/// Image bytes of one block: reads of this size keep an NVMe disk busy from two threads, and four
/// chunks still fit the second-level cache.
pub(crate) const BLOCK_BYTES: u64 = 4 * CHUNK_BYTES;
/// Blocks that may be in memory for each worker.
const BUFFERS_PER_WORKER: usize = 4;
/// Threads where nobody asks for a number: eight hash faster than any disk reads, and more would
/// reserve address space by the gigabyte where that is limited.
const WORKERS_DEFAULT_MAX: usize = 8;
const WORKERS_MAX: usize = 48;

/// How work on many records is done.
#[derive(Clone, Default)]
pub struct WorkOptions {
    /// Threads; 0 takes one per CPU, at most 8.
    pub threads: usize,
    /// Who is told how far it is.
    pub progress: Option<Arc<dyn Progress>>,
    /// Set to true to stop; the call returns [`StoreError::Interrupted`].
    pub cancel: Option<Arc<AtomicBool>>,
}

impl std::fmt::Debug for WorkOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkOptions")
            .field("threads", &self.threads)
            .field("cancel", &self.cancel)
            .finish_non_exhaustive()
    }
}

impl WorkOptions {
    pub(crate) fn workers(&self) -> usize {
        match self.threads {
            0 => {
                std::thread::available_parallelism().map_or(1, |n| n.get().min(WORKERS_DEFAULT_MAX))
            }
            n => n,
        }
        .min(WORKERS_MAX)
    }

    pub(crate) fn progress(&self) -> &dyn Progress {
        self.progress.as_deref().unwrap_or(&NoProgress)
    }

    /// *Errors*: [`StoreError::Interrupted`] once the caller asked to stop.
    pub(crate) fn check_cancel(&self) -> Result<(), StoreError> {
        match &self.cancel {
            Some(c) if c.load(Ordering::Relaxed) => Err(StoreError::Interrupted),
            _ => Ok(()),
        }
    }
}

/// Some bytes of one record image, starting at a chunk border.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    pub(crate) layer: &'a Layer,
    pub(crate) layer_index: usize,
    pub(crate) position: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

impl<'a> Block<'a> {
    pub(crate) fn class(&self) -> &'a Class {
        self.layer.class(self.position)
    }

    pub(crate) fn key(&self) -> Key {
        Key::new(self.layer.layer, self.layer.experts[self.position])
    }

    pub(crate) fn first_chunk(&self) -> u32 {
        (self.offset / CHUNK_BYTES) as u32
    }

    /// Whether the record ends here.
    pub(crate) fn is_last(&self) -> bool {
        self.offset + self.bytes as u64 == self.class().image_bytes
    }

    /// The first chunk whose sum is not the catalogue's; `None` also where the catalogue has none.
    pub(crate) fn mismatches<'s>(
        &self,
        sums: &'s [u64],
    ) -> impl Iterator<Item = (u32, u64, u64)> + use<'a, 's> {
        let first = self.first_chunk();
        let want = self
            .layer
            .record_checksums(self.position)
            .and_then(|all| all.get(first as usize..))
            .unwrap_or(&[]);
        sums.iter()
            .zip(want)
            .enumerate()
            .filter(|(_, (got, want))| got != want)
            .map(move |(i, (&got, &want))| (first + i as u32, got, want))
    }

    pub(crate) fn check(&self, sums: &[u64]) -> Result<(), StoreError> {
        match self.mismatches(sums).next() {
            None => Ok(()),
            Some((chunk, got, want)) => Err(StoreError::Checksum {
                key: self.key(),
                chunk,
                got,
                want,
            }),
        }
    }
}

/// Quiet descriptors of a store's files.
pub(crate) struct Reader {
    files: Vec<QuietFile>,
}

impl Reader {
    /// Opens each file anew and makes sure that it is the same one.
    pub(crate) fn open(files: &[StoreFile]) -> Result<Self, StoreError> {
        let open = |f: &StoreFile| {
            let file = QuietFile::open(&f.path)?;
            let now = file
                .file()
                .metadata()
                .map_err(StoreError::io("reading the state of", &f.path))?;
            match f.stamp.change(&FileStamp::of(&now)) {
                None => Ok(file),
                Some(why) => Err(StoreError::ChangedInUse {
                    path: f.path.clone(),
                    why,
                }),
            }
        };
        if let Some(first) = files.first() {
            make_room(&first.path, files.len())?;
        }
        Ok(Self {
            files: files.iter().map(open).collect::<Result<_, _>>()?,
        })
    }

    pub(crate) fn read_file(
        &self,
        file: u32,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), StoreError> {
        match self.files.get(file as usize) {
            Some(f) => f.read_exact_at(buf, offset),
            None => Err(StoreError::Usage(format!(
                "file {file} of {}",
                self.files.len()
            ))),
        }
    }

    /// Fills `buf` with the image's bytes from `offset`, padding as zeros.
    pub(crate) fn read_image(
        &self,
        layer: &Layer,
        position: usize,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), StoreError> {
        pieces::fill(layer, position, offset, buf, |file, offset, part| {
            self.read_file(file, offset, part)
        })
    }
}

/// Calls its function where a panic unwinds through its scope: a worker that dies must not leave the
/// others waiting for it.
pub(crate) struct OnPanic<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.0)();
        }
    }
}

/// A pass over all records of a catalogue.
pub(crate) struct Scan<'a> {
    pub(crate) catalogue: &'a Catalogue,
    pub(crate) reader: Reader,
    pub(crate) options: &'a WorkOptions,
}

struct State<'a> {
    next: Option<(usize, usize, u64)>,
    issued: u64,
    free: Vec<Vec<u8>>,
    done: BTreeMap<u64, (Block<'a>, Vec<u8>, Vec<u64>)>,
    handed_on: u64,
    handing_on: bool,
    stopped: bool,
    error: Option<StoreError>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Scan<'a> {
    pub(crate) fn of(store: &'a Store, options: &'a WorkOptions) -> Result<Self, StoreError> {
        Ok(Self {
            catalogue: store.catalogue(),
            reader: Reader::open(store.files())?,
            options,
        })
    }

    /// Image bytes of all records.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.catalogue.image_bytes()
    }

    /// Reads and hashes all records; a chunk that is not what the catalogue says is an error.
    /// `in_order` gets each block, its bytes and its chunks' sums.
    pub(crate) fn checked(
        &self,
        what: &str,
        in_order: impl FnMut(&Block<'_>, &[u8], &[u64]) -> Result<(), StoreError> + Send,
    ) -> Result<(), StoreError> {
        self.run(
            what,
            |block, buf| {
                self.reader
                    .read_image(block.layer, block.position, block.offset, buf)
                    .map(|()| true)
            },
            |block, _, sums| block.check(sums),
            in_order,
        )
    }

    /// The loop: `read` fills a buffer (false: leave this block out), `on_worker` runs in parallel
    /// and `in_order` one at a time, in order of layer, expert and offset.
    pub(crate) fn run<R, W, O>(
        &self,
        what: &str,
        read: R,
        on_worker: W,
        in_order: O,
    ) -> Result<(), StoreError>
    where
        R: Fn(&Block<'_>, &mut [u8]) -> Result<bool, StoreError> + Sync,
        W: Fn(&Block<'_>, &[u8], &[u64]) -> Result<(), StoreError> + Sync,
        O: FnMut(&Block<'_>, &[u8], &[u64]) -> Result<(), StoreError> + Send,
    {
        let workers = self.options.workers();
        let progress = self.options.progress();
        let state = Mutex::new(State {
            next: (!self.catalogue.layers.is_empty()).then_some((0, 0, 0)),
            issued: 0,
            free: (0..workers * BUFFERS_PER_WORKER)
                .map(|_| Vec::new())
                .collect(),
            done: BTreeMap::new(),
            handed_on: 0,
            handing_on: false,
            stopped: false,
            error: None,
        });
        let freed = Condvar::new();
        let in_order = Mutex::new(in_order);
        progress.start(what, self.total_bytes());
        let work = || {
            let _guard = OnPanic(|| {
                lock(&state).stopped = true;
                freed.notify_all();
            });
            let result = self.work(&state, &freed, &read, &on_worker, &in_order);
            if let Err(e) = result {
                let mut s = lock(&state);
                s.stopped = true;
                s.error.get_or_insert(e);
                drop(s);
                freed.notify_all();
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..workers {
                // A thread that cannot be had is missed, not fatal: the others do its share.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        progress.finish();
        match lock(&state).error.take() {
            Some(e) => Err(e),
            None => Ok(()),
        }
    }

    fn work<'s>(
        &'s self,
        state: &Mutex<State<'s>>,
        freed: &Condvar,
        read: &impl Fn(&Block<'_>, &mut [u8]) -> Result<bool, StoreError>,
        on_worker: &impl Fn(&Block<'_>, &[u8], &[u64]) -> Result<(), StoreError>,
        in_order: &Mutex<impl FnMut(&Block<'_>, &[u8], &[u64]) -> Result<(), StoreError>>,
    ) -> Result<(), StoreError> {
        loop {
            self.options.check_cancel()?;
            let (number, block, mut buf) = {
                let mut s = lock(state);
                loop {
                    if s.stopped || s.next.is_none() {
                        return Ok(());
                    }
                    if let Some(buf) = s.free.pop() {
                        let Some(block) = self.take(&mut s.next) else {
                            return Ok(());
                        };
                        s.issued += 1;
                        break (s.issued - 1, block, buf);
                    }
                    s = freed.wait(s).unwrap_or_else(PoisonError::into_inner);
                }
            };
            buf.resize(block.bytes, 0);
            let mut sums = Vec::new();
            if read(&block, &mut buf)? {
                sums.extend(buf.chunks(CHUNK_BYTES as usize).map(xxh3_64));
                on_worker(&block, &buf, &sums)?;
            } else {
                buf.clear();
            }
            self.options.progress().advance(block.bytes as u64);
            let mut s = lock(state);
            s.done.insert(number, (block, buf, sums));
            if s.handing_on {
                continue;
            }
            s.handing_on = true;
            loop {
                let number = s.handed_on;
                let Some((block, buf, sums)) = s.done.remove(&number) else {
                    break;
                };
                if s.stopped {
                    break;
                }
                drop(s);
                if !buf.is_empty() {
                    (*lock(in_order))(&block, &buf, &sums)?;
                }
                s = lock(state);
                s.handed_on += 1;
                s.free.push(buf);
                freed.notify_one();
            }
            s.handing_on = false;
            if s.next.is_none() {
                freed.notify_all();
            }
        }
    }

    /// The block at the cursor, which moves on.
    fn take(&self, next: &mut Option<(usize, usize, u64)>) -> Option<Block<'_>> {
        let (layer_index, position, offset) = (*next)?;
        let layer = self.catalogue.layers.get(layer_index)?;
        let image_bytes = layer.class(position).image_bytes;
        let block = Block {
            layer,
            layer_index,
            position,
            offset,
            bytes: BLOCK_BYTES.min(image_bytes - offset) as usize,
        };
        let after = offset + block.bytes as u64;
        *next = if after < image_bytes {
            Some((layer_index, position, after))
        } else if position + 1 < layer.experts.len() {
            Some((layer_index, position + 1, 0))
        } else if layer_index + 1 < self.catalogue.layers.len() {
            Some((layer_index + 1, 0, 0))
        } else {
            None
        };
        Some(block)
    }
}
