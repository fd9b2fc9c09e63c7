//! Reads of files through a ring: what arrives, in which window, and what becomes of what is under way.
//!
//! They need io_uring, as a kernel since 5.6 has it and as container policies may forbid it.

#![cfg(not(miri))]

use expert_arena::{FILE_DEPTH_MAX, FileQueue, FileRead, leaked_windows};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn file_of(content: &[u8]) -> Arc<File> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    Arc::new(file)
}

fn read(file: &Arc<File>, offset: u64, bytes: usize) -> FileRead {
    FileRead {
        file: file.clone(),
        offset,
        bytes,
        need_bytes: bytes,
        block_bytes: 1,
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 31 / 7) as u8).collect()
}

/// What never ends by itself, to be read like a file.
fn stream() -> (File, Arc<File>) {
    let mut fds = [0; 2];
    // SAFETY: two descriptors fit.
    let rc = unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(rc, 0);
    // SAFETY: the pipe's ends were just opened, and nobody else has them.
    let [reader, writer] = fds.map(|fd| unsafe { File::from_raw_fd(fd) });
    (writer, Arc::new(reader))
}

/// Takes ends of reads until nothing is under way.
fn take_all<T>(queue: &mut FileQueue<T>, mut f: impl FnMut(T, io::Result<&[u8]>)) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !queue.is_empty() {
        queue.submit().unwrap();
        if queue.reap(&mut f).is_none() {
            assert!(Instant::now() < limit, "a read does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn reads_at_full_depth_arrive_each_in_a_window_of_its_own() {
    const BYTES: usize = 5000;
    let content = pattern(BYTES * 100);
    let file = file_of(&content);
    let mut queue = FileQueue::new(8, BYTES).unwrap();
    let (mut next, mut seen) = (0, vec![false; 100]);
    while next < 100 || !queue.is_empty() {
        while next < 100 && queue.has_room() {
            queue
                .post(next, read(&file, (next * BYTES) as u64, BYTES))
                .unwrap();
            next += 1;
        }
        assert!(queue.len() <= 8);
        queue.submit().unwrap();
        queue.reap(|i: usize, bytes| {
            assert_eq!(bytes.unwrap(), &content[i * BYTES..][..BYTES]);
            assert!(!std::mem::replace(&mut seen[i], true));
        });
    }
    assert!(seen.iter().all(|&s| s));
}

#[test]
fn a_file_that_ends_before_the_need_gives_what_there_is() {
    let file = file_of(&pattern(1000));
    let mut queue = FileQueue::new(4, 4096).unwrap();
    for (offset, want) in [(0, 1000), (900, 100), (1000, 0), (5000, 0)] {
        queue
            .post((offset, want), read(&file, offset, 2048))
            .unwrap();
    }
    take_all(&mut queue, |(offset, want), bytes| {
        let bytes = bytes.unwrap();
        assert_eq!(bytes.len(), want);
        if want > 0 {
            assert_eq!(bytes, &pattern(1000)[offset as usize..]);
        }
    });
}

#[test]
fn a_stream_that_gives_little_by_little_is_read_to_the_end_of_the_need() {
    let (mut writer, file) = stream();
    let mut queue = FileQueue::new(1, 4096).unwrap();
    // A stream has no places: the kernel reads on.
    queue.post((), read(&file, 0, 12)).unwrap();
    queue.submit().unwrap();
    for part in [b"four", b"more", b"last"] {
        writer.write_all(part).unwrap();
        let limit = Instant::now() + Duration::from_millis(20);
        while Instant::now() < limit {
            assert!(queue.len() == 1 || part == b"last");
            if part != b"last" {
                assert!(queue.reap(|(), _| ()).is_none());
            }
            queue.submit().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    take_all(&mut queue, |(), bytes| {
        assert_eq!(bytes.unwrap(), b"fourmorelast");
    });
}

#[test]
fn what_does_not_fit_comes_back() {
    let file = file_of(b"content");
    let mut queue = FileQueue::new(1, 4096).unwrap();
    let window = queue.window_bytes();
    assert_eq!(queue.post(1, read(&file, 0, window + 1)), Err(1));
    let more = FileRead {
        need_bytes: 8,
        ..read(&file, 0, 7)
    };
    assert_eq!(queue.post(2, more), Err(2));
    assert_eq!(queue.post(3, read(&file, 0, 7)), Ok(()));
    assert_eq!(queue.post(4, read(&file, 0, 7)), Err(4), "no window left");
    take_all(&mut queue, |token, bytes| {
        assert_eq!((token, bytes.unwrap()), (3, &b"content"[..]));
    });
}

#[test]
fn a_bad_descriptor_is_an_error_of_that_read_alone() {
    let folder = tempfile::tempdir().unwrap();
    let is_folder = Arc::new(File::open(folder.path()).unwrap());
    let good = file_of(b"good");
    let mut queue = FileQueue::new(2, 4096).unwrap();
    queue.post("bad", read(&is_folder, 0, 4)).unwrap();
    queue.post("good", read(&good, 0, 4)).unwrap();
    take_all(&mut queue, |token, bytes| match token {
        "good" => assert_eq!(bytes.unwrap(), b"good"),
        _ => assert_eq!(bytes.unwrap_err().raw_os_error(), Some(libc::EISDIR)),
    });
}

#[test]
fn the_descriptor_is_readable_when_a_read_has_ended() {
    let file = file_of(b"content");
    let mut queue = FileQueue::new(1, 4096).unwrap();
    queue.post((), read(&file, 0, 7)).unwrap();
    queue.submit().unwrap();
    let mut fd = libc::pollfd {
        fd: queue.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd.
    let ready = unsafe { libc::poll(&mut fd, 1, 60_000) };
    assert_eq!(ready, 1);
    assert!(queue.reap(|(), bytes| assert!(bytes.is_ok())).is_some());
}

#[test]
fn windows_under_an_endless_read_are_leaked_when_the_queue_is_dropped() {
    let (_writer, file) = stream();
    let token = Arc::new(());
    let mut queue = FileQueue::new(2, 4096).unwrap();
    queue.post(token.clone(), read(&file, 0, 16)).unwrap();
    queue.submit().unwrap();
    let before = leaked_windows();
    let start = Instant::now();
    drop(queue);
    assert!(start.elapsed() < Duration::from_secs(30));
    // Other tests of this file leave nothing behind.
    assert_eq!(leaked_windows(), before + 1);
    assert_eq!(Arc::strong_count(&file), 2, "the kernel may still read it");
}

#[test]
fn depths_and_sizes_outside_the_limits_are_refused() {
    for (depth, bytes) in [(0, 4096), (FILE_DEPTH_MAX + 1, 4096), (1, 0)] {
        let error = FileQueue::<()>::new(depth, bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
}

#[test]
fn ring_that_does_not_run_is_an_error_and_nothing_is_leaked_with_it() {
    let file = file_of(b"content");
    let mut queue = FileQueue::disabled(2, 4096).unwrap();
    queue.post((), read(&file, 0, 7)).unwrap();
    let error = queue.submit().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADFD));
    drop(queue);
    assert_eq!(Arc::strong_count(&file), 1, "the kernel never saw it");
}
