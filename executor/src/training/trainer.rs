//! What stands between the gradients of a step and the next one: norm, clipping, learning rate, optimizer.

use super::clip::{clip_factor, gradient_norm};
use super::optimizer::{Optimizer, OptimizerSettings};
use super::ownership::Ownership;
use super::schedule::LearningRate;
use crate::comm::{Comm, StepContext};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stage::Stage;

/// How a model is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainerSettings {
    /// Learning rate by step.
    pub learning_rate: LearningRate,
    /// How weights are updated.
    pub optimizer: OptimizerSettings,
    /// Largest norm of the gradients of all parameters; larger ones are scaled down. `None` for no bound.
    pub gradient_norm_max: Option<f64>,
}

impl TrainerSettings {
    /// A learning rate, and the usual rest: [`OptimizerSettings::default`] and a norm of at most 1.
    #[must_use]
    pub fn new(learning_rate: LearningRate) -> Self {
        Self { learning_rate, optimizer: OptimizerSettings::default(), gradient_norm_max: Some(1.0) }
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

/// What an update did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateReport {
    /// The step, from 0.
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
/// It has a communicator of its own, so that the stages can be borrowed from what else has one.
pub struct Trainer<D: Device> {
    pub(super) settings: TrainerSettings,
    pub(super) optimizer: Optimizer<D>,
    pub(super) ownership: Ownership,
    pub(super) comm: Box<dyn Comm>,
}

impl<D: Device> Trainer<D> {
    /// Makes a trainer that has taken no step; all ranks of `comm` call it.
    ///
    /// - `stages`: of this rank, in the order in which they come to [`update`](Self::update)
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a setting makes no sense, [`Error::Comm`].
    pub fn new<'a>(
        settings: TrainerSettings,
        comm: &dyn Comm,
        stages: impl IntoIterator<Item = &'a Stage<D>>,
    ) -> Result<Self> {
        settings.check()?;
        let optimizer = Optimizer::new(settings.optimizer)?;
        let own = comm.split(StepContext::step(0, "split for the trainer"), Some(0), comm.rank() as u64)?;
        let Some(comm) = own else {
            let reason = "the communicator gave no part of itself".to_owned();
            return Err(Error::InvalidSetting { setting: "comm", reason });
        };
        let ownership = Ownership::agree(&*comm, stages)?;
        Ok(Self { settings, optimizer, ownership, comm })
    }

    /// Updates all parameters with the gradients of a step and sets these to zero; all ranks call it.
    ///
    /// - `stages`: of this rank; their gradients are summed over replicas, those of a tied parameter on two stages over
    ///   both
    /// - `gradient_factor`: what the gradients lack to those of the mean loss: 1, or [`super::StepLoss::factor`]
    ///
    /// # Errors
    /// [`Error::Gradient`] if one is not finite: then nothing was updated on any rank, and the job is over;
    /// [`Error::Comm`], [`Error::OutOfMemory`].
    pub fn update<'a>(
        &mut self,
        stages: impl IntoIterator<Item = &'a mut Stage<D>>,
        gradient_factor: f64,
    ) -> Result<UpdateReport> {
        let mut stages: Vec<&mut Stage<D>> = stages.into_iter().collect();
        for stage in &mut stages {
            let device = stage.device().clone();
            stage.parameters_mut().fold_shared_gradients(&device)?;
        }
        let step = self.optimizer.steps();
        let norm = gradient_norm(&mut stages, &self.ownership, &*self.comm, step)? * gradient_factor;
        let factor = self.settings.gradient_norm_max.map_or(1.0, |norm_max| clip_factor(norm, norm_max));
        let learning_rate = self.settings.learning_rate.at(step);
        self.optimizer.step(&mut stages, learning_rate, gradient_factor * factor)?;
        for stage in stages {
            let device = stage.device().clone();
            stage.parameters_mut().zero_gradients(&device)?;
        }
        Ok(UpdateReport { step, gradient_norm: norm, learning_rate, is_clipped: factor < 1.0 })
    }

    /// Returns the steps taken: the number of the next one.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Returns the settings.
    #[must_use]
    pub const fn settings(&self) -> &TrainerSettings {
        &self.settings
    }

    /// Returns which rank answers for which parameter.
    #[must_use]
    pub const fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    /// Returns the optimizer.
    #[must_use]
    pub const fn optimizer(&self) -> &Optimizer<D> {
        &self.optimizer
    }
}
