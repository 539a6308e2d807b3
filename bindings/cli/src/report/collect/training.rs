//! Collects the steps from a training run.
//!
//! Collects the measured and predicted passes in a training run as a study.

use super::described::SampleTable;
use super::trace::Measured;
use crate::failure::Failure;
use crate::report::document::{Basis, StrategyResult, Study, TrainedStep, Training};
use crate::report::verdict::percent;
use dflop_loader::StepPlanner;

impl Training {
    /// Means over consecutive steps, so that the page has at most [`Self::STEPS_MAX`] entries; `None` without
    /// a step.
    pub(crate) fn new(strategy: &str, steps: &[TrainedStep]) -> Option<Self> {
        let every = steps.len().div_ceil(Self::STEPS_MAX).max(1);
        let shown: Vec<TrainedStep> = steps.chunks(every).map(TrainedStep::mean).collect();
        let taken = steps.len() as u64;
        (taken > 0).then(|| Self { strategy: strategy.to_owned(), steps: shown, taken })
    }

    const STEPS_MAX: usize = 1_000;

    /// Returns the changes of the loss and the evaluation loss as a sentence part; empty if none is recorded.
    pub(crate) fn loss_change(&self) -> String {
        let change = |name: &str, of: fn(&TrainedStep) -> Option<f64>| {
            let losses = || self.steps.iter().filter_map(of);
            let ends = losses().next().zip(losses().next_back());
            ends.map_or_else(String::new, |(first, last)| format!(", {name} {first:.3} to {last:.3}"))
        };
        change("loss", |step| step.loss) + &change("evaluation loss", |step| step.evaluation?.loss)
    }

    /// Returns a sentence on the time between steps in which devices are idle, by cause; `None` if it is not
    /// recorded. Without the first step, which waits for the run to start.
    pub(crate) fn idle(&self) -> Option<String> {
        let steps = if self.steps.len() > 1 { &self.steps[1..] } else { &self.steps[..] };
        let seconds: f64 = steps.iter().map(|step| step.seconds).sum();
        let sum = |of: fn(&TrainedStep) -> Option<f64>| steps.iter().map(of).sum::<Option<f64>>();
        let parts = [
            ("waiting for data", sum(|step| Some(step.data_wait_seconds))?),
            ("preparing and copying inputs", sum(|step| step.input_seconds)?),
            ("planning on the host", sum(|step| step.plan_seconds)?),
            ("reading results", sum(|step| step.result_seconds)?),
            ("reporting", sum(|step| step.report_seconds)?),
            ("saving checkpoints", sum(|step| step.checkpoint_seconds)?),
        ];
        let share = |part: f64| percent(part / seconds.max(f64::MIN_POSITIVE));
        let idle = share(parts.iter().map(|(_, part)| part).sum());
        let named: Vec<String> =
            parts.iter().map(|(what, part)| format!("{what} {}", share(*part))).collect();
        let update = share(sum(|step| step.update_seconds)?);
        Some(format!(
            "Between steps devices have nothing to do for {idle} of the time: {}. The update takes {update}.",
            named.join(", ")
        ))
    }

    /// Returns the mean time of a step; without the first, which warms up, if there are more.
    pub(crate) fn mean_seconds(&self) -> f64 {
        let timed = if self.steps.len() > 1 { &self.steps[1..] } else { &self.steps[..] };
        timed.iter().map(|step| step.seconds).sum::<f64>() / timed.len().max(1) as f64
    }
}

impl TrainedStep {
    /// Returns the mean over consecutive steps, under the last step number.
    fn mean(steps: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| steps.iter().map(of).sum::<f64>() / steps.len().max(1) as f64;
        // Of the steps that have the value.
        let known = |of: fn(&Self) -> Option<f64>| {
            let values: Vec<f64> = steps.iter().filter_map(of).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        Self {
            step: steps.last().map_or(0, |step| step.step),
            seconds: mean(|step| step.seconds),
            data_wait_seconds: mean(|step| step.data_wait_seconds),
            loss: known(|step| step.loss),
            pipeline_seconds: known(|step| step.pipeline_seconds),
            predicted_seconds: known(|step| step.predicted_seconds),
            replayed_seconds: known(|step| step.replayed_seconds),
            exposed_communication_seconds: known(|step| step.exposed_communication_seconds),
            tokens_per_second: known(|step| step.tokens_per_second),
            bubble_fraction: known(|step| step.bubble_fraction),
            pass_seconds: known(|step| step.pass_seconds),
            update_seconds: known(|step| step.update_seconds),
            input_seconds: known(|step| step.input_seconds),
            plan_seconds: known(|step| step.plan_seconds),
            result_seconds: known(|step| step.result_seconds),
            report_seconds: known(|step| step.report_seconds),
            checkpoint_seconds: known(|step| step.checkpoint_seconds),
            evaluation: steps.iter().rev().find_map(|step| step.evaluation),
        }
    }
}

impl Measured {
    /// Names the samples in every step group, and describes them in `table`.
    ///
    /// - `planner`: the run's planner; its strategy does not matter, because all strategies have the samples
    ///   in the same order
    ///
    /// # Errors
    /// [`Failure`] if a step cannot be planned again.
    pub(crate) fn name_samples(
        &mut self,
        planner: &StepPlanner,
        table: &mut SampleTable,
    ) -> Result<(), Failure> {
        let mut places = self.places.drain(..);
        for step in &mut self.steps {
            let plan = planner.plan(step.step)?;
            for timeline in &mut step.timelines {
                let groups = places.next().unwrap_or_default().into_iter();
                let mut index_of = |place: u32| {
                    let (sample, cost) = (plan.samples.get(place as usize)?, plan.costs.get(place as usize)?);
                    Some(table.sample_index(planner.datasets(), sample.dataset, sample.sample, cost))
                };
                timeline.groups =
                    groups.map(|group| group.into_iter().filter_map(&mut index_of).collect()).collect();
            }
        }
        Ok(())
    }

