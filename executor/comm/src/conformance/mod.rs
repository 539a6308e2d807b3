//! Conformance suite for transports.
//!
//! Caller mistakes, which do not affect the job, and failures, which end the job on all ranks.
//!
//! A case is a function that every rank in a job runs on its communicator, in one process or in many; it
//! panics if the communicator violates the contract. A transport states its [`Promises`] and provides a
//! function that runs a case on a number of ranks.
//!
//! # Examples
//! ```
//! use dflop_comm::{Comm, Settings, conformance, threads};
//!
//! for case in conformance::cases(conformance::Promises::ALL) {
//!     for &size in case.sizes {
//!         let ranks = threads::world(size, Settings::default())?;
//!         std::thread::scope(|scope| {
//!             ranks.into_iter().for_each(|comm| drop(scope.spawn(move || (case.run)(&comm))));
//!         });
//!     }
//! }
//! # Ok::<(), dflop_comm::Error>(())
//! ```

#![allow(clippy::float_cmp, reason = "sums are exact, or equal bit by bit")]
mod collectives;
mod messages;
mod sums;

use super::api::{Comm, P2pOp};
use super::dtype::Dtype;
use super::error::{Cause, Error, Failure, Result, StepContext};
use super::message::{Buffer, Payload, PayloadShape, Slice, even_parts};
use half::bf16;
use std::fmt::Debug;

/// Test for the [`Comm`] contract.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Claim that the case checks, as an identifier.
    pub name: &'static str,
    /// Group sizes to run the case on.
    pub sizes: &'static [usize],
    /// Runs one rank; panics if the claim does not hold. Cases whose names start with `refused` end the job.
    pub run: fn(&dyn Comm),
    needs: fn(Promises) -> bool,
}

/// Promises that only some transports make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promises {
    /// Whether sums have ring order: part `p` of [`crate::even_parts`] is summed from the rank
    /// after `p` on. Otherwise sums are only equal on all ranks and close to the exact sum.
    pub has_ring_order: bool,
    /// Whether messages with different tags may be received out of order.
    pub has_tags: bool,
    /// Whether step, microbatch and shape travel with a message; a mismatch ends the job.
    pub has_headers: bool,
}

impl Promises {
    /// Promises for the transports in this crate.
    pub const ALL: Self = Self { has_ring_order: true, has_tags: true, has_headers: true };
}

/// Returns the cases that a transport with these promises must pass.
#[must_use]
pub fn cases(promises: Promises) -> Vec<Case> {
    let all = [messages::CASES, sums::CASES, collectives::CASES, CASES].concat();
    all.into_iter().filter(|case| (case.needs)(promises)).collect()
}

fn at(step: u64) -> StepContext {
    StepContext::step(step, "conformance")
}

/// Returns floats whose sum depends on the order, different on every rank.
#[must_use]
pub fn floats(rank: usize, elements: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32.wrapping_mul(rank as u32 + 1) | 1;
    let mut float = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state as f32 / u32::MAX as f32 - 0.5) * 10_f32.powi((state % 7) as i32 - 3)
    };
    (0..elements).map(|_| float()).collect()
}

/// Sums [`floats`] over all ranks in ring order: part `p` from rank `p + 1` on.
#[must_use]
pub fn ring_sum(size: usize, elements: usize) -> Vec<f32> {
    let inputs: Vec<_> = (0..size).map(|rank| floats(rank, elements)).collect();
    let parts = even_parts(elements, size);
    let owner = parts.iter().enumerate().flat_map(|(part, &length)| std::iter::repeat_n(part, length));
    let sum = |(index, part): (usize, usize)| {
        let term = |round: usize| inputs[(part + round) % size][index];
        (2..=size).map(term).fold(term(1), |sum, term| sum + term)
    };
    owner.enumerate().map(sum).collect()
}

/// Creates a message with one row.
///
/// # Panics
/// Never: one row can have any number of elements.
fn row(elements: &[f32]) -> Payload {
    Payload::flat(elements.to_vec().into())
}

/// Keeps a rank in the job until all ranks are done.
fn stay(comm: &dyn Comm) {
    comm.barrier(at(99)).expect("all ranks reach the end of the case");
}

const CASES: &[Case] = &[
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
