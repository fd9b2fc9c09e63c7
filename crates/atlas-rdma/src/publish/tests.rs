//! Publishing onto rails that record what is done to them.

use super::*;
use crate::mapping::page_bytes;
use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Weak;

/// What a rail does not register.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refuses {
    Nothing,
    /// Mappings of files that are not writable: kernels before 6.2.
    ReadOnly,
    /// Every mapping of a file: persistent memory.
    Mappings,
}

/// What happened on a rail, in order. Regions are named by their keys.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Event {
    Registered { rkey: u32, bytes: usize },
    Deregistered { rkey: u32, memory_alive: bool },
}

struct FakeRail {
    name: &'static str,
    refuses: Refuses,
    region_bytes_max: u64,
    regions_max: u64,
    /// Registrations that work; the one after fails for lack of memory.
    room: AtomicU64,
    preflight: Option<&'static str>,
    log: Arc<Mutex<Vec<Event>>>,
}

#[derive(Debug)]
struct FakeRegion {
    addr: u64,
    rkey: u32,
    memory: Weak<dyn StableMemory>,
    log: Arc<Mutex<Vec<Event>>>,
}

impl FakeRail {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            refuses: Refuses::Nothing,
            region_bytes_max: u64::MAX,
            regions_max: 0,
            room: AtomicU64::new(u64::MAX),
            preflight: None,
            log: Arc::default(),
        }
    }

    fn log(&self) -> Vec<Event> {
        self.log.lock().unwrap().clone()
    }

    /// Keys that are registered now.
    fn alive(&self) -> HashSet<u32> {
        let mut alive = HashSet::new();
        for event in self.log() {
            match event {
                Event::Registered { rkey, .. } => assert!(alive.insert(rkey)),
                Event::Deregistered { rkey, .. } => assert!(alive.remove(&rkey)),
            }
        }
        alive
    }
}

impl Registered for FakeRegion {
    fn addr(&self) -> u64 {
        self.addr
    }

    fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for FakeRegion {
    fn drop(&mut self) {
        let memory_alive = self.memory.strong_count() > 0;
        let rkey = self.rkey;
        let event = Event::Deregistered { rkey, memory_alive };
        self.log.lock().unwrap().push(event);
    }
}

impl Registrar for FakeRail {
    type Region = FakeRegion;

    fn name(&self) -> &str {
        self.name
    }

    fn region_bytes_max(&self) -> u64 {
        self.region_bytes_max
    }

    fn regions_max(&self) -> u64 {
        self.regions_max
    }

    fn preflight(&self, _total_bytes: u64) -> Result<(), RegisterRefusal> {
        self.preflight
            .map_or(Ok(()), |why| Err(refusal(false, why)))
    }

    fn register(
        &self,
        memory: Arc<dyn StableMemory>,
        offset: usize,
        bytes: usize,
    ) -> Result<FakeRegion, RegisterRefusal> {
        assert!(offset + bytes <= memory.len_bytes() && bytes > 0);
        assert!(bytes as u64 <= self.region_bytes_max);
        let addr = memory.base().addr() + offset;
        let (writable, of_file) = protection(addr);
        let refused = match self.refuses {
            Refuses::Nothing => false,
            Refuses::ReadOnly => !writable,
            Refuses::Mappings => of_file,
        };
        if refused {
            return Err(refusal(true, "Bad address (os error 14)"));
        }
        let room = self
            .room
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| {
                room.checked_sub(1)
            });
        if room.is_err() {
            return Err(refusal(false, "locked-memory limit is 65536 bytes"));
        }
        let mut log = self.log.lock().unwrap();
        let rkey = log.len() as u32 + 1000;
        log.push(Event::Registered { rkey, bytes });
        Ok(FakeRegion {
            addr: addr as u64,
            rkey,
            memory: Arc::downgrade(&memory),
            log: Arc::clone(&self.log),
        })
    }
}

