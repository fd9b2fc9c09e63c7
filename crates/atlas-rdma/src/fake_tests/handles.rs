//! Regions, steps and limits.

use super::*;

#[test]
fn a_region_is_deregistered_before_its_memory_goes() {
    let fake = Fake::new();
    let pd = Pd::new(&fake.open()).unwrap();
    let mr = Mr::register(&pd, pages(&fake, 64), 16, 32, Access::RemoteRead).unwrap();
    assert_eq!(mr.bytes(), 32);
    assert_ne!(mr.lkey().0, mr.rkey().0);
    fake.take_calls();
    drop(mr);
    assert_eq!(fake.take_calls(), ["dereg_mr", "release memory"]);
}

#[test]
fn memory_under_a_region_that_cannot_be_deregistered_is_leaked_and_counted() {
    let fake = Fake::new();
    let pd = Pd::new(&fake.open()).unwrap();
    let mr = Mr::register(&pd, pages(&fake, 64), 0, 64, Access::RemoteRead).unwrap();
    fake.take_calls();
    fake.fail("dereg_mr", libc::EBUSY);
    let before = crate::leaks();
    drop(mr);
    assert_eq!(fake.take_calls(), ["dereg_mr"]);
    assert!(crate::leaks() > before);
}

#[test]
fn access_is_one_thing_only_and_ordering_is_relaxed_where_the_library_can() {
    for old in [false, true] {
        let fake = Fake::new();
        if old {
            fake.set_old_library();
        }
        let pd = Pd::new(&fake.open()).unwrap();
        fake.take_calls();
        let landing =
            Mr::register(&pd, pages(&fake, 64), 0, 64, Access::LandingLocalWrite).unwrap();
        let served = Mr::register(&pd, pages(&fake, 64), 0, 64, Access::RemoteRead).unwrap();
        // LOCAL_WRITE is 1, REMOTE_READ 4, RELAXED_ORDERING 1 << 20.
        let first = if old {
            "reg_mr 64 0x1"
        } else {
            "reg_mr_iova2 64 0x100001"
        };
        assert_eq!(fake.take_calls(), [first, "reg_mr 64 0x4"]);
        drop((landing, served));
    }
}

#[test]
fn relaxed_ordering_that_is_refused_is_given_up() {
    let fake = Fake::new();
    fake.fail("reg_mr_iova2", libc::EINVAL);
    let pd = Pd::new(&fake.open()).unwrap();
    fake.take_calls();
    Mr::register(&pd, pages(&fake, 64), 0, 64, Access::LandingLocalWrite).unwrap();
    assert_eq!(fake.take_calls()[..2], ["reg_mr_iova2", "reg_mr 64 0x1"]);
}

