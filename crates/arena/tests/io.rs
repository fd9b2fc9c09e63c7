//! System calls into ranges, over sockets and files.

mod common;

use common::{heap_arena, slot};
use expert_arena::{Landing, POISON_BYTE, Poison, RecvFlags};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

const IMAGE_BYTES: usize = 32;

fn landing() -> Landing {
    let arena = heap_arena(1, 4096, Poison::Full);
    arena.begin_landing(slot(0), IMAGE_BYTES).unwrap()
}

fn contents(range: &expert_arena::LandingRange) -> Vec<u8> {
    let mut out = vec![0; range.len()];
    range.copy_out(0, &mut out);
    out
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no socket pairs")]
fn recv_writes_at_the_place_and_no_more_than_asked() {
    let (mut there, here) = UnixStream::pair().unwrap();
    there.write_all(b"0123456789").unwrap();
    let mut landing = landing();
    let mut range = landing.split(16).unwrap();
    let count = range.recv(here.as_fd(), 4, 6, RecvFlags::NONE).unwrap();
    assert_eq!(count, 6);
    let mut expected = [POISON_BYTE; 16];
    expected[4..10].copy_from_slice(b"012345");
    assert_eq!(contents(&range), expected);
    // The rest is still in the socket.
    let mut rest = [0; 4];
    (&here).read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"6789");
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no socket pairs")]
fn recv_says_would_block_and_end_of_stream() {
    let (there, here) = UnixStream::pair().unwrap();
    let mut landing = landing();
    let mut range = landing.split(16).unwrap();
    let error = range
        .recv(here.as_fd(), 0, 16, RecvFlags::DONT_WAIT)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(there);
    assert_eq!(range.recv(here.as_fd(), 0, 16, RecvFlags::NONE).unwrap(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no socket pairs")]
fn recv_with_wait_all_waits_for_the_last_byte() {
    let (mut there, here) = UnixStream::pair().unwrap();
    let mut landing = landing();
    let mut range = landing.split(8).unwrap();
    let sender = std::thread::spawn(move || {
        there.write_all(b"head").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        there.write_all(b"tail").unwrap();
    });
    let flags = RecvFlags::NONE | RecvFlags::WAIT_ALL;
    assert_eq!(range.recv(here.as_fd(), 0, 8, flags).unwrap(), 8);
    sender.join().unwrap();
    assert_eq!(contents(&range), b"headtail");
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no socket pairs")]
fn vectored_receive_puts_the_surplus_into_the_tail() {
    let (mut there, here) = UnixStream::pair().unwrap();
    there.write_all(b"payloadHEADER").unwrap();
    let mut landing = landing();
    let mut range = landing.split(7).unwrap();
    let mut tail = [0; 16];
    let count = range
        .recv_vectored_tail(here.as_fd(), 0, 7, &mut tail)
        .unwrap();
    assert_eq!(count, 13);
    assert_eq!(contents(&range), b"payload");
    assert_eq!(&tail[..6], b"HEADER");
    assert_eq!(tail[6..], [0; 10]);
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no socket pairs")]
fn vectored_receive_leaves_the_tail_alone_until_the_range_is_full() {
    let (mut there, here) = UnixStream::pair().unwrap();
    there.write_all(b"pay").unwrap();
    let mut landing = landing();
    let mut range = landing.split(10).unwrap();
    let mut tail = [9; 4];
    let count = range
        .recv_vectored_tail(here.as_fd(), 2, 7, &mut tail)
        .unwrap();
    assert_eq!((count, tail), (3, [9; 4]));
    assert_eq!(&contents(&range)[2..5], b"pay");
}

#[test]
fn pread_reads_from_the_offset_and_stops_at_the_end_of_the_file() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"....record").unwrap();
    file.rewind().unwrap();
    let mut landing = landing();
    let mut range = landing.split(16).unwrap();
    assert_eq!(range.pread(file.as_fd(), 1, 6, 4).unwrap(), 6);
    assert_eq!(&contents(&range)[1..7], b"record");
    assert_eq!(range.pread(file.as_fd(), 0, 16, 8).unwrap(), 2);
    assert_eq!(range.pread(file.as_fd(), 0, 16, 10).unwrap(), 0);
    // The file's own position did not move.
    let mut whole = Vec::new();
    file.read_to_end(&mut whole).unwrap();
    assert_eq!(whole.len(), 10);
    let error = range.pread(file.as_fd(), 0, 1, u64::MAX).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no socket pairs")]
fn part_outside_the_range_is_refused_before_anything_is_received() {
    let (mut there, here) = UnixStream::pair().unwrap();
    there.write_all(b"0123456789").unwrap();
    let file = tempfile::tempfile().unwrap();
    let mut landing = landing();
    // The image goes on behind the range: its bounds count, not the slot's.
    let mut range = landing.split(8).unwrap();
    for (at, len) in [(0, 9), (8, 1), (usize::MAX, 2)] {
        let fd = here.as_fd();
        for result in [
            range.recv(fd, at, len, RecvFlags::DONT_WAIT),
            range.recv_vectored_tail(fd, at, len, &mut []),
            range.pread(file.as_fd(), at, len, 0),
        ] {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
    let mut untouched = [0; 10];
    (&here).read_exact(&mut untouched).unwrap();
    assert_eq!(&untouched, b"0123456789");
}

#[test]
fn wrong_kind_of_descriptor_is_an_error_of_the_system() {
    let file = tempfile::tempfile().unwrap();
    let mut landing = landing();
    let mut range = landing.split(8).unwrap();
    let error = range.recv(file.as_fd(), 0, 8, RecvFlags::NONE).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTSOCK));
}
