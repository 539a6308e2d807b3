//! Faults on request.

use super::{
    library::{Handle, INVALID_USAGE, Operation, REMOTE_ERROR, SUCCESS, init, unique_id},
    world::{FLOAT32, Gate, Rank, SUM, at, becomes, run_ranks, threaded},
};
use crate::support::cuda;
use dflop_cuda_stand_in::NcclFault;
use std::{thread, time::Duration};

/// Sums twice on each of two ranks, where rank 1 has a fault in the second sum; returns the asynchronous
/// errors.
fn errors_of_second_sum(fault: NcclFault) -> Option<Vec<i32>> {
    let cuda = threaded(2)?;
    cuda.nccl().request_fault(fault, 1, 2);
    let both = Gate::new(2);
    Some(run_ranks(2, |rank: &Rank| {
        let x = rank.upload(&[1_f32]);
        let sum = Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM);
        rank.issue(sum);
        assert_eq!(rank.download(&x), [2.0]);
        // The fault comes after the other rank has issued its operation.
        if rank.rank == 1 {
            both.wait();
        }
        rank.issue(sum);
        if rank.rank == 0 {
            both.wait();
        }
        let event = rank.stream.record_event(None).unwrap();
        if fault == NcclFault::Hang || (rank.rank == 0 && fault != NcclFault::Lost) {
            thread::sleep(Duration::from_millis(100));
        } else {
            assert!(becomes(|| rank.comm.async_error() != SUCCESS));
        }
        assert!(!event.is_complete(), "it ends with an abort only");
        let error = rank.comm.async_error();
        both.wait();
        assert_eq!(rank.comm.abort(), SUCCESS);
        rank.stream.synchronize().unwrap();
        error
    }))
}

#[test]
fn an_error_is_one_of_its_rank() {
    let Some(errors) = errors_of_second_sum(NcclFault::Error(3)) else { return };
    assert_eq!(errors, [SUCCESS, 3]);
}

#[test]
fn a_rank_that_hangs_tells_nobody() {
    let Some(errors) = errors_of_second_sum(NcclFault::Hang) else { return };
    assert_eq!(errors, [SUCCESS, SUCCESS]);
}

#[test]
fn a_rank_that_is_lost_is_an_error_of_all() {
    let Some(errors) = errors_of_second_sum(NcclFault::Lost) else { return };
    assert_eq!(errors, [REMOTE_ERROR, REMOTE_ERROR]);
}

#[test]
fn the_making_of_a_communicator_fails() {
    let Some(cuda) = cuda() else { return };
    cuda.nccl().request_fault(NcclFault::Init(INVALID_USAGE), 0, 2);
    let init_one = || init(1, unique_id(), 0).map(Handle::destroy);
    assert_eq!([init_one(), init_one(), init_one()], [Ok(SUCCESS), Err(INVALID_USAGE), Ok(SUCCESS)]);
}
