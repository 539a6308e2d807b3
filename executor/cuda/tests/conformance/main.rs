//! The conformance suite of communicators of tensors on the CUDA device, through the host, on the stand-in.

#[path = "../support/cuda.rs"]
mod device;
#[path = "../../../device/tests/conformance/suite.rs"]
mod suite;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
