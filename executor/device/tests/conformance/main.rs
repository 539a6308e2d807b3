//! The conformance suite of communicators of tensors on the CPU, through the host.

#[path = "../support/cpu.rs"]
mod device;
mod suite;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
