//! Sizes samples by work in all modules.

use dflop_balancer::{Error, Result};
use dflop_costmodel::{MediaUnits, SampleUnits};

/// Maximum number of encoders in a planned model.
pub(super) const ENCODERS_MAX: usize = 4;

/// Sample size in all modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ItemSize {
    /// Media in each encoder, in model order; 0 for missing encoders.
    media: [MediaUnits; ENCODERS_MAX],
    /// Tokens in the LLM, at least 1.
    pub tokens: u32,
}

impl ItemSize {
    /// Returns the size for a sample without media.
    #[must_use]
    pub const fn from_text(tokens: u32) -> Self {
        Self { media: [MediaUnits { units: 0, pairs: 0 }; ENCODERS_MAX], tokens }
    }

    /// Returns a sample size for a model with a single encoder and fixed-size tiles or windows.
    #[must_use]
    pub const fn from_tiles(tiles: u32, tokens: u32) -> Self {
        let mut size = Self::from_text(tokens);
        size.media[0].units = tiles;
        size
    }

    /// Returns the size for a sample with media in some encoders.
    ///
    /// - `media`: units in each encoder, in model order
    ///
    /// # Errors
    /// [`Error::Config`] for more encoders than plans support.
    pub fn from_media(media: &[MediaUnits], tokens: u32) -> Result<Self> {
        let mut size = Self::from_text(tokens);
        let Some(own) = size.media.get_mut(..media.len()) else {
            return Err(too_many_encoders(media.len()));
        };
        own.copy_from_slice(media);
        Ok(size)
    }

    /// Returns the media in an encoder.
    #[must_use]
    pub fn media(&self, encoder: usize) -> MediaUnits {
        self.media.get(encoder).copied().unwrap_or_default()
    }

    /// Returns the media in all encoders.
    pub(super) fn all_media(&self) -> &[MediaUnits; ENCODERS_MAX] {
        &self.media
    }
}

impl TryFrom<SampleUnits> for ItemSize {
    type Error = Error;

    fn try_from(SampleUnits { encoders, tokens }: SampleUnits) -> Result<Self> {
        Self::from_media(&encoders, tokens)
    }
}

/// Returns the error for a model with this many encoders.
pub(super) fn too_many_encoders(encoders: usize) -> Error {
    let reason =
        format!("plans are made for 1 to {ENCODERS_MAX} encoders and an LLM, got {encoders} encoders");
    Error::Config { setting: "encoders", reason }
}
