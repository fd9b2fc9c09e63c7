//! Queues of READs on a real kernel with soft-RoCE devices `rxe0` and `rxe1`, whose addresses reach each other.
//!
//! They need a kernel, so each is ignored unless asked for, and fails when there is no device:
//! `cargo test -p atlas-rdma --test rxe -- --ignored --test-threads 1`.

use atlas_rdma::attributes::{Gid, GidEntry, GidType, LinkLayer, Mtu, PortState};
use atlas_rdma::memory::StableMemory;
use atlas_rdma::{
    Access, CompletionStatus, Context, DEFAULT_SLICE_MAX_BYTES, LandingRegions, LocalEndpoint,
    LocalPart, Mr, Path, Pd, QpState, RdmaError, ReadDone, ReadQueue, ReadQueueOptions, Refusal,
    RemoteEndpoint, RemoteRead, Responder,
};
use expert_arena::{ArenaBuilder, ExpertArena, Lock, SlotId, SlotState};
use std::alloc::Layout;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLOT_BYTES: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// Pages with a pattern, as a peer serves them.
struct Served {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: it owns its block, which the global allocator may free on any thread.
unsafe impl Send for Served {}
// SAFETY: nothing writes to it after it was made.
unsafe impl Sync for Served {}

impl Served {
    fn new(bytes: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: the layout has a size.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!base.is_null());
        for index in 0..bytes {
            // SAFETY: inside the block.
            let byte = unsafe { base.add(index) };
            // SAFETY: inside the block, which nobody else has yet.
            unsafe { byte.write(pattern(index)) };
        }
        Arc::new(Self { base, layout })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { std::alloc::dealloc(self.base, self.layout) }
    }
}

// SAFETY: one block of the heap, alive until this is dropped.
unsafe impl StableMemory for Served {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len_bytes(&self) -> usize {
        self.layout.size()
    }
}

fn pattern(index: usize) -> u8 {
    (index.wrapping_mul(2_654_435_761) >> 7) as u8
}

fn context(name: &str) -> Arc<Context> {
    Context::open(name).unwrap_or_else(|error| panic!("these tests need {name}: {error}"))
}

fn gid(context: &Context) -> GidEntry {
    let table = context.gid_table(1).unwrap();
    let fits =
        |e: &&GidEntry| e.kind == GidType::RoceV2 && e.gid.ip().is_ipv4() && e.netdev.is_some();
    let entry = table.iter().find(fits);
    entry
        .unwrap_or_else(|| panic!("no RoCE v2 address: {table:?}"))
        .clone()
}

/// The two ends of one connection, and what is read.
struct Rig {
    queue: ReadQueue<u32>,
    responder: Option<Responder>,
    region: Option<Mr>,
    arena: Arc<ExpertArena>,
    client: Arc<Context>,
    peer: Arc<Context>,
    mtu: Mtu,
    reads: u8,
}

impl Rig {
    fn unconnected(client: &str, peer: &str, slots: u32) -> Self {
        let client = context(client);
        let peer = context(peer);
        let builder = ArenaBuilder::new()
            .slab(slots, SLOT_BYTES)
            .lock(Lock::Never);
        let arena = Arc::new(builder.reserve_bytes(Some(0)).build().unwrap());
        let landing =
            LandingRegions::register(&Pd::new(&client).unwrap(), &arena, DEFAULT_SLICE_MAX_BYTES)
                .unwrap();
        let options = ReadQueueOptions {
            port: 1,
            pkey_index: 0,
            posts_max: 1024,
            work_requests_max: 2048,
            sge_max: 4,
        }
        .limited_to(client.attributes());
        let peer_pd = Pd::new(&peer).unwrap();
        let region = Mr::register(
            &peer_pd,
            Served::new(SLOT_BYTES),
            0,
            SLOT_BYTES,
            Access::RemoteRead,
        );
        Self {
            queue: ReadQueue::new(landing, options).unwrap(),
            responder: Some(Responder::new(&peer_pd, 1, 0).unwrap()),
            region: Some(region.unwrap()),
            arena,
            client,
            peer,
            mtu: Mtu::B1024,
            reads: 16,
        }
    }

    fn connected(client: &str, peer: &str, slots: u32) -> Self {
        let rig = Self::unconnected(client, peer, slots);
        rig.connect_responder();
        rig.connect_queue();
        rig
    }

