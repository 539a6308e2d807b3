//! Conformance suite for tensor communicators.
//!
//! A case is a function that every rank in a job runs on a device and communicator; it panics if the
//! communicator violates the contract in [`DeviceComm`]. Messages are sent and received in the same order per
//! [`MessageLane`], so that the cases also hold for communicators that match by order.

#![allow(clippy::float_cmp, reason = "sums are exact, or equal bit by bit")]
mod collectives;
mod failures;
mod messages;

use crate::comm::{DeviceComm, MessageLane, RowShape};
use crate::error::Result;
use crate::ops::Device;
use crate::runtime::{Dtype, Lane, Tensor, Transfer};
use dflop_comm::StepContext;
use std::collections::BTreeSet;

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

/// Test case rank.
struct Rank<'a, D: Device> {
    device: &'a D,
    comm: &'a dyn DeviceComm<D>,
}

/// Returns the step context for a case.
fn at(step: u64) -> StepContext {
    StepContext::step(step, "conformance")
}

/// Small whole numbers, which every type can represent and whose sums are exact.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| ((index * 7 + seed * 13) % 31) as f32 - 15.0).collect()
}

/// Numbers whose sums round.
fn fractions(seed: usize, len: usize) -> Vec<f32> {
    numbers(seed, len).into_iter().map(|number| number / 7.0 + 0.01).collect()
}

impl<D: Device> Rank<'_, D> {
    fn rank(&self) -> usize {
        self.comm.host().rank()
    }

    fn size(&self) -> usize {
        self.comm.host().size()
    }

    /// Loads the kernels that cases use while messages are in flight.
    fn prepare(&self) {
        let done: Result<()> = self.device.prepare(|| {
            for dtype in [self.device.storage(), Dtype::F32] {
                let (x, mut y) = (self.device.zeros_as(dtype, 1)?, self.device.zeros_as(dtype, 1)?);
                self.device.add(&x, &mut y)?;
                self.device.scale(2.0, &mut y)?;
            }
            Ok(())
        });
        done.expect("the device works");
    }

    fn upload(&self, dtype: Dtype, values: &[f32]) -> Tensor<D> {
        self.device.upload_as(dtype, values).expect("there is memory")
    }

    fn download(&self, tensor: &Tensor<D>) -> Vec<f32> {
        self.device.download(tensor).expect("the device works")
    }

    /// Returns the event after all operations so far.
    fn now(&self) -> D::Event {
        self.device.mark(Lane::Compute).expect("the device works")
    }

    /// Opens the lanes between all ranks, in both flows.
    fn open_all_lanes(&self) {
        let ranks = 0..self.size();
        let pairs = ranks.clone().flat_map(|from| ranks.clone().map(move |to| (from, to)));
        let lanes = pairs.filter(|(from, to)| from != to);
        let lanes: BTreeSet<_> =
            lanes.flat_map(|(from, to)| [0, 1].map(|flow| MessageLane { from, to, flow })).collect();
        self.comm.open_lanes(at(0), &lanes).expect("all ranks open the same lanes");
    }

    fn send(&self, to: usize, tag: u64, step: u64, rows: Tensor<D>, cols: usize) -> Transfer<D> {
        self.comm.send(to, tag, at(step), rows, cols, &self.now()).expect("the job goes on")
    }

    fn recv(&self, from: usize, tag: u64, step: u64, shape: RowShape) -> Transfer<D> {
        self.comm.recv(from, tag, at(step), shape, &self.now()).expect("the job goes on")
    }

    /// Waits for a transfer, and returns the received numbers.
    fn received(&self, transfer: Transfer<D>) -> Vec<f32> {
        let rows = transfer.wait(Lane::Compute).expect("the job goes on");
        self.download(&rows.expect("a receive has rows"))
    }

    /// Keeps a rank in the job until all are done.
    fn stay(&self) {
        self.comm.host().barrier(at(99)).expect("the job goes on");
    }
}
