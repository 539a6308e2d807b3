//! Schedules and simulations keep their guarantees: a module per kind of claim.

mod closed_forms;
mod common;
mod exposed;
mod lists;
mod makespan;
mod modules;
mod refusals;
mod timelines;
