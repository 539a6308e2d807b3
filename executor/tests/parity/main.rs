//! Tiny models of Hugging Face transformers: logits, loss and every gradient, on packed samples of uneven length with
//! media among them, against what `tests/record/executor_parity.py` recorded.

mod fixture;
mod language_models;
