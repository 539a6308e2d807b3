//! Selects what decoders produce from sample bytes.

use std::num::NonZeroU32;

use dflop_samples::media::augment::Augment;

use crate::error::{Error, Result};

/// Decode mode for sample fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decode {
    /// No decoding: fields are delivered as stored.
    Raw,
    /// Every field is decoded by extension: pixels, PCM, text, JSON, arrays.
    Media,
    /// Images are decoded into a single tensor: shorter side to `side` (bilinear, antialiased), center crop,
    /// normalized. Further fields that are selected by name are decoded by extension.
    Pixels {
        /// Height and width in pixels.
        side: NonZeroU32,
    },
}

/// Rejects image augmentation where images stay undecoded.
pub(crate) fn check_augment(decode: Decode, augment: Option<&Augment>) -> Result<()> {
    if decode != Decode::Raw || augment.is_none() {
        return Ok(());
    }
    Err(Error::Config {
        setting: "augment",
        reason: "only decoded images can be augmented; decode to media or pixels".into(),
    })
}
