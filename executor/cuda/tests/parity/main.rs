//! The parity suite on the CUDA device, on the stand-in: logits, loss and gradients against PyTorch's.

#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

#[path = "../support/cuda.rs"]
mod device;
#[path = "../../../models/tests/parity/encoder.rs"]
mod encoder;
#[path = "../../../models/tests/parity/fixture.rs"]
mod fixture;
#[path = "../../../models/tests/parity/language_models.rs"]
mod language_models;
#[path = "../../../models/tests/parity/media.rs"]
mod media;
#[path = "../../../models/tests/parity/omni.rs"]
mod omni;
