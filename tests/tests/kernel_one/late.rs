//! A READ that comes late: the other end does not answer until whoever wanted the bytes has given up.
//!
//! The responder is held in INIT, where it answers nothing, and connected when the READ is to go on.

use std::fs;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use atlas_expert_tests::guest;
use atlas_expert_tests::net::SLACK;
use atlas_rdma::attributes::{GidType, LinkLayer, Mtu};
use atlas_rdma::choose::{PortView, RailChoice, Wanted, choose_rails};
use atlas_rdma::mapping::{MappableFile, MappedExtent, MappingMode};
use atlas_rdma::{
    Access, Context, DEFAULT_SLICE_MAX_BYTES, LandingRegions, LocalEndpoint, LocalPart, Mr, Path,
    Pd, ReadDone, ReadQueue, ReadQueueOptions, RemoteEndpoint, RemoteRead, Responder,
};
use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, Lock, SlotState};

use super::programs::folder;

const BYTES: usize = 4096;
/// What the next owner of a slot has in it.
const NEXT: u8 = 0x5a;

/// A queue that has a READ out to a responder in INIT, and nobody who waits for it.
struct Late {
    queue: ReadQueue<()>,
    responder: Responder,
    region: Mr,
    arena: Arc<ExpertArena>,
    choice: RailChoice,
    served: Vec<u8>,
}

impl Late {
    fn new() -> Self {
        let context = Context::open("rxe0").expect("a device");
        let view = PortView {
            device: "rxe0".into(),
            port: 1,
            attributes: context.port(1).expect("a port"),
            gids: context.gid_table(1).expect("its addresses"),
        };
        let wanted = Wanted::Explicit(vec!["rxe0".parse().expect("a device name")]);
        let choice = choose_rails(&[view], wanted).expect("a rail").remove(0);
        assert_eq!(choice.gid.entry.kind, GidType::RoceV2);
        let pd = Pd::new(&context).expect("a domain");

        let served: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
        let folder = folder();
        let path = folder.path().join("served");
        fs::write(&path, &served).expect("a file");
        let file = Arc::new(fs::File::open(&path).expect("the file"));
        let file = MappableFile::new("served", &file).expect("a plain file");
        let never = AtomicBool::new(false);
        let extent = MappedExtent::map(&file, 0, BYTES as u64, MappingMode::Copy, &never);
        let extent = Arc::new(extent.expect("a copy"));
        let region = Mr::register(&pd, extent, 0, BYTES, Access::RemoteRead).expect("a region");

        let arena = ArenaBuilder::new()
            .slab(1, BYTES)
            .lock(Lock::Never)
            .reserve_bytes(Some(0));
        let arena = Arc::new(arena.build().expect("an arena"));
        let landing = LandingRegions::register(&pd, &arena, DEFAULT_SLICE_MAX_BYTES);
        let options = ReadQueueOptions {
            port: 1,
            pkey_index: 0,
            posts_max: 16,
            work_requests_max: 16,
            sge_max: 1,
        };
        let late = Self {
            queue: ReadQueue::new(landing.expect("regions"), options).expect("a queue"),
            responder: Responder::new(&pd, 1, 0).expect("a responder"),
            region,
            arena,
            choice,
            served,
        };
        late.queue
            .connect(&late.path(late.responder.local()))
            .expect("RTS");
        late.post();
        late
    }

    fn path(&self, remote: LocalEndpoint) -> Path {
        let own = &self.choice.gid.entry;
        let remote = RemoteEndpoint {
            qpn: remote.qpn,
            psn: remote.psn,
            gid: own.gid,
            lid: 0,
        };
        let mut path = Path::new(1, LinkLayer::Ethernet, Mtu::B1024, remote);
        path.gid_index = own.index;
        // The READ is repeated until it is answered.
        path.timeout = Duration::from_secs(2);
        path
    }

    /// Posts the READ into the only slot. Its request is given up at once.
    fn post(&self) {
        let mut landing = self.arena.acquire(BYTES).expect("the slot");
        let range = landing.split(BYTES).expect("all of it");
        let request = RemoteRead {
            remote_addr: self.region.addr(),
            rkey: self.region.rkey(),
            part_count: 1,
        };
        let part = LocalPart {
            at: 0,
            bytes: BYTES,
        };
        self.queue
            .post((), range, &[request], &[part])
            .expect("posted");
    }

    /// The other end begins to answer; what comes of the READ.
    fn answer(&self) -> ReadDone<()> {
        self.responder
            .connect(&self.path(self.queue.local()))
            .expect("RTS");
        let limit = Instant::now() + SLACK;
        let mut done = Vec::new();
        while done.is_empty() {
            let left = limit.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the READ did not end within {SLACK:?}");
            self.queue
                .wait(left, Duration::ZERO, None)
                .expect("waiting");
            self.queue.poll(&mut done);
        }
        done.remove(0)
    }

    fn is_out(&self) -> bool {
        let mut done = Vec::new();
        self.queue.poll(&mut done);
        done.is_empty() && self.queue.outstanding() == 1
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_slot_of_a_late_read_is_nobodys_until_the_read_completes() {
    let late = Late::new();
    let slot = expert_arena::SlotId { slab: 0, slot: 0 };
    for _ in 0..20 {
        assert!(late.is_out());
        assert_eq!(late.arena.slot_state(slot), Some(SlotState::Quarantined));
        assert!(late.arena.acquire(BYTES).is_err(), "the slot is the READ's");
        std::thread::sleep(Duration::from_millis(10));
    }
    let done = late.answer();
    assert_eq!(done.result, Ok(()));
    let mut bytes = vec![0; BYTES];
    done.range.copy_out(0, &mut bytes);
    assert_eq!(bytes, late.served);
    assert!(
        late.arena.acquire(BYTES).is_err(),
        "its range is still held"
    );
    drop(done);
    assert!(late.arena.acquire(BYTES).is_ok(), "the slot is free");
}

/// What the guard is for: somebody who knows nothing of the READ uses the same memory at once, as a tier without
/// quarantine would, and loses every byte to it, with status success.
#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_memory_that_is_used_again_before_a_late_read_completes_is_overwritten() {
    let late = Late::new();
    let base = NonNull::new(late.arena.base_ptr()).expect("memory");
    let bytes = late.arena.total_bytes();
    // SAFETY: the memory is the first arena's, which this one keeps alive; its bytes are initialised. That the device
    // writes to it meanwhile is what is shown: neither arena makes a reference to it, both copy through raw pointers,
    // on this thread alone.
    let memory = unsafe { ForeignMemory::new(base, bytes, None, Box::new(late.arena.clone())) };
    let unguarded = ArenaBuilder::new().slab(1, BYTES).foreign(memory).build();
    let unguarded = Arc::new(unguarded.expect("an arena"));
    let mut next = unguarded.acquire(BYTES).expect("free, as it believes");
    let mut range = next.split(BYTES).expect("all of it");
    range.write(0, &[NEXT; BYTES]);
    let mut seen = vec![0; BYTES];
    range.copy_out(0, &mut seen);
    assert!(late.is_out() && seen.iter().all(|b| *b == NEXT));

    assert_eq!(late.answer().result, Ok(()));
    range.copy_out(0, &mut seen);
    let lost = seen
        .iter()
        .zip(&late.served)
        .filter(|(a, b)| a == b)
        .count();
    guest::figure("overwritten_bytes", lost);
    assert_eq!(lost, BYTES, "the hazard that the guard is for is gone");
    range.retire();
}
