//! Reads of files through an io_uring: many under way at once, into aligned windows that the queue owns.
//!
//! Direct reads want offset, length and address at multiples of the disk's block, which the bytes of a record seldom
//! are. So a queue never reads into a slot: what its user wants of a window is copied into the slot when it is there,
//! and a slot is free as soon as its user says so, whatever the disk does.

use crate::windows::Windows;
use io_uring::{IoUring, Probe, opcode, types};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Most reads under way on one queue.
pub const FILE_DEPTH_MAX: u32 = 1024;

/// How long `drop` waits for the kernel to be done with the windows before it leaks them: a disk that works answers in
/// far less, and one that does not may never.
const DROP_DRAIN: Duration = Duration::from_millis(500);

/// How often a read is begun anew in a row without a byte gained: what an interrupted or refused read needs is one
/// more try, and a kernel that says "again" for ever is not asked for ever.
const TRIES_MAX: u8 = 64;

static LEAKED: AtomicU64 = AtomicU64::new(0);

/// How many windows this process gave up because a disk still owed their bytes when their queue was dropped. Anything
/// but 0 is worth an alarm; each queue has a line in the log.
pub fn leaked_windows() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// A read to post.
#[derive(Debug)]
pub struct FileRead {
    /// The file; open until the read has ended.
    pub file: Arc<File>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes to ask for, at most those of a window. The file may end before.
    pub bytes: usize,
    /// Bytes that must arrive, at most `bytes`: a read that comes short of them is continued.
    pub need_bytes: usize,
    /// What offset and length are multiples of, and those of a continued read must be, too: 1 for a buffered read.
    pub block_bytes: usize,
}

/// A queue of reads. `T` is what its user wants back with each.
///
/// *Invariant:* a window belongs to the kernel from [`post`](Self::post) until the completion of its read was taken;
/// its bytes are seen only after that, and only during [`reap`](Self::reap).
///
/// **Threads.** One at a time, any. **Cleanup.** Drop waits half a second for what is under way. Windows that the
/// kernel may still write to after that are leaked with their ring, logged and counted ([`leaked_windows`]).
/// Steady use allocates nothing.
pub struct FileQueue<T> {
    // Both are taken in `drop` alone.
    ring: Option<IoUring>,
    windows: Option<Windows>,
    /// One per window.
    entries: Vec<Option<Entry<T>>>,
    free: Vec<u32>,
}

struct Entry<T> {
    token: T,
    read: FileRead,
    done_bytes: usize,
    tries: u8,
}

