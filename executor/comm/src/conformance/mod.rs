//! Conformance suite: the cases that every transport must pass.
//!
//! A case is a function that every rank of a job runs on its own communicator, in one process or in many; it
//! panics where the communicator breaks the contract. A transport states its [`Promises`] and brings a
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
mod inputs;
mod messages;
mod sums;

pub use inputs::{floats, ring_sum};

use crate::api::Comm;

/// Test of the contract of [`Comm`].
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Claim that the case checks, as an identifier.
    pub name: &'static str,
    /// Numbers of ranks to run it on.
    pub sizes: &'static [usize],
    /// Runs one rank; panics if the claim does not hold. Cases whose names begin with `refused` end the job.
    pub run: fn(&dyn Comm),
    needs: fn(Promises) -> bool,
}

/// Promises that not every transport makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promises {
    /// Sums have the order of a ring: part `p` of [`even_parts`](crate::even_parts) is summed from the rank
    /// after `p` on. Otherwise they are only equal on all ranks and close to the exact sum.
    pub has_ring_order: bool,
    /// Messages with different tags may be received in another order than they were sent.
    pub has_tags: bool,
    /// Step, microbatch and shape travel with a message; one that differs ends the job.
    pub has_headers: bool,
}

impl Promises {
    /// Promises of the transports of this crate.
    pub const ALL: Self = Self { has_ring_order: true, has_tags: true, has_headers: true };
}

/// Returns the cases that a transport with these promises must pass.
#[must_use]
pub fn cases(promises: Promises) -> Vec<Case> {
    let all = [messages::CASES, sums::CASES, collectives::CASES, failures::CASES].concat();
    all.into_iter().filter(|case| (case.needs)(promises)).collect()
}
