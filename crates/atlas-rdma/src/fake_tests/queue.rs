//! The queue of READs.

use super::*;

#[test]
fn everything_goes_in_the_order_queue_regions_domain_device_memory() {
    let fake = Fake::new();
    let arena = noting_arena(&fake, 2);
    let queue = queue(&fake, &arena);
    let range = range(&arena, SLOT_BYTES);
    drop(arena);
    post(&queue, 1, range, 1).unwrap();
    fake.take_calls();
    drop(queue);
    assert_eq!(
        fake.take_calls(),
        [
            "to_error",
            "destroy_qp",
            "destroy_cq",
            "destroy_comp_channel",
            "dereg_mr",
            // The one for probes.
            "dereg_mr",
            "dealloc_pd",
            "close_device",
            "release memory",
        ]
    );
}

#[test]
fn a_chain_is_posted_with_one_call_and_signals_its_last_request_alone() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    let range = range(&arena, SLOT_BYTES);
    let start = range.as_mut_ptr().addr() as u64;
    fake.take_calls();
    post(&queue, 1, range, 3).unwrap();
    assert_eq!(fake.take_calls(), ["post_send"]);
    let posted = fake.posted();
    let signaled: Vec<_> = posted.iter().map(|p| p.signaled).collect();
    assert_eq!(signaled, [false, false, true]);
    let remote: Vec<_> = posted.iter().map(|p| p.remote_addr).collect();
    assert_eq!(remote, [0x1_0000, 0x1_0010, 0x1_0020]);
    assert!(
        posted
            .iter()
            .enumerate()
            .all(|(i, p)| p.local[0].0 == start + 16 * i as u64)
    );
    fake.complete(2, IBV_WC_SUCCESS);
    assert!(poll(&queue).is_empty(), "the last one is still on its way");
    fake.complete(1, IBV_WC_SUCCESS);
    let done = poll(&queue);
    assert_eq!(
        (done[0].token, status(&done[0])),
        (1, CompletionStatus::Success)
    );
}

#[test]
fn a_full_queue_gives_token_and_range_back() {
    let fake = Fake::new();
    let arena = arena(6, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    post(&queue, 1, range(&arena, SLOT_BYTES), 7).unwrap();
    let (token, kept, why) = post(&queue, 2, range(&arena, SLOT_BYTES), 2).unwrap_err();
    assert_eq!((token, why), (2, Refusal::Full));
    post(&queue, 3, kept, 1).unwrap();
    fake.complete(8, IBV_WC_SUCCESS);
    // What ended and was not handed out counts as well: nothing is ever allocated for it.
    queue
        .wait(Duration::from_secs(5), Duration::ZERO, None)
        .unwrap();
    post(&queue, 4, range(&arena, SLOT_BYTES), 1).unwrap();
    post(&queue, 5, range(&arena, SLOT_BYTES), 1).unwrap();
    let (_, _, why) = post(&queue, 6, range(&arena, SLOT_BYTES), 1).unwrap_err();
    assert_eq!(why, Refusal::Full);
    assert_eq!(poll(&queue).len(), 2);
    post(&queue, 7, range(&arena, SLOT_BYTES), 1).unwrap();
    assert_eq!(queue.outstanding(), 3);
}

#[test]
fn a_look_counts_what_has_come_and_leaves_it_to_poll() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    post(&queue, 1, range(&arena, SLOT_BYTES), 1).unwrap();
    fake.complete(1, IBV_WC_SUCCESS);
    assert_eq!(queue.progress_bytes(), 0, "nobody looked");
    queue.look();
    assert_eq!(queue.progress_bytes(), SLOT_BYTES as u64);
    assert_eq!(poll(&queue).len(), 1);
    assert_eq!(queue.progress_bytes(), SLOT_BYTES as u64);
}

#[test]
fn a_post_that_the_device_takes_nothing_of_is_given_back_and_the_queue_goes_on() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    fake.fail_post_after(0, libc::ENOMEM);
    let (token, range, why) = post(&queue, 1, range(&arena, SLOT_BYTES), 3).unwrap_err();
    assert_eq!((token, why), (1, Refusal::Failed(libc::ENOMEM)));
    assert_eq!(queue.outstanding(), 0);
    post(&queue, 2, range, 3).unwrap();
}

