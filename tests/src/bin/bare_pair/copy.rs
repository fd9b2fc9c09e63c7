//! The floor: the same records, from memory or the page cache into memory, by one thread or several.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::work::{Clock, Work, compare, prefaulted};

pub(crate) fn copy(path: &Path, work: &Work, threads: usize, from_file: bool) -> Result<(), Error> {
    let file = File::open(path)?;
    let image = match from_file {
        true => Vec::new(),
        false => std::fs::read(path)?,
    };
    let offsets = work.offsets();
    let size = work.record_bytes as usize;
    let mut buffers: Vec<Vec<u8>> = (0..threads)
        .map(|_| prefaulted(work.record_bytes * work.batch as u64))
        .collect();
    let run = |buffer: &mut [u8], first: usize| -> Result<Vec<Duration>, Error> {
        let mut took = Vec::new();
        for (i, &offset) in offsets.iter().skip(first).step_by(threads).enumerate() {
            let start = Instant::now();
            let at = i % work.batch * size;
            let slot = &mut buffer[at..at + size];
            match from_file {
                true => file.read_exact_at(slot, offset)?,
                false => {
                    let from = offset as usize;
                    let record = image.get(from..from + size);
                    slot.copy_from_slice(
                        record.ok_or_else(|| format!("the file ends before {offset}"))?,
                    );
                }
            }
            took.push(start.elapsed());
        }
        Ok(took)
    };
    let clock = Clock::start();
    let outcomes: Vec<Result<Vec<Duration>, Error>> = thread::scope(|scope| {
        let workers: Vec<_> = buffers
            .iter_mut()
            .enumerate()
            .map(|(first, buffer)| scope.spawn(move || run(buffer, first)))
            .collect();
        workers
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".into())))
            .collect()
    });
    let mut took = Vec::new();
    for outcome in outcomes {
        took.extend(outcome?);
    }
    clock.report(work, took);
    // Each thread's last record.
    for (first, buffer) in buffers.iter().enumerate() {
        let of_thread: Vec<u64> = offsets
            .iter()
            .copied()
            .skip(first)
            .step_by(threads)
            .collect();
        if let Some(&offset) = of_thread.last() {
            let at = (of_thread.len() - 1) % work.batch * size;
            compare(path, offset, &buffer[at..at + size])?;
        }
    }
    Ok(())
}
