//! Conformance suite for transports.
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
mod failures;
mod messages;
mod sums;

use crate::api::Comm;
use crate::error::StepContext;
use crate::message::{Payload, even_parts};

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
    let all = [messages::CASES, sums::CASES, collectives::CASES, failures::CASES].concat();
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