fn refusal(wrong_memory: bool, why: &str) -> RegisterRefusal {
    RegisterRefusal {
        wrong_memory,
        source: why.into(),
    }
}

/// Whether the mapping at an address is writable, and whether it is of a file.
fn protection(addr: usize) -> (bool, bool) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (from, to) = words.next().unwrap().split_once('-').unwrap();
        let from = usize::from_str_radix(from, 16).unwrap();
        let to = usize::from_str_radix(to, 16).unwrap();
        if (from..to).contains(&addr) {
            let writable = words.next().unwrap().contains('w');
            let inode = words.nth(2).unwrap();
            return (writable, inode != "0");
        }
    }
    panic!("{addr:#x} is not mapped:\n{maps}");
}

/// Files of a folder that goes away with it.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn add(&self, label: &str, bytes: usize, extents: &[(u64, u64)]) -> PublishFile {
        let path = self.0.path().join(label);
        let content = pattern(label, bytes);
        fs::File::create(&path)
            .unwrap()
            .write_all(&content)
            .unwrap();
        PublishFile {
            label: label.to_owned(),
            file: Arc::new(File::open(&path).unwrap()),
            extents: extents.to_vec(),
        }
    }
}

fn pattern(label: &str, bytes: usize) -> Vec<u8> {
    let seed = label.len();
    (0..bytes)
        .map(|i| ((i + seed) * 31 % 251) as u8 + 1)
        .collect()
}

fn quiet(_: Progress) {}

fn options() -> PublishOptions {
    PublishOptions {
        threads: 3,
        ..PublishOptions::default()
    }
}

fn modes(publication: &Publication<FakeRegion>) -> Vec<MappingMode> {
    publication
        .modes()
        .iter()
        .map(|report| report.mode)
        .collect()
}

/// Reads a region as a device would.
fn remote_read(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes as usize];
    let memory = File::open("/proc/self/mem").unwrap();
    memory.read_exact_at(&mut bytes, region.addr).unwrap();
    bytes
}

#[test]
fn every_extent_is_readable_on_every_rail_and_at_the_same_address() {
    let files = Files::new();
    let list = [
        files.add("one.bin", 300_000, &[(200_000, 100_000), (5, 50_000)]),
        files.add("three.bin", 5000, &[(0, 5000)]),
    ];
    let rails = [FakeRail::new("rxe0"), FakeRail::new("rxe1")];
    for force_copy in [false, true] {
        let options = PublishOptions {
            force_copy,
            ..options()
        };
        let publication = publish(&rails, &list, &options, &quiet).unwrap();
        let shape: Vec<(u32, u64, u64)> = publication
            .regions(0)
            .iter()
            .map(|region| (region.file, region.file_offset, region.bytes))
            .collect();
        assert_eq!(shape, [(0, 5, 50_000), (0, 200_000, 100_000), (1, 0, 5000)]);
        for rail in 0..2 {
            for (region, first) in publication.regions(rail).iter().zip(publication.regions(0)) {
                let label = &list[region.file as usize].label;
                let content = pattern(label, 300_000);
                let from = region.file_offset as usize;
                assert_eq!(
                    remote_read(region),
                    content[from..from + region.bytes as usize]
                );
                assert_eq!(region.addr, first.addr);
            }
        }
        let (mapped, copied) = (publication.mapped_bytes(), publication.copied_bytes());
        let expected = if force_copy {
            (0, 155_000)
        } else {
            (155_000, 0)
        };
        assert_eq!((mapped, copied), expected);
        let pages = publication.modes()[0].pages;
        assert_eq!(pages.is_some(), force_copy);
    }
}