#[test]
fn a_post_that_the_device_takes_a_part_of_stays_owned_and_takes_the_queue_down() {
    // Either its part is still posted when the queue pair goes to ERR, or it was over before and tells nothing: the
    // marker ends it then.
    for over_before in [false, true] {
        let fake = Fake::new();
        let arena = arena(1, SLOT_BYTES);
        let queue = queue(&fake, &arena);
        let range = range(&arena, SLOT_BYTES);
        if over_before {
            fake.complete_posted_at_once();
        }
        fake.fail_post_after(2, libc::ENOMEM);
        fake.take_calls();
        post(&queue, 1, range, 3).unwrap();
        let calls = fake.take_calls();
        assert_eq!(
            calls,
            ["post_send", "to_error", "post_send"],
            "the second one is the marker"
        );
        assert!(queue.is_down());
        let done = poll(&queue);
        assert_eq!(done.len(), 1);
        assert_eq!(
            (done[0].token, status(&done[0])),
            (1, CompletionStatus::Flushed)
        );
        let root = queue.root_cause().unwrap();
        assert_eq!(root.status, CompletionStatus::PostFailed(libc::ENOMEM));
        assert!(queue.is_quiesced());
        assert_eq!(queue.stale_completions(), 0);
        // A sleeper is not told that the queue cannot be read.
        queue.wait(Duration::ZERO, Duration::ZERO, None).unwrap();
    }
}

#[test]
fn a_failure_takes_the_queue_down_and_is_told_apart_from_what_it_flushes() {
    let fake = Fake::new();
    let arena = arena(3, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    for token in 0..3 {
        post(&queue, token, range(&arena, SLOT_BYTES), 2).unwrap();
    }
    fake.complete(2, IBV_WC_SUCCESS);
    fake.complete(1, IBV_WC_REM_ACCESS_ERR);
    fake.take_calls();
    let done = poll(&queue);
    assert_eq!(fake.take_calls(), ["to_error"]);
    let statuses: Vec<_> = done.iter().map(status).collect();
    assert_eq!(
        statuses,
        [
            CompletionStatus::Success,
            CompletionStatus::RemoteAccess,
            CompletionStatus::Flushed
        ]
    );
    assert!(done[1].result.unwrap_err().root && !done[2].result.unwrap_err().root);
    assert!(queue.is_quiesced());
    drop(done);
    let (_, _, why) = post(&queue, 9, range(&arena, SLOT_BYTES), 1).unwrap_err();
    assert_eq!(why, Refusal::Down);
}

#[test]
fn completions_of_nobody_are_counted_and_end_nothing() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    post(&queue, 1, range(&arena, SLOT_BYTES), 1).unwrap();
    let old = fake.posted()[0].wr_id;
    fake.complete(1, IBV_WC_SUCCESS);
    drop(poll(&queue));
    post(&queue, 2, range(&arena, SLOT_BYTES), 1).unwrap();
    fake.complete_stray(old);
    assert!(poll(&queue).is_empty());
    assert_eq!((queue.stale_completions(), queue.outstanding()), (1, 1));
}

#[test]
fn a_sleeper_wakes_with_a_completion_with_its_descriptor_and_with_time() {
    use std::io::Write;
    use std::os::fd::AsFd;
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    let long = Duration::from_secs(60);
    let start = Instant::now();
    queue
        .wait(Duration::from_millis(20), Duration::ZERO, None)
        .unwrap();
    assert!(start.elapsed() >= Duration::from_millis(20));
    post(&queue, 1, range(&arena, SLOT_BYTES), 1).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            fake.complete(1, IBV_WC_SUCCESS);
        });
        queue.wait(long, Duration::ZERO, None).unwrap();
    });
    assert_eq!(poll(&queue).len(), 1);
    let (mine, mut other) = std::os::unix::net::UnixStream::pair().unwrap();
    other.write_all(&[1]).unwrap();
    queue
        .wait(long, Duration::ZERO, Some(mine.as_fd()))
        .unwrap();
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn closing_gives_back_what_a_dead_device_never_completes_once_the_queue_pair_is_gone() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    post(&queue, 7, range(&arena, SLOT_BYTES), 2).unwrap();
    fake.lose_all();
    let start = Instant::now();
    let closed = queue.close(Duration::from_millis(30));
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!(
        (closed.done[0].token, status(&closed.done[0])),
        (7, CompletionStatus::Flushed)
    );
    assert!(closed.lost.is_empty());
    drop(closed);
    assert!(arena.acquire(1).is_ok());
}

#[test]
fn ranges_under_a_queue_pair_that_cannot_be_destroyed_are_leaked() {
    let fake = Fake::new();
    let arena = noting_arena(&fake, 2);
    let queue = queue(&fake, &arena);
    post(&queue, 7, range(&arena, SLOT_BYTES), 1).unwrap();
    fake.lose_all();
    fake.fail("destroy_qp", libc::EIO);
    let before = crate::leaks();
    let closed = queue.close(Duration::ZERO);
    assert_eq!((closed.done.len(), closed.lost), (0, vec![7]));
    assert!(crate::leaks() >= before + 2);
    assert_eq!(arena.stats().leaked, 1);
    drop(arena);
    assert!(!fake.take_calls().contains(&"release memory".to_owned()));
}

