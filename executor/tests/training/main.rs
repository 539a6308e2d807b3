//! Training around stages: updates over ranks, saved states, bf16.

#![allow(clippy::print_stdout, reason = "figures that were reached are shown")]
#![allow(clippy::float_cmp, reason = "tests compare bits on purpose")]

#[path = "../support/mod.rs"]
mod support;

mod bf16;
mod checkpoint;
mod killed;
mod model;
mod tensor_parallel;
mod update;
