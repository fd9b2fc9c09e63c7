//! Extents of real files; the memory is read through `/proc/self/mem`, as a device would, without references.

use super::*;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;

static GO_ON: AtomicBool = AtomicBool::new(false);

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 31 % 251) as u8 + 1).collect()
}

/// A file with the pattern, open for reading alone.
fn source(bytes: usize) -> (tempfile::NamedTempFile, MappableFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&pattern(bytes)).unwrap();
    let open = Arc::new(File::open(file.path()).unwrap());
    let source = MappableFile::new("weights.bin", &open).unwrap();
    (file, source)
}

fn seen(extent: &MappedExtent) -> Vec<u8> {
    let mut bytes = vec![0; extent.len_bytes()];
    let memory = File::open("/proc/self/mem").unwrap();
    memory
        .read_exact_at(&mut bytes, extent.base().addr() as u64)
        .unwrap();
    bytes
}

const MODES: [MappingMode; 3] = [
    MappingMode::SharedReadOnly,
    MappingMode::SharedReadWrite,
    MappingMode::Copy,
];

#[test]
fn extent_has_exactly_the_files_bytes_whatever_its_alignment() {
    let page = page_bytes();
    let file_bytes = 3 * page + 1234;
    let (_file, source) = source(file_bytes);
    for (offset, bytes) in [
        (0, 1),
        (0, file_bytes),
        (1, page),
        (page, page),
        (page + 7, 2 * page),
        (3 * page, 1234),
        (file_bytes - 1, 1),
        (page - 1, 2),
    ] {
        for mode in MODES {
            let (at, len) = (offset as u64, bytes as u64);
            let extent = MappedExtent::map(&source, at, len, mode, &GO_ON).unwrap();
            assert_eq!(
                seen(&extent),
                pattern(file_bytes)[offset..offset + bytes],
                "{mode} {offset}"
            );
            assert_eq!(extent.delta(), offset % page);
            assert_eq!((extent.file_offset(), extent.bytes()), (at, len));
            assert_eq!((extent.base().addr() - extent.delta()) % page, 0);
            let last = extent.address_of(at + len - 1);
            assert_eq!(last, extent.base().addr() as u64 + len - 1);
        }
    }
}

#[test]
fn copy_in_parts_and_over_many_steps_is_whole() {
    let file_bytes = (9 << 20) + 777;
    let (_file, source) = source(file_bytes);
    let (offset, bytes) = (12_345, file_bytes as u64 - 12_345);
    let mut extent = MappedExtent::reserve(&source, offset, bytes, MappingMode::Copy).unwrap();
    let parts: Vec<_> = extent.copy_parts(2 << 20).collect();
    assert_eq!(parts.len(), 5);
    let needed: usize = parts.iter().map(|part| part.needed_bytes).sum();
    assert_eq!(needed as u64, bytes + offset % page_bytes() as u64);
    for part in parts {
        fill(&source, part, &GO_ON, &|_| {}).unwrap();
    }
    assert_eq!(seen(&extent), pattern(file_bytes)[12_345..]);
    assert!(extent.pages().is_some());
}

#[test]
fn mapping_has_nothing_to_fill() {
    let (_file, source) = source(5000);
    let mut extent = MappedExtent::reserve(&source, 10, 20, MappingMode::SharedReadOnly).unwrap();
    assert_eq!(extent.copy_parts(4096).count(), 0);
    assert_eq!(extent.pages(), None);
}

