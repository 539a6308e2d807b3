//! Communicators over NCCL on the stand-ins: the conformance suite, failures, orders that differ.

#[path = "../support/nccl.rs"]
mod device;
mod failures;
#[path = "../../../device/tests/conformance/suite.rs"]
mod suite;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
