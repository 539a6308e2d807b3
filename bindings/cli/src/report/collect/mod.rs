//! Collects report sections from plans, datasets and traces.
//!
//! Collects planned steps under several strategies as a study.

mod accuracy;
mod described;
mod steps;
mod trace;
mod training;

use super::document::{StrategyResult, Study};
use crate::failure::Failure;
use dflop_balancer::Strategy;
use dflop_balancer::schedule::ScheduleKind;
use dflop_loader::StepPlanner;
use std::ops::Range;

pub(crate) use described::{SampleTable, jpeg as shrunk_jpeg};
pub(crate) use steps::{timelines_of_methods, timelines_of_plans};
pub(crate) use trace::{Measured, read_traces};
pub(crate) use training::ABOUT_RUN;

/// Planned steps and how they are shown.
#[derive(Debug)]
pub(crate) struct PlannedSteps<'a> {
    pub(crate) planner: &'a StepPlanner,
    /// Strategies with results over all steps, data-blind first.
    pub(crate) strategies: Vec<(Strategy, StrategyResult)>,
    pub(crate) schedule: ScheduleKind,
    pub(crate) steps: Range<u64>,
    /// Number of samples with previews.
    pub(crate) previews: usize,
}

impl PlannedSteps<'_> {
    /// Plans and simulates the first steps pass by pass; returns the study, and a note if previews could not
    /// be read.
    ///
    /// # Errors
    /// [`Failure`] if a step cannot be planned or simulated.
    pub(crate) fn study(self, name: &str, about: &str) -> Result<(Study, Option<String>), Failure> {
        let Self { planner, strategies, schedule, steps, previews } = self;
        let (kinds, results): (Vec<Strategy>, Vec<StrategyResult>) = strategies.into_iter().unzip();
        let mut table = SampleTable::default();
        let steps = timelines_of_plans(planner, &kinds, schedule, steps, 0, &mut table)?;
        let (samples, note) = table.finish(planner.datasets(), previews);
        let study = Study {
            name: name.to_owned(),
            about: about.to_owned(),
            modules: planner.model().modules().iter().map(ToString::to_string).collect(),
            strategies: results,
            samples,
            steps,
        };
        Ok((study, note))
    }
}
