//! Asynchronous errors: ranks that do not fit together, and ranks that are gone.

use super::{
    library::{
        INVALID_ARGUMENT, INVALID_USAGE, Operation, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR,
        UNHANDLED_CUDA_ERROR, init, issue, unique_id,
    },
    world::{FLOAT32, Gate, Rank, SUM, at, becomes, run_ranks, stream_handle, threaded},
};
use crate::{
    launch,
    support::{context_kernel, grid},
};
use cudarc::driver::CudaContext;
use std::{thread, time::Duration};

/// Waits for an asynchronous error, aborts after all ranks have theirs, and returns it with its text.
fn wait_for_error(rank: &Rank, all: &Gate) -> (i32, String) {
    assert!(becomes(|| rank.comm.async_error() != SUCCESS));
    let error = (rank.comm.async_error(), rank.comm.last_error());
    all.wait();
    assert!(!rank.stream.record_event(None).unwrap().is_complete(), "the operation ends with an abort only");
    assert_eq!(rank.comm.abort(), SUCCESS);
    rank.stream.synchronize().unwrap();
    error
}

#[test]
fn sends_and_receives_that_do_not_fit_are_errors_on_both_ends() {
    const UINT32: i32 = 3;
    let Some(_cuda) = threaded(2) else { return };
    for (count, data_type, received) in [(11, FLOAT32, "11 float32"), (10, UINT32, "10 uint32")] {
        let all = Gate::new(2);
        let errors = run_ranks(2, |rank| {
            let x = rank.upload(&[0_f32; 11]);
            rank.issue(match rank.rank {
                0 => Operation::Send(at(&x), 10, FLOAT32, 1),
                _ => Operation::Recv(at(&x), count, data_type, 0),
            });
            wait_for_error(rank, &all)
        });
        assert_eq!(errors[0].0, INVALID_USAGE);
        assert_eq!(errors[1].0, INVALID_USAGE);
        let sender = format!("ncclSend of 10 float32 to rank 1 meets ncclRecv of {received} of rank 1");
        assert_eq!(errors[0].1, sender);
        let receiver = format!("ncclRecv of {received} from rank 0 meets ncclSend of 10 float32 of rank 0");
        assert_eq!(errors[1].1, receiver);
    }
}

#[test]
fn collectives_that_do_not_fit_are_errors_on_all_ranks() {
    const RANKS: usize = 3;
    let Some(_cuda) = threaded(RANKS) else { return };
    let others: [fn(u64) -> Operation; 5] = [
        |x| Operation::AllReduce(x, x, 3, FLOAT32, SUM),
        |x| Operation::AllReduce(x, x, 4, 3, SUM),
        |x| Operation::AllReduce(x, x, 4, FLOAT32, 2),
        |x| Operation::AllGather(x + 64, x, 4, FLOAT32),
        |x| Operation::Broadcast(x, x, 4, FLOAT32, 1),
    ];
    for other in others {
        let all = Gate::new(RANKS);
        let errors = run_ranks(RANKS, |rank| {
            let x = rank.upload(&[0_f32; 32]);
            rank.issue(match rank.rank {
                0 => other(at(&x)),
                _ => Operation::AllReduce(at(&x), at(&x), 4, FLOAT32, SUM),
            });
            wait_for_error(rank, &all)
        });
        assert!(errors.iter().all(|error| error.0 == INVALID_USAGE), "{errors:?}");
        assert!(errors[0].1.contains("ncclAllReduce of 4 float32 of rank"), "{errors:?}");
    }
    let all = Gate::new(2);
    let errors = run_ranks(2, |rank| {
        let x = rank.upload(&[0_f32; 4]);
        rank.issue(Operation::Broadcast(at(&x), at(&x), 4, FLOAT32, rank.rank as i32));
        wait_for_error(rank, &all)
    });
    assert!(errors[1].1.contains("with root 1 meets ncclBroadcast of 4 float32 with root 0"), "{errors:?}");
}

#[test]
fn an_abort_is_an_error_of_the_other_ranks() {
    let Some(_cuda) = threaded(2) else { return };
    let (all, both) = (Gate::new(1), Gate::new(2));
    run_ranks(2, |rank| {
        let x = rank.upload(&[0_f32]);
        if rank.rank == 1 {
            both.wait();
            assert_eq!(rank.comm.abort(), SUCCESS);
            return;
        }
        rank.issue(Operation::Recv(at(&x), 1, FLOAT32, 1));
        both.wait();
        let comm = rank.comm;
        assert!(becomes(|| comm.async_error() == REMOTE_ERROR));
        let again = issue(Operation::Recv(at(&x), 1, FLOAT32, 1), comm, stream_handle(&rank.stream));
        assert_eq!(again, REMOTE_ERROR, "later calls return the error");
        assert!(
            wait_for_error(rank, &all).1.starts_with("rank 1 has closed its connection without a farewell")
        );
    });
}

