//! Step results that the device may not have computed yet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pipeline_rank::{StepOutcome, end};
use super::timeline::Clock;
use crate::error::Result;
use dflop_comm::StepContext;
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, DeviceComm, Dtype, Tensor};

/// Step whose losses are on the device.
pub struct UnreadStep<D: Device> {
    pub(super) device: D,
    pub(super) comm: Arc<dyn DeviceComm<D>>,
    /// Name of the last stage on this rank, for errors.
    pub(super) stage: String,
    pub(super) step: u64,
    pub(super) microbatches: usize,
    pub(super) loss_scale: f64,
    /// Whether the losses on this rank count; false if another tensor-parallel rank has the same losses.
    pub(super) is_counted: bool,
    /// Losses of the microbatches whose loss this rank computes.
    pub(super) losses: Vec<(u32, Tensor<D>)>,
    pub(super) clock: Clock<D>,
    /// Time at which the first work in the step was queued.
    pub(super) queued: Instant,
    /// Compute lane events before the first work in the step and after the last pass and sum.
    pub(super) span: [D::Event; 2],
}

/// Step times on a device, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "units come last")]
pub(crate) struct DeviceTimes {
    /// Time from the last work in the previous step to the first work in this step; `None` for a first step.
    pub(crate) gap_ns: Option<u64>,
    /// Time from the first work in the step to the end of the passes and communication.
    pub(crate) passes_ns: u64,
    /// Time from there to the first work in the update.
    pub(crate) late_ns: u64,
    /// Time from the end of passes and communication to the end of the update.
    pub(crate) update_ns: u64,
}

impl DeviceTimes {
    /// Time from the first work in the step to the end of the update.
    pub(crate) const fn total(self) -> Duration {
        Duration::from_nanos(self.passes_ns + self.late_ns + self.update_ns)
    }
}

impl<D: Device> UnreadStep<D> {
    /// Returns the number of microbatches in the step, each of which has a loss.
    #[must_use]
    pub const fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Writes the losses computed on this rank to the first elements in `figures`, `f64`, which are zero.
    /// Every microbatch comes from one rank, so the sum over ranks is exact.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn write_losses(&self, figures: &mut Tensor<D>) -> Result<()> {
        for (microbatch, loss) in self.losses.iter().filter(|_| self.is_counted) {
            let place = CopyRange { from: 0, to: *microbatch as usize, len: 1 };
            self.device.copy_ranges(&[place], loss, figures)?;
        }
        Ok(())
    }

    /// Returns the step outcome from the losses of all microbatches, after the device has completed all work.
    ///
    /// # Errors
    /// [`dflop_models::Error::Loss`] on the ranks that computed a loss that is not finite, which ends the
    /// job; [`crate::Error::Comm`] on all other ranks.
    pub fn outcome(&self, losses: &[f64]) -> Result<StepOutcome> {
        let at = StepContext::step(self.step, "add up losses");
        if let Some(microbatch) = losses.iter().position(|loss| !loss.is_finite()) {
            if self.losses.iter().any(|&(own, _)| own as usize == microbatch) {
                let (stage, loss) = (self.stage.clone(), losses[microbatch]);
                let error = dflop_models::Error::Loss { stage, microbatch, loss };
                return Err(end(self.comm.host(), at, error.into()));
            }
            // The rank that computed the loss ends the job.
            self.comm.host().barrier(at)?;
        }
        Ok(self.outcome_from_losses(losses))
    }

    /// Returns the time at which the first work in the step was queued.
    pub(crate) const fn queued(&self) -> Instant {
        self.queued
    }

    /// Returns the device times of the step, after the device has completed all work.
    ///
    /// - `before`: point after the previous step's update
    /// - `update`: points before and after this step's update
    pub(crate) fn device_times(&self, before: Option<&D::Event>, update: &[D::Event; 2]) -> DeviceTimes {
        let between =
            |from: Option<&D::Event>, to: &D::Event| u64::try_from(self.device.elapsed_ns(from?, to)?).ok();
        let ([begin, end], [updating, updated]) = (&self.span, update);
        DeviceTimes {
            gap_ns: between(before, begin),
            passes_ns: between(Some(begin), end).unwrap_or(0),
            late_ns: between(Some(end), updating).unwrap_or(0),
            update_ns: between(Some(updating), updated).unwrap_or(0),
        }
    }

    /// Returns the step outcome from any losses, which need not be finite.
    pub(crate) fn outcome_from_losses(&self, losses: &[f64]) -> StepOutcome {
        let loss = losses.iter().sum::<f64>() * self.loss_scale;
        let timeline = self.clock.timeline(&self.device);
        StepOutcome { loss, timeline, communication: self.clock.communication(&self.device) }
    }

    /// Waits until the device has done all work, regardless of success.
    pub(crate) fn wait(&self) {
        let _ = self.device.zeros_as(Dtype::F64, 1).and_then(|zero| self.device.read(&zero));
    }

    /// Adds up the losses on all ranks and waits for the device; all ranks call it.
    ///
    /// # Errors
    /// Same as [`outcome`](Self::outcome).
    pub fn read(self) -> Result<StepOutcome> {
        let at = StepContext::step(self.step, "add up losses");
        let mut figures = self.device.zeros_as(Dtype::F64, self.microbatches)?;
        self.write_losses(&mut figures)?;
        self.comm.all_reduce(at, &mut figures)?;
        let losses = self.device.read(&figures)?;
        self.outcome(&losses)
    }
}
