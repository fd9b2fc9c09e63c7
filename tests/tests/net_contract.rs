//! One contract for all backends that need no card; the behaviours are those of `atlas_expert_tests::net::contract`.

use atlas_expert_tests::net::contract;
use atlas_expert_tests::net::rig::Backend;

atlas_expert_tests::contract_tests!(
    and [
        bytes_counted_are_records_times_their_size_on_both_ends,
        several_streams_carry_one_tier,
        processor_time_of_a_rails_threads_is_counted,
    ] for
    rdma_in_place = Backend::RdmaInPlace,
    rdma_packed = Backend::RdmaPacked,
    rdma_v1 = Backend::RdmaV1,
    posix = Backend::Posix,
    uma_in_place = Backend::UmaInPlace,
    uma_packed = Backend::UmaPacked,
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
    fn uma_zero_expert_is_refused_as_what_it_is() {
        contract::zero_expert_is_refused_as_what_it_is(Backend::UmaPacked);
    }

    #[test]
    fn posix_zero_expert_is_refused_as_what_it_is() {
        contract::zero_expert_is_refused_as_what_it_is(Backend::Posix);
    }
}
