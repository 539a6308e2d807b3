//! Test case rank: device, communicator, and helpers.

use std::collections::BTreeSet;

use dflop_comm::StepContext;

use crate::comm::{DeviceComm, MessageLane, RowShape};
use crate::error::Result;
use crate::ops::Device;
use crate::runtime::{Dtype, Lane, Tensor, Transfer};

/// Test case rank.
pub(super) struct Rank<'a, D: Device> {
    pub(super) device: &'a D,
    pub(super) comm: &'a dyn DeviceComm<D>,
}

/// Returns the step context for a case.
pub(super) fn at(step: u64) -> StepContext {
    StepContext::step(step, "conformance")
}

/// Small whole numbers, which every type can represent and whose sums are exact.
pub(super) fn numbers(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| ((index * 7 + seed * 13) % 31) as f32 - 15.0).collect()
}

/// Numbers whose sums round.
pub(super) fn fractions(seed: usize, len: usize) -> Vec<f32> {
    numbers(seed, len).into_iter().map(|number| number / 7.0 + 0.01).collect()
}

impl<D: Device> Rank<'_, D> {
    pub(super) fn rank(&self) -> usize {
        self.comm.host().rank()
    }

    pub(super) fn size(&self) -> usize {
        self.comm.host().size()
    }

    /// Loads the kernels that cases use while messages are in flight.
    pub(super) fn prepare(&self) {
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

    pub(super) fn upload(&self, dtype: Dtype, values: &[f32]) -> Tensor<D> {
        self.device.upload_as(dtype, values).expect("there is memory")
    }

    pub(super) fn download(&self, tensor: &Tensor<D>) -> Vec<f32> {
        self.device.download(tensor).expect("the device works")
    }

    /// Returns the event after all operations so far.
    pub(super) fn now(&self) -> D::Event {
        self.device.mark(Lane::Compute).expect("the device works")
    }

    /// Opens the lanes between all ranks, in both flows.
    pub(super) fn open_all_lanes(&self) {
        let ranks = 0..self.size();
        let pairs = ranks.clone().flat_map(|from| ranks.clone().map(move |to| (from, to)));
        let lanes = pairs.filter(|(from, to)| from != to);
        let lanes: BTreeSet<_> =
            lanes.flat_map(|(from, to)| [0, 1].map(|flow| MessageLane { from, to, flow })).collect();
        self.comm.open_lanes(at(0), &lanes).expect("all ranks open the same lanes");
    }

    pub(super) fn send(&self, to: usize, tag: u64, step: u64, rows: Tensor<D>, cols: usize) -> Transfer<D> {
        self.comm.send(to, tag, at(step), rows, cols, &self.now()).expect("the job goes on")
    }

    pub(super) fn recv(&self, from: usize, tag: u64, step: u64, shape: RowShape) -> Transfer<D> {
        self.comm.recv(from, tag, at(step), shape, &self.now()).expect("the job goes on")
    }

    /// Waits for a transfer, and returns the received numbers.
    pub(super) fn received(&self, transfer: Transfer<D>) -> Vec<f32> {
        let rows = transfer.wait(Lane::Compute).expect("the job goes on");
        self.download(&rows.expect("a receive has rows"))
    }

    /// Keeps a rank in the job until all are done.
    pub(super) fn stay(&self) {
        self.comm.host().barrier(at(99)).expect("the job goes on");
    }
}
