//! The conformance suite of communicators of tensors over NCCL, on the stand-ins.

#[path = "../support/nccl.rs"]
mod device;
#[path = "../../../device/tests/conformance/suite.rs"]
mod suite;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
