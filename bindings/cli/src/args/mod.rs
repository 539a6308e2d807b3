//! Argument groups that several commands share, and conversions to library types.

pub(crate) mod dataset;
pub(crate) mod mixture;
pub(crate) mod model;
pub(crate) mod planned_steps;
pub(crate) mod profile;
pub(crate) mod report;
pub(crate) mod set;
pub(crate) mod step_plan;
pub(crate) mod tokenizer;
