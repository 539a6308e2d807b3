//! The optimizer and checkpoint suite on the CUDA device, on the stand-in.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../../../tests/training/bf16.rs"]
mod bf16;
#[path = "../../../tests/training/checkpoint.rs"]
mod checkpoint;
#[path = "../support/cuda.rs"]
mod device;
#[path = "../../../tests/training/model.rs"]
mod model;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
#[path = "../../../tests/training/tensor_parallel.rs"]
mod tensor_parallel;
#[path = "../../../tests/training/update.rs"]
mod update;
