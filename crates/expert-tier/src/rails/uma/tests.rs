//! The rail by itself: what it does where the machine refuses, and that every READ comes back.

use std::path::PathBuf;
use std::time::Instant;

use expert_arena::{ArenaBuilder, ExpertArena, ForeignMemory, SlotId};
use expert_store::synth::{SynthSpec, synth};
use expert_store::{BuildOptions, OpenOptions, pack};
use expert_wire::Key;
use tempfile::TempDir;

use super::*;
use crate::rail::ReadId;
use crate::rails::uma::mode::IoMode;

const CONFIG: UmaConfig = UmaConfig {
    threads: 2,
    depth: 4,
    rank: 0,
    direct: true,
    ring: true,
};

const SLOTS: u32 = 16;

/// A packed store of 16 records of more than a megabyte, and slots for all.
struct Rig {
    store: Arc<Store>,
    content: ContentTag,
    arena: Arc<ExpertArena>,
    files: Vec<PathBuf>,
    _folder: TempDir,
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let spec = SynthSpec {
            family: "qwen3-moe".into(),
            layers: Some(2),
            experts: Some(8),
            hidden: Some(520),
            inter: Some(400),
            ..SynthSpec::default()
        };
        let (checkpoint, packed) = (
            folder.path().join("checkpoint"),
            folder.path().join("packed"),
        );
        synth(&spec, &checkpoint).unwrap();
        let source = Store::open(&checkpoint, &OpenOptions::default()).unwrap();
        pack(&source, &packed, &BuildOptions::default()).unwrap();
        let store = Arc::new(Store::open(&packed, &OpenOptions::default()).unwrap());
        let content = ContentTag {
            id: store.content_id().unwrap(),
            instance: None,
        };
        let slot_bytes = 2 << 20;
        let memory = ForeignMemory::heap(SLOTS as usize * slot_bytes).unwrap();
        let arena = ArenaBuilder::new().slab(SLOTS, slot_bytes).foreign(memory);
        Self {
            files: store.files().iter().map(|f| f.path.clone()).collect(),
            store,
            content,
            arena: Arc::new(arena.build().unwrap()),
            _folder: folder,
        }
    }

    fn rail(&self, config: &UmaConfig) -> UmaRail {
        let notifier = Arc::new(Notifier::new().unwrap());
        UmaRail::new(self.store.clone(), self.content, config, notifier).unwrap()
    }

    /// A READ of the whole of each record.
    fn reads(&self) -> Vec<Read> {
        let mut reads = Vec::new();
        for layer in &self.store.catalogue().layers {
            let layer = Arc::new(layer.clone());
            for (position, &expert) in layer.experts.iter().enumerate() {
                let bytes = layer.class(position).image_bytes as usize;
                let slot = SlotId {
                    slab: 0,
                    slot: reads.len() as u32,
                };
                let mut landing = self.arena.begin_landing(slot, bytes).unwrap();
                reads.push(Read {
                    id: ReadId {
                        record: reads.len() as u32,
                        reuse: 0,
                    },
                    key: Key::new(layer.layer, expert),
                    position,
                    layer: layer.clone(),
                    content: self.content,
                    range: landing.split(bytes).unwrap(),
                    verify: true,
                    class: crate::Class::Demand,
                    posted_at: Instant::now(),
                });
            }
        }
        assert_eq!(reads.len(), SLOTS as usize);
        reads
    }
}