#[test]
fn a_completion_queue_that_cannot_be_read_is_an_error_for_sleepers_and_the_root_cause() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    post(&queue, 7, range(&arena, SLOT_BYTES), 1).unwrap();
    fake.fail("poll_cq", libc::EIO);
    assert!(poll(&queue).is_empty());
    let error = queue
        .wait(Duration::from_secs(60), Duration::ZERO, None)
        .unwrap_err();
    assert_eq!(error.errno(), Some(libc::EIO));
    assert_eq!(
        queue.root_cause().unwrap().status,
        CompletionStatus::QueueBroken(libc::EIO)
    );
    assert!(queue.is_down() && !queue.is_quiesced());
    assert_eq!(queue.close(Duration::ZERO).done.len(), 1);
}

#[test]
fn a_range_of_another_arena_is_refused() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    let other = crate::test_arena::arena(1, SLOT_BYTES);
    let (_, _, why) = post(&queue, 1, range(&other, SLOT_BYTES), 1).unwrap_err();
    assert!(matches!(why, Refusal::Invalid(_)), "{why}");
    assert!(fake.posted().is_empty());
}

#[test]
fn a_probe_reads_one_byte_and_says_how_it_ended() {
    for (status, expected) in [
        (IBV_WC_SUCCESS, None),
        (IBV_WC_RETRY_EXC_ERR, Some("no answer after all retries")),
    ] {
        let fake = Fake::new();
        let arena = arena(1, SLOT_BYTES);
        let queue = queue(&fake, &arena);
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                while fake.posted().is_empty() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(fake.posted()[0].local[0].1, 1);
                fake.complete(1, status);
            });
            queue.probe(0x1_0000, RemoteKey(9), Duration::from_secs(20))
        });
        match expected {
            None => {
                ended.unwrap();
                post(&queue, 1, range(&arena, SLOT_BYTES), 1).unwrap();
            }
            Some(text) => {
                let error = ended.unwrap_err();
                assert!(error.to_string().contains(text), "{error}");
            }
        }
    }
}

#[test]
fn a_probe_without_an_answer_ends_in_time() {
    let fake = Fake::new();
    let arena = arena(1, SLOT_BYTES);
    let queue = queue(&fake, &arena);
    let start = Instant::now();
    let error = queue
        .probe(0x1_0000, RemoteKey(9), Duration::from_millis(20))
        .unwrap_err();
    assert!(
        error.is_retryable() && error.to_string().contains("no answer within 20ms"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[derive(Debug, Clone)]
enum Act {
    Post(usize),
    Complete(usize),
    Fail,
    Poll,
    Quiesce,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        5 => (1_usize..6).prop_map(Act::Post),
        5 => (1_usize..6).prop_map(Act::Complete),
        1 => Just(Act::Fail),
        4 => Just(Act::Poll),
        1 => Just(Act::Quiesce),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn each_post_ends_exactly_once_and_never_while_the_device_has_a_request_of_it(acts in prop::collection::vec(act(), 0..60)) {
        let fake = Fake::new();
        let arena = arena(4, SLOT_BYTES);
        let queue = queue(&fake, &arena);
        let mut next = 0;
        let mut ended = Vec::new();
        let mut taken = Vec::new();
        let mut polled = |queue: &ReadQueue<u32>, fake: &Fake| {
            for done in poll(queue) {
                let start = done.range.as_mut_ptr().addr() as u64;
                let slot = start..start + SLOT_BYTES as u64;
                for posted in fake.posted() {
                    prop_assert!(!slot.contains(&posted.local[0].0), "a range came back too early");
                }
                ended.push(done.token);
            }
            Ok(())
        };
        for act in acts {
            match act {
                Act::Post(requests) => {
                    let Ok(mut landing) = arena.acquire(SLOT_BYTES) else { continue };
                    let range = landing.split(SLOT_BYTES).unwrap();
                    if post(&queue, next, range, requests).is_ok() {
                        taken.push(next);
                    }
                    next += 1;
                }
                Act::Complete(count) => fake.complete(count.min(fake.posted().len()), IBV_WC_SUCCESS),
                Act::Fail => {
                    if !fake.posted().is_empty() {
                        fake.complete(1, IBV_WC_RETRY_EXC_ERR);
                    }
                }
                Act::Poll => polled(&queue, &fake)?,
                Act::Quiesce => queue.begin_quiesce(),
            }
        }
        queue.begin_quiesce();
        polled(&queue, &fake)?;
        prop_assert_eq!(ended, taken, "RC completes in order");
        prop_assert!(queue.is_quiesced());
        prop_assert_eq!(queue.stale_completions(), 0);
    }
}