#[test]
fn kernel_that_refuses_read_only_mappings_gets_a_copy() {
    let files = Files::new();
    let list = [files.add("a.bin", 10_000, &[(1, 9000)])];
    let mut rail = FakeRail::new("rxe0");
    rail.refuses = Refuses::ReadOnly;
    let publication = publish(&[rail], &list, &options(), &quiet).unwrap();
    assert_eq!(modes(&publication), [MappingMode::Copy]);
    let why = &publication.modes()[0].why;
    assert!(
        why.contains("Bad address") && why.contains("--allow-rw-map"),
        "{why}"
    );
    assert_eq!(
        remote_read(&publication.regions(0)[0]),
        pattern("a.bin", 10_000)[1..9001]
    );
}

#[test]
fn read_write_mapping_is_used_only_with_permission_and_only_where_needed() {
    let files = Files::new();
    let list = [files.add("a.bin", 10_000, &[(0, 10_000)])];
    let allow = PublishOptions {
        allow_rw_map: true,
        ..options()
    };
    let with = |refuses| {
        let mut rail = FakeRail::new("rxe0");
        rail.refuses = refuses;
        let publication = publish(&[rail], &list, &allow, &quiet).unwrap();
        (modes(&publication)[0], publication.modes()[0].why.clone())
    };
    assert_eq!(with(Refuses::Nothing).0, MappingMode::SharedReadOnly);
    let (mode, why) = with(Refuses::ReadOnly);
    assert_eq!(mode, MappingMode::SharedReadWrite);
    assert!(why.contains("modification time"), "{why}");
    // Allowed, and refused as well.
    assert_eq!(with(Refuses::Mappings).0, MappingMode::Copy);
}

#[test]
fn one_rail_that_refuses_decides_for_all() {
    let files = Files::new();
    let list = [files.add("a.bin", 10_000, &[(0, 10_000)])];
    let mut second = FakeRail::new("rxe1");
    second.refuses = Refuses::Mappings;
    let rails = [FakeRail::new("rxe0"), second];
    let publication = publish(&rails, &list, &options(), &quiet).unwrap();
    assert_eq!(modes(&publication), [MappingMode::Copy]);
    assert!(publication.modes()[0].why.contains("rxe1"));
    // One copy, two regions of it.
    assert_eq!(publication.copied_bytes(), 10_000);
    assert_eq!(
        publication.regions(0)[0].addr,
        publication.regions(1)[0].addr
    );
}

#[test]
fn region_limit_of_any_rail_splits_and_the_parts_add_up() {
    let files = Files::new();
    let list = [files.add("a.bin", 100_000, &[(7, 90_000)])];
    let mut small = FakeRail::new("rxe1");
    small.region_bytes_max = 20_000;
    let rails = [FakeRail::new("rxe0"), small];
    let publication = publish(&rails, &list, &options(), &quiet).unwrap();
    for rail in 0..2 {
        let mut next = 7;
        for region in publication.regions(rail) {
            assert_eq!(region.file_offset, next);
            assert!(region.bytes <= 20_000);
            next += region.bytes;
        }
        assert_eq!(next, 90_007);
    }
    assert!(publication.regions(0).len() > 4);
}

#[test]
fn lack_of_memory_half_way_rolls_back_and_names_the_place() {
    let files = Files::new();
    let list: Vec<PublishFile> = (0..6)
        .map(|i| files.add(&format!("{i}.bin"), 50_000, &[(0, 50_000)]))
        .collect();
    for force_copy in [false, true] {
        let mut second = FakeRail::new("rxe1");
        // Six probes where mappings are tried, then some of the regions.
        second.room = AtomicU64::new(if force_copy { 3 } else { 6 + 3 });
        let rails = [FakeRail::new("rxe0"), second];
        let options = PublishOptions {
            force_copy,
            ..options()
        };
        let error = publish(&rails, &list, &options, &quiet).unwrap_err();
        let text = error.to_string();
        for words in [
            "rail rxe1",
            "50000 bytes at offset 0",
            "600000 bytes",
            "2 rails",
            "65536",
        ] {
            assert!(text.contains(words), "{text}");
        }
        for rail in &rails {
            assert!(rail.alive().is_empty(), "{:?}", rail.log());
            assert!(rail.log().iter().all(memory_alive));
            assert!(!rail.log().is_empty());
        }
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains(files.0.path().to_str().unwrap()), "{maps}");
    }
}

