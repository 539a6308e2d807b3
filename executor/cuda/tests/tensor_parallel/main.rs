//! The tensor-parallel suite on the CUDA device, on the stand-in: several ranks on one device.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../../../models/tests/tensor_parallel/counted.rs"]
mod counted;
#[path = "../../../models/tests/tensor_parallel/decoders.rs"]
mod decoders;
#[path = "../support/cuda.rs"]
mod device;
#[path = "../../../models/tests/parity/encoder.rs"]
mod encoder;
#[path = "../../../models/tests/parity/fixture.rs"]
mod fixture;
#[path = "../../../models/tests/tensor_parallel/job.rs"]
mod job;
#[path = "../../../models/tests/tensor_parallel/media.rs"]
mod media;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
#[path = "../../../models/tests/tensor_parallel/weights.rs"]
mod weights;
