//! One reader: a thread that keeps its ring full, copies what arrives into the slots and compares checksums.
//!
//! *Memory rule*: the kernel writes to the ring's windows alone. A READ can so be given back at any time; what a disk
//! still owes for it lands in a window and is thrown away.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expert_arena::{FileQueue, FileRead};
use expert_store::catalogue::CHUNK_BYTES;
use expert_store::{Piece, StoreError};

use super::files::is_refusal_of_direct;
use super::plan::{Part, Plan, plan};
use super::shared::Shared;
use crate::cpu::WorkClock;
use crate::rail::{Landed, Read, ReadError};

/// Pause before another look where the kernel could not take all requests.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Longest sleep with reads under way: a lost wake-up costs so much.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Reader<'a> {
    shared: &'a Shared,
    index: usize,
    clock: &'a WorkClock,
    queue: FileQueue<Token>,
    works: Vec<Work>,
    /// Names of works are never used twice.
    last_name: u64,
    /// Spans that are read once more, through the page cache.
    again: Vec<(u64, usize)>,
    /// Chunks that are there and not compared yet: work and place in the READ.
    landed: VecDeque<(u64, usize)>,
    parts: Vec<Part>,
}

/// What a read of a file is posted with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token {
    work: u64,
    span: usize,
    is_direct: bool,
}

/// A READ under way.
struct Work {
    name: u64,
    read: Read,
    round: u64,
    plan: Plan,
    /// The next span to post.
    next: usize,
    /// Bytes that each chunk still lacks.
    lacks: Vec<u32>,
    /// Chunks that are not compared yet.
    unproven: usize,
    verify_time: Duration,
}