    fn path(&self, from: &Context, to: &Context, remote: LocalEndpoint) -> Path {
        let own = gid(from);
        let remote = RemoteEndpoint {
            qpn: remote.qpn,
            psn: remote.psn,
            gid: gid(to).gid,
            lid: 0,
        };
        let mut path = Path::new(1, LinkLayer::Ethernet, self.mtu, remote);
        path.gid_index = own.index;
        path.reads_in = self.reads;
        path.reads_out = self.reads;
        // Requests to an end that does not answer yet must outlive a slow machine's test.
        path.timeout = Duration::from_secs(1);
        path
    }

    fn responder(&self) -> &Responder {
        self.responder.as_ref().unwrap()
    }

    fn connect_queue(&self) {
        let path = self.path(&self.client, &self.peer, self.responder().local());
        self.queue.connect(&path).unwrap();
    }

    fn connect_responder(&self) {
        let path = self.path(&self.peer, &self.client, self.queue.local());
        self.responder().connect(&path).unwrap();
    }

    /// Posts a READ of `bytes` bytes at `offset` of what is served into a new slot, in requests of `request_bytes`,
    /// each into two parts. The landing is given up at once, so that the range alone holds the slot.
    fn post(&self, token: u32, offset: usize, bytes: usize, request_bytes: usize) -> SlotId {
        let mut landing = self.arena.acquire(bytes).unwrap();
        let slot = landing.slot();
        let range = landing.split(bytes).unwrap();
        let region = self.region.as_ref().unwrap();
        let mut requests = Vec::new();
        let mut parts = Vec::new();
        let mut at = 0;
        while at < bytes {
            let len = request_bytes.min(bytes - at);
            requests.push(RemoteRead {
                remote_addr: region.addr() + (offset + at) as u64,
                rkey: region.rkey(),
                part_count: if len > 1 { 2 } else { 1 },
            });
            let half = len / 2;
            if half > 0 {
                parts.push(LocalPart { at, bytes: half });
            }
            parts.push(LocalPart {
                at: at + half,
                bytes: len - half,
            });
            at += len;
        }
        self.queue.post(token, range, &requests, &parts).unwrap();
        slot
    }

    fn poll_all(&self, count: usize) -> Vec<ReadDone<u32>> {
        let mut done = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        while done.len() < count {
            assert!(
                Instant::now() < deadline,
                "{} of {count} after {PATIENCE:?}",
                done.len()
            );
            let left = deadline.saturating_duration_since(Instant::now());
            self.queue.wait(left, Duration::ZERO, None).unwrap();
            self.queue.poll(&mut done);
        }
        done
    }
}

