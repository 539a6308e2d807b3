//! Failures end a job on all ranks, in time, with rank and action named, over every transport.

use super::support::{ALL, Transport, failure, floats, patient, row, run};
use dflop_comm::{Buffer, Cause, Comm, Communicator, Failure, PayloadShape, Settings, StepContext};
use std::time::{Duration, Instant};

/// Short time limits, but long enough for a busy machine to answer status requests.
fn short() -> Settings {
    brief().slow(Duration::from_millis(700))
}

/// Short time limit for ranks that are not busy.
fn brief() -> Settings {
    patient().wait(Duration::from_millis(700))
}

/// Runs ranks that all fail, and returns an error per rank; communicators live until all have failed.
fn failures(
    transport: Transport,
    size: usize,
    settings: Settings,
    rank: impl Fn(&Communicator) -> (Failure, String) + Sync,
) -> Vec<(Failure, String)> {
    let ended = run(transport, size, settings, |comm| {
        let failed = rank(&comm);
        (failed, comm)
    });
    ended.into_iter().map(|(failed, _comm)| failed).collect()
}

#[test]
fn a_wait_ends_in_time_and_names_peer_tag_and_action() {
    for transport in ALL {
        let begin = Instant::now();
        let found = failures(transport, 3, short(), |comm| match comm.rank() {
            0 => failure(comm.recv(1, 42, StepContext::microbatch(7, 3, "recv"), PayloadShape::f32(2, 3))),
            1 => {
                comm.note(StepContext::microbatch(7, 2, "backward"));
                std::thread::sleep(Duration::from_millis(2500));
                failure(comm.barrier(StepContext::step(7, "end")))
            }
            // not involved in the failure
            _ => failure(comm.recv(0, 1, StepContext::step(8, "idle"), PayloadShape::f32(1, 1))),
        });
        assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
        for (failure, text) in &found {
            assert_eq!((failure.cause, failure.culprit), (Cause::TimedOut, Some(1)), "{text}");
            assert!(text.contains("rank 1 is busy since step 7, microbatch 2, `backward`"), "{text}");
            assert!(text.contains("the limit for a busy rank is 0.7 s"), "{text}");
        }
        let (noticed, text) = &found[0];
        if noticed.by == 0 {
            assert!(text.contains("42 of F32 [2 x 3]") && text.contains("from rank 1"), "{text}");
            assert!(text.contains("step 7, microbatch 3, `recv`"), "{text}");
        }
        assert!(found[2].1.contains("rank 2 was at step 8, `idle`"), "{}", found[2].1);
    }
}

#[test]
fn the_end_of_a_chain_of_waits_is_blamed() {
    for transport in ALL {
        let found = failures(transport, 4, short(), |comm| {
            let rank = comm.rank();
            if rank == 3 {
                comm.note(StepContext::step(1, "load weights"));
                std::thread::sleep(Duration::from_secs(2));
                return failure(comm.barrier(StepContext::step(1, "end")));
            }
            failure(comm.recv(rank + 1, 0, StepContext::step(1, "recv"), PayloadShape::f32(1, 1)))
        });
        for (failure, text) in found {
            assert_eq!((failure.cause, failure.culprit), (Cause::TimedOut, Some(3)), "{text}");
            assert!(text.contains("`load weights`"), "{text}");
        }
    }
}

#[test]
fn ranks_in_a_deadlock_are_listed() {
    for transport in ALL {
        let found = failures(transport, 3, brief(), |comm| {
            let next = (comm.rank() + 1) % 3;
            failure(comm.recv(next, 0, StepContext::step(1, "recv"), PayloadShape::f32(1, 1)))
        });
        for (failure, text) in found {
            assert_eq!((failure.cause, failure.culprit), (Cause::TimedOut, None), "{text}");
            assert!(text.contains("wait for each other"), "{text}");
            assert!(text.contains("the limit for a rank that is not busy is 0.7 s"), "{text}");
        }
    }
}

