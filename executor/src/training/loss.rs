//! The loss of a step, by target tokens.
//!
//! A microbatch gives the sum of losses over its target tokens; the loss of a step is the sum over all microbatches of
//! all ranks, divided by all target tokens. A mean of means of microbatches is another number as soon as they have
//! different numbers of targets. Gradients are scaled by the tokens that the plan counts; where these turn out otherwise,
//! [`StepLoss::factor`] is what is missing to the gradient of the mean.

use crate::comm::{Comm, StepContext};
use crate::error::{Error, Result};

/// Sum of losses and target tokens of the microbatches of a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossSum {
    /// Sum over target tokens, in nats.
    pub sum: f64,
    /// Target tokens.
    pub target_tokens: u64,
}

/// The loss of a step, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLoss {
    /// Mean over target tokens, in nats; 0 where there are none.
    pub mean: f64,
    /// Target tokens of all ranks.
    pub target_tokens: u64,
}

impl LossSum {
    /// Adds a microbatch.
    pub fn add(&mut self, sum: f64, target_tokens: u64) {
        self.sum += sum;
        self.target_tokens += target_tokens;
    }

    /// Adds up over all ranks, each of which brings the microbatches whose loss it computed, perhaps none.
    ///
    /// # Errors
    /// [`Error::StepLoss`] on a rank whose sum is not finite, which ends the job; [`Error::Comm`].
    pub fn reduce(self, comm: &dyn Comm, step: u64) -> Result<StepLoss> {
        let at = StepContext::step(step, "loss");
        let Self { mut sum, mut target_tokens } = self;
        if !sum.is_finite() {
            let error = Error::StepLoss { step, target_tokens, sum };
            comm.abort(at, &error.to_string());
            return Err(error);
        }
        comm.all_reduce(at, std::slice::from_mut(&mut sum).into())?;
        comm.all_reduce(at, std::slice::from_mut(&mut target_tokens).into())?;
        Ok(StepLoss { mean: sum / target_tokens.max(1) as f64, target_tokens })
    }
}

impl StepLoss {
    /// Returns the factor on gradients that were scaled by `1 / planned` target tokens.
    #[must_use]
    pub fn factor(&self, planned: u64) -> f64 {
        planned as f64 / self.target_tokens.max(1) as f64
    }
}
