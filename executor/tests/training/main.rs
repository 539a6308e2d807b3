//! Optimizer and checkpoints: updates over ranks, saving and loading, bf16.

#![allow(clippy::print_stdout, reason = "measured values are shown")]
#![allow(clippy::float_cmp, reason = "tests compare bits on purpose")]

#[path = "../../comm/tests/support/mod.rs"]
mod support;

mod bf16;
mod checkpoint;
#[path = "../../device/tests/support/cpu.rs"]
mod device;
mod killed;
mod model;
mod saver;
mod tensor_parallel;
mod update;