#[test]
fn a_chain_of_waits_lasts_as_long_as_its_end_is_busy() {
    for transport in ALL {
        let begin = Instant::now();
        run(transport, 4, brief(), |comm| {
            let (rank, at) = (comm.rank(), StepContext::step(1, "chain"));
            if rank == 3 {
                std::thread::sleep(Duration::from_millis(2500));
            } else {
                comm.recv(rank + 1, 0, at, PayloadShape::f32(1, 1)).unwrap();
            }
            if rank > 0 {
                comm.send(rank - 1, 0, at, row(&[1.0])).unwrap();
            }
            super::support::stay(&comm);
        });
        assert!(begin.elapsed() > Duration::from_secs(2), "longer than three short limits");
    }
}

#[test]
fn a_rank_that_computes_during_a_sum_is_busy() {
    for transport in ALL {
        run(transport, 2, brief(), |comm| {
            let at = StepContext::step(1, "sum");
            let start = || comm.start_all_reduce(at, Buffer::F32(vec![1.0; 2])).unwrap();
            let sum = if comm.rank() == 0 {
                let sum = start();
                // its collective waits for rank 1, which waits for a message from this rank
                std::thread::sleep(Duration::from_millis(2500));
                comm.send(1, 0, at, row(&[1.0])).unwrap();
                sum
            } else {
                comm.recv(0, 0, at, PayloadShape::f32(1, 1)).unwrap();
                start()
            };
            assert_eq!(sum.wait().unwrap(), Buffer::F32(vec![2.0; 2]));
            super::support::stay(&comm);
        });
    }
}

#[test]
fn a_deadlock_after_a_long_computation_is_found_within_the_short_limit() {
    for transport in ALL {
        let begin = Instant::now();
        let found = failures(transport, 2, brief(), |comm| {
            let other = 1 - comm.rank();
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_secs(2));
                // the peer waits for tag 0
                let _ = comm.start_send(0, 1, StepContext::step(1, "send"), row(&[1.0])).unwrap();
            }
            failure(comm.recv(other, 0, StepContext::step(1, "recv"), PayloadShape::f32(1, 1)))
        });
        for (failure, text) in found {
            assert_eq!((failure.cause, failure.culprit), (Cause::TimedOut, None), "{text}");
            assert!(text.contains("wait for each other"), "{text}");
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }
}

#[test]
fn messages_of_another_plan_are_refused() {
    let at = StepContext::microbatch(4, 1, "send");
    let shape = PayloadShape::f32(2, 3);
    let wrong = [
        (StepContext { step: 5, ..at }, PayloadShape::f32(2, 3), "step 5"),
        (StepContext { microbatch: Some(2), ..at }, shape, "microbatch 2"),
        (StepContext { microbatch: None, ..at }, shape, "step 4, `send`"),
        (at, PayloadShape::f32(3, 2), "[3 x 2]"),
        (at, PayloadShape::f32(2, 4), "[2 x 4]"),
    ];
    for transport in ALL {
        for (sent_at, sent, words) in wrong {
            let found = failures(transport, 2, patient(), |comm| {
                if comm.rank() == 0 {
                    let payload = super::support::row(&vec![1.0; sent.rows * sent.cols]).into_buffer();
                    let payload = dflop_comm::Payload::new(sent.rows, sent.cols, payload).unwrap();
                    failure(comm.send(1, 9, sent_at, payload).and_then(|()| comm.barrier(at)))
                } else {
                    failure(comm.recv(0, 9, at.action("recv"), shape))
                }
            });
            for (failure, text) in found {
                assert_eq!(
                    (failure.cause, failure.culprit, failure.by),
                    (Cause::Mismatch, Some(0), 1),
                    "{text}"
                );
                assert!(text.contains("rank 0 sent") && text.contains("rank 1 expects"), "{text}");
                assert!(text.contains(words) && text.contains("[2 x 3]"), "{text}");
            }
        }
        let found = failures(transport, 2, patient(), |comm| {
            if comm.rank() == 0 {
                let bytes = dflop_comm::Payload::flat(Buffer::U8(vec![0; 6]));
                failure(comm.send(1, 9, at, bytes).and_then(|()| comm.barrier(at)))
            } else {
                failure(comm.recv(0, 9, at, PayloadShape::f32(1, 6)))
            }
        });
        assert!(found.iter().all(|(failure, text)| failure.cause == Cause::Mismatch && text.contains("U8")));
    }
}

