//! Tiny models of Hugging Face transformers: logits, loss and every gradient, on packed samples of uneven length with
//! media among them, against what `tests/record/executor_parity.py` recorded.

#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]
#![allow(clippy::print_stdout, reason = "differences are worth reading")]

mod encoder;
mod fixture;
mod language_models;
mod media;
