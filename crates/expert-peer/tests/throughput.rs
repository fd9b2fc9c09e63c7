//! How fast records leave the peer over loopback, for those who change the data path.
//!
//! `cargo test --release -p expert-peer --test throughput -- --ignored --nocapture`

mod common;

use std::collections::VecDeque;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use expert_peer::{Peer, Transfer};
use expert_wire::Key;
use expert_wire::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use rustix::net::RecvFlags;
use rustix::time::{ClockId, clock_gettime};

/// Qwen3-30B-A3B, BF16: three matrices of 768 x 2048.
const RECORD_BYTES: u64 = 9_437_184;
const OUTSTANDING: usize = 8;
const DURATION: Duration = Duration::from_millis(1500);

/// Reads records in pieces with several requests on the way and discards them in the kernel.
fn drain(address: std::net::SocketAddr, piece_bytes: u64, seed: u32) -> u64 {
    let (mut client, welcome) = Client::v2(address);
    let mut pieces = (seed..).flat_map(|i| {
        let key = Key::new(i % LAYERS, i / LAYERS % EXPERTS);
        (0..RECORD_BYTES.div_ceil(piece_bytes)).map(move |k| {
            let offset = k * piece_bytes;
            let bytes = piece_bytes.min(RECORD_BYTES - offset);
            request(key, welcome.epoch, offset, bytes)
        })
    });
    let mut scrap = vec![0; piece_bytes as usize];
    let mut wanted = VecDeque::new();
    let mut total = 0;
    let start = Instant::now();
    while start.elapsed() < DURATION {
        while wanted.len() < OUTSTANDING {
            let read = pieces.next().unwrap();
            wanted.push_back(read.bytes);
            client.read(1, read);
        }
        let mut header = [0; HEADER_BYTES];
        client.stream.read_exact(&mut header).unwrap();
        let header = FrameHeader::decode(&header, 1 << 20).unwrap();
        assert_eq!(header.kind, FrameKind::Data);
        assert_eq!(Some(header.payload_bytes), wanted.pop_front());
        let mut left = header.payload_bytes as usize;
        while left > 0 {
            let flags = RecvFlags::TRUNC;
            let (_, n) = rustix::net::recv(&client.stream, &mut scrap[..left], flags).unwrap();
            assert!(n > 0, "the peer closed");
            left -= n;
        }
        total += u64::from(header.payload_bytes);
    }
    total
}

#[test]
#[ignore = "a measurement of the machine that it runs on; needs a release build and idle processors"]
fn loopback_rate_of_nine_megabyte_records() {
    let source = Arc::new(TempSource::contiguous(1, RECORD_BYTES));
    println!("transfer  send buffer  piece KiB  streams   GB/s  CPU s per GB (both ends)");
    let cpu_seconds = || {
        let t = clock_gettime(ClockId::ProcessCPUTime);
        t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
    };
    for transfer in [Transfer::Sendfile, Transfer::Copy] {
        for send_buffer_bytes in [None, Some(1 << 20), Some(4 << 20)] {
            for (piece_bytes, streams) in [(256 << 10, 1), (1 << 20, 1), (1 << 20, 2), (4 << 20, 1)]
            {
                let mut config = config(&source);
                config.transfer = transfer;
                config.send_buffer_bytes = send_buffer_bytes;
                let peer = Peer::start(config).unwrap();
                let address = peer.local_addr();
                let (start, cpu) = (Instant::now(), cpu_seconds());
                let readers: Vec<_> = (0..streams)
                    .map(|i| std::thread::spawn(move || drain(address, piece_bytes, i * 5)))
                    .collect();
                let bytes: u64 = readers.into_iter().map(|r| r.join().unwrap()).sum();
                let rate = bytes as f64 / 1e9 / start.elapsed().as_secs_f64();
                let buffer =
                    send_buffer_bytes.map_or("auto".into(), |b| format!("{} KiB", b >> 10));
                println!(
                    "{:<9} {buffer:>11} {:>10} {streams:>8} {rate:>6.2}  {:.2}",
                    format!("{transfer:?}"),
                    piece_bytes >> 10,
                    (cpu_seconds() - cpu) / (bytes as f64 / 1e9),
                );
            }
        }
    }
}
