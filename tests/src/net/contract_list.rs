//! The contract as a list: [`contract_tests!`](crate::contract_tests) makes a test per behaviour and backend.

/// Makes a module per backend, with a test per behaviour of [`contract`](crate::net::contract), each named
/// `<module>::<behaviour>`. Attributes before the list go to each test.
///
/// The behaviours are the same for all backends; what only a connection of ours has (streams, the peer's count of
/// payload bytes) is in a list of its own, after `and`. A backend that need not show all of it names what it does show
/// after `only`.
#[macro_export]
macro_rules! contract_tests {
    ($(#[$attr:meta])* for $($name:ident = $backend:expr),+ $(,)?) => {
        $crate::contract_tests!($(#[$attr])* and [] for $($name = $backend),+);
    };
    ($(#[$attr:meta])* and [$($more:ident),* $(,)?] for $($name:ident = $backend:expr),+ $(,)?) => {
        $crate::contract_tests!(@all [
            $(#[$attr])*
        ] [
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
            timeout_changes_nothing_that_is_readable,
            empty_batch_is_done_at_once,
            records_of_odd_sizes_equal_the_source,
            tier_dropped_with_requests_under_way_frees_its_memory,
            records_in_random_order_and_random_slots_equal_the_source,
            eight_threads_fetch_at_once,
            records_land_in_memory_that_the_arena_mapped,
            slots_of_several_sizes_take_what_fits,
            content_other_than_expected_is_refused,
            deadline_in_proportion_to_bytes_is_enough_for_a_large_batch,
            $($more,)*
        ] $($name = $backend),+);
    };
    ($(#[$attr:meta])* only [$($test:ident),+ $(,)?] for $($name:ident = $backend:expr),+ $(,)?) => {
        $crate::contract_tests!(@all [
            $(#[$attr])*
        ] [
            $($test,)+
        ] $($name = $backend),+);
    };
    (@all $attrs:tt $tests:tt $($name:ident = $backend:expr),+) => {
        $($crate::contract_tests!(@one $name, $backend, $attrs, $tests);)+
    };
    (@one $name:ident, $backend:expr, $attrs:tt, [$($test:ident,)+]) => {
        mod $name {
            use super::*;
            $($crate::contract_tests!(@test $backend, $attrs, $test);)+
        }
    };
    (@test $backend:expr, [$(#[$attr:meta])*], $test:ident) => {
        #[test]
        $(#[$attr])*
        fn $test() {
            $crate::net::contract::$test($backend);
        }
    };
}