impl<T> FileQueue<T> {
    /// A ring and windows for `depth` reads of up to `window_bytes`.
    ///
    /// # Errors
    ///
    /// `ENOSYS`, `EPERM`, `EACCES` where the kernel has no io_uring or a policy forbids it, `ENOMEM` for want of memory
    /// (kernels before 5.12 count rings as locked memory), [`io::ErrorKind::Unsupported`] for a kernel before 5.6,
    /// [`io::ErrorKind::InvalidInput`] for a depth that is 0 or above [`FILE_DEPTH_MAX`].
    ///
    /// *Source.* io_uring_setup(2).
    pub fn new(depth: u32, window_bytes: usize) -> io::Result<Self> {
        let limit = u32::MAX as usize;
        if depth == 0 || depth > FILE_DEPTH_MAX || window_bytes == 0 || window_bytes > limit {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{depth} reads of {window_bytes} bytes, the limits are {FILE_DEPTH_MAX} and {limit}"
                ),
            ));
        }
        Self::with_ring(
            IoUring::builder().dontfork().build(depth)?,
            depth,
            window_bytes,
        )
    }

    /// A queue whose ring the kernel refuses to run, for tests of what its users do then.
    #[doc(hidden)]
    pub fn disabled(depth: u32, window_bytes: usize) -> io::Result<Self> {
        let ring = IoUring::builder().setup_r_disabled().build(depth)?;
        Self::with_ring(ring, depth, window_bytes)
    }

    fn with_ring(ring: IoUring, depth: u32, window_bytes: usize) -> io::Result<Self> {
        let mut probe = Probe::new();
        // The question came with 5.6, as the read did.
        let can_read = ring.submitter().register_probe(&mut probe).is_ok()
            && probe.is_supported(opcode::Read::CODE);
        if !can_read {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring has no plain reads (they came with Linux 5.6)",
            ));
        }
        let windows = Windows::map(depth as usize, window_bytes).map_err(io::Error::other)?;
        Ok(Self {
            ring: Some(ring),
            windows: Some(windows),
            entries: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
        })
    }

    /// Bytes of a window: those asked for, rounded up to whole pages.
    pub fn window_bytes(&self) -> usize {
        self.windows().window_bytes()
    }

    /// Reads under way.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether one more read can be posted.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a read; it begins with the next [`submit`](Self::submit).
    ///
    /// # Errors
    ///
    /// The token comes back where there is no window left, or the read is larger than one.
    pub fn post(&mut self, token: T, read: FileRead) -> Result<(), T> {
        if read.bytes > self.window_bytes() || read.need_bytes > read.bytes {
            return Err(token);
        }
        let Some(index) = self.free.pop() else {
            return Err(token);
        };
        self.entries[index as usize] = Some(Entry {
            token,
            read,
            done_bytes: 0,
            tries: 0,
        });
        self.push(index);
        Ok(())
    }

    /// Hands what was posted to the kernel; `false` where it cannot take all of it now: call it again soon.
    ///
    /// # Errors
    ///
    /// The ring is of no use any more; what is under way stays so until the queue is dropped.
    ///
    /// *Source.* io_uring_enter(2).
    pub fn submit(&mut self) -> io::Result<bool> {
        let ring = self.ring.as_mut().expect("only `drop` takes it");
        while !ring.submission().is_empty() {
            match ring.submit() {
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    return Ok(false);
                }
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Takes the end of one read, if there is one, and shows it: the bytes that arrived, at least those needed, fewer
    /// only where the file ends. The window is free when `f` returns. It never waits.
    ///
    /// A read that must be continued is posted again: [`submit`](Self::submit) after the last call.
    pub fn reap<R>(&mut self, f: impl FnOnce(T, io::Result<&[u8]>) -> R) -> Option<R> {
        loop {
            let ring = self.ring.as_mut().expect("only `drop` takes it");
            let completion = ring.completion().next()?;
            let index = completion.user_data() as usize;
            let Some(entry) = self.entries.get_mut(index).and_then(Option::as_mut) else {
                // The kernel says only what it was told.
                debug_assert!(false, "a completion that nobody waits for");
                continue;
            };
            let result = match entry.advance(completion.result()) {
                Step::Again => {
                    self.push(index as u32);
                    continue;
                }
                Step::Ended(result) => result,
            };
            let entry = self.entries[index].take().expect("seen above");
            let shown = match result {
                Ok(bytes) => {
                    let start = self.windows().ptr(index);
                    // SAFETY: `bytes` lie inside the window (the kernel writes no more than it was asked for), which
                    // is initialised: a mapping is, and the kernel wrote to it. The completion of the read was taken,
                    // so the kernel has let go of the window; it goes back to the free ones after `f` only, which
                    // cannot post as the queue is borrowed. The slice ends with this call.
                    let bytes = unsafe { std::slice::from_raw_parts(start, bytes) };
                    f(entry.token, Ok(bytes))
                }
                Err(e) => f(entry.token, Err(e)),
            };
            self.free.push(index as u32);
            return Some(shown);
        }
    }

    fn windows(&self) -> &Windows {
        self.windows.as_ref().expect("only `drop` takes them")
    }

    /// Puts an entry's read, or what is left of it, into the submission queue.
    fn push(&mut self, index: u32) {
        let start = self.windows().ptr(index as usize);
        let entry = self.entries[index as usize].as_ref().expect("just posted");
        let (at, read) = (entry.done_bytes, &entry.read);
        // A window is at most as large as a u32 can say.
        let bytes = (read.bytes - at) as u32;
        let request = opcode::Read::new(
            types::Fd(read.file.as_raw_fd()),
            start.wrapping_add(at),
            bytes,
        )
        .offset(read.offset.saturating_add(at as u64))
        .build()
        .user_data(u64::from(index));
        let ring = self.ring.as_mut().expect("only `drop` takes it");
        // SAFETY: the request writes to `bytes` bytes from byte `at` of the window, which end with it (`post` checked).
        // The window is mapped until no request is under way, else for ever. The entry keeps it out of the free ones,
        // and nobody sees its bytes, until the completion was taken. The file is open as long as the entry lives.
        let pushed = unsafe { ring.submission().push(&request) };
        // It has a place for each window, and a window has one request at most.
        pushed.expect("room in the submission queue");
    }

    /// Reads that the kernel has taken and not ended.
    fn owed(&mut self) -> usize {
        let ring = self.ring.as_mut().expect("only `drop` takes it");
        // What it was not told of yet, it never will be once the ring is gone.
        let untold = ring.submission().len();
        self.len() - untold
    }

    /// Waits until the kernel owes nothing, or the time is over.
    fn drain(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        loop {
            while self.reap(|token, _| drop(token)).is_some() {}
            let left = deadline.saturating_duration_since(Instant::now());
            if self.owed() == 0 || left.is_zero() {
                return;
            }
            let mut fd = libc::pollfd {
                fd: self.as_fd().as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            let left_ms = left.as_millis().max(1) as libc::c_int;
            // SAFETY: `fd` is one valid, writable pollfd for the whole call.
            unsafe { libc::poll(&mut fd, 1, left_ms) };
        }
    }
}

/// What to do after a completion.
enum Step {
    Again,
    /// Bytes in the window.
    Ended(io::Result<usize>),
}

impl<T> Entry<T> {
    /// Takes what the kernel says of the last request: a count, or an error's number below 0.
    fn advance(&mut self, result: i32) -> Step {
        self.tries += 1;
        let is_last_try = self.tries >= TRIES_MAX;
        let Ok(count) = usize::try_from(result) else {
            return match -result {
                libc::EINTR | libc::EAGAIN if !is_last_try => Step::Again,
                errno => Step::Ended(Err(io::Error::from_raw_os_error(errno))),
            };
        };
        let here = (self.done_bytes + count).min(self.read.bytes);
        if here >= self.read.need_bytes {
            return Step::Ended(Ok(here));
        }
        // A direct read goes on at a block; one that ends within the first block ends with the file.
        let next = here - here % self.read.block_bytes.max(1);
        if next <= self.done_bytes {
            return Step::Ended(Ok(here));
        }
        self.done_bytes = next;
        self.tries = 0;
        Step::Again
    }
}

/// Readable while a completion waits to be taken.
impl<T> AsFd for FileQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let ring = self.ring.as_ref().expect("only `drop` takes it");
        // SAFETY: the ring owns its descriptor, and is borrowed as long as this is.
        unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }
    }
}

