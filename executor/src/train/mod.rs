//! Trains on a rank, step by step: inputs, pipeline, optimizer, plan corrections, report, trace.
//!
//! [`TrainingRank::step`] is called by all ranks together, as are all methods documented so. Reports are
//! equal on all ranks except for times from local clocks; print rank 0's report.
//!
//! Measured times of modules are summed over ranks, and every rank learns the same correction tables from
//! them ([`dflop_costmodel::correction`]), without further messages. The tables are recorded and reported;
//! plans change by them only if [`CorrectionSettings::is_applied`], because they depend on the load of the
//! machine. A [`CorrectionRecorder`] keeps them for a later run, which plans with the same tables at the same
//! steps ([`RecordedCorrections`]) and so has the same plans and bits.
//!
//! At the end of a step the ranks also agree whether to stop, for a signal or a closed output
//! ([`StopReason`]), and how far a checkpoint is that is written meanwhile; it takes no message of its own.
//!
//! The time of a step is divided into passes, the update, and what a device waits for between two steps
//! ([`IdleTimes`]), as far as that is known on the device's own clock.
//!
//! The first report also divides the time from the start of the run ([`StartReport`]).
//!
//! [`TraceWriter`] writes measured next to predicted times of every action, [`utilization`] is the MFU of a
//! step.

mod build_stages;
mod correction_record;
mod measured_times;
mod pass_predictor;
mod plan_correction;
mod skip_warnings;
mod start_times;
mod step_end;
mod step_report;
mod step_times;
mod trace;
mod training_rank;

pub(crate) use build_stages::build_stages_to_join;
pub use build_stages::{build_stages, build_stages_over, join_job, join_job_over};
pub use correction_record::{CorrectionRecorder, CorrectionSubject, RecordedCorrections};
pub use measured_times::MeasuredTimes;
pub use pass_predictor::{Forecast, PassPredictor};
pub use plan_correction::{CorrectionReport, CorrectionSettings};
pub(crate) use start_times::START_VARIABLE;
pub use start_times::{StartPart, StartPartTime, StartReport, StartTimes};
pub use step_end::StopReason;
pub use step_report::{StepReport, model_flops, utilization};
pub use step_times::IdleTimes;
pub use trace::{TraceWriter, TracedAction, join_traces};
pub use training_rank::{StopCheck, TrainingRank, TrainingRankOptions};

/// Configuration of a small run on CPU for `dflop train`, TOML.
pub const EXAMPLE_CONFIG: &str = include_str!("../../examples/train-cpu.toml");
