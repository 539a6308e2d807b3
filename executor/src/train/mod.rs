//! Trains on one rank, step by step: inputs, pipeline, optimizer, corrections of the plan, report, trace.
//!
//! [`TrainingRank::step`] is called by all ranks together, as are all methods documented so. Reports are
//! equal on all ranks except for times measured on their own clocks; print the one of rank 0. Measured times
//! of modules are summed over ranks and correct the cost model that plans later steps
//! ([`dflop_costmodel::correction`]); every rank computes the same correction tables without further
//! messages. [`TraceWriter`] writes measured next to predicted times of every action, [`utilization`] is the
//! MFU of a step.

mod build_stages;
mod forecast;
mod measured_times;
mod mfu;
mod pass_predictor;
mod plan_correction;
mod skip_warnings;
mod step_report;
mod trace;
mod training_rank;

pub use build_stages::{build_stages, join_job};
pub use forecast::Forecast;
pub use measured_times::MeasuredTimes;
pub use mfu::{model_flops, utilization};
pub use pass_predictor::PassPredictor;
pub use step_report::StepReport;
pub use trace::{TraceWriter, TracedAction, join_traces};
pub use training_rank::{TrainingRank, TrainingRankOptions};

/// Configuration of a small run on CPU for `dflop train`, TOML.
pub const EXAMPLE_CONFIG: &str = include_str!("../../examples/train-cpu.toml");
