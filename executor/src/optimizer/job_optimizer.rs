//! Updates the weights of a job: gradient norm over all ranks, clipping, learning rate, `AdamW`.

use super::adamw::{AdamWOptimizer, AdamWSettings};
use super::gradient_norm::{clip_factor, gradient_norm};
use super::learning_rate::LearningRate;
use super::ownership::Ownership;
use crate::error::{Error, Result};
use dflop_comm::{Comm, StepContext};
use dflop_device::Device;
use dflop_models::Stage;

/// Settings of the optimizer of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobOptimizerSettings {
    /// Learning rate by step.
    pub learning_rate: LearningRate,
    /// Settings of `AdamW`.
    pub adamw: AdamWSettings,
    /// Largest norm of the gradients of all parameters; larger gradients are scaled down. `None` for no
    /// limit.
    pub gradient_norm_max: Option<f64>,
}

impl JobOptimizerSettings {
    /// Creates settings with a learning rate, [`AdamWSettings::default`] and a largest norm of 1.
    #[must_use]
    pub fn new(learning_rate: LearningRate) -> Self {
        Self { learning_rate, adamw: AdamWSettings::default(), gradient_norm_max: Some(1.0) }
    }

    fn check(&self) -> Result<()> {
        self.learning_rate.check()?;
        match self.gradient_norm_max {
            Some(norm) if norm.is_nan() || norm <= 0.0 => {
                let reason = format!("{norm} is not above 0");
                Err(Error::InvalidSetting { setting: "gradient_norm_max", reason })
            }
            _ => Ok(()),
        }
    }
}

/// Report of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateReport {
    /// Number of the step, from 0.
    pub step: u64,
    /// Norm of the gradients of all parameters, before clipping; the same bits on all ranks.
    pub gradient_norm: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Whether the gradients were scaled down.
    pub is_clipped: bool,
}

/// One rank's part of the optimizer of a job.
///
/// It has its own communicator, so that it does not borrow the pipeline's while it updates the pipeline's
/// stages.
pub struct JobOptimizer<D: Device> {
    pub(crate) settings: JobOptimizerSettings,
    pub(crate) adamw: AdamWOptimizer<D>,
    pub(crate) ownership: Ownership,
    pub(crate) comm: Box<dyn Comm>,
}

impl<D: Device> JobOptimizer<D> {
    /// Creates an optimizer that has taken no step; all ranks of `comm` call it.
    ///
    /// - `stages`: of this rank, in the order of later calls of [`update`](Self::update)
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a setting is invalid, [`Error::Comm`].
    pub fn new<'a>(
        settings: JobOptimizerSettings,
        comm: &dyn Comm,
        stages: impl IntoIterator<Item = &'a Stage<D>>,
    ) -> Result<Self> {
        settings.check()?;
        let adamw = AdamWOptimizer::new(settings.adamw)?;
        let own = comm.split(StepContext::step(0, "split for the optimizer"), Some(0), comm.rank() as u64)?;
        let Some(comm) = own else {
            let reason = "expected a communicator with this rank, found none after a split".to_owned();
            return Err(Error::InvalidSetting { setting: "comm", reason });
        };
        let ownership = Ownership::agree(&*comm, stages)?;
        Ok(Self { settings, adamw, ownership, comm })
    }

    /// Updates all parameters with the gradients of a step and sets these to zero; all ranks call it.
    ///
    /// - `stages`: of this rank; gradients must be summed over replicas, and for a tied parameter on two
    ///   stages over both
    ///
    /// # Errors
    /// [`Error::Gradient`] if a gradient is not finite: no rank has updated anything, and the job has ended;
    /// [`Error::Comm`], [`Error::Device`].
    pub fn update<'a>(&mut self, stages: impl IntoIterator<Item = &'a mut Stage<D>>) -> Result<UpdateReport> {
        let mut stages: Vec<&mut Stage<D>> = stages.into_iter().collect();
        for stage in &mut stages {
            let device = stage.device().clone();
            stage.parameters_mut().fold_shared_gradients(&device)?;
        }
        let step = self.adamw.steps();
        // After the fold: the norm must see the sum of both uses of a shared parameter.
        let norm = gradient_norm(&mut stages, &self.ownership, &*self.comm, step)?;
        let factor = self.settings.gradient_norm_max.map_or(1.0, |norm_max| clip_factor(norm, norm_max));
        let learning_rate = self.settings.learning_rate.at(step);
        self.adamw.step(&mut stages, learning_rate, factor)?;
        for stage in stages {
            let device = stage.device().clone();
            stage.parameters_mut().zero_gradients(&device)?;
        }
        Ok(UpdateReport { step, gradient_norm: norm, learning_rate, is_clipped: factor < 1.0 })
    }

    /// Returns the number of steps taken, which is the number of the next one.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.adamw.steps()
    }

    /// Returns the settings.
    #[must_use]
    pub const fn settings(&self) -> &JobOptimizerSettings {
        &self.settings
    }

    /// Returns the owner of every parameter.
    #[must_use]
    pub const fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    /// Returns the `AdamW` optimizer of this rank's stages.
    #[must_use]
    pub const fn adamw(&self) -> &AdamWOptimizer<D> {
        &self.adamw
    }
}
