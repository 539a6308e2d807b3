//! Collects the steps of a training run.

use crate::report::document::{TrainedStep, Training};

impl Training {
    /// Means of consecutive steps, so that the page has at most [`Self::STEPS_MAX`] of them; `None` without a
    /// step.
    pub(crate) fn new(strategy: &str, steps: &[TrainedStep]) -> Option<Self> {
        let every = steps.len().div_ceil(Self::STEPS_MAX).max(1);
        let shown: Vec<TrainedStep> = steps.chunks(every).map(TrainedStep::mean).collect();
        let taken = steps.len() as u64;
        (taken > 0).then(|| Self { strategy: strategy.to_owned(), steps: shown, taken })
    }

    const STEPS_MAX: usize = 1_000;

    /// Returns the mean time of a step; without the first, which warms up, if there are more.
    pub(crate) fn mean_seconds(&self) -> f64 {
        let timed = if self.steps.len() > 1 { &self.steps[1..] } else { &self.steps[..] };
        timed.iter().map(|step| step.seconds).sum::<f64>() / timed.len().max(1) as f64
    }
}

impl TrainedStep {
    /// Returns the means of consecutive steps, at the number of the last one.
    fn mean(steps: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| steps.iter().map(of).sum::<f64>() / steps.len().max(1) as f64;
        Self {
            step: steps.last().map_or(0, |step| step.step),
            loss: mean(|step| step.loss),
            seconds: mean(|step| step.seconds),
            pipeline_seconds: mean(|step| step.pipeline_seconds),
            predicted_seconds: mean(|step| step.predicted_seconds),
            replayed_seconds: mean(|step| step.replayed_seconds),
            data_wait_seconds: mean(|step| step.data_wait_seconds),
            exposed_communication_seconds: mean(|step| step.exposed_communication_seconds),
            tokens_per_second: mean(|step| step.tokens_per_second),
            bubble_fraction: mean(|step| step.bubble_fraction),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_steps_become_means() {
        let step = |step: u64| TrainedStep { step, seconds: step as f64, ..TrainedStep::default() };
        let steps: Vec<TrainedStep> = (0..2_500).map(step).collect();
        let training = Training::new("balanced", &steps).unwrap();
        assert_eq!((training.steps.len(), training.taken), (834, 2_500));
        assert_eq!((training.steps[0].step, training.steps[0].seconds), (2, 1.0));
        assert!(Training::new("balanced", &[]).is_none());
    }
}
