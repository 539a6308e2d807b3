//! Conformance suite for tensor communicators.
//!
//! A case is a function that every rank in a job runs on a device and communicator; it panics if the
//! communicator violates the contract in [`DeviceComm`]. Messages are sent and received in the same order per
//! [`MessageLane`](crate::MessageLane), so that the cases also hold for communicators that match by order.

#![allow(clippy::float_cmp, reason = "sums are exact, or equal bit by bit")]

mod collectives;
mod failures;
mod messages;
mod rank;

use rank::Rank;

use crate::comm::DeviceComm;
use crate::ops::Device;

/// Test for the [`DeviceComm`] contract.
pub struct Case<D: Device> {
    /// Claim that the case checks, as an identifier.
    pub name: &'static str,
    /// Group sizes to run the case on.
    pub sizes: &'static [usize],
    /// Runs one rank; panics if the claim does not hold. Cases whose names start with `refused` end the job.
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