/// What became of a read of a file.
enum Ended {
    /// Nobody wants it any more.
    Stale,
    Copied,
    /// The file ends so many bytes after the span's begin.
    Short(usize),
    Failed(io::Error),
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        index: usize,
        clock: &'a WorkClock,
        queue: FileQueue<Token>,
    ) -> Self {
        Self {
            shared,
            index,
            clock,
            queue,
            works: Vec::new(),
            last_name: 0,
            again: Vec::new(),
            landed: VecDeque::new(),
            parts: Vec::new(),
        }
    }

    /// Reads until the rail ends.
    ///
    /// *Errors*: the ring broke. The READs in hand are back in the queue.
    pub(super) fn run(mut self) -> io::Result<()> {
        while !self.shared.has_ended() {
            self.flush_old();
            self.fill();
            let went_out = match self.queue.submit() {
                Ok(all) => all,
                Err(e) => {
                    for work in self.works.drain(..).rev() {
                        self.shared.put_back(work.read);
                    }
                    return Err(e);
                }
            };
            // Chunks are compared while they are in a cache and the disk has something to do.
            if self.compare_one() || self.reap_one() {
                continue;
            }
            self.shared.note_cpu(self.index, self.clock);
            self.sleep(went_out);
        }
        Ok(())
    }

    /// Gives back what the rail was told to give back.
    fn flush_old(&mut self) {
        let round = self.shared.round();
        while let Some(old) = self.works.iter().position(|w| w.round != round) {
            let work = self.works.swap_remove(old);
            self.shared.complete(work.read, Err(ReadError::Flushed));
        }
    }

    /// Posts reads until no window is free or nothing is wanted.
    fn fill(&mut self) {
        while self.queue.has_room() {
            if let Some((work, span)) = self.again.pop() {
                self.post(work, span);
                continue;
            }
            let unposted = self.works.iter_mut().find(|w| w.next < w.plan.spans.len());
            if let Some(work) = unposted {
                let (name, span) = (work.name, work.next);
                work.next += 1;
                self.post(name, span);
                continue;
            }
            let Some((read, round)) = self.shared.take() else {
                return;
            };
            self.begin(read, round);
        }
    }

    fn begin(&mut self, mut read: Read, round: u64) {
        let total = read.range.len();
        let chunks = total.div_ceil(CHUNK_BYTES as usize);
        let mut lacks: Vec<u32> = (0..chunks).map(|i| chunk_len(total, i) as u32).collect();
        self.last_name += 1;
        let name = self.last_name;
        self.parts.clear();
        let (parts, landed, range) = (&mut self.parts, &mut self.landed, &mut read.range);
        let mut at = 0;
        let image_at = range.offset() as u64;
        let pieces =
            self.shared
                .store
                .for_each_piece(read.key, image_at, total as u64, &mut |piece| {
                    let bytes = piece.bytes() as usize;
                    match piece {
                        Piece::Zeros { .. } => {
                            range.fill_zero(at, bytes);
                            note_landed(&mut lacks, at, bytes, |i| landed.push_back((name, i)));
                        }
                        Piece::File { file, offset, .. } => parts.push(Part {
                            file,
                            offset,
                            at,
                            bytes,
                        }),
                    }
                    at += bytes;
                });
        if let Err(e) = pieces {
            let error = match e {
                StoreError::Io { .. } => ReadError::Unavailable(e.to_string()),
                _ => ReadError::Refused(e.to_string()),
            };
            self.shared.complete(read, Err(error));
            return;
        }
        let files = &self.shared.files;
        let plan = plan(&mut self.parts, self.shared.io_bytes, |file| {
            files.block_bytes(file)
        });
        self.works.push(Work {
            name,
            read,
            round,
            plan,
            next: 0,
            lacks,
            unproven: chunks,
            verify_time: Duration::ZERO,
        });
    }

    fn post(&mut self, name: u64, span_index: usize) {
        let Some(work) = self.works.iter().find(|w| w.name == name) else {
            return;
        };
        let span = &work.plan.spans[span_index];
        let source = match self.shared.files.source(&self.shared.store, span.file) {
            Ok(source) => source,
            Err(e) => {
                let why = format!(
                    "opening {}: {e}",
                    self.shared.files.path(span.file).display()
                );
                self.end(name, Err(ReadError::Unavailable(why)));
                return;
            }
        };
        let token = Token {
            work: name,
            span: span_index,
            is_direct: source.is_direct,
        };
        let read = FileRead {
            file: source.file,
            offset: span.offset,
            bytes: span.bytes,
            need_bytes: span.need_bytes,
            block_bytes: source.block_bytes as usize,
        };
        let posted = self.queue.post(token, read);
        debug_assert!(posted.is_ok(), "there is room, and spans fit a window");
        if posted.is_err() {
            let why = format!("a read of {} bytes does not fit a window", span.bytes);
            self.end(name, Err(ReadError::Refused(why)));
        }
    }

    /// Takes what one read of a file brought; `false` if none has ended.
    fn reap_one(&mut self) -> bool {
        let (queue, works, landed) = (&mut self.queue, &mut self.works, &mut self.landed);
        let shared = self.shared;
        let reaped = queue.reap(|token, result| {
            let Some(work) = works.iter_mut().find(|w| w.name == token.work) else {
                return (token, Ended::Stale);
            };
            let span = &work.plan.spans[token.span];
            let bytes = match result {
                Ok(bytes) if bytes.len() >= span.need_bytes => bytes,
                Ok(bytes) => return (token, Ended::Short(bytes.len())),
                Err(e) => return (token, Ended::Failed(e)),
            };
            let mut sum = 0;
            for copy in &work.plan.copies[span.copies.clone()] {
                let from = &bytes[copy.in_window..][..copy.bytes];
                work.read.range.write(copy.at, from);
                sum += copy.bytes as u64;
                note_landed(&mut work.lacks, copy.at, copy.bytes, |i| {
                    landed.push_back((token.work, i));
                });
            }
            shared.progress.fetch_add(sum, Ordering::Relaxed);
            (token, Ended::Copied)
        });
        let Some((token, ended)) = reaped else {
            return false;
        };
        if let Ended::Failed(_) | Ended::Short(_) = ended {
            self.note_failure(token, ended);
        }
        true
    }

    fn note_failure(&mut self, token: Token, ended: Ended) {
        let Some(work) = self.works.iter().find(|w| w.name == token.work) else {
            return;
        };
        let span = &work.plan.spans[token.span];
        let path = self.shared.files.path(span.file);
        let why = match ended {
            Ended::Failed(e) if token.is_direct && is_refusal_of_direct(&e) => {
                let files = &self.shared.files;
                files.refuse_direct(span.file, &self.shared.state, &e);
                self.again.push((token.work, token.span));
                return;
            }
            Ended::Failed(e) => format!(
                "reading {} bytes at {} of {}: {e}",
                span.bytes,
                span.offset,
                path.display()
            ),
            Ended::Short(bytes) => format!(
                "{} ends at {}, {} more bytes of it are needed: it was truncated",
                path.display(),
                span.offset + bytes as u64,
                span.need_bytes - bytes
            ),
            Ended::Stale | Ended::Copied => return,
        };
        self.end(token.work, Err(ReadError::Unavailable(why)));
    }

    /// Compares one chunk that is there, and gives the READ back with its last; `false` if there is none.
    fn compare_one(&mut self) -> bool {
        let Some((name, chunk)) = self.landed.pop_front() else {
            return false;
        };
        let Some(work) = self.works.iter_mut().find(|w| w.name == name) else {
            return true;
        };
        let (total, start) = (work.read.range.len(), Instant::now());
        let from = chunk as u64 * CHUNK_BYTES;
        let compared = work.read.check_chunks(from, chunk_len(total, chunk) as u64);
        if work.read.verify {
            work.verify_time += start.elapsed();
        }
        work.unproven -= 1;
        match compared {
            Err(bad) => self.end(name, Err(ReadError::Checksum(bad))),
            Ok(()) if work.unproven == 0 => {
                let landed = Landed {
                    verified: work.read.verify,
                    verify_time: work.verify_time,
                };
                self.end(name, Ok(landed));
            }
            Ok(()) => {}
        }
        true
    }

    fn end(&mut self, name: u64, result: Result<Landed, ReadError>) {
        if let Some(index) = self.works.iter().position(|w| w.name == name) {
            // In order: the oldest is read first.
            let work = self.works.remove(index);
            self.shared.note_cpu(self.index, self.clock);
            self.shared.complete(work.read, result);
        }
    }

    fn sleep(&mut self, went_out: bool) {
        let has_room = self.queue.has_room();
        let oldest = self.works.iter().map(|w| w.round).min();
        let waker = self.shared.prepare_sleep(self.index, has_room);
        if self.shared.has_news(has_room, oldest) {
            waker.cancel();
            return;
        }
        let timeout = match (went_out, self.queue.is_empty()) {
            (false, _) => Some(BUSY_PAUSE),
            (true, true) => None,
            (true, false) => Some(SLEEP_MAX),
        };
        waker.wait_beside(self.queue.as_fd(), timeout);
    }
}

