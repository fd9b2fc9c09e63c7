//! One contract for all backends; the behaviours are those of `atlas_expert_tests::net::contract`.

use atlas_expert_tests::net::contract;
use atlas_expert_tests::net::rig::Backend;

/// A test per behaviour and backend, each named `<backend>::<behaviour>`.
macro_rules! contract {
    ($tests:tt for $($name:ident = $backend:expr),+ $(,)?) => {
        $(contract!(@one $name, $backend, $tests);)+
    };
    (@one $name:ident, $backend:expr, [$($test:ident),+ $(,)?]) => {
        mod $name {
            use super::*;
            $(
                #[test]
                fn $test() {
                    contract::$test($backend);
                }
            )+
        }
    };
}

contract!([
    every_record_equals_the_source_files,
    record_named_twice_in_a_batch_lands_twice,
    slot_named_twice_in_a_batch_is_refused_and_nothing_is_taken,
    slot_is_busy_while_leased_and_free_afterwards,
    slot_that_is_too_small_is_refused_with_the_sizes,
    slot_that_does_not_exist_is_refused,
    layer_or_expert_that_does_not_exist_is_refused,
    stream_other_than_zero_is_refused,
    batch_larger_than_window_and_budget_completes,
    checksums_are_compared_as_often_as_asked,
    cancelled_batch_ends_at_once_and_frees_its_slots,
    expired_batch_ends_with_the_deadlines_error,
    tier_dropped_with_requests_under_way_frees_its_memory,
    records_in_random_order_and_random_slots_equal_the_source,
    eight_threads_fetch_at_once,
    several_streams_carry_one_tier,
    records_land_in_memory_that_the_arena_mapped,
    slots_of_several_sizes_take_what_fits,
    bytes_counted_are_records_times_their_size_on_both_ends,
    content_other_than_expected_is_refused,
    deadline_in_proportion_to_bytes_is_enough_for_a_large_batch,
] for
    rdma_in_place = Backend::RdmaInPlace,
    rdma_packed = Backend::RdmaPacked,
    rdma_v1 = Backend::RdmaV1,
    posix = Backend::Posix,
);

mod zero_experts {
    use super::*;

    #[test]
    fn in_place_zero_expert_is_refused_as_what_it_is() {
        contract::zero_expert_is_refused_as_what_it_is(Backend::RdmaInPlace);
    }

    #[test]
    fn packed_zero_expert_is_refused_as_what_it_is() {
        contract::zero_expert_is_refused_as_what_it_is(Backend::RdmaPacked);
    }

    #[test]
    fn posix_zero_expert_is_refused_as_what_it_is() {
        contract::zero_expert_is_refused_as_what_it_is(Backend::Posix);
    }
}
