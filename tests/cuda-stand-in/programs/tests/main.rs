//! Programs that use CUDA devices, on the stand-ins: the command, and the checks in `benches/gpu`.

#[allow(dead_code, reason = "tests of the command without CUDA devices use all of it")]
#[path = "../../../../bindings/cli/tests/cli/command.rs"]
mod command;
#[allow(dead_code, reason = "tests of the command without CUDA devices use all of it")]
#[path = "../../../../bindings/cli/tests/cli/train/config.rs"]
mod config;
mod dflop;
mod gpu_check;