#[test]
fn locked_memory_that_is_not_enough_says_limit_need_and_remedy() {
    let fake = Fake::new();
    fake.fail("reg_mr", libc::ENOMEM);
    let pd = Pd::new(&fake.open()).unwrap();
    let error = Mr::register(&pd, pages(&fake, 4096), 0, 4096, Access::RemoteRead).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOMEM));
    let RdmaError::MemoryLock {
        bytes,
        device,
        need_bytes,
        source,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert!(need_bytes >= 4096);
    let error = RdmaError::MemoryLock {
        bytes,
        device,
        limit_bytes: Some(65536),
        need_bytes: 8192,
        source,
    };
    let text = error.to_string();
    for part in [
        "registering 4096 bytes on rail fake0 failed",
        "limit is 65536 bytes",
        "need 8192",
        "ulimit -l unlimited",
        "LimitMEMLOCK=infinity",
        "--ulimit memlock=-1",
        "IPC_LOCK",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn memory_of_a_kind_that_the_kernel_refuses_has_its_own_error() {
    let fake = Fake::new();
    fake.fail("reg_mr", libc::EFAULT);
    let pd = Pd::new(&fake.open()).unwrap();
    let error = Mr::register(&pd, pages(&fake, 64), 0, 64, Access::RemoteRead).unwrap_err();
    assert!(
        matches!(error, RdmaError::NotRegistrable { bytes: 64, .. }),
        "{error}"
    );
}

#[test]
fn a_region_above_the_devices_limit_or_outside_its_memory_is_refused_and_never_shortened() {
    let fake = Fake::new();
    fake.set_max_mr_bytes(4096);
    let pd = Pd::new(&fake.open()).unwrap();
    fake.take_calls();
    let register =
        |offset, bytes| Mr::register(&pd, pages(&fake, 8192), offset, bytes, Access::RemoteRead);
    let error = register(0, 4097).unwrap_err();
    assert!(
        matches!(
            error,
            RdmaError::RegionTooLarge {
                bytes: 4097,
                limit_bytes: 4096,
                ..
            }
        ),
        "{error}"
    );
    for (offset, bytes) in [(0, 0), (8000, 193), (usize::MAX, 2)] {
        let error = register(offset, bytes).unwrap_err();
        assert!(matches!(error, RdmaError::RegionOutside { .. }), "{error}");
    }
    assert!(
        fake.take_calls()
            .iter()
            .all(|call| call == "release memory")
    );
}

#[test]
fn an_arena_that_is_refused_in_slices_is_registered_whole() {
    let fake = Fake::new();
    let pd = Pd::new(&fake.open()).unwrap();
    let arena = arena(4, SLOT_BYTES);
    let sliced = LandingRegions::register(&pd, &arena, 2 * SLOT_BYTES as u64).unwrap();
    assert_eq!(
        (sliced.region_count(), sliced.registered_bytes()),
        (2, 4 * SLOT_BYTES as u64)
    );
    let keys: Vec<_> = (0..4)
        .map(|slot| sliced.lkey_for(slot * SLOT_BYTES, SLOT_BYTES).unwrap())
        .collect();
    assert!(keys[0] == keys[1] && keys[1] != keys[2] && keys[2] == keys[3]);
    assert_eq!(
        sliced.lkey_for(2 * SLOT_BYTES - 1, 2),
        None,
        "across the seam"
    );
    assert_eq!(
        sliced.lkey_for(4 * SLOT_BYTES - 1, 2),
        None,
        "beyond the end"
    );
    drop(sliced);
    // ENOMEM is no reason to try more at once.
    fake.fail("reg_mr_iova2", libc::ENOMEM);
    let error = LandingRegions::register(&pd, &arena, SLOT_BYTES as u64).unwrap_err();
    assert!(matches!(error, RdmaError::MemoryLock { .. }), "{error}");
    fake.heal("reg_mr_iova2");
    fake.refuse_below(4 * SLOT_BYTES, libc::EFAULT);
    let whole = LandingRegions::register(&pd, &arena, SLOT_BYTES as u64).unwrap();
    assert_eq!(
        (whole.region_count(), whole.registered_bytes()),
        (1, 4 * SLOT_BYTES as u64)
    );
    assert!(whole.lkey_for(SLOT_BYTES - 1, 2).is_some());
}

#[test]
fn a_step_that_is_refused_says_which_attribute_and_what_was_sent() {
    let fake = Fake::new();
    fake.fail("to_rtr", libc::EINVAL);
    let pd = Pd::new(&fake.open()).unwrap();
    let responder = Responder::new(&pd, 1, 0).unwrap();
    let mut path = path();
    path.mtu = Mtu::B4096;
    let error = responder.connect(&path).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EINVAL));
    assert!(!error.is_retryable());
    let text = error.to_string();
    for part in [
        "queue pair 77",
        "fake0",
        "RTR",
        "MTU 4096 exceeds the port's active MTU 1024",
        "remote QP 5",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn more_than_the_device_can_do_is_refused_with_its_limit() {
    let fake = Fake::new();
    let pd = Pd::new(&fake.open()).unwrap();
    let arena = arena(1, SLOT_BYTES);
    let landing = LandingRegions::register(&pd, &arena, u64::MAX).unwrap();
    let options = ReadQueueOptions {
        work_requests_max: 1000,
        ..options()
    };
    let error = ReadQueue::<u32>::new(Arc::clone(&landing), options).unwrap_err();
    assert!(
        matches!(
            error,
            RdmaError::LimitExceeded {
                asked: 1000,
                limit: 999,
                ..
            }
        ),
        "{error}"
    );
    let options = options.limited_to(pd.context().attributes());
    assert_eq!(options.work_requests_max, 999);
    ReadQueue::<u32>::new(landing, options).unwrap();
    let cq = Cq::new(pd.context(), 1, None).unwrap();
    let capabilities = QpCapabilities {
        send_sge: 9,
        ..QpCapabilities::IDLE
    };
    let error = QueuePair::create(&pd, &cq, capabilities).unwrap_err();
    assert!(
        matches!(
            error,
            RdmaError::LimitExceeded {
                asked: 9,
                limit: 8,
                ..
            }
        ),
        "{error}"
    );
}