fn assert_bytes(done: &ReadDone<u32>, offset: usize) {
    assert_eq!(done.result, Ok(()));
    let mut bytes = vec![0; done.range.len()];
    done.range.copy_out(0, &mut bytes);
    let wrong = (0..bytes.len()).find(|&at| bytes[at] != pattern(offset + at));
    assert_eq!(wrong, None, "first wrong byte");
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn a_device_says_what_it_is() {
    let context = context("rxe0");
    let attributes = context.attributes();
    assert!(
        attributes.max_qp_wr > 0 && attributes.max_mr_bytes > 0,
        "{attributes:?}"
    );
    let port = context.port(1).unwrap();
    assert_eq!(
        (port.state, port.link_layer),
        (PortState::Active, LinkLayer::Ethernet)
    );
    assert!(port.max_message_bytes >= 1 << 20, "{port:?}");
    assert!(matches!(
        context.port(2),
        Err(RdmaError::UnknownPort { ports: 1, .. })
    ));
    let gid = gid(&context);
    assert_eq!(gid.prefix_len, Some(24), "{gid:?}");
    assert_eq!(context.async_event(Duration::from_millis(1)).unwrap(), None);
    let error = Context::open("rxe").unwrap_err();
    assert!(
        matches!(&error, RdmaError::UnknownDevice { present, .. } if present.contains("rxe0")),
        "{error}"
    );
    eprintln!(
        "{attributes:?}\n{port:?}\n{:?}",
        context.gid_table(1).unwrap()
    );
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn reads_arrive_on_one_device_and_between_two() {
    for (client, peer) in [("rxe0", "rxe0"), ("rxe0", "rxe1")] {
        let rig = Rig::connected(client, peer, 4);
        rig.post(0, 0, SLOT_BYTES, 256 << 10);
        rig.post(1, 4096, 5, 5);
        rig.post(2, 12_345, 77_777, 1000);
        for done in rig.poll_all(3) {
            assert_bytes(&done, [0, 4096, 12_345][done.token as usize]);
            done.range.retire();
        }
        assert_eq!(
            (rig.queue.outstanding(), rig.queue.stale_completions()),
            (0, 0)
        );
    }
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn each_mtu_and_read_depth_works() {
    for (mtu, reads) in [
        (Mtu::B256, 16),
        (Mtu::B1024, 1),
        (Mtu::B4096, 1),
        (Mtu::B4096, 16),
    ] {
        let mut rig = Rig::unconnected("rxe0", "rxe1", 8);
        (rig.mtu, rig.reads) = (mtu, reads);
        rig.connect_responder();
        rig.connect_queue();
        let start = Instant::now();
        for token in 0..8 {
            rig.post(token, 1000 * token as usize, 200_000, 64 << 10);
        }
        for done in rig.poll_all(8) {
            assert_bytes(&done, 1000 * done.token as usize);
        }
        eprintln!(
            "MTU {}, {reads} READs at once: {:?}",
            mtu.bytes(),
            start.elapsed()
        );
    }
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn a_late_read_keeps_its_slot_until_it_completes() {
    // The other end stays in INIT, so the READ waits; then it is connected, and the READ arrives late.
    let rig = Rig::unconnected("rxe0", "rxe0", 1);
    rig.connect_queue();
    let slot = rig.post(7, 0, 4096, 4096);
    std::thread::sleep(Duration::from_millis(50));
    let mut done = Vec::new();
    rig.queue.poll(&mut done);
    assert!(done.is_empty());
    assert_eq!(rig.arena.slot_state(slot), Some(SlotState::Quarantined));
    assert!(rig.arena.acquire(4096).is_err(), "the slot is the READ's");
    rig.connect_responder();
    let done = rig.poll_all(1);
    assert_bytes(&done[0], 0);
    drop(done);
    assert!(rig.arena.acquire(4096).is_ok());
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn a_late_read_that_is_flushed_never_writes_afterwards() {
    let rig = Rig::unconnected("rxe0", "rxe0", 1);
    rig.connect_queue();
    let slot = rig.post(7, 0, 4096, 1024);
    let start = Instant::now();
    rig.queue.begin_quiesce();
    assert!(!rig.queue.is_quiesced());
    let done = rig.poll_all(1);
    eprintln!("flushed after {:?}", start.elapsed());
    assert_eq!(
        done[0].result.unwrap_err().status,
        CompletionStatus::Flushed
    );
    assert_eq!(rig.arena.slot_state(slot), Some(SlotState::Quarantined));
    drop(done);
    assert!(rig.queue.is_quiesced());
    // The other end comes alive; the slot's next owner sees nothing of the old READ.
    let mut landing = rig.arena.acquire(4096).unwrap();
    let mut range = landing.split(4096).unwrap();
    range.fill_zero(0, 4096);
    rig.connect_responder();
    std::thread::sleep(Duration::from_millis(300));
    let mut bytes = [1; 4096];
    range.copy_out(0, &mut bytes);
    assert!(bytes.iter().all(|&byte| byte == 0));
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn everything_that_is_posted_is_flushed_by_err_and_counted_once() {
    let rig = Rig::unconnected("rxe0", "rxe1", 100);
    rig.connect_queue();
    for token in 0..100 {
        rig.post(token, 0, 8192, 1024);
    }
    assert_eq!(rig.queue.outstanding(), 100);
    rig.queue.begin_quiesce();
    let done = rig.poll_all(100);
    let mut tokens: Vec<u32> = done.iter().map(|done| done.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..100).collect::<Vec<_>>());
    for done in &done {
        assert_eq!(
            done.result.unwrap_err().status,
            CompletionStatus::Flushed,
            "{}",
            done.token
        );
    }
    assert!(rig.queue.is_quiesced());
    assert_eq!(rig.queue.stale_completions(), 0);
    drop(done);
    let mut landing = rig.arena.acquire(1).unwrap();
    let range = landing.split(1).unwrap();
    let region = rig.region.as_ref().unwrap();
    let request = RemoteRead {
        remote_addr: region.addr(),
        rkey: region.rkey(),
        part_count: 1,
    };
    let refused = rig
        .queue
        .post(1, range, &[request], &[LocalPart { at: 0, bytes: 1 }]);
    assert_eq!(refused.unwrap_err().why, Refusal::Down);
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn a_region_that_is_gone_is_an_access_error_at_once() {
    let mut rig = Rig::connected("rxe0", "rxe1", 3);
    rig.post(0, 0, 4096, 4096);
    assert_bytes(&rig.poll_all(1)[0], 0);
    let region = rig.region.take().unwrap();
    let (addr, rkey) = (region.addr(), region.rkey());
    drop(region);
    let start = Instant::now();
    for token in 1..3 {
        let mut landing = rig.arena.acquire(4096).unwrap();
        let range = landing.split(4096).unwrap();
        let request = RemoteRead {
            remote_addr: addr,
            rkey,
            part_count: 1,
        };
        let parts = [LocalPart { at: 0, bytes: 4096 }];
        // The first may have taken the queue down before the second is posted.
        if let Err(refused) = rig.queue.post(token, range, &[request], &parts) {
            assert_eq!(refused.why, Refusal::Down);
        }
    }
    let mut done = rig.poll_all(rig.queue.outstanding().max(1));
    let first = done.remove(0).result.unwrap_err();
    eprintln!("access error after {:?}: {first}", start.elapsed());
    assert_eq!(
        (first.status, first.root),
        (CompletionStatus::RemoteAccess, true)
    );
    assert_eq!(rig.queue.root_cause(), Some(first));
    assert!(
        done.iter()
            .all(|done| done.result.unwrap_err().status == CompletionStatus::Flushed)
    );
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    assert!(rig.queue.is_down());
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn dropping_a_queue_with_a_thousand_reads_gives_all_slots_back_in_time() {
    let rig = Rig::unconnected("rxe0", "rxe1", 2);
    rig.connect_queue();
    let mut landing = rig.arena.acquire(SLOT_BYTES).unwrap();
    let region = rig.region.as_ref().unwrap();
    let request = RemoteRead {
        remote_addr: region.addr(),
        rkey: region.rkey(),
        part_count: 1,
    };
    for token in 0..1000 {
        let range = landing.split(1024).unwrap();
        rig.queue
            .post(
                token,
                range,
                &[request],
                &[LocalPart { at: 0, bytes: 1024 }],
            )
            .unwrap();
    }
    assert_eq!(landing.outstanding(), 1000);
    let start = Instant::now();
    let Rig {
        queue,
        arena,
        responder,
        ..
    } = rig;
    drop(queue);
    eprintln!("dropped after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(landing.outstanding(), 0);
    drop(landing);
    assert_eq!(arena.stats().leaked, 0);
    assert_eq!(responder.unwrap().state().unwrap(), QpState::Init);
    assert_eq!(atlas_rdma::leaks(), 0);
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn a_wrong_attribute_is_named() {
    let rig = Rig::unconnected("rxe0", "rxe1", 1);
    let mut path = rig.path(&rig.client, &rig.peer, rig.responder().local());
    path.gid_index = 200;
    let error = rig.queue.connect(&path).unwrap_err().to_string();
    eprintln!("{error}");
    assert!(
        error.contains("RTR") && error.contains("GID index 200"),
        "{error}"
    );
    path.gid_index = gid(&rig.client).index;
    path.remote.gid = Gid([0; 16]);
    if let Err(error) = rig.queue.connect(&path) {
        assert!(error.to_string().contains("remote GID is empty"), "{error}");
    }
}

#[test]
#[ignore = "needs soft-RoCE devices rxe0 and rxe1"]
fn slices_carry_reads_across_their_seams_slot_by_slot() {
    let mut rig = Rig::unconnected("rxe0", "rxe1", 4);
    let pd = Pd::new(&rig.client).unwrap();
    // Two slots in each region.
    let landing = LandingRegions::register(&pd, &rig.arena, 2 * SLOT_BYTES as u64 + 5).unwrap();
    assert_eq!(
        (landing.region_count(), landing.registered_bytes()),
        (2, 4 * SLOT_BYTES as u64)
    );
    rig.queue = ReadQueue::new(landing, *rig.queue.options()).unwrap();
    rig.connect_responder();
    rig.connect_queue();
    for token in 0..4 {
        rig.post(token, 0, SLOT_BYTES, 300_000);
    }
    for done in rig.poll_all(4) {
        assert_bytes(&done, 0);
    }
}
