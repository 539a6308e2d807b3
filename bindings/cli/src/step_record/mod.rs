//! The record of a run, a file of JSON lines: what the run is, then a line for each step, and how it ended.
//!
//! `dflop train` and the Python package write it, `dflop top` and `dflop report` read it. A resumed run
//! appends another heading; a line that a killed process cut is the last one, and is left out.

mod follow;
mod line;
mod writer;

pub(crate) use follow::Follower;
pub(crate) use line::{EndLine, Heading, Line, Outcome, StepLine, unix_seconds};
pub(crate) use writer::StepRecorder;

/// Name of the record in the directory of a run.
pub(crate) const FILE_NAME: &str = "steps.jsonl";
