//! Collects report sections from plans, datasets and traces.

mod accuracy;
mod described;
mod planned;
mod previews;
mod run;
mod steps;
mod trace;
mod training;

pub(crate) use described::SampleTable;
pub(crate) use planned::PlannedSteps;
pub(crate) use previews::jpeg as shrunk_jpeg;
pub(crate) use run::ABOUT_RUN;
pub(crate) use steps::timelines_of_plans;
pub(crate) use trace::{Measured, read_traces};
