//! The parity suite on the test device that computes late.

#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../../../device/tests/support/deferred.rs"]
mod device;
#[path = "../parity/encoder.rs"]
mod encoder;
#[path = "../parity/fixture.rs"]
mod fixture;
#[path = "../parity/language_models.rs"]
mod language_models;
#[path = "../parity/media.rs"]
mod media;
#[path = "../parity/omni.rs"]
mod omni;