impl Drop for Reader<'_> {
    /// Also after a panic: every READ comes back.
    fn drop(&mut self) {
        for work in self.works.drain(..) {
            self.shared.complete(work.read, Err(ReadError::Flushed));
        }
    }
}

/// Bytes of a READ's chunk.
fn chunk_len(total: usize, chunk: usize) -> usize {
    (CHUNK_BYTES as usize).min(total - chunk * CHUNK_BYTES as usize)
}

/// Takes `bytes` at `at` off what the chunks lack, and calls `whole` for each that lacks nothing any more.
fn note_landed(lacks: &mut [u32], at: usize, bytes: usize, mut whole: impl FnMut(usize)) {
    let chunk_bytes = CHUNK_BYTES as usize;
    let (mut at, end) = (at, at + bytes);
    while at < end {
        let chunk = at / chunk_bytes;
        let here = ((chunk + 1) * chunk_bytes).min(end) - at;
        lacks[chunk] -= here as u32;
        if lacks[chunk] == 0 {
            whole(chunk);
        }
        at += here;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_when_their_last_byte_lands() {
        let chunk = CHUNK_BYTES as usize;
        let total = 2 * chunk + 100;
        let mut lacks: Vec<u32> = (0..3).map(|i| chunk_len(total, i) as u32).collect();
        assert_eq!(lacks[2], 100);
        let mut whole = Vec::new();
        for (at, bytes) in [
            (chunk - 1, 2),
            (2 * chunk - 50, 150),
            (0, chunk - 1),
            (chunk + 1, chunk - 51),
        ] {
            note_landed(&mut lacks, at, bytes, |i| whole.push(i));
        }
        assert_eq!(whole, [2, 0, 1]);
        assert_eq!(lacks, [0, 0, 0]);
    }
}
