//! Caller mistakes, which do not affect the job, and failures, which end the job on all ranks.

use std::fmt::Debug;

use half::bf16;

use super::{Case, at, floats, row, stay};
use crate::api::{Comm, P2pOp};
use crate::dtype::Dtype;
use crate::error::{Cause, Error, Failure, Result, StepContext};
use crate::message::{Buffer, Payload, PayloadShape, Slice};

pub(super) const CASES: &[Case] = &[
    Case { name: "mistakes_of_the_caller_do_not_end_the_job", sizes: &[2], run: mistakes, needs: |_| true },
    Case { name: "refused_another_digest", sizes: &[2, 4, 9], run: digests, needs: |_| true },
    Case { name: "refused_by_the_caller", sizes: &[2, 4], run: abort, needs: |_| true },
    Case { name: "refused_another_step", sizes: &[2], run: another_step, needs: |has| has.has_headers },
    Case {
        name: "refused_another_shape_of_a_sum",
        sizes: &[3],
        run: another_shape,
        needs: |has| has.has_headers,
    },
];

fn mistakes(comm: &dyn Comm) {
    let shape = PayloadShape::f32(1, 1);
    let other = 1 - comm.rank();
    let no_rank = comm.start_send(2, 0, at(0), row(&[1.0])).unwrap_err();
    assert!(matches!(no_rank, Error::Rank { rank: 2, size: 2 }), "{no_rank}");
    assert!(matches!(comm.recv(9, 0, at(0), shape), Err(Error::Rank { rank: 9, .. })));
    assert!(matches!(Payload::f32(2, 3, vec![0.0; 5]), Err(Error::Length { found: 5, .. })));
    let receives = vec![P2pOp::Recv { from: 0, tag: 0, shape }, P2pOp::Recv { from: 5, tag: 0, shape }];
    assert!(matches!(comm.group(at(0), receives), Err(Error::Rank { rank: 5, .. })));
    let summed = comm.all_reduce(at(0), Slice::U8(&mut [1, 2]));
    assert!(matches!(summed, Err(Error::NotSummable { dtype: Dtype::U8 })));
    // bf16 sums would round after every term
    let summed = comm.all_reduce(at(0), Slice::Bf16(&mut [bf16::ONE; 2]));
    assert!(matches!(summed, Err(Error::NotSummable { dtype: Dtype::Bf16 })));
    let mut values = [0.0_f32; 4];
    let parts = comm.all_gather(at(0), values.as_mut_slice().into(), &[1, 2]);
    assert!(matches!(parts, Err(Error::Parts { sum: 3, elements: 4, .. })), "{parts:?}");
    // rejected calls have no effect
    let exchanges = vec![
        P2pOp::Send { to: other, tag: 0, payload: row(&[5.0]) },
        P2pOp::Recv { from: other, tag: 0, shape },
    ];
    assert_eq!(comm.group(at(1), exchanges).unwrap().remove(0).into_f32().unwrap(), [5.0]);
    stay(comm);
}

/// Returns the job failure, which every later call returns.
fn failure<T: Debug>(comm: &dyn Comm, result: Result<T>) -> Failure {
    let error = result.expect_err("the job has failed");
    let failure = error.failure().expect("the job is over").clone();
    let later = comm.barrier(at(100)).expect_err("the job has failed");
    assert_eq!(later.failure(), Some(&failure));
    failure
}

fn digests(comm: &dyn Comm) {
    let culprit = comm.size() - 1;
    let digest = if comm.rank() == culprit { 0xbad } else { 0x600d };
    let found = failure(comm, comm.check_digest(12, digest));
    assert_eq!((found.cause, found.culprit), (Cause::Digest, Some(culprit)), "{found}");
    assert!(found.message.contains("step 12") && found.message.contains("0x0000000000000bad"), "{found}");
    assert!(found.message.contains("rank 0 has 0x000000000000600d"), "{found}");
}

fn abort(comm: &dyn Comm) {
    let at = StepContext::microbatch(3, 1, "loss");
    let found = if comm.rank() == 1 {
        failure::<()>(comm, Err(comm.abort(at, "the loss is NaN")))
    } else {
        failure(comm, comm.recv(1, 0, StepContext::step(3, "recv"), PayloadShape::f32(1, 1)))
    };
    assert_eq!((found.cause, found.culprit, found.by), (Cause::Caller, Some(1), 1), "{found}");
    assert!(found.message.contains("rank 1 ended the job: the loss is NaN"), "{found}");
}

fn another_step(comm: &dyn Comm) {
    let shape = PayloadShape::f32(2, 3);
    let found = if comm.rank() == 0 {
        let payload = Payload::f32(2, 3, vec![1.0; 6]).expect("two rows of three");
        failure(comm, comm.send(1, 9, at(5), payload).and_then(|()| comm.barrier(at(5))))
    } else {
        failure(comm, comm.recv(0, 9, at(4), shape))
    };
    assert_eq!((found.cause, found.culprit, found.by), (Cause::Mismatch, Some(0), 1), "{found}");
    assert!(found.message.contains("step 5") && found.message.contains("step 4"), "{found}");
}

fn another_shape(comm: &dyn Comm) {
    let values = floats(comm.rank(), if comm.rank() == 2 { 9 } else { 12 });
    let sum = comm.start_all_reduce(at(2), Buffer::F32(values)).and_then(crate::api::Handle::wait);
    let found = failure(comm, sum.and_then(|_| comm.barrier(at(2))));
    assert_eq!(found.cause, Cause::Mismatch, "{found}");
}