fn memory_alive(event: &Event) -> bool {
    !matches!(
        event,
        Event::Deregistered {
            memory_alive: false,
            ..
        }
    )
}

#[test]
fn withdraw_and_drop_deregister_everything_before_memory_goes() {
    let files = Files::new();
    let list = [
        files.add("a.bin", 90_000, &[(0, 10), (50_000, 40_000)]),
        files.add("b.bin", 90_000, &[(0, 90_000)]),
    ];
    for withdraw in [true, false] {
        for force_copy in [true, false] {
            let rails = [FakeRail::new("rxe0"), FakeRail::new("rxe1")];
            let options = PublishOptions {
                force_copy,
                ..options()
            };
            let publication = publish(&rails, &list, &options, &quiet).unwrap();
            assert_eq!(rails[0].alive().len(), 3);
            if withdraw {
                publication.withdraw();
            } else {
                drop(publication);
            }
            for rail in &rails {
                assert!(rail.alive().is_empty());
                assert!(rail.log().iter().all(memory_alive), "{:?}", rail.log());
            }
        }
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(files.0.path().to_str().unwrap()), "{maps}");
}

#[test]
fn revoked_file_is_gone_from_every_table_and_the_others_stay() {
    let files = Files::new();
    let list = [
        files.add("a.bin", 90_000, &[(0, 10), (50_000, 40_000)]),
        files.add("b.bin", 90_000, &[(0, 90_000)]),
    ];
    let rails = [FakeRail::new("rxe0"), FakeRail::new("rxe1")];
    let mut publication = publish(&rails, &list, &options(), &quiet).unwrap();
    assert_eq!(publication.revoke(0), 2);
    for (i, rail) in rails.iter().enumerate() {
        let table: HashSet<u32> = publication.regions(i).iter().map(|r| r.rkey).collect();
        assert_eq!(rail.alive(), table);
        assert!(publication.regions(i).iter().all(|region| region.file == 1));
        assert!(rail.log().iter().all(memory_alive));
    }
    assert_eq!(publication.revoke(0), 0);
    // The addresses stay taken until everything goes: nothing else may come to lie there while clients do not know.
    let maps = || fs::read_to_string("/proc/self/maps").unwrap();
    let path = |label: &str| files.0.path().join(label).to_str().unwrap().to_owned();
    assert!(maps().contains(&path("a.bin")) && maps().contains(&path("b.bin")));
    drop(publication);
    assert!(!maps().contains(&path("a.bin")) && !maps().contains(&path("b.bin")));
}

