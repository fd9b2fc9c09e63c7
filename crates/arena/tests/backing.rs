//! Where the memory comes from: our own mapping, memory of an engine, and refusals.

mod common;

use common::{Switch, land, lasting_pages, slot};
use expert_arena::{
    ArenaBuilder, ArenaError, ExpertArena, ForeignMemory, HugePages, Lock, LockOutcome, PageKind,
    SLOT_ALIGN_BYTES, SlotId, memlock_limit_bytes,
};
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

#[test]
fn mapped_arena_is_present_aligned_and_usable_to_its_last_byte() {
    let record_bytes: usize = if cfg!(miri) { 5_000 } else { 100_000 };
    let arena = Arc::new(ExpertArena::new(2, 3, record_bytes).unwrap());
    assert_eq!(
        (arena.num_slabs(), arena.slots(1), arena.slots(2)),
        (2, 3, 0)
    );
    let slot_bytes = record_bytes.next_multiple_of(SLOT_ALIGN_BYTES);
    assert_eq!((arena.slot_bytes(0), arena.slot_bytes(2)), (slot_bytes, 0));
    assert_eq!(arena.total_bytes(), 6 * slot_bytes);
    assert_eq!(arena.base_ptr().addr() % SLOT_ALIGN_BYTES, 0);
    let mut leases = Vec::new();
    for slab in 0..2 {
        for slot in 0..3 {
            let name = SlotId { slab, slot };
            let offset = (slab as usize * 3 + slot as usize) * slot_bytes;
            let ptr = arena.slot_host_ptr(name).unwrap();
            assert_eq!(ptr.addr(), arena.base_ptr().addr() + offset);
            let value = (slab * 3 + slot) as u8;
            let landing = arena.begin_landing(name, slot_bytes).unwrap();
            leases.push(land(landing, &vec![value; slot_bytes]));
        }
    }
    for (value, lease) in leases.iter().enumerate() {
        assert!(lease.iter().all(|&byte| byte == value as u8));
    }
    let missing = SlotId { slab: 1, slot: 3 };
    assert_eq!(arena.slot_host_ptr(missing), None);
    assert_eq!(arena.slot_state(missing), None);
}

