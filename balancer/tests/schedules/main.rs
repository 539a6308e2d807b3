//! Schedules and their simulation: lists that fit together, closed forms, timelines worked out by hand, and two ways
//! to the same makespan.

mod closed_forms;
mod common;
mod lists;
mod makespan;
mod modules;
mod refusals;
mod timelines;