#[test]
fn an_abort_ends_what_is_queued_from_any_thread() {
    let Some(_cuda) = threaded(2) else { return };
    let both = Gate::new(2);
    run_ranks(2, |rank| {
        let x = rank.upload(&[0_f32]);
        let streams: Vec<_> = (0..3).map(|_| rank.context.new_stream().unwrap()).collect();
        rank.stream.synchronize().unwrap();
        for stream in &streams {
            for _ in 0..20 {
                rank.issue_on(stream, Operation::Recv(at(&x), 1, FLOAT32, 1 - rank.rank as i32));
            }
        }
        both.wait();
        let comm = rank.comm;
        assert_eq!(thread::spawn(move || comm.abort()).join().unwrap(), SUCCESS);
        for stream in &streams {
            stream.synchronize().unwrap();
        }
        assert_eq!(comm.abort(), INVALID_ARGUMENT, "it has ended");
    });
}

#[test]
fn a_rank_that_has_left_is_an_error_for_who_needs_it() {
    let Some(_cuda) = threaded(2) else { return };
    let all = Gate::new(1);
    run_ranks(2, |rank| {
        let x = rank.upload(&[1_f32]);
        rank.issue(Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM));
        rank.stream.synchronize().unwrap();
        if rank.rank == 0 {
            assert_eq!(rank.comm.finalize(), SUCCESS);
            assert_eq!(rank.comm.destroy(), SUCCESS);
            return;
        }
        thread::sleep(Duration::from_millis(50));
        assert_eq!(rank.comm.async_error(), SUCCESS, "to leave is no error by itself");
        rank.issue(Operation::Send(at(&x), 1, FLOAT32, 0));
        let expected = (REMOTE_ERROR, "rank 0 has destroyed its communicator".to_owned());
        assert_eq!(wait_for_error(rank, &all), expected);
    });
}

#[test]
fn a_rank_waits_for_the_others_for_some_time() {
    let Some(cuda) = threaded(2) else { return };
    cuda.nccl().set_init_timeout(Duration::from_millis(50));
    let _context = CudaContext::new(0).unwrap();
    assert_eq!(init(2, unique_id(), 0), Err(SYSTEM_ERROR));
    assert!(super::library::Handle::NULL.last_error().contains("not all of 2 ranks have come"));
}

#[test]
fn a_unique_id_makes_one_communicator_of_ranks_that_fit() {
    let Some(_cuda) = threaded(2) else { return };
    let context = CudaContext::new(0).unwrap();
    let id = unique_id();
    let comm = init(1, id, 0).unwrap();
    assert_eq!(init(1, id, 0), Err(SYSTEM_ERROR), "the id has been used");
    assert_eq!(comm.destroy(), SUCCESS);
    for (ranks, rank) in [(3, 1), (2, 0)] {
        let id = unique_id();
        let first = thread::spawn(move || {
            let _context = CudaContext::new(1).unwrap();
            init(2, id, 0)
        });
        thread::sleep(Duration::from_millis(50));
        context.bind_to_thread().unwrap();
        assert_eq!(init(ranks, id, rank), Err(INVALID_USAGE), "{ranks} {rank}");
        assert_eq!(first.join().unwrap(), Err(INVALID_USAGE));
    }
}

const NOTHING: &str = r#"extern "C" __global__ void nothing(int x) {}"#;

#[test]
fn an_error_of_the_device_ends_its_operations_and_is_one_of_the_communicator() {
    let Some(cuda) = threaded(2) else { return };
    let both = Gate::new(2);
    run_ranks(2, |rank| {
        let x = rank.upload(&[1_f32]);
        if rank.rank == 1 {
            both.wait();
            return assert_eq!(rank.comm.abort(), SUCCESS);
        }
        // after the receive, a load would wait for it
        let nothing = context_kernel(&rank.context, NOTHING, "nothing");
        rank.issue(Operation::Recv(at(&x), 1, FLOAT32, 1));
        let second = rank.context.new_stream().unwrap();
        let send = Operation::Recv(at(&x), 1, FLOAT32, 1);
        cuda.fail_launch("nothing", 1);
        launch!(second, nothing, grid(1, 1), &0_i32).unwrap();
        assert!(second.synchronize().is_err());
        assert!(rank.stream.synchronize().is_err(), "the receive has ended with its device");
        assert!(becomes(|| rank.comm.async_error() == UNHANDLED_CUDA_ERROR));
        assert_eq!(issue(send, rank.comm, stream_handle(&rank.stream)), UNHANDLED_CUDA_ERROR);
        both.wait();
        assert_eq!(rank.comm.abort(), SUCCESS);
        let _ = x.leak();
    });
    cuda.reset();
}