#[test]
fn report_says_what_the_arena_got() {
    let builder = ArenaBuilder::new().slab(4, 1 << 20);
    let builder = builder.huge_pages(HugePages::Never).lock(Lock::Never);
    let arena = builder.build().unwrap();
    let report = arena.report();
    assert_eq!(
        (report.total_bytes, report.mapped_bytes),
        (4 << 20, 4 << 20)
    );
    assert_eq!((report.pages, report.huge_bytes), (PageKind::Plain, 0));
    assert_eq!(report.lock, LockOutcome::NotAsked);
    assert!(report.page_bytes.is_power_of_two());
    let text = report.to_string();
    for part in ["4194304 bytes", "plain pages", "not locked", "ready after"] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn best_effort_locking_is_reported_either_way() {
    let arena = ArenaBuilder::new().slab(1, 4096).build().unwrap();
    match &arena.report().lock {
        LockOutcome::Locked => {}
        LockOutcome::Failed(reason) => assert!(reason.contains("RLIMIT_MEMLOCK"), "{reason}"),
        other => panic!("locking was asked for, the report says {other:?}"),
    }
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn arena_that_would_eat_the_reserve_is_refused_with_the_numbers() {
    let builder = ArenaBuilder::new()
        .slab(1, 4096)
        .reserve_bytes(Some(1 << 60));
    let error = builder.build().unwrap_err();
    assert!(matches!(
        error,
        ArenaError::NotEnoughMemory { need_bytes: 4096, reserve_bytes, .. } if reserve_bytes == 1 << 60
    ));
    assert!(!error.is_retryable());
}

fn fake_root(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    root
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn default_reserve_refuses_what_would_freeze_a_machine_with_unified_memory() {
    let meminfo = "MemTotal: 128000000 kB\nMemAvailable: 120000000 kB\n";
    let root = fake_root(&[("proc/meminfo", meminfo)]);
    let error = ArenaBuilder::new()
        .slab(115, 1 << 30)
        .system_root(root.path())
        .build()
        .unwrap_err();
    let text = error.to_string();
    // 8 % of the total, which is above 8 GB.
    assert!(text.contains("10485760000 must stay free"), "{text}");
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn required_huge_pages_that_are_missing_are_an_error_with_the_pools() {
    let root = fake_root(&[(
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
        "3\n",
    )]);
    let builder = ArenaBuilder::new()
        .slab(4, 2 << 20)
        .system_root(root.path());
    let error = builder.huge_pages(HugePages::Require).build().unwrap_err();
    let text = error.to_string();
    for part in [
        "8388608 bytes",
        "3 free of 2097152 bytes",
        "vm.nr_hugepages",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn huge_pages_that_vanish_between_look_and_take_fall_back_to_plain_ones() {
    // The pool says it has pages; the size is one that no machine has.
    let root = fake_root(&[
        (
            "sys/kernel/mm/hugepages/hugepages-8kB/free_hugepages",
            "999999\n",
        ),
        (
            "proc/meminfo",
            "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n",
        ),
    ]);
    let builder = ArenaBuilder::new()
        .slab(4, 1 << 20)
        .system_root(root.path());
    let arena = builder.build().unwrap();
    assert_eq!(arena.report().pages, PageKind::Plain);
}

#[test]
#[ignore = "needs 4 free huge pages of 2 MiB: sysctl vm.nr_hugepages=4"]
fn explicit_huge_pages_are_used_when_the_pool_has_them() {
    let builder = ArenaBuilder::new().slab(2, 4 << 20);
    let builder = builder.huge_pages(HugePages::Require).lock(Lock::Require);
    let arena = Arc::new(builder.build().unwrap());
    let report = arena.report();
    let page_bytes = 2 << 20;
    assert_eq!(report.pages, PageKind::Explicit { page_bytes });
    assert_eq!((report.huge_bytes, report.mapped_bytes), (8 << 20, 8 << 20));
    assert_eq!(report.lock, LockOutcome::Locked);
    assert_eq!(report.reserve_bytes, None);
    let lease = land(
        arena.begin_landing(slot(1), 4 << 20).unwrap(),
        &vec![7; 4 << 20],
    );
    assert!(lease.iter().all(|&byte| byte == 7));
}

#[test]
#[ignore = "needs transparent huge pages: /sys/kernel/mm/transparent_hugepage/enabled not 'never'"]
fn transparent_huge_pages_are_asked_for_and_counted() {
    let arena = ArenaBuilder::new().slab(8, 8 << 20).build().unwrap();
    let report = arena.report();
    assert!(
        matches!(report.pages, PageKind::Transparent { .. }),
        "{report}"
    );
    assert!(report.huge_bytes > 0, "{report}");
    assert!(report.huge_bytes <= report.mapped_bytes, "{report}");
}

#[test]
#[ignore = "needs a kernel with NUMA: /sys/devices/system/node/node0"]
fn arena_bound_to_a_node_that_exists_is_reported_there() {
    let builder = ArenaBuilder::new().slab(1, 1 << 20).numa_node(0);
    let arena = builder.build().unwrap();
    assert_eq!(arena.report().numa_node, Some(0));
    assert!(arena.report().to_string().contains("on NUMA node 0"));
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn numa_node_that_does_not_exist_is_refused_with_the_nodes_online() {
    for node in [1000, 5000] {
        let builder = ArenaBuilder::new().slab(1, 4096).numa_node(node);
        let error = builder.build().unwrap_err();
        assert!(matches!(error, ArenaError::Numa { .. }), "{error}");
        let text = error.to_string();
        for part in [&format!("NUMA node {node}"), "nodes online: "] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn numa_node_without_enough_memory_is_refused_before_the_kernel_kills() {
    let root = fake_root(&[
        (
            "proc/meminfo",
            "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n",
        ),
        (
            "sys/devices/system/node/node0/meminfo",
            "Node 0 MemFree: 4 kB\n",
        ),
    ]);
    let builder = ArenaBuilder::new().slab(1, 8192).numa_node(0);
    let error = builder.system_root(root.path()).build().unwrap_err();
    assert!(
        error.to_string().contains("NUMA node 0 has 4096 bytes"),
        "{error}"
    );
}

/// Counts that the owner was told to let go.
struct KeepAlive(Arc<AtomicU32>);

impl Drop for KeepAlive {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// An engine's pool of two pages, and a count of how often it was let go.
fn engine_memory(device_base: Option<u64>) -> (NonNull<u8>, Arc<AtomicU32>, ForeignMemory) {
    let base = lasting_pages();
    let dropped = Arc::new(AtomicU32::new(0));
    let keep_alive = Box::new(KeepAlive(Arc::clone(&dropped)));
    // SAFETY: the pages are initialised, never freed, and known to this arena alone.
    let memory = unsafe { ForeignMemory::new(base, 8192, device_base, keep_alive) };
    (base, dropped, memory)
}

fn foreign_arena(memory: ForeignMemory) -> Arc<ExpertArena> {
    let builder = ArenaBuilder::new().slab(2, 4096).foreign(memory);
    Arc::new(builder.build().unwrap())
}

#[test]
fn foreign_memory_is_used_and_kept_alive_until_the_last_lease_is_gone() {
    let (base, dropped, memory) = engine_memory(None);
    let arena = foreign_arena(memory);
    assert_eq!(arena.base_ptr(), base.as_ptr());
    assert_eq!(arena.report().pages, PageKind::Foreign);
    let lease = land(arena.begin_landing(slot(1), 5).unwrap(), b"image");
    assert_eq!(lease.host_ptr().addr(), base.as_ptr().addr() + 4096);
    drop(arena);
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    assert_eq!(&lease[..], b"image");
    drop(lease);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
}

#[test]
fn outstanding_range_keeps_the_memory_alive_after_arena_and_landing() {
    let (_, dropped, memory) = engine_memory(None);
    let arena = foreign_arena(memory);
    let mut landing = arena.acquire(100).unwrap();
    let mut range = landing.split(100).unwrap();
    drop(landing);
    drop(arena);
    range.write(0, b"late completion");
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    drop(range);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
}

#[test]
fn leaked_range_leaks_the_memory_when_the_arena_is_dropped() {
    let (_, dropped, memory) = engine_memory(None);
    let arena = foreign_arena(memory);
    let mut landing = arena.acquire(100).unwrap();
    landing.split(100).unwrap().leak();
    drop((landing, arena));
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
}

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn leaked_range_leaves_our_own_mapping_mapped() {
    let builder = ArenaBuilder::new().slab(1, 1 << 20);
    let builder = builder.huge_pages(HugePages::Never).lock(Lock::Never);
    let arena = Arc::new(builder.build().unwrap());
    let mut landing = arena.acquire(100).unwrap();
    let range = landing.split(100).unwrap();
    let address = range.as_mut_ptr();
    range.leak();
    drop((landing, arena));
    let mut present = 0;
    // SAFETY: asks about one page, whether it is mapped or not, and writes one byte of answer.
    let rc = unsafe { libc::mincore(address.cast(), 1, &mut present) };
    assert_eq!(rc, 0, "the page is not mapped any more");
}

#[test]
fn fence_that_never_fired_leaks_the_memory_and_one_that_fired_does_not() {
    for fires in [false, true] {
        let (_, dropped, memory) = engine_memory(None);
        let arena = foreign_arena(memory);
        let lease = land(arena.acquire(5).unwrap(), b"image");
        let fence = Switch::default();
        lease.release_after(Box::new(fence.clone()));
        if fires {
            fence.fire();
        }
        drop(arena);
        assert_eq!(dropped.load(Ordering::Relaxed), u32::from(fires));
    }
}

#[test]
fn foreign_memory_that_does_not_fit_is_refused() {
    let (_, dropped, memory) = engine_memory(None);
    let builder = ArenaBuilder::new().slab(3, 4096).foreign(memory);
    assert!(matches!(
        builder.build(),
        Err(ArenaError::ForeignTooSmall {
            have_bytes: 8192,
            need_bytes: 12288
        })
    ));
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    let (base, _, _) = engine_memory(None);
    // SAFETY: the first byte of the pages is followed by 8191 more.
    let odd = unsafe { base.add(64) };
    // SAFETY: the pages are initialised and never freed, and this part of them has this size.
    let memory = unsafe { ForeignMemory::new(odd, 8192 - 64, None, Box::new(())) };
    let error = ArenaBuilder::new().slab(1, 4096).foreign(memory).build();
    assert!(matches!(
        error,
        Err(ArenaError::ForeignMisaligned {
            align_bytes: 4096,
            ..
        })
    ));
}

#[test]
fn options_that_foreign_memory_cannot_honour_are_refused_and_not_ignored() {
    let with = |change: fn(ArenaBuilder) -> ArenaBuilder| {
        let memory = ForeignMemory::heap(4096).unwrap();
        change(ArenaBuilder::new().slab(1, 4096).foreign(memory)).build()
    };
    for result in [
        with(|builder| builder.numa_node(0)),
        with(|builder| builder.huge_pages(HugePages::Require)),
    ] {
        assert!(matches!(result, Err(ArenaError::ForeignOption { .. })));
    }
    assert!(with(|builder| builder.lock(Lock::Require)).is_ok());
}

#[test]
fn device_address_exists_only_if_someone_supplied_it() {
    let (_, _, memory) = engine_memory(None);
    let arena = foreign_arena(memory);
    assert_eq!(arena.slot_dev_va(slot(1)), None);
    arena.set_device_base(0x7000_0000).unwrap();
    assert_eq!(arena.slot_dev_va(slot(1)), Some(0x7000_1000));
    assert_eq!(arena.slot_dev_va(slot(2)), None);
    assert!(arena.set_device_base(0x7000_0000).is_ok());
    assert!(matches!(
        arena.set_device_base(1),
        Err(ArenaError::DeviceBaseConflict {
            first: 0x7000_0000,
            second: 1
        })
    ));

    let (_, _, memory) = engine_memory(Some(0x1000));
    let arena = foreign_arena(memory);
    let lease = land(arena.begin_landing(slot(1), 5).unwrap(), b"image");
    assert_eq!(lease.dev_va(), Some(0x2000));

    let (_, _, memory) = engine_memory(Some(0x1000));
    let builder = ArenaBuilder::new().slab(1, 4096).foreign(memory);
    let error = builder.device_base(Some(0x2000)).build();
    assert!(matches!(error, Err(ArenaError::DeviceBaseConflict { .. })));
}

/// A limit that some but not all of an arena of 16 MiB fits in, so that locking fails half-way. An ordinary user may
/// not raise a limit, so one that is lower already stays.
fn low_limit_bytes() -> u64 {
    memlock_limit_bytes().unwrap_or(u64::MAX).min(6 << 20)
}

/// Set in the process that this test starts, which has a low limit and no right to exceed it.
const CHILD: &str = "EXPERT_ARENA_TEST_LOCK_CHILD";

#[test]
#[cfg_attr(
    miri,
    ignore = "asks the system, which a heap block under Miri does not"
)]
fn required_lock_above_the_limit_is_an_error_with_limit_need_and_remedies() {
    if std::env::var_os(CHILD).is_some() {
        lock_with_a_low_limit();
        println!("child checked the error");
        return;
    }
    let this = std::env::current_exe().unwrap();
    let mut child = Command::new(&this);
    child.env(CHILD, "1").args([
        "--exact",
        "required_lock_above_the_limit_is_an_error_with_limit_need_and_remedies",
        "--nocapture",
    ]);
    lower_limit(&mut child);
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("child checked the error"), "{text}");
}

fn lower_limit(child: &mut Command) {
    use std::os::unix::process::CommandExt;
    /// As the kernel has it (linux/capability.h).
    const CAP_IPC_LOCK: libc::c_ulong = 14;
    let limit = libc::rlimit {
        rlim_cur: low_limit_bytes(),
        rlim_max: low_limit_bytes(),
    };
    let prepare = move || {
        // SAFETY: the limit is a valid rlimit for the whole call.
        let rc = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) };
        if rc != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // A user without the right to do this has not the capability either; the child checks that it is gone.
        // SAFETY: takes numbers only.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) };
        Ok(())
    };
    // SAFETY: the closure makes two system calls and allocates nothing, as is needed between fork and exec.
    unsafe { child.pre_exec(prepare) };
}

fn lock_with_a_low_limit() {
    let status = std::fs::read_to_string(Path::new("/proc/self/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = u64::from_str_radix(line.unwrap().trim(), 16).unwrap();
    assert_eq!(
        capabilities >> 14 & 1,
        0,
        "the child may not have CAP_IPC_LOCK"
    );
    let builder = || {
        ArenaBuilder::new()
            .slab(1, 16 << 20)
            .huge_pages(HugePages::Never)
    };

    let error = builder().lock(Lock::Require).build().unwrap_err();
    let limit = low_limit_bytes();
    assert!(matches!(
        error,
        ArenaError::Lock { need_bytes: 16_777_216, limit_bytes, .. } if limit_bytes == Some(limit)
    ));
    let text = error.to_string();
    let numbers = format!("{limit} bytes, need 16777216");
    for part in [
        numbers.as_str(),
        "ulimit -l unlimited",
        "LimitMEMLOCK=infinity",
        "--ulimit memlock=-1:-1",
        "IPC_LOCK",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }

    let arena = builder().lock(Lock::BestEffort).build().unwrap();
    assert!(matches!(&arena.report().lock, LockOutcome::Failed(_)));
    // Nothing of it stays locked, so the limit is there for others.
    let status = std::fs::read_to_string(Path::new("/proc/self/status")).unwrap();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    assert_eq!(locked.unwrap().trim(), "0 kB");
}
