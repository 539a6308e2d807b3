//! Training around stages: updates over ranks, saved states, traces.

#[path = "../support/mod.rs"]
mod support;

mod model;
mod update;