/// What comes back until `enough` says so.
fn completions(
    rail: &mut UmaRail,
    mut enough: impl FnMut(&UmaRail, usize) -> bool,
) -> Vec<Completion> {
    let limit = Instant::now() + Duration::from_secs(60);
    let (mut events, mut done) = (Vec::new(), Vec::new());
    loop {
        rail.poll(&mut events);
        for event in events.drain(..) {
            match event {
                RailEvent::Completion(completion) => done.push(completion),
                RailEvent::Ready(_) => {}
                other => panic!("{other:?}"),
            }
        }
        if enough(rail, done.len()) {
            return done;
        }
        assert!(Instant::now() < limit, "{} came back", done.len());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn assert_reads_all(rig: &Rig, rail: &mut UmaRail) {
    let reads = rig.reads();
    let count = reads.len();
    for read in reads {
        assert!(rail.post(read).is_ok());
    }
    let done = completions(rail, |_, done| done == count);
    for completion in done {
        // The reader compared each chunk; that the bytes are the source's, the contract's tests say.
        let landed = completion.result.expect("a READ that is done");
        assert!(landed.verified);
        let again = completion.read.check_chunks(0, completion.read.bytes());
        assert!(again.is_ok(), "{:?}", completion.read.key);
    }
}

#[test]
fn ring_that_is_refused_is_done_without_and_counted() {
    let rig = Rig::new();
    // ENOSYS: no such call; EPERM: a policy, or kernel.io_uring_disabled; ENOMEM: the limit on locked memory.
    for errno in [
        rustix::io::Errno::NOSYS,
        rustix::io::Errno::PERM,
        rustix::io::Errno::NOMEM,
    ] {
        let notifier = Arc::new(Notifier::new().unwrap());
        let refuse = |_, _| Err(errno.into());
        let store = rig.store.clone();
        let mut rail = UmaRail::with_queues(store, rig.content, &CONFIG, notifier, refuse).unwrap();
        assert_reads_all(&rig, &mut rail);
        let report = rail.io().unwrap();
        assert_eq!((report.mode, report.fallbacks), (IoMode::Pread, 1));
        assert_eq!(
            rail.capabilities().lanes,
            CONFIG.depth,
            "a thread for each read"
        );
    }
}

#[test]
fn ring_that_breaks_under_way_leaves_its_reads_to_pread() {
    let rig = Rig::new();
    let notifier = Arc::new(Notifier::new().unwrap());
    let config = UmaConfig {
        threads: 1,
        ..CONFIG
    };
    let mut rail = UmaRail::with_queues(
        rig.store.clone(),
        rig.content,
        &config,
        notifier,
        |_, depth| {
            let bytes = plan::window_bytes(IO_BYTES);
            Ok(vec![FileQueue::disabled(depth, bytes)?])
        },
    )
    .unwrap();
    assert_reads_all(&rig, &mut rail);
    let report = rail.io().unwrap();
    assert_eq!((report.mode, report.fallbacks), (IoMode::Pread, 1));
}

#[test]
fn file_that_refuses_direct_reads_under_way_is_read_through_the_page_cache() {
    let rig = Rig::new();
    let mut rail = rig.rail(&CONFIG);
    let before = rail.io().unwrap();
    let why = io::Error::from(rustix::io::Errno::INVAL);
    for _ in 0..2 {
        let state = &rail.shared.state;
        rail.shared.files.refuse_direct(0, state, &why);
    }
    assert_reads_all(&rig, &mut rail);
    let report = rail.io().unwrap();
    assert_eq!(report.mode, IoMode::IoUringBuffered);
    // Where the folder takes no direct reads at all that was counted at the opening.
    if before.fallbacks == 0 {
        assert_eq!(report.fallbacks, 1, "each file once");
    }
    assert!(!rail.shared.files.source(&rig.store, 0).unwrap().is_direct);
}

#[test]
fn quiesce_gives_every_read_back_and_the_rail_works_again() {
    let rig = Rig::new();
    for config in [
        CONFIG,
        UmaConfig {
            ring: false,
            ..CONFIG
        },
    ] {
        let mut rail = rig.rail(&config);
        for wait_us in [0, 100, 1000, 5000] {
            let reads = rig.reads();
            let count = reads.len();
            for read in reads {
                assert!(rail.post(read).is_ok());
            }
            std::thread::sleep(Duration::from_micros(wait_us));
            rail.begin_quiesce();
            let done = completions(&mut rail, |rail, _| rail.is_quiesced());
            assert_eq!(done.len(), count);
            for completion in done {
                assert!(matches!(completion.result, Ok(_) | Err(ReadError::Flushed)));
            }
            rail.begin_probe();
            assert_reads_all(&rig, &mut rail);
        }
    }
}

#[test]
fn reads_of_other_content_come_back_untouched() {
    let rig = Rig::new();
    let mut rail = rig.rail(&CONFIG);
    let mut read = rig.reads().remove(0);
    read.content.id ^= 1;
    assert!(rail.post(read).is_ok());
    let done = completions(&mut rail, |_, done| done == 1);
    assert_eq!(done[0].result, Err(ReadError::ContentChanged));
}

#[test]
fn file_that_was_truncated_is_an_error_that_names_it_and_others_are_read() {
    for (direct, ring) in [(true, true), (false, true), (false, false)] {
        let rig = Rig::new();
        let mut rail = rig.rail(&UmaConfig {
            direct,
            ring,
            ..CONFIG
        });
        // In the midst of a block of the fifth record.
        let cut = &rig.files[0];
        let left = 4 * std::fs::metadata(cut).unwrap().len() / 8 + 5000;
        let file = std::fs::OpenOptions::new().write(true).open(cut).unwrap();
        file.set_len(left).unwrap();
        for read in rig.reads() {
            assert!(rail.post(read).is_ok());
        }
        let done = completions(&mut rail, |_, done| done == SLOTS as usize);
        for completion in done {
            let key = completion.read.key;
            match completion.result {
                Ok(_) => assert!(key.layer == 1 || key.expert < 4, "{key}"),
                Err(ReadError::Unavailable(why)) => {
                    assert!(key.layer == 0 && key.expert >= 4, "{key}");
                    assert!(why.contains("truncated"), "{why}");
                    assert!(why.contains(&cut.display().to_string()), "{why}");
                }
                Err(other) => panic!("{key}: {other}"),
            }
        }
    }
}

#[test]
fn rail_dropped_with_reads_under_way_lets_go_of_the_memory() {
    let rig = Rig::new();
    for (round, ring) in [true, false, true, true, true].into_iter().enumerate() {
        let mut rail = rig.rail(&UmaConfig { ring, ..CONFIG });
        for read in rig.reads() {
            assert!(rail.post(read).is_ok());
        }
        std::thread::sleep(Duration::from_micros(300 * round as u64));
        drop(rail);
        let limit = Instant::now() + Duration::from_secs(60);
        while rig.arena.stats().outstanding_ranges > 0 {
            assert!(Instant::now() < limit, "{:?}", rig.arena.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A pipe into which nobody writes stands for a disk that does not answer.
#[test]
fn disk_that_does_not_answer_holds_neither_slots_nor_the_driver() {
    let rig = Rig::new();
    let mut rail = rig.rail(&UmaConfig {
        direct: false,
        threads: 1,
        ..CONFIG
    });
    let path = rig.files[0].with_extension("pipe");
    let (mode, kind) = (rustix::fs::Mode::RWXU, rustix::fs::FileType::Fifo);
    rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
    let pipe = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path);
    rail.shared.files.stand_in(0, pipe.unwrap());
    let mut reads = rig.reads();
    let other_disk = reads.split_off(SLOTS as usize / 2);
    // One, so that windows are left for the other disk.
    let stuck = reads.remove(0);
    assert!(rail.post(stuck).is_ok());
    let count = other_disk.len();
    for read in other_disk {
        assert!(rail.post(read).is_ok());
    }
    let done = completions(&mut rail, |_, done| done == count);
    assert!(
        done.iter()
            .all(|c| c.read.key.layer == 1 && c.result.is_ok())
    );
    rail.begin_quiesce();
    let back = completions(&mut rail, |rail, _| rail.is_quiesced());
    assert_eq!(back.len(), 1);
    assert_eq!(back[0].result, Err(ReadError::Flushed));
    drop((done, back, reads));
    assert_eq!(rig.arena.stats().outstanding_ranges, 0);
    // The windows that the kernel may still write to are given up.
    let before = expert_arena::leaked_windows();
    drop(rail);
    let limit = Instant::now() + Duration::from_secs(60);
    while expert_arena::leaked_windows() == before {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn readers_processor_time_is_counted() {
    let rig = Rig::new();
    let mut rail = rig.rail(&CONFIG);
    assert_reads_all(&rig, &mut rail);
    assert!(rail.cpu_time() > Duration::ZERO);
    let bytes: u64 = rig.reads().iter().map(Read::bytes).sum();
    assert_eq!(rail.progress_bytes(), bytes);
}
