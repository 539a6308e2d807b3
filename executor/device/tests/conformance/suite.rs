//! The conformance suite of communicators of tensors, over threads and TCP.

use std::sync::Arc;

use dflop_device::comm::conformance::cases;

use super::device::{TestDevice, device, tensors};
use super::support::{ALL, patient, run};

/// Runs a case of the suite over both transports, on all its numbers of ranks.
fn conforms(name: &str) {
    let all = cases::<TestDevice>();
    let case = all.iter().find(|case| case.name == name).expect("a case of the suite");
    for transport in ALL {
        for &size in case.sizes {
            run(transport, size, patient(), |comm| {
                let device = device(1);
                let comm = tensors(&device, Arc::new(comm)).unwrap();
                case.run(&device, &*comm);
            });
        }
    }
}

macro_rules! conformance {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            conforms(stringify!($name));
        })*

        #[test]
        fn every_case_of_the_suite_is_a_test() {
            let names: Vec<_> = cases::<TestDevice>().iter().map(|case| case.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

conformance! {
    rows_of_every_type_and_size_arrive
    messages_of_a_lane_keep_their_order
    receives_posted_ahead_hold_up_nothing
    flows_between_two_ranks_are_independent
    a_message_comes_behind_the_operations_before_it
    sums_are_equal_on_all_ranks
    sums_that_overlap_have_the_bits_of_others
    sums_of_bf16_are_rounded_once
    parts_are_summed_and_gathered
    collectives_keep_the_order_of_calls
    splits_have_their_own_ranks
    parts_that_do_not_fit_are_refused
    ranks_that_do_not_exist_are_refused
    refused_while_a_message_is_awaited
    refused_while_a_sum_is_awaited
}