#[test]
fn copies_beyond_the_limit_are_refused_before_anything_is_read() {
    let files = Files::new();
    let list = [
        files.add("a.bin", 6000, &[(0, 6000)]),
        files.add("b.bin", 6000, &[(0, 6000)]),
    ];
    let mut rail = FakeRail::new("rxe0");
    rail.refuses = Refuses::ReadOnly;
    let limited = |max_copy_bytes| PublishOptions {
        max_copy_bytes: Some(max_copy_bytes),
        ..options()
    };
    let fail = |_: Progress| panic!("nothing is to be read");
    let rails = [rail];
    let text = publish(&rails, &list, &limited(11_999), &fail)
        .unwrap_err()
        .to_string();
    for words in ["2 files need 12000 bytes", "limit is 11999", "Bad address"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(publish(&rails, &list, &limited(12_000), &quiet).is_ok());
}

#[test]
fn progress_counts_up_to_the_whole_of_each_phase() {
    let files = Files::new();
    let bytes = 9 << 20;
    let list = [files.add("a.bin", bytes, &[(100, bytes as u64 - 100)])];
    let rails = [FakeRail::new("rxe0"), FakeRail::new("rxe1")];
    for force_copy in [false, true] {
        let last = Mutex::new([0; 2]);
        let note = |progress: Progress| {
            let phase = usize::from(progress.phase == Phase::Registering);
            let rails = 1 + phase as u64;
            assert_eq!(progress.total_bytes, rails * (bytes as u64 - 100));
            assert!(progress.done_bytes <= progress.total_bytes);
            let mut last = last.lock().unwrap();
            last[phase] = last[phase].max(progress.done_bytes);
        };
        let options = PublishOptions {
            force_copy,
            ..options()
        };
        publish(&rails, &list, &options, &note).unwrap();
        let whole = bytes as u64 - 100;
        assert_eq!(*last.lock().unwrap(), [whole, 2 * whole]);
    }
}

#[test]
fn stop_ends_it_while_reading_and_while_registering() {
    let files = Files::new();
    let list = [
        files.add("a.bin", 9 << 20, &[(0, 9 << 20)]),
        files.add("b.bin", 9 << 20, &[(0, 9 << 20)]),
    ];
    for phase in [Phase::Reading, Phase::Registering] {
        let rails = [FakeRail::new("rxe0")];
        let options = PublishOptions {
            force_copy: true,
            threads: 1,
            ..options()
        };
        let stop = |progress: Progress| {
            if progress.phase == phase {
                options.stop.store(true, Ordering::Relaxed);
            }
        };
        let error = publish(&rails, &list, &options, &stop).unwrap_err();
        assert!(error.to_string().contains("stopped as asked"), "{error}");
        assert!(rails[0].alive().is_empty());
    }
}

#[test]
fn what_cannot_work_is_refused_with_its_reason() {
    let files = Files::new();
    let list = [files.add("a.bin", 5000, &[(0, 10), (100, 10), (4000, 1001)])];
    let none: [FakeRail; 0] = [];
    let error = publish(&none, &list, &options(), &quiet).unwrap_err();
    assert!(matches!(error, PublishError::NoRails), "{error}");
    let error = publish(&[FakeRail::new("r")], &list, &options(), &quiet).unwrap_err();
    assert!(
        error.to_string().contains("a.bin, which has 5000 bytes"),
        "{error}"
    );

    let list = [files.add("b.bin", 5000, &[(0, 10), (100, 10), (4000, 1000)])];
    let mut rail = FakeRail::new("rxe0");
    rail.regions_max = 2;
    let error = publish(&[rail], &list, &options(), &quiet).unwrap_err();
    assert!(
        matches!(
            error,
            PublishError::TooManyRegions {
                need: 3,
                limit: 2,
                ..
            }
        ),
        "{error}"
    );

    let mut rail = FakeRail::new("rxe0");
    rail.preflight = Some("locked-memory limit is 1 byte");
    let fail = |_: Progress| panic!("nothing is to be read");
    let error = publish(&[rail], &list, &options(), &fail).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("rxe0 cannot work: locked-memory"),
        "{error}"
    );
}

#[test]
fn file_without_extents_is_published_as_nothing() {
    let files = Files::new();
    let list = [files.add("a.bin", 5000, &[])];
    let publication = publish(&[FakeRail::new("r")], &list, &options(), &quiet).unwrap();
    assert!(publication.regions(0).is_empty());
    assert_eq!(publication.modes().len(), 1);
}

#[test]
fn probe_registers_one_page_at_most() {
    let files = Files::new();
    let list = [files.add("a.bin", 100_000, &[(3, 90_000)])];
    let rails = [FakeRail::new("rxe0")];
    let publication = publish(&rails, &list, &options(), &quiet).unwrap();
    let Event::Registered { bytes, .. } = rails[0].log()[0] else {
        panic!("{:?}", rails[0].log());
    };
    assert_eq!(bytes, page_bytes());
    drop(publication);
}
