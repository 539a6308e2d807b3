//! The tensor-parallel suite on the test device that computes late.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../tensor_parallel/counted.rs"]
mod counted;
#[path = "../tensor_parallel/decoders.rs"]
mod decoders;
#[path = "../../../device/tests/support/deferred.rs"]
mod device;
#[path = "../parity/encoder.rs"]
mod encoder;
#[path = "../parity/fixture.rs"]
mod fixture;
#[path = "../tensor_parallel/job.rs"]
mod job;
#[path = "../tensor_parallel/media.rs"]
mod media;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
#[path = "../tensor_parallel/weights.rs"]
mod weights;
