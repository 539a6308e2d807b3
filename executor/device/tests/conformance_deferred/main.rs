//! The conformance suite of communicators of tensors on the test device that computes late.

#[path = "../support/deferred.rs"]
mod device;
#[path = "../conformance/suite.rs"]
mod suite;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
