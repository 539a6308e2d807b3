//! Mistakes in library use.

use super::{
    library::{
        Handle, INVALID_ARGUMENT, INVALID_USAGE, Operation, REMOTE_ERROR, SUCCESS, UNHANDLED_CUDA_ERROR,
        group, init, issue, unique_id,
    },
    world::{FLOAT32, Gate, Rank, SUM, at, becomes, run_ranks, stream_handle, threaded},
};
use crate::support::{ILLEGAL_ADDRESS, code, cuda, raw};
use cudarc::driver::CudaContext;
use std::thread;

/// Operation result on a rank, with the failure text.
fn failure(rank: &Rank, operation: Operation) -> (i32, String) {
    (issue(operation, rank.comm, stream_handle(&rank.stream)), rank.comm.last_error())
}

#[test]
fn several_ranks_on_lazy_streams_are_refused() {
    let Some(cuda) = cuda() else { return };
    assert_eq!(init(2, unique_id(), 0), Err(INVALID_USAGE));
    let text = Handle::NULL.last_error();
    assert!(text.contains("CUDA_STAND_IN_STREAM_THREADS=1"), "{text}");
    assert_eq!(cuda.last_failure(), text);
    assert_eq!(init(1, unique_id(), 0).map(Handle::destroy), Ok(SUCCESS));
}

#[test]
fn ranks_of_a_communicator_have_devices_of_their_own() {
    let Some(cuda) = threaded(1) else { return };
    let init_both = || {
        let id = unique_id();
        let other = thread::spawn(move || {
            let _context = CudaContext::new(0).unwrap();
            init(2, id, 1).map(Handle::destroy)
        });
        let own = init(2, id, 0).map(Handle::destroy);
        [own, other.join().unwrap()]
    };
    assert_eq!(init_both(), [Err(INVALID_USAGE); 2]);
    assert_eq!(cuda.last_failure(), "ranks 0 and 1 are both on device 0 of one machine");
    cuda.nccl().set_shares_devices(true);
    assert_eq!(init_both(), [Ok(SUCCESS); 2]);
}

#[test]
fn communicators_that_are_none_are_found() {
    let Some(cuda) = cuda() else { return };
    let rank = Rank::new(1, 0, unique_id());
    let x = rank.upload(&[1_f32]);
    let sum = Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM);
    assert_eq!(issue(sum, Handle::NULL, 0), INVALID_ARGUMENT);
    assert!(cuda.last_failure().contains("on a null communicator"));
    assert_eq!(rank.comm.finalize(), SUCCESS);
    assert_eq!(failure(&rank, sum).0, INVALID_USAGE);
    assert_eq!(rank.comm.finalize(), INVALID_USAGE);
    assert_eq!(rank.comm.destroy(), SUCCESS);
    assert_eq!(failure(&rank, sum).0, INVALID_ARGUMENT);
    assert!(cuda.last_failure().contains("a communicator that has ended or never was"));
    assert_eq!(rank.comm.destroy(), INVALID_ARGUMENT);
}

