//! The optimizer and checkpoint suite on the test device that computes late.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../training/bf16.rs"]
mod bf16;
#[path = "../training/checkpoint.rs"]
mod checkpoint;
#[path = "../../device/tests/support/deferred.rs"]
mod device;
#[path = "../training/model.rs"]
mod model;
#[path = "../../comm/tests/support/mod.rs"]
mod support;
#[path = "../training/tensor_parallel.rs"]
mod tensor_parallel;
#[path = "../training/update.rs"]
mod update;
