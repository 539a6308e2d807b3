//! Parity with Hugging Face transformers: logits, loss and every gradient of tiny models.
//!
//! Inputs are packed samples of uneven length with media, recorded by `tests/record/executor_parity.py`.

#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../../../device/tests/support/cpu.rs"]
mod device;
mod encoder;
mod fixture;
mod language_models;
mod media;
mod omni;
