//! Conformance of transports: the same tests over threads and TCP.

#![allow(clippy::float_cmp, reason = "sums are exact, or equal bit by bit")]

mod support;

use dflop_comm::{Buffer, Comm, Dtype, Error, P2pOp, Payload, PayloadShape, Slice, StepContext, even_parts};
use half::bf16;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{ALL, Transport, floats, patient, ring_sum, row, run, stay};

fn at(step: u64) -> StepContext {
    StepContext::step(step, "test")
}

#[test]
fn messages_of_all_sizes_arrive() {
    // around the bounds of headers, inline writes and socket buffers
    let sizes = [0, 1, 3, 1023, 16 << 10, (16 << 10) + 1, 100_003, 2 << 20];
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            let other = 1 - comm.rank();
            for (step, elements) in sizes.into_iter().enumerate() {
                let at = at(step as u64);
                if comm.rank() == 0 {
                    comm.send(other, 7, at, row(&floats(0, elements))).unwrap();
                    let back = comm.recv(other, 8, at, PayloadShape::f32(1, elements)).unwrap();
                    assert_eq!(back.into_f32().unwrap(), floats(1, elements));
                } else {
                    let there = comm.recv(other, 7, at, PayloadShape::f32(1, elements)).unwrap();
                    assert_eq!(there.into_f32().unwrap(), floats(0, elements));
                    comm.send(other, 8, at, row(&floats(1, elements))).unwrap();
                }
            }
        });
    }
}

#[test]
fn every_type_keeps_its_bits_and_its_shape() {
    let buffers = || {
        [
            Buffer::U8(vec![1, 2, 255, 0, 9, 8]),
            Buffer::Bf16([1.5, -0.0, f32::INFINITY, 3.0, 0.1, 2.0].map(bf16::from_f32).to_vec()),
            Buffer::F32(vec![f32::MIN_POSITIVE, -0.0, 1.0, f32::MAX, 5.5, 0.1]),
            Buffer::F64(vec![f64::EPSILON, -0.0, 1.0, f64::MAX, 5.5, 0.1]),
            Buffer::U64(vec![u64::MAX, 0, 1, 2, 3, 4]),
        ]
    };
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            for (tag, buffer) in buffers().into_iter().enumerate() {
                let payload = Payload::new(2, 3, buffer).unwrap();
                if comm.rank() == 0 {
                    comm.send(1, tag as u64, at(0), payload).unwrap();
                } else {
                    let found = comm.recv(0, tag as u64, at(0), payload.shape()).unwrap();
                    assert_eq!(found.buffer().as_bytes(), payload.buffer().as_bytes());
                    assert_eq!(found.shape(), payload.shape());
                }
            }
        });
    }
}

#[test]
fn tags_are_received_in_any_order_and_keep_their_own() {
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            if comm.rank() == 0 {
                for value in 0..30_u8 {
                    comm.send(1, u64::from(value % 3), at(0), row(&[f32::from(value)])).unwrap();
                }
            } else {
                let recv =
                    |tag| comm.recv(0, tag, at(0), PayloadShape::f32(1, 1)).unwrap().into_f32().unwrap()[0];
                for tag in [2, 0, 1] {
                    let values: Vec<f32> = (0..10).map(|_| recv(tag)).collect();
                    let expected: Vec<f32> = (0..10).map(|index| index as f32 * 3.0 + tag as f32).collect();
                    assert_eq!(values, expected);
                }
            }
        });
    }
}

#[test]
fn receives_take_messages_in_the_order_of_their_calls() {
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            if comm.rank() == 0 {
                stay(&comm);
                let sends: Vec<_> =
                    (0..3).map(|value| comm.start_send(1, 0, at(0), row(&[value as f32])).unwrap()).collect();
                for send in sends {
                    send.wait().unwrap();
                }
            } else {
                let receive = || comm.start_recv(0, 0, at(0), PayloadShape::f32(1, 1)).unwrap();
                let receives = [receive(), receive(), receive()];
                assert!(receives.iter().all(|receive| !receive.is_complete()), "nothing was sent yet");
                stay(&comm);
                // the last one first
                for (expected, receive) in receives.into_iter().enumerate().rev() {
                    assert_eq!(receive.wait().unwrap().into_f32().unwrap(), [expected as f32]);
                }
            }
        });
    }
}

#[test]
fn large_messages_cross_without_waiting_for_each_other() {
    let elements = 2 << 20;
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            let (rank, other) = (comm.rank(), 1 - comm.rank());
            // both send before either receives
            comm.send(other, 0, at(0), row(&floats(rank, elements))).unwrap();
            let found = comm.recv(other, 0, at(0), PayloadShape::f32(1, elements)).unwrap();
            assert_eq!(found.into_f32().unwrap(), floats(other, elements));
        });
    }
}