#[test]
fn collectives_that_differ_are_refused() {
    for transport in ALL {
        let found = failures(transport, 3, patient(), |comm| {
            let at = StepContext::step(2, "gradients");
            let mut values = floats(comm.rank(), if comm.rank() == 2 { 9 } else { 12 });
            let first = comm.all_reduce(at, values.as_mut_slice().into());
            failure(first.and_then(|()| comm.barrier(at)))
        });
        assert!(found.iter().all(|(failure, _)| failure.cause == Cause::Mismatch), "{found:?}");
        assert!(found[0].1.contains("all-reduce"), "{}", found[0].1);
        let found = failures(transport, 2, patient(), |comm| {
            let at = StepContext::step(2, "x");
            let mut values = [0.0_f32];
            if comm.rank() == 0 {
                failure(comm.broadcast(at, 0, values.as_mut_slice().into()).and_then(|()| comm.barrier(at)))
            } else {
                failure(comm.barrier(at))
            }
        });
        let text = &found[1].1;
        assert!(text.contains("broadcast") && text.contains("barrier"), "{text}");
    }
}

#[test]
fn a_different_digest_ends_the_job_and_names_both_sides() {
    for transport in ALL {
        let found = failures(transport, 4, patient(), |comm| {
            let digest = if comm.rank() == 0 { 0xbad } else { 0x600d };
            failure(comm.check_digest(12, digest))
        });
        for (failure, text) in found {
            assert_eq!((failure.cause, failure.culprit), (Cause::Digest, Some(0)), "{text}");
            assert!(text.contains("step 12") && text.contains("0x0000000000000bad"), "{text}");
            assert!(text.contains("rank 1 has 0x000000000000600d"), "{text}");
        }
    }
}

#[test]
fn a_digest_of_another_step_is_refused() {
    for transport in ALL {
        let found =
            failures(transport, 2, patient(), |comm| failure(comm.check_digest(comm.rank() as u64, 1)));
        assert!(found.iter().all(|(failure, _)| failure.cause == Cause::Mismatch), "{found:?}");
    }
}

#[test]
fn a_caller_ends_the_job_on_all_ranks() {
    for transport in ALL {
        let begin = Instant::now();
        let found = failures(transport, 4, patient(), |comm| {
            let at = StepContext::microbatch(3, 1, "loss");
            if comm.rank() == 2 {
                return failure::<()>(Err(comm.abort(at, "the loss is NaN")));
            }
            // no rank waits for the failing rank
            failure(comm.recv(
                (comm.rank() + 1) % 2,
                0,
                StepContext::step(3, "recv"),
                PayloadShape::f32(1, 1),
            ))
        });
        assert!(begin.elapsed() < Duration::from_secs(10));
        for (rank, (failure, text)) in found.into_iter().enumerate() {
            assert_eq!((failure.cause, failure.culprit, failure.by), (Cause::Caller, Some(2), 2));
            assert!(text.contains("rank 2 ended the job: the loss is NaN"), "{text}");
            assert!(text.contains("step 3, microbatch 1, `loss`"), "{text}");
            assert!(text.contains(&format!("rank {rank} was at")), "{text}");
        }
    }
}

#[test]
fn a_rank_that_finishes_while_others_wait_is_named() {
    for transport in ALL {
        let found = run(transport, 3, patient(), |comm| {
            let at = StepContext::step(3, "recv");
            (comm.rank() != 1).then(|| failure(comm.recv(1, 0, at, PayloadShape::f32(1, 1))))
        });
        for (failure, text) in found.into_iter().flatten() {
            assert_eq!((failure.cause, failure.culprit), (Cause::Left, Some(1)), "{text}");
            assert!(text.contains("rank 1 finished"), "{text}");
        }
    }
}

