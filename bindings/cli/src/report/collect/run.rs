//! Collects the measured and predicted passes in a training run as a study.

use dflop_loader::StepPlanner;

use super::described::SampleTable;
use super::trace::Measured;
use crate::failure::Failure;
use crate::report::document::{Basis, StrategyResult, Study};

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