impl<T> Drop for FileQueue<T> {
    fn drop(&mut self) {
        self.drain(DROP_DRAIN);
        let left = self.owed();
        if left == 0 {
            return;
        }
        LEAKED.fetch_add(left as u64, Ordering::Relaxed);
        tracing::error!(
            "a disk owes {left} reads since more than {DROP_DRAIN:?}; their memory ({} bytes with the rest) is leaked",
            self.entries.len() * self.window_bytes()
        );
        // The files' descriptors too: the kernel may not have looked at a request yet.
        std::mem::forget(std::mem::take(&mut self.entries));
        std::mem::forget(self.windows.take());
        std::mem::forget(self.ring.take());
    }
}

impl<T> fmt::Debug for FileQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileQueue")
            .field("depth", &self.entries.len())
            .field("under_way", &self.len())
            .finish_non_exhaustive()
    }
}

// A queue is made by one thread and used by another.
const _: () = {
    const fn send<T: Send>() {}
    send::<FileQueue<u64>>();
};

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bytes: usize, need_bytes: usize, block_bytes: usize) -> Entry<()> {
        Entry {
            token: (),
            read: FileRead {
                file: Arc::new(tempfile::tempfile().unwrap()),
                offset: 0,
                bytes,
                need_bytes,
                block_bytes,
            },
            done_bytes: 0,
            tries: 0,
        }
    }

    fn ended<T>(entry: &mut Entry<T>, result: i32) -> Option<io::Result<usize>> {
        match entry.advance(result) {
            Step::Again => None,
            Step::Ended(result) => Some(result),
        }
    }

    #[test]
    fn a_short_read_goes_on_at_a_block_and_ends_where_the_file_does() {
        let mut entry = entry(8192, 8000, 512);
        assert!(ended(&mut entry, 4000).is_none());
        assert_eq!(entry.done_bytes, 3584);
        // 416 more than was known, and no further block of the file.
        assert_eq!(ended(&mut entry, 416).unwrap().unwrap(), 4000);
    }

    #[test]
    fn what_is_needed_is_enough() {
        assert_eq!(
            ended(&mut entry(8192, 8000, 512), 8000).unwrap().unwrap(),
            8000
        );
        assert_eq!(ended(&mut entry(8192, 8000, 1), 0).unwrap().unwrap(), 0);
    }

    #[test]
    fn again_is_tried_again_but_not_for_ever_and_other_errors_are_passed_on() {
        let mut one = entry(512, 512, 512);
        for _ in 1..TRIES_MAX {
            assert!(ended(&mut one, -libc::EAGAIN).is_none());
        }
        let error = ended(&mut one, -libc::EAGAIN).unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
        let error = ended(&mut entry(512, 512, 512), -libc::EIO);
        assert_eq!(error.unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    }
}
