//! Selects what the decoders make of the bytes of a sample.

use std::num::NonZeroU32;

use crate::error::{Error, Result};
use crate::media::augment::Augment;

/// What is done with the bytes of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decode {
    /// Nothing: fields are delivered as stored.
    Raw,
    /// Every field becomes what its extension says: pixels, PCM, text, JSON, arrays.
    Media,
    /// Images into one tensor: shorter side to `side` (bilinear, antialiased), center crop, normalized. Other fields, where
    /// they are asked for by name, become what their extensions say.
    Pixels {
        /// Height and width in pixels.
        side: NonZeroU32,
    },
}

/// Refuses to change images that stay undecoded.
pub(crate) fn check_augment(decode: Decode, augment: Option<&Augment>) -> Result<()> {
    if decode != Decode::Raw || augment.is_none() {
        return Ok(());
    }
    Err(Error::Config { setting: "augment", reason: "only decoded images can be changed".into() })
}