#[test]
fn neighbors_exchange_in_a_group_in_any_order() {
    let elements = 300_000;
    for transport in ALL {
        run(transport, 4, patient(), |comm| {
            let (rank, size) = (comm.rank(), comm.size());
            let (before, after) = ((rank + size - 1) % size, (rank + 1) % size);
            let shape = PayloadShape::f32(3, elements / 3);
            let send = |to| {
                let payload = Payload::f32(3, elements / 3, floats(rank, elements)).unwrap();
                P2pOp::Send { to, tag: to as u64, payload }
            };
            let recv = |from| P2pOp::Recv { from, tag: rank as u64, shape };
            let exchanges = if rank % 2 == 0 {
                vec![send(before), send(after), send(rank), recv(before), recv(after), recv(rank)]
            } else {
                vec![recv(before), recv(after), recv(rank), send(after), send(before), send(rank)]
            };
            let found = comm.group(at(0), exchanges).unwrap();
            for (from, payload) in [before, after, rank].into_iter().zip(found) {
                assert_eq!(payload.into_f32().unwrap(), floats(from, elements), "from {from}");
            }
        });
    }
}

#[test]
fn sums_have_the_bits_of_the_ring_over_every_transport() {
    for size in 1..=5 {
        for transport in ALL {
            let sums = run(transport, size, patient(), |comm| {
                [0, 1, 2, 3, 7, 1000, 4099, 70_001].map(|elements| {
                    let mut values = floats(comm.rank(), elements);
                    comm.all_reduce(at(1), values.as_mut_slice().into()).unwrap();
                    assert_eq!(values, ring_sum(size, elements), "{transport:?}, {size} ranks, {elements}");
                    values.len()
                })
            });
            assert_eq!(sums.len(), size);
        }
    }
}

#[test]
fn sums_of_every_type_are_right() {
    for transport in ALL {
        run(transport, 3, patient(), |comm| {
            let one = comm.rank() + 1;
            let mut counts = [one as u64, u64::MAX, 5];
            let mut norms = [one as f64 / 8.0, 1e300];
            let mut halves = [1.0, 0.5, -2.0, 256.0].map(bf16::from_f32);
            comm.all_reduce(at(0), counts.as_mut_slice().into()).unwrap();
            comm.all_reduce(at(0), norms.as_mut_slice().into()).unwrap();
            comm.all_reduce(at(0), halves.as_mut_slice().into()).unwrap();
            assert_eq!(counts, [6, u64::MAX - 2, 15]);
            assert_eq!(norms, [0.75, 1e300 + 1e300 + 1e300]);
            assert_eq!(halves.map(bf16::to_f32), [3.0, 1.5, -6.0, 768.0]);
        });
    }
}

#[test]
fn reduce_scatter_and_all_gather_are_the_halves_of_a_sum() {
    for size in 1..=5 {
        for transport in ALL {
            run(transport, size, patient(), |comm| {
                let rank = comm.rank();
                for elements in [0, 3, 1000, 4099] {
                    let parts = even_parts(elements, size);
                    let begin: usize = parts[..rank].iter().sum();
                    let mut values = floats(rank, elements);
                    comm.reduce_scatter(at(0), values.as_mut_slice().into(), &parts).unwrap();
                    let sum = ring_sum(size, elements);
                    assert_eq!(values[begin..][..parts[rank]], sum[begin..][..parts[rank]]);
                    comm.all_gather(at(0), values.as_mut_slice().into(), &parts).unwrap();
                    assert_eq!(values, sum);
                }
            });
        }
    }
}

#[test]
fn parts_may_be_of_any_length() {
    let parts = [5, 0, 1000, 1];
    for transport in ALL {
        run(transport, 4, patient(), |comm| {
            let rank = comm.rank();
            let owners: Vec<usize> =
                parts.iter().enumerate().flat_map(|(rank, &length)| vec![rank; length]).collect();
            let mut gathered: Vec<u8> =
                owners.iter().map(|&owner| if owner == rank { owner as u8 + 1 } else { 0 }).collect();
            comm.all_gather(at(0), Slice::U8(&mut gathered), &parts).unwrap();
            assert!(gathered.iter().zip(&owners).all(|(&value, &owner)| usize::from(value) == owner + 1));
            let mut summed = vec![1.0_f32; 1006];
            comm.reduce_scatter(at(0), summed.as_mut_slice().into(), &parts).unwrap();
            let begin: usize = parts[..rank].iter().sum();
            assert_eq!(summed[begin..][..parts[rank]], vec![4.0; parts[rank]]);
        });
    }
}

#[test]
fn every_root_broadcasts() {
    for size in 1..=5 {
        for transport in ALL {
            run(transport, size, patient(), |comm| {
                for root in 0..size {
                    for elements in [0, 1, 50_000] {
                        let mut values = floats(comm.rank(), elements);
                        comm.broadcast(at(0), root, values.as_mut_slice().into()).unwrap();
                        assert_eq!(values, floats(root, elements));
                    }
                }
            });
        }
    }
}

#[test]
fn no_rank_passes_a_barrier_before_all_have_entered() {
    for size in 1..=5 {
        for transport in ALL {
            let come = AtomicUsize::new(0);
            run(transport, size, patient(), |comm| {
                for round in 1..=20 {
                    come.fetch_add(1, Ordering::SeqCst);
                    comm.barrier(at(round as u64)).unwrap();
                    assert!(come.load(Ordering::SeqCst) >= round * size);
                }
            });
        }
    }
}