    /// Returns the mean pass makespan under a strategy, and the number of steps.
    pub(crate) fn mean_seconds(&self, strategy: usize) -> (f64, u64) {
        let own = self.steps.iter().flat_map(|step| &step.timelines);
        let own: Vec<u64> = own
            .filter(|timeline| timeline.strategy == strategy)
            .map(|timeline| timeline.makespan_ns)
            .collect();
        (own.iter().sum::<u64>() as f64 / 1e9 / own.len().max(1) as f64, own.len() as u64)
    }

    /// Returns a strategy's result.
    pub(crate) fn result(&self, strategy: usize, name: &str, basis: Basis) -> StrategyResult {
        let (step_seconds, steps) = self.mean_seconds(strategy);
        StrategyResult {
            name: name.to_owned(),
            basis,
            step_seconds,
            step_seconds_p95: None,
            bubble_fraction: None,
            bound_seconds: None,
            steps,
            plan: String::new(),
        }
    }

    /// Returns the run study: measured steps compared with predicted steps.
    pub(crate) fn study(&self, name: &str) -> Study {
        let strategies = vec![self.result(0, name, Basis::Measured), self.result(1, name, Basis::Simulated)];
        Study {
            name: "Passes of the run".to_owned(),
            about: ABOUT_RUN.to_owned(),
            modules: self.modules.clone(),
            strategies,
            samples: Vec::new(),
            steps: self.steps.clone(),
        }
    }
}

/// Explanation for people: measured timelines.
pub(crate) const ABOUT_RUN: &str = "Passes of the last steps, as they were measured and as they are simulated. A \
    simulated step is the schedule alone, without messages, optimizer and other load.";

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_executor::step_record::EvaluationLine;

    #[test]
    fn many_steps_become_means() {
        let step = |step: u64| TrainedStep { step, seconds: step as f64, ..TrainedStep::default() };
        let steps: Vec<TrainedStep> = (0..2_500).map(step).collect();
        let training = Training::new("balanced", &steps).unwrap();
        assert_eq!((training.steps.len(), training.taken), (834, 2_500));
        assert_eq!((training.steps[0].step, training.steps[0].seconds), (2, 1.0));
        assert!(Training::new("balanced", &[]).is_none());
        assert_eq!((training.steps[0].loss, training.loss_change().as_str()), (None, ""));
        let losses =
            [TrainedStep { loss: Some(3.0), ..step(0) }, step(1), TrainedStep { loss: Some(2.0), ..step(2) }];
        let training = Training::new("balanced", &losses).unwrap();
        assert_eq!(training.loss_change(), ", loss 3.000 to 2.000");
        assert_eq!(TrainedStep::mean(&losses).loss, Some(2.5));
    }

    #[test]
    fn an_entry_has_its_last_evaluation() {
        let evaluated = |step: u64, loss: Option<f64>| {
            let evaluation = Some(EvaluationLine { loss, seconds: 1.0 });
            TrainedStep { step, evaluation, ..TrainedStep::default() }
        };
        let plain = TrainedStep { step: 2, ..TrainedStep::default() };
        let steps = [evaluated(0, Some(3.5)), evaluated(1, Some(3.0)), plain];
        assert_eq!(TrainedStep::mean(&steps).evaluation.unwrap().loss, Some(3.0));
        assert_eq!(TrainedStep::mean(&[plain]).evaluation, None);
        let training = Training::new("balanced", &steps).unwrap();
        assert_eq!(training.loss_change(), ", evaluation loss 3.500 to 3.000");
        let training = Training::new("balanced", &[evaluated(0, None)]).unwrap();
        assert_eq!(training.loss_change(), "");
    }

    #[test]
    fn idle_time_is_named_by_what_it_is_if_every_step_records_it() {
        let step = |step: u64| TrainedStep {
            step,
            seconds: if step == 0 { 9.0 } else { 2.0 },
            data_wait_seconds: 0.1,
            update_seconds: Some(0.08),
            input_seconds: Some(0.2),
            plan_seconds: Some(0.0),
            result_seconds: Some(0.02),
            report_seconds: Some(0.04),
            checkpoint_seconds: Some(0.0),
            ..TrainedStep::default()
        };
        let training = |steps: &[TrainedStep]| Training::new("balanced", steps).unwrap();
        assert_eq!(
            training(&[step(0), step(1), step(2)]).idle().unwrap(),
            "Between steps devices have nothing to do for 18.0 % of the time: waiting for data 5.0 %, preparing \
             and copying inputs 10.0 %, planning on the host 0.0 %, reading results 1.0 %, reporting 2.0 %, saving \
             checkpoints 0.0 %. The update takes 4.0 %."
        );
        let earlier = TrainedStep { plan_seconds: None, ..step(1) };
        assert_eq!(training(&[step(0), earlier, step(2)]).idle(), None);
    }
}
