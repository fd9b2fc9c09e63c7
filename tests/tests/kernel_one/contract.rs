//! The contract of all backends, over soft-RoCE and over TCP in the same guest; the behaviours are those of
//! `atlas_expert_tests::net::contract`.
//!
//! The whole list is for one-sided READs and for TCP, from a checkpoint where it lies. Packed and v1 stores differ from
//! it in where records lie and in how queue pairs are made, so they show what depends on that.

use atlas_expert_tests::net::rig::Backend;

atlas_expert_tests::contract_tests!(
    #[ignore = "needs the kernel rig: make kernel-test"]
    for
    verbs_in_place = Backend::VerbsInPlace,
    tcp_in_place = Backend::RdmaInPlace,
);

atlas_expert_tests::contract_tests!(
    #[ignore = "needs the kernel rig: make kernel-test"]
    only [
        every_record_equals_the_source_files,
        records_in_random_order_and_random_slots_equal_the_source,
    ] for
    verbs_packed = Backend::VerbsPacked,
);

atlas_expert_tests::contract_tests!(
    #[ignore = "needs the kernel rig: make kernel-test"]
    only [
        every_record_equals_the_source_files,
        batch_larger_than_window_and_budget_completes,
        cancelled_batch_ends_at_once_and_frees_its_slots,
        tier_dropped_with_requests_under_way_frees_its_memory,
        content_other_than_expected_is_refused,
    ] for
    verbs_v1 = Backend::VerbsV1,
);
