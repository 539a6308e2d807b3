//! Tensor-parallel ranks give what one rank gives, and what PyTorch gives: losses, logits, gradients.

#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../../../device/tests/support/cpu.rs"]
mod device;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../parity/encoder.rs"]
mod encoder;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../parity/fixture.rs"]
mod fixture;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;

mod counted;
mod decoders;
mod failures;
mod job;
mod media;
mod weights;
