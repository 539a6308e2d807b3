//! Conformance suite of communicators of tensors: the cases that each must pass.
//!
//! A case is a function that every rank of a job runs on its own device and communicator; it panics where the
//! communicator breaks the contract of [`DeviceComm`]. Messages are sent and received in one order per
//! [`MessageLane`](crate::MessageLane), so that the cases hold for communicators that match by order, too.

#![allow(clippy::float_cmp, reason = "sums are exact, or equal bit by bit")]

mod collectives;
mod failures;
mod messages;
mod rank;

use rank::Rank;

use crate::comm::DeviceComm;
use crate::device::Device;

/// Test of the contract of [`DeviceComm`].
pub struct Case<D: Device> {
    /// Claim that the case checks, as an identifier.
    pub name: &'static str,
    /// Numbers of ranks to run it on.
    pub sizes: &'static [usize],
    /// Runs one rank; panics if the claim does not hold. Cases whose names begin with `refused` end the job.
    run: fn(&Rank<'_, D>),
}

impl<D: Device> Case<D> {
    /// Runs one rank.
    ///
    /// # Panics
    /// If the claim does not hold.
    pub fn run(&self, device: &D, comm: &dyn DeviceComm<D>) {
        let rank = Rank { device, comm };
        rank.prepare();
        (self.run)(&rank);
    }
}

/// Returns the cases that a communicator of tensors must pass.
#[must_use]
pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = messages::cases();
    cases.extend(collectives::cases());
    cases.extend(failures::cases());
    cases
}