#[test]
fn splits_have_their_own_ranks_and_messages() {
    for transport in ALL {
        run(transport, 5, patient(), |comm| {
            let world = comm.rank();
            // even ranks in reverse, odd ranks in order, and one rank that does not take part
            let color = (world != 3).then_some(world as u64 % 2);
            let key = if world % 2 == 0 { 10 - world as u64 } else { 0 };
            let part = comm.split(at(0), color, key).unwrap();
            let Some(part) = part else {
                assert_eq!(world, 3);
                return stay(&comm);
            };
            let members: Vec<usize> = (0..part.size()).map(|rank| part.world_rank(rank)).collect();
            assert_eq!(members, if world % 2 == 0 { vec![4, 2, 0] } else { vec![1] });
            assert_eq!(members[part.rank()], world);
            let mut sum = [world as u64];
            part.all_reduce(at(1), sum.as_mut_slice().into()).unwrap();
            assert_eq!(sum[0] as usize, members.iter().sum::<usize>());
            // the same tag between the same two processes, in two communicators
            if world == 4 {
                comm.send(0, 5, at(2), row(&[1.0])).unwrap();
                part.send(2, 5, at(2), row(&[2.0])).unwrap();
            } else if world == 0 {
                assert_eq!(
                    part.recv(0, 5, at(2), PayloadShape::f32(1, 1)).unwrap().into_f32().unwrap(),
                    [2.0]
                );
                assert_eq!(
                    comm.recv(4, 5, at(2), PayloadShape::f32(1, 1)).unwrap().into_f32().unwrap(),
                    [1.0]
                );
            }
            // a split of a split
            let single = part.split(at(3), Some(part.rank() as u64), 0).unwrap().unwrap();
            assert_eq!((single.size(), single.world_rank(0)), (1, world));
            stay(&comm);
        });
    }
}

#[test]
fn sums_overlap_with_computation() {
    for transport in ALL {
        run(transport, 3, patient(), |comm| {
            let sizes = [70_001, 1, 4099];
            let begin = |&elements: &usize| {
                comm.start_all_reduce(at(0), floats(comm.rank(), elements).into()).unwrap()
            };
            let handles: Vec<_> = sizes.iter().map(begin).collect();
            let mut values = floats(comm.rank(), 1000);
            comm.all_reduce(at(0), values.as_mut_slice().into()).unwrap();
            assert_eq!(values, ring_sum(3, 1000));
            for (elements, handle) in sizes.into_iter().zip(handles) {
                let sum = handle.wait().unwrap();
                assert_eq!(sum, Buffer::F32(ring_sum(3, elements)));
            }
        });
    }
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
    // a message is as large as the bound: without room for two, the next one would wait for ever
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
                // some messages have arrived by now, others arrive later
                std::thread::sleep(Duration::from_millis(50));
                drop(receives);
                std::thread::sleep(Duration::from_millis(500));
                assert_eq!(last.wait().unwrap().into_bytes().unwrap(), vec![99; 1 << 20]);
            }
        });
    }
}

#[test]
fn mistakes_of_the_caller_do_not_end_the_job() {
    for transport in ALL {
        run(transport, 2, patient(), |comm| {
            let no_rank = comm.start_send(2, 0, at(0), row(&[1.0])).unwrap_err();
            assert!(matches!(no_rank, Error::Rank { rank: 2, size: 2 }), "{no_rank}");
            assert!(matches!(
                comm.recv(9, 0, at(0), PayloadShape::f32(1, 1)),
                Err(Error::Rank { rank: 9, .. })
            ));
            assert!(matches!(Payload::f32(2, 3, vec![0.0; 5]), Err(Error::Length { found: 5, .. })));
            let shape = PayloadShape::f32(1, 1);
            let receives =
                vec![P2pOp::Recv { from: 0, tag: 0, shape }, P2pOp::Recv { from: 5, tag: 0, shape }];
            assert!(matches!(comm.group(at(0), receives), Err(Error::Rank { rank: 5, .. })));
            let summed = comm.all_reduce(at(0), Slice::U8(&mut [1, 2]));
            assert!(matches!(summed, Err(Error::NotSummable { dtype: Dtype::U8 })));
            let mut values = [0.0_f32; 4];
            let parts = comm.all_gather(at(0), values.as_mut_slice().into(), &[1, 2]);
            assert!(matches!(parts, Err(Error::Parts { sum: 3, elements: 4, .. })), "{parts:?}");
            // refused calls leave no trace
            comm.send(1 - comm.rank(), 0, at(1), row(&[5.0])).unwrap();
            assert_eq!(comm.recv(1 - comm.rank(), 0, at(1), shape).unwrap().into_f32().unwrap(), [5.0]);
            stay(&comm);
        });
    }
}

#[test]
fn equal_digests_pass() {
    for transport in ALL {
        run(transport, 3, patient(), |comm| {
            for step in 0..10 {
                comm.check_digest(step, step * 77).unwrap();
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
