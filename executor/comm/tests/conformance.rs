//! Conformance suite over threads and TCP, and promises beyond the suite.

#![allow(clippy::float_cmp, reason = "sums are exact, or equal bit by bit")]

use super::support::{ALL, Transport, floats, patient, row, run};
use dflop_comm::conformance::{Promises, cases};
use dflop_comm::{Buffer, Comm, Dtype, Payload, PayloadShape, StepContext};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn at(step: u64) -> StepContext {
    StepContext::step(step, "test")
}

/// Runs a suite case over both transports, on all group sizes in the case.
fn conforms(name: &str) {
    let all = cases(Promises::ALL);
    let case = all.iter().find(|case| case.name == name).expect("a case of the suite");
    for transport in ALL {
        for &size in case.sizes {
            run(transport, size, patient(), |comm| (case.run)(&comm));
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
            let names: Vec<_> = cases(Promises::ALL).iter().map(|case| case.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

conformance! {
    messages_of_all_sizes_arrive
    every_type_keeps_its_bits_and_its_shape
    rows_of_bf16_travel_as_two_bytes
    tags_are_received_in_any_order
    receives_take_messages_in_order
    large_messages_cross
    neighbors_exchange_in_a_group
    sent_bytes_are_counted
    sums_are_close_and_equal_on_all_ranks
    sums_have_the_order_of_the_ring
    sums_of_every_type_are_right
    reduce_scatter_and_all_gather_are_the_halves_of_a_sum
    sums_overlap_with_computation
    halves_of_sums_overlap_with_computation_and_keep_their_order
    parts_may_be_of_any_length
    rows_of_bf16_are_gathered
    every_root_broadcasts
    no_rank_passes_a_barrier_before_all_have_entered
    splits_have_their_own_ranks_and_messages
    numbers_are_gathered_in_rank_order
    equal_digests_pass
    mistakes_of_the_caller_do_not_end_the_job
    refused_another_digest
    refused_by_the_caller
    refused_another_step
    refused_another_shape_of_a_sum
}

#[test]
fn a_transport_that_promises_less_has_fewer_cases() {
    let weak = Promises { has_ring_order: false, has_tags: false, has_headers: false };
    let names: Vec<_> = cases(weak).iter().map(|case| case.name).collect();
    assert!(names.contains(&"sums_are_close_and_equal_on_all_ranks"));
    assert!(!names.contains(&"sums_have_the_order_of_the_ring") && !names.contains(&"refused_another_step"));
}

#[test]
fn a_sender_waits_for_room_but_not_for_an_awaited_message() {
    let settings = patient().buffered_bytes_max(1 << 20);
    let elements = 200_000;
    for transport in ALL {
        run(transport, 2, settings, |comm| {
            if comm.rank() == 0 {
                let payload = |_| comm.start_send(1, 0, at(0), row(&floats(0, elements))).unwrap();
                let sends: Vec<_> = (0..40).map(payload).collect();
                comm.send(1, 1, at(0), row(&[1.0])).unwrap();
                for send in sends {
                    send.wait().unwrap();
                }
            } else {
                std::thread::sleep(Duration::from_millis(100));
                // after 32 MB of messages that no rank has received
                comm.recv(0, 1, at(0), PayloadShape::f32(1, 1)).unwrap();
                for _ in 0..40 {
                    let found = comm.recv(0, 0, at(0), PayloadShape::f32(1, elements)).unwrap();
                    assert_eq!(found.into_f32().unwrap(), floats(0, elements));
                }
            }
        });
    }
}

#[test]
fn sends_wait_while_their_receiver_is_full() {
    let settings = patient().buffered_bytes_max(1 << 20);
    for transport in ALL {
        let taken = AtomicUsize::new(0);
        run(transport, 2, settings, |comm| {
            let megabytes = 64_usize;
            let shape = PayloadShape::flat(Dtype::U8, 1 << 20);
            for _ in 0..megabytes {
                if comm.rank() == 0 {
                    comm.send(1, 0, at(0), Payload::flat(Buffer::U8(vec![1; 1 << 20]))).unwrap();
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                    comm.recv(0, 0, at(0), shape).unwrap();
                    taken.fetch_add(1, Ordering::SeqCst);
                }
            }
            // socket buffers hold some megabytes more; without a bound all would have been sent by now
            if comm.rank() == 0 {
                assert!(taken.load(Ordering::SeqCst) > 32, "{transport:?}");
            }
        });
    }
}

#[test]
fn a_receive_that_is_dropped_frees_the_bound_for_other_messages() {
    // a message is as large as the limit: without room for two, the next message would wait forever
    let settings = patient().buffered_bytes_max(1 << 20);
    let shape = PayloadShape::flat(Dtype::U8, 1 << 20);
    for transport in ALL {
        run(transport, 2, settings, |comm| {
            if comm.rank() == 0 {
                let payload = |value| Payload::flat(Buffer::U8(vec![value; 1 << 20]));
                for value in 0..40 {
                    comm.send(1, 0, at(0), payload(value)).unwrap();
                }
                comm.send(1, 0, at(0), payload(99)).unwrap();
            } else {
                let receives: Vec<_> =
                    (0..40).map(|_| comm.start_recv(0, 0, at(0), shape).unwrap()).collect();
                let last = comm.start_recv(0, 0, at(0), shape).unwrap();
                // some messages have arrived by now, more arrive later
                std::thread::sleep(Duration::from_millis(50));
                drop(receives);
                std::thread::sleep(Duration::from_millis(500));
                assert_eq!(last.wait().unwrap().into_bytes().unwrap(), vec![99; 1 << 20]);
            }
        });
    }
}

#[test]
fn the_last_messages_of_a_rank_still_arrive() {
    let elements = 2 << 20;
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            if comm.rank() == 0 {
                // sent, not awaited, and dropped
                let _sent = comm.start_send(1, 0, at(0), row(&floats(0, elements))).unwrap();
            } else {
                std::thread::sleep(Duration::from_millis(100));
                let found = comm.recv(0, 0, at(0), PayloadShape::f32(1, elements)).unwrap();
                assert_eq!(found.into_f32().unwrap(), floats(0, elements));
            }
        });
    }
}

#[test]
fn many_threads_of_a_rank_share_a_communicator() {
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            let other = 1 - comm.rank();
            std::thread::scope(|scope| {
                for tag in 0..8 {
                    let comm = &comm;
                    scope.spawn(move || {
                        for round in 0..50_u64 {
                            comm.send(other, tag, at(round), row(&[tag as f32])).unwrap();
                            let found = comm.recv(other, tag, at(round), PayloadShape::f32(1, 1)).unwrap();
                            assert_eq!(found.into_f32().unwrap(), [tag as f32]);
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn a_job_of_one_rank_opens_no_socket() {
    let begin = Instant::now();
    run(Transport::Tcp, 1, patient(), |comm| {
        let mut values = [1.0_f32, 2.0];
        comm.all_reduce(at(0), values.as_mut_slice().into()).unwrap();
        comm.send(0, 3, at(0), row(&values)).unwrap();
        assert_eq!(comm.recv(0, 3, at(0), PayloadShape::f32(1, 2)).unwrap().into_f32().unwrap(), [1.0, 2.0]);
        comm.barrier(at(0)).unwrap();
        comm.check_digest(0, 1).unwrap();
        assert!(comm.split(at(0), Some(1), 0).unwrap().is_some());
    });
    assert!(begin.elapsed() < Duration::from_secs(5));
}

/// A receiver that leaves after the last message does not fail its sender.
#[test]
fn a_receiver_may_leave_after_the_last_message() {
    let elements = 100_000;
    for _ in 0..30 {
        run(Transport::Tcp, 3, patient(), |comm| match comm.rank() {
            0 => {
                let send = |to| comm.start_send(to, 0, at(0), row(&floats(0, elements))).unwrap();
                for send in [send(1), send(2)] {
                    send.wait().unwrap();
                }
            }
            _ => drop(comm.recv(0, 0, at(0), PayloadShape::f32(1, elements)).unwrap()),
        });
    }
}
