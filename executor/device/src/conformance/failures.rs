//! Failures, which end the job on all ranks, no matter what the ranks wait for.

use dflop_comm::{Cause, Failure, StepContext};

use super::{Case, Rank, at, numbers};
use crate::comm::RowShape;
use crate::error::{Error, Result};
use crate::ops::Device;
use crate::runtime::{Dtype, Lane, Tensor};

pub(super) fn cases<D: Device>() -> Vec<Case<D>> {
    vec![
        Case { name: "ranks_that_do_not_exist_are_refused", sizes: &[2], run: no_rank },
        Case { name: "refused_while_a_message_is_awaited", sizes: &[2, 3], run: awaited_message },
        Case { name: "refused_while_a_sum_is_awaited", sizes: &[3], run: awaited_sum },
    ]
}

fn no_rank<D: Device>(rank: &Rank<'_, D>) {
    let shape = RowShape { dtype: Dtype::F32, rows: 1, cols: 1 };
    let now = rank.now();
    let received = rank.comm.recv(9, 0, at(1), shape, &now).and_then(|receive| receive.wait(Lane::Compute));
    let sent = rank.comm.send(9, 0, at(1), rank.upload(Dtype::F32, &[1.0]), 1, &now);
    let sent = sent.and_then(|sent| sent.wait(Lane::Compute));
    // a device that computes late also rejects late
    for refused in [received, sent] {
        let refused = refused.and_then(|_| rank.device.download(&rank.upload(Dtype::F32, &[1.0])));
        assert!(refused.is_err(), "there are two ranks");
    }
}

/// Returns the failure from a device call.
fn failure<D: Device>(rank: &Rank<'_, D>, awaited: Result<Tensor<D>>) -> Failure {
    let error = awaited.and_then(|values| rank.device.download(&values)).expect_err("the job has failed");
    let Error::Comm(error) = error else { panic!("expected the failure of the job, found {error}") };
    error.failure().expect("the job is over").clone()
}

fn ends<D: Device>(rank: &Rank<'_, D>, awaited: impl FnOnce() -> Result<Tensor<D>>) {
    if rank.rank() == 1 {
        // all other ranks wait by now
        std::thread::sleep(std::time::Duration::from_millis(200));
        let at = StepContext::microbatch(3, 1, "loss");
        drop(rank.comm.host().abort(at, "the loss is NaN"));
        return;
    }
    let found = failure(rank, awaited());
    assert_eq!((found.cause, found.culprit), (Cause::Caller, Some(1)), "{found}");
    assert!(found.message.contains("the loss is NaN"), "{found}");
}

fn awaited_message<D: Device>(rank: &Rank<'_, D>) {
    rank.open_all_lanes();
    ends(rank, || {
        let shape = RowShape { dtype: Dtype::F32, rows: 4, cols: 4 };
        let receive = rank.comm.recv(1, 0, at(3), shape, &rank.now())?;
        Ok(receive.wait(Lane::Compute)?.expect("a receive has rows"))
    });
}

fn awaited_sum<D: Device>(rank: &Rank<'_, D>) {
    ends(rank, || {
        let values = rank.upload(Dtype::F32, &numbers(1, 100));
        let sum = rank.comm.start_all_reduce(at(3), values, &rank.now())?;
        let mut sum = sum.wait(Lane::Compute)?.expect("a sum returns its tensor");
        rank.comm.all_reduce(at(3), &mut sum)?;
        Ok(sum)
    });
}
