//! Training around stages: updates over ranks, saved states, traces.

#[path = "../support/mod.rs"]
mod support;

mod bf16;
mod checkpoint;
mod killed;
mod model;
mod update;
