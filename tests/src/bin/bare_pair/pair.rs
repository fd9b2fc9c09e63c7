//! The server and the client.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::work::{Clock, Work, compare, prefaulted};

/// A side that hears nothing for so long gives up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Connections at once.
const CONNECTIONS: usize = 256;
/// Of the buffer between `pread` and `send`: what the peer takes, it stays in the second-level cache.
const COPY_BYTES: u64 = 256 << 10;
const REQUEST_BYTES: usize = 16;

pub(crate) fn serve(file: PathBuf, copies: bool) -> Result<(), Error> {
    let file = Arc::new(File::open(file)?);
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    println!("{{\"listening\": \"{}\"}}", listener.local_addr()?);
    let connections = Arc::new(AtomicUsize::new(0));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
                connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (file, connections) = (Arc::clone(&file), Arc::clone(&connections));
            thread::spawn(move || {
                // An end of the stream between two requests is how a client leaves.
                if let Err(e) = answer(stream, &file, copies) {
                    eprintln!("bare_pair: {e}");
                }
                connections.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn answer(mut stream: TcpStream, file: &File, copies: bool) -> Result<(), Error> {
    tune(&stream)?;
    // A client that thinks between two requests is not a slow one.
    stream.set_read_timeout(None)?;
    let file_bytes = file.metadata()?.len();
    let mut buffer = prefaulted(if copies { COPY_BYTES } else { 0 });
    let mut request = [0; REQUEST_BYTES];
    loop {
        match stream.read_exact(&mut request) {
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let word = |at: usize| request[at..at + 8].try_into().map(u64::from_le_bytes);
        let (mut offset, length) = (word(0)?, word(8)?);
        let end = offset.checked_add(length).filter(|&end| end <= file_bytes);
        let end = end.ok_or_else(|| {
            format!("{length} bytes at {offset} were asked for, the file has {file_bytes}")
        })?;
        while offset < end {
            let left = end - offset;
            if copies {
                let some = &mut buffer[..COPY_BYTES.min(left) as usize];
                file.read_exact_at(some, offset)?;
                stream.write_all(some)?;
                offset += some.len() as u64;
            } else if rustix::fs::sendfile(&stream, file, Some(&mut offset), left as usize)? == 0 {
                return Err(format!("the file ends at {offset}").into());
            }
        }
    }
}

/// What both sides set, as the peer and its clients do; buffers are left to the kernel.
fn tune(stream: &TcpStream) -> Result<(), Error> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(())
}

/// Every stream has a thread of its own, takes each N-th record, and has its share of a batch under way all the time.
pub(crate) fn read(
    addr: SocketAddr,
    file: &Path,
    work: &Work,
    streams: usize,
) -> Result<(), Error> {
    let streams = streams.min(work.batch);
    let offsets = work.offsets();
    let mut lanes = Vec::new();
    for i in 0..streams {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE)?;
        tune(&stream)?;
        // The first shares are larger where they cannot be equal.
        let under_way = work.batch / streams + usize::from(i < work.batch % streams);
        let mut lane = Lane {
            stream,
            offsets: offsets.iter().copied().skip(i).step_by(streams).collect(),
            buffer: prefaulted(work.record_bytes * under_way as u64),
            record_bytes: work.record_bytes as usize,
        };
        // The connection's windows have grown when the clock starts.
        let warm: Vec<u64> = lane.offsets.iter().copied().take(under_way).collect();
        lane.run(&warm)?;
        lanes.push(lane);
    }
    let clock = Clock::start();
    let outcomes: Vec<Result<Vec<Duration>, Error>> = thread::scope(|scope| {
        let run = |lane: &mut Lane| lane.run(&lane.offsets.clone());
        let threads: Vec<_> = lanes
            .iter_mut()
            .map(|lane| scope.spawn(move || run(lane)))
            .collect();
        threads
            .into_iter()
            .map(|t| {
                t.join()
                    .unwrap_or_else(|_| Err("a stream's thread panicked".into()))
            })
            .collect()
    });
    let mut took = Vec::with_capacity(work.records);
    for outcome in outcomes {
        took.extend(outcome?);
    }
    clock.report(work, took);
    lanes.iter().try_for_each(|lane| lane.compare(file))
}

/// One stream, its records, and where they land: slot after slot, round and round.
struct Lane {
    stream: TcpStream,
    offsets: Vec<u64>,
    buffer: Vec<u8>,
    record_bytes: usize,
}

impl Lane {
    /// Reads the records, and gives back how long each took from its request to its last byte.
    fn run(&mut self, offsets: &[u64]) -> Result<Vec<Duration>, Error> {
        let slots = self.buffer.len() / self.record_bytes;
        let mut asked: Vec<Instant> = Vec::with_capacity(offsets.len());
        for &offset in offsets.iter().take(slots) {
            asked.push(self.ask(offset)?);
        }
        let mut took = Vec::with_capacity(offsets.len());
        for i in 0..offsets.len() {
            let at = i % slots * self.record_bytes;
            let mut slot = &mut self.buffer[at..at + self.record_bytes];
            while !slot.is_empty() {
                let got = self.stream.read(slot)?;
                if got == 0 {
                    return Err("the server hung up".into());
                }
                slot = &mut slot[got..];
            }
            took.push(asked[i].elapsed());
            if let Some(&next) = offsets.get(i + slots) {
                asked.push(self.ask(next)?);
            }
        }
        Ok(took)
    }

    fn ask(&mut self, offset: u64) -> Result<Instant, Error> {
        let mut request = [0; REQUEST_BYTES];
        request[..8].copy_from_slice(&offset.to_le_bytes());
        request[8..].copy_from_slice(&(self.record_bytes as u64).to_le_bytes());
        let now = Instant::now();
        self.stream.write_all(&request)?;
        Ok(now)
    }

    /// The last round of slots, byte for byte.
    fn compare(&self, file: &Path) -> Result<(), Error> {
        let slots = self.buffer.len() / self.record_bytes;
        let last = self.offsets.len().saturating_sub(slots);
        for (i, &offset) in self.offsets.iter().enumerate().skip(last) {
            let at = i % slots * self.record_bytes;
            compare(file, offset, &self.buffer[at..at + self.record_bytes])?;
        }
        Ok(())
    }
}