#[test]
fn a_panic_counts_as_the_death_of_the_rank() {
    for transport in ALL {
        let found = run(transport, 3, patient(), |comm| {
            if comm.rank() == 1 {
                comm.note(StepContext::microbatch(5, 0, "forward"));
                let panics = std::thread::spawn(move || {
                    let _comm = comm;
                    panic!("as the test wants");
                });
                panics.join().unwrap_err();
                return None;
            }
            Some(failure(comm.barrier(StepContext::step(5, "barrier"))))
        });
        for (failure, text) in found.into_iter().flatten() {
            assert_eq!((failure.cause, failure.culprit), (Cause::Died, Some(1)), "{text}");
        }
    }
}

#[test]
fn later_calls_return_the_failure_of_the_job() {
    for transport in ALL {
        failures(transport, 2, patient(), |comm| {
            let at = StepContext::step(0, "x");
            if comm.rank() == 0 {
                let _ = comm.abort(at, "enough");
            }
            let first = failure(comm.barrier(at)).0;
            assert_eq!(first, failure(comm.start_send(1, 0, at, row(&[1.0]))).0);
            assert_eq!(first, failure(comm.recv(1, 0, at, PayloadShape::f32(1, 1))).0);
            let sum = comm.start_all_reduce(at, Buffer::F32(vec![1.0])).and_then(dflop_comm::Handle::wait);
            assert_eq!(first, failure(sum).0);
            let last = failure(comm.check_digest(0, 0));
            assert_eq!(first, last.0);
            last
        });
    }
}

#[test]
fn overlapped_sums_fail_with_the_job() {
    for transport in ALL {
        failures(transport, 2, patient(), |comm| {
            let at = StepContext::step(0, "x");
            if comm.rank() == 0 {
                std::thread::sleep(Duration::from_millis(50));
                return failure::<()>(Err(comm.abort(at, "enough")));
            }
            let sum = comm.start_all_reduce(at, Buffer::F32(vec![1.0])).unwrap();
            failure(sum.wait())
        });
    }
}

#[test]
fn ranks_that_wait_for_each_other_outside_of_messages_are_found() {
    for transport in ALL {
        let found = failures(transport, 2, brief(), |comm| {
            let (at, begin) = (StepContext::microbatch(4, 1, "wait for the device"), Instant::now());
            let peer = 1 - comm.rank();
            let _wait = comm.record_wait(peer, at);
            loop {
                let what = format!("receive from rank {peer}");
                match comm.check_wait(peer, at, &what, begin.elapsed()) {
                    Ok(()) => std::thread::sleep(Duration::from_millis(50)),
                    ended => break failure(ended),
                }
            }
        });
        for (failure, text) in &found {
            assert_eq!((failure.cause, failure.culprit), (Cause::TimedOut, None), "{text}");
            assert!(text.contains("deadlock: ranks wait for each other"), "{text}");
            assert!(
                text.contains("to receive from rank") && text.contains("`wait for the device`"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_wait_outside_of_messages_lasts_as_long_as_its_peer_is_busy() {
    for transport in ALL {
        let found = failures(transport, 2, short(), |comm| {
            let (at, begin) = (StepContext::step(4, "sum"), Instant::now());
            if comm.rank() == 1 {
                comm.note(StepContext::step(3, "save"));
                // the failure of rank 0 ends the job of this one
                while comm.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                return failure(comm.barrier(at));
            }
            let _wait = comm.record_wait(1, at);
            loop {
                if let ended @ Err(_) = comm.check_wait(1, at, "sum", begin.elapsed()) {
                    assert!(begin.elapsed() >= Duration::from_millis(700), "{:?}", begin.elapsed());
                    break failure(ended);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        for (failure, text) in &found {
            assert_eq!((failure.cause, failure.culprit), (Cause::TimedOut, Some(1)), "{text}");
            assert!(text.contains("rank 1 is busy since step 3, `save`"), "{text}");
        }
    }
}
