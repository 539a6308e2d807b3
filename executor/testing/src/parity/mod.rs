//! Parity with Hugging Face transformers: logits, loss and every gradient for tiny models.
//!
//! Inputs are packed samples with uneven lengths and media, recorded by `tests/record/executor_parity.py`.

pub(crate) mod encoder;
pub(crate) mod fixture;
pub mod language_models;
pub mod media;
pub mod omni;

use crate::claim::Claim;
use crate::device::TestBackend;

/// Lists the claims in this suite.
pub fn claims<B: TestBackend>() -> Vec<Claim> {
    let files = [language_models::claims::<B>(), media::claims::<B>(), omni::claims::<B>()];
    files.into_iter().flatten().collect()
}