#[test]
fn arguments_and_buffers_are_checked_at_the_call() {
    let Some(cuda) = cuda() else { return };
    cuda.set_devices(2);
    let rank = Rank::new(1, 0, unique_id());
    let x = rank.upload(&[1_f32; 64]);
    let other = CudaContext::new(1).unwrap();
    let foreign = other.default_stream().alloc_zeros::<f32>(64).unwrap();
    rank.context.bind_to_thread().unwrap();
    let host = [0_f32; 4];
    let host = host.as_ptr() as u64;
    let sum = |from, to, count| Operation::AllReduce(from, to, count, FLOAT32, SUM);
    for (operation, expected) in [
        (sum(at(&x), at(&x), 65), "260 bytes of the send buffer are not all in a buffer of the device"),
        (sum(at(&x), host, 4), "16 bytes of the receive buffer are not all in a buffer of the device"),
        (sum(at(&x), 0, 4), "16 bytes of the receive buffer"),
        (sum(at(&x), at(&foreign), 4), "are on device 1, the communicator is on device 0"),
        (sum(at(&x), at(&x) + 4, 4), "the buffers overlap"),
        (Operation::AllReduce(at(&x), at(&x), 4, 12, SUM), "no such type"),
        (Operation::AllReduce(at(&x), at(&x), 4, 6, SUM), "has no such reduction of this type"),
        (Operation::Send(at(&x), 4, FLOAT32, 1), "there are 1 ranks"),
        (Operation::Broadcast(at(&x), at(&x), 4, FLOAT32, -1), "there are 1 ranks"),
    ] {
        let (result, text) = failure(&rank, operation);
        assert!(result == INVALID_ARGUMENT && text.contains(expected), "{result}: {text}");
        assert_eq!(cuda.last_failure(), text);
    }
    let (result, text) = failure(&rank, Operation::Send(at(&x), 4, FLOAT32, 0));
    assert!(result == INVALID_USAGE && text.contains("needs its receive in the same group"), "{text}");
    let on = |stream| issue(sum(at(&x), at(&x), 4), rank.comm, stream);
    assert_eq!(on(stream_handle(&other.new_stream().unwrap())), INVALID_USAGE);
    assert!(cuda.last_failure().contains("the stream is one of another device"));
    assert_eq!(on(0x1000), INVALID_USAGE);
    rank.context.bind_to_thread().unwrap();
    let broken = group(|| {
        assert_eq!(on(0x1000), INVALID_USAGE);
        rank.issue(sum(at(&x), at(&x), 4));
    });
    assert_eq!(broken, INVALID_USAGE, "nothing of the group begins");
    assert_eq!(cuda.nccl().counts().all_reduces, 0);
    assert_eq!(rank.comm.destroy(), SUCCESS);
}

#[test]
fn a_buffer_that_is_released_before_its_turn_is_an_illegal_address() {
    let Some(cuda) = cuda() else { return };
    let rank = Rank::new(1, 0, unique_id());
    let x = rank.upload(&[1_f32]);
    rank.stream.synchronize().unwrap();
    rank.issue(Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM));
    let other = rank.context.new_stream().unwrap();
    raw::release(x.leak(), &other);
    other.synchronize().unwrap();
    assert_eq!(code(rank.stream.synchronize()), ILLEGAL_ADDRESS);
    assert!(cuda.last_failure().contains("does not live when the stream runs it"));
    assert_eq!(rank.comm.async_error(), UNHANDLED_CUDA_ERROR);
    assert_eq!(rank.comm.destroy(), SUCCESS);
}

#[test]
fn two_host_threads_at_once_are_found() {
    let Some(cuda) = threaded(2) else { return };
    let both = Gate::new(2);
    run_ranks(2, |rank| {
        let x = rank.upload(&[1_f32]);
        let sum = Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM);
        let (comm, stream) = (rank.comm, stream_handle(&rank.stream));
        let result = group(|| {
            rank.issue(sum);
            let other = thread::spawn(move || issue(sum, comm, stream));
            assert_eq!(other.join().unwrap(), INVALID_USAGE);
        });
        assert_eq!(result, SUCCESS, "the first thread goes on");
        rank.stream.synchronize().unwrap();
        both.wait();
    });
    assert!(cuda.last_failure().contains("another host thread is in a call of the communicator"));
}

#[test]
fn a_context_that_ends_takes_its_operations_along() {
    let Some(_cuda) = threaded(2) else { return };
    let errors = run_ranks(2, |rank| {
        if rank.rank == 0 {
            assert!(becomes(|| rank.comm.async_error() == REMOTE_ERROR));
            return rank.comm.async_error();
        }
        let x = rank.upload(&[1_f32]);
        rank.issue(Operation::Recv(at(&x), 1, FLOAT32, 0));
        rank.issue(Operation::Recv(at(&x), 1, FLOAT32, 0));
        let _ = x.leak();
        raw::end_context(rank.rank);
        let error = rank.comm.async_error();
        assert_eq!(rank.comm.abort(), SUCCESS);
        error
    });
    assert_eq!(errors, [REMOTE_ERROR, UNHANDLED_CUDA_ERROR]);
}
