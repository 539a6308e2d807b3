//! Training around stages: updates over ranks, saved states, traces.

#[path = "../support/mod.rs"]
mod support;

mod checkpoint;
mod killed;
mod model;
mod update;