#[test]
fn extents_outside_the_file_are_refused_with_its_size() {
    let (_file, source) = source(5000);
    for (offset, bytes) in [
        (0, 0),
        (0, 5001),
        (5000, 1),
        (4999, 2),
        (u64::MAX, 2),
        (9, u64::MAX),
    ] {
        for mode in MODES {
            let error = MappedExtent::map(&source, offset, bytes, mode, &GO_ON).unwrap_err();
            assert!(matches!(error, MappingError::Outside { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("weights.bin, which has 5000 bytes"), "{text}");
        }
    }
}

#[test]
fn file_truncated_before_its_copy_is_an_error_that_says_where() {
    let (file, source) = source(3 << 20);
    file.as_file().set_len(1 << 20).unwrap();
    let error = MappedExtent::map(&source, 0, 3 << 20, MappingMode::Copy, &GO_ON).unwrap_err();
    let MappingError::Truncated {
        offset,
        missing_bytes,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((offset, missing_bytes), (1 << 20, 2 << 20));
}

#[test]
fn truncated_mapping_raises_no_signal_and_is_unmapped_as_usual() {
    let (file, source) = source(3 << 20);
    let mode = MappingMode::SharedReadOnly;
    let extent = MappedExtent::map(&source, 0, 3 << 20, mode, &GO_ON).unwrap();
    file.as_file().set_len(0).unwrap();
    assert!(!extent.is_resident(0..3 << 20));
    let name = file.path().file_name().unwrap().to_str().unwrap();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps().contains(name));
    drop(extent);
    assert!(!maps().contains(name), "{}", maps());
}

#[test]
fn copy_stops_at_the_next_step_when_asked() {
    let (_file, source) = source(20 << 20);
    let stop = AtomicBool::new(false);
    let mut extent = MappedExtent::reserve(&source, 0, 20 << 20, MappingMode::Copy).unwrap();
    let part = extent.copy_parts(usize::MAX).next().unwrap();
    let error = fill(&source, part, &stop, &|_| {
        stop.store(true, Ordering::Relaxed);
    })
    .unwrap_err();
    assert!(matches!(error, MappingError::Stopped { .. }), "{error}");
    // The second step was not read.
    assert_eq!(seen(&extent)[8 << 20], 0);
}

#[test]
fn neither_mapping_nor_copying_changes_the_file_or_the_callers_handle() {
    let (file, _) = source(100_000);
    let before = std::fs::metadata(file.path()).unwrap();
    let open = Arc::new(File::open(file.path()).unwrap());
    let source = MappableFile::new("weights.bin", &open).unwrap();
    for mode in MODES {
        MappedExtent::map(&source, 5, 90_000, mode, &GO_ON).unwrap();
    }
    let after = std::fs::metadata(file.path()).unwrap();
    assert_eq!(before.mtime_nsec(), after.mtime_nsec());
    assert_eq!(before.ctime_nsec(), after.ctime_nsec());
    assert_eq!(before.atime_nsec(), after.atime_nsec());
    let flags = rustix::fs::fcntl_getfl(&*open).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::DIRECT));
}

#[test]
fn copy_without_direct_reads_is_the_same_and_what_was_cached_stays() {
    let (_file, source) = source(9 << 20);
    let source = source.without_direct();
    // It was just written, so the page cache has all of it.
    let mode = MappingMode::SharedReadOnly;
    let mapping = MappedExtent::map(&source, 0, 9 << 20, mode, &GO_ON).unwrap();
    assert!(mapping.is_resident(0..9 << 20));
    let copy = MappedExtent::map(&source, 5000, 8 << 20, MappingMode::Copy, &GO_ON).unwrap();
    assert_eq!(seen(&copy), pattern(9 << 20)[5000..5000 + (8 << 20)]);
    assert!(mapping.is_resident(0..9 << 20));
}

#[test]
fn populating_reads_what_is_missing_and_reports_every_byte() {
    let (_file, source) = source(6 << 20);
    let mode = MappingMode::SharedReadOnly;
    let extent = MappedExtent::map(&source, 100, 5 << 20, mode, &GO_ON).unwrap();
    let done = std::cell::Cell::new(0);
    let count = |bytes| done.set(done.get() + bytes);
    let mut scratch = Vec::new();
    populate(&source, &extent, 0..5 << 20, &mut scratch, &GO_ON, &count).unwrap();
    assert_eq!(done.get(), 5 << 20);
    assert!(extent.is_resident(0..5 << 20));
}

#[test]
#[should_panic(expected = "is not inside")]
fn address_of_a_byte_outside_is_a_bug() {
    let (_file, source) = source(5000);
    let extent = MappedExtent::map(&source, 10, 20, MappingMode::Copy, &GO_ON).unwrap();
    extent.address_of(30);
}
