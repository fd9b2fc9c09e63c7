//! The handles and the queue of READs against the fake device.

mod handles;
mod queue;

use crate::attributes::{Gid, LinkLayer, Mtu};
use crate::fake::Fake;
use crate::memory::StableMemory;
use crate::sys::bindings::{IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_SUCCESS};
use crate::test_arena::{arena, range};
use crate::{
    Access, CompletionStatus, Cq, LandingRegions, LocalPart, Mr, Path, Pd, QpCapabilities,
    QueuePair, RdmaError, ReadDone, ReadQueue, ReadQueueOptions, Refusal, RemoteEndpoint,
    RemoteKey, RemoteRead, Responder,
};
use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, LandingRange};
use proptest::prelude::*;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLOT_BYTES: usize = 4096;

/// Pages that note when they are let go.
struct Pages {
    bytes: Box<[u8]>,
    _kept: Box<dyn Any + Send + Sync>,
}

// SAFETY: a block of the heap that this owns and nobody else knows.
unsafe impl StableMemory for Pages {
    fn base(&self) -> *mut u8 {
        self.bytes.as_ptr().cast_mut()
    }

    fn len_bytes(&self) -> usize {
        self.bytes.len()
    }
}

fn pages(fake: &Fake, bytes: usize) -> Arc<dyn StableMemory> {
    Arc::new(Pages {
        bytes: vec![0; bytes].into(),
        _kept: Box::new(fake.noting("release memory")),
    })
}

/// An arena that notes when its memory is let go.
fn noting_arena(fake: &Fake, slots: u32) -> Arc<ExpertArena> {
    let bytes = slots as usize * SLOT_BYTES;
    let layout = std::alloc::Layout::from_size_align(bytes, SLOT_BYTES).unwrap();
    // SAFETY: the layout has a size.
    let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
    // SAFETY: a block of this size, zeroed, known to nobody else, and never freed.
    let memory =
        unsafe { ForeignMemory::new(base, bytes, None, Box::new(fake.noting("release memory"))) };
    let builder = ArenaBuilder::new().slab(slots, SLOT_BYTES).foreign(memory);
    Arc::new(builder.build().unwrap())
}

fn path() -> Path {
    let remote = RemoteEndpoint {
        qpn: 5,
        psn: 6,
        gid: Gid::of("10.0.0.2".parse().unwrap()),
        lid: 0,
    };
    Path::new(1, LinkLayer::Ethernet, Mtu::B1024, remote)
}

fn options() -> ReadQueueOptions {
    ReadQueueOptions {
        port: 1,
        pkey_index: 0,
        posts_max: 4,
        work_requests_max: 8,
        sge_max: 4,
    }
}

fn queue(fake: &Fake, arena: &Arc<ExpertArena>) -> ReadQueue<u32> {
    let pd = Pd::new(&fake.open()).unwrap();
    let landing = LandingRegions::register(&pd, arena, u64::MAX).unwrap();
    let queue = ReadQueue::new(landing, options()).unwrap();
    queue.connect(&path()).unwrap();
    queue
}

/// A post of so many requests of 16 bytes each.
fn post(
    queue: &ReadQueue<u32>,
    token: u32,
    range: LandingRange,
    requests: usize,
) -> Result<(), (u32, LandingRange, Refusal)> {
    let reads: Vec<_> = (0..requests)
        .map(|index| RemoteRead {
            remote_addr: 0x1_0000 + 16 * index as u64,
            rkey: RemoteKey(9),
            part_count: 1,
        })
        .collect();
    let parts: Vec<_> = (0..requests)
        .map(|index| LocalPart {
            at: 16 * index,
            bytes: 16,
        })
        .collect();
    queue
        .post(token, range, &reads, &parts)
        .map_err(|refused| (refused.token, refused.range, refused.why))
}

fn poll(queue: &ReadQueue<u32>) -> Vec<ReadDone<u32>> {
    let mut done = Vec::new();
    queue.poll(&mut done);
    done
}

fn status(done: &ReadDone<u32>) -> CompletionStatus {
    done.result
        .err()
        .map_or(CompletionStatus::Success, |error| error.status)
}
