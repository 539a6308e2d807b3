//! Sizes samples by the work of both modules.

use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::{EncoderWork, VisionRule};
use dflop_costmodel::{ModelSpec, SampleUnits};

/// Size of a sample in both modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ItemSize {
    /// Units of the encoder: tiles, windows of audio, or patches of media in native resolution; 0 for text
    /// alone.
    pub tiles: u32,
    /// Tokens in the LLM, at least 1.
    pub tokens: u32,
    /// Query-key pairs of the media in a mean encoder layer, for media in native resolution: each attends
    /// within itself, so that the sample has at most `tiles²`. 0 where all units have one size, because their
    /// attention is part of the time per unit.
    pub pairs: u64,
}

impl ItemSize {
    /// Returns the size of a sample whose tiles or windows have one size.
    #[must_use]
    pub const fn of_tiles(tiles: u32, tokens: u32) -> Self {
        Self { tiles, tokens, pairs: 0 }
    }

    /// Returns the size of a sample whose media come in native resolution, for a model that sees them so.
    ///
    /// - `squares`: sum over its media of their squared patches
    /// - `window_squares`: sum over attention windows of their squared patches; `None` takes all windows as
    ///   full, which is a little too much, as windows at the edges are smaller
    #[must_use]
    pub fn of_patches(
        spec: &ModelSpec,
        patches: u32,
        tokens: u32,
        squares: u64,
        window_squares: Option<u64>,
    ) -> Self {
        let mut size = Self::of_tiles(patches, tokens);
        let Some(VisionSpec { encoder, rule: VisionRule::Native(rule) }) = &spec.vision else { return size };
        let full_windows = rule.window_patches.map_or(squares, |side| {
            u64::from(side.get()).pow(2).saturating_mul(u64::from(patches)).min(squares)
        });
        let window_pairs = window_squares.unwrap_or(full_windows);
        let work = EncoderWork { attention_pairs: squares, window_pairs, ..EncoderWork::default() };
        size.pairs = encoder.mean_layer_pairs(&work);
        size
    }
}

impl From<SampleUnits> for ItemSize {
    fn from(SampleUnits { encoder_units, tokens, pairs }: SampleUnits) -> Self {
        Self { tiles: encoder_units, tokens, pairs }
    }
}
