//! Lists the shapes that a module can be measured at, by sequence kind.

use dflop_costmodel::Module;
use dflop_costmodel::model::ModelSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::audio::AudioRule;

use super::synthetic_inputs::Media;
use crate::error::Result;
use dflop_models::encoder::TiledMedium;

/// Tokens per sequence in linear measurements, if the length is free: a single attention tile, so that
/// attention takes little time.
const SHORT: u32 = 64;
/// Image side in linear measurements, if the size is free, in patches.
const IMAGE_SIDE: u32 = 16;

/// Sequence kind in a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sequences {
    /// Samples with any length.
    Text,
    /// Image tiles with this token count.
    Tiles(u32),
    /// Full audio windows with this token count.
    Windows(u32),
    /// Audio in full chunks with these token and mel frame counts.
    Chunks {
        /// Number of encoder tokens.
        tokens: u32,
        /// Number of mel frames.
        frames: u32,
    },
    /// Images whose sides are multiples of this number of patches.
    Images(u32),
}

impl Sequences {
    /// Returns a module's sequence kind.
    ///
    /// # Errors
    /// [`dflop_models::Error::ModelConfig`] if the model has no such module.
    pub(super) fn of(spec: &ModelSpec, module: Module) -> Result<Self> {
        let rule = match (module, spec.vision.as_ref(), spec.audio.as_ref()) {
            (Module::Llm, _, _) => return Ok(Self::Text),
            (Module::Vision, Some(vision), _) => vision.rule,
            (Module::Audio, _, Some(audio)) => return Ok(Self::from_audio_rule(&audio.rule)),
            _ => {
                let problem = format!("has no module {module}");
                return Err(super::model_type(problem));
            }
        };
        Ok(match rule {
            VisionRule::AnyRes(rule) => Self::Tiles(u32::from(rule.patches_per_side).pow(2).max(1)),
            VisionRule::ListedGrids(rule) => Self::Tiles(u32::from(rule.patches_per_side).pow(2).max(1)),
            VisionRule::ScaledTiles(rule) => Self::Tiles(rule.tile_patches.max(1)),
            VisionRule::FittedTiles(rule) => Self::Tiles(rule.tile_patches.max(1)),
            VisionRule::DynamicTiles(rule) => Self::Tiles(u32::from(rule.tile_patches).max(1)),
            VisionRule::Fixed(rule) => Self::Tiles(rule.tile_patches.max(1)),
            VisionRule::PanAndScan(rule) => Self::Tiles(rule.tile.tile_patches.max(1)),
            VisionRule::Native(rule) => Self::Images(u32::from(rule.merge.get())),
            VisionRule::LongestEdge(rule) => Self::Images(u32::from(rule.merge.get())),
        })
    }

    fn from_audio_rule(rule: &AudioRule) -> Self {
        match rule {
            AudioRule::Windows(rule) => Self::Windows(rule.window_tokens.max(1)),
            AudioRule::Chunks(rule) => Self::Chunks {
                tokens: u32::try_from(rule.chunk_tokens()).unwrap_or(u32::MAX),
                frames: rule.chunk_frames.max(1),
            },
        }
    }

    /// Returns whether sequences differ in length, so that attention is measured by length.
    pub(super) const fn has_free_lengths(self) -> bool {
        matches!(self, Self::Text | Self::Images(_) | Self::Chunks { .. })
    }

    /// Returns the minimum token count to measure.
    pub(super) fn tokens_min(self) -> u32 {
        match self {
            Self::Text => SHORT / 4,
            Self::Tiles(tokens) | Self::Windows(tokens) | Self::Chunks { tokens, .. } => tokens,
            Self::Images(merge) => self.snap_length(4 * merge * merge),
        }
    }

    /// Returns the number and length of sequences, for about `tokens` tokens in total.
    pub(super) fn packed(self, tokens: u32) -> (u32, u32) {
        match self {
            Self::Text if tokens < SHORT => (1, tokens.max(1)),
            Self::Text => (tokens / SHORT, SHORT),
            Self::Tiles(length) | Self::Windows(length) | Self::Chunks { tokens: length, .. } => {
                ((tokens / length).max(1), length)
            }
            Self::Images(merge) => {
                let length = (IMAGE_SIDE / merge * merge).max(merge).pow(2);
                if tokens < length { (1, self.snap_length(tokens)) } else { (tokens / length, length) }
            }
        }
    }

    /// Returns the valid length nearest to `tokens`.
    pub(super) fn snap_length(self, tokens: u32) -> u32 {
        match self {
            // Attention is timed separately, also over more tokens than a chunk has.
            Self::Text | Self::Chunks { .. } => tokens.max(1),
            Self::Tiles(length) | Self::Windows(length) => length,
            Self::Images(merge) => {
                let side = f64::from(tokens).sqrt() / f64::from(merge);
                (side.round().max(1.0) as u32 * merge).pow(2)
            }
        }
    }

    /// Returns the media for `batch` sequences with equal lengths; `None` for text.
    pub(super) fn media(self, batch: u32, tokens: u32) -> Option<Media> {
        match self {
            Self::Text => None,
            Self::Tiles(_) => {
                let tile = TiledMedium::Image { height: 1, width: 1, tiles: 1 };
                Some(Media::Tiles(vec![tile; batch as usize]))
            }
            Self::Windows(_) => Some(Media::Windows(batch as usize)),
            Self::Chunks { frames, .. } => Some(Media::Clips(vec![frames; batch as usize])),
            Self::Images(_) => {
                let side = tokens.isqrt();
                Some(Media::Grids(vec![[1, side, side]; batch as usize]))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_those_that_there_can_be() {
        assert_eq!([15, 64, 200].map(|tokens| Sequences::Text.packed(tokens)), [(1, 15), (1, 64), (3, 64)]);
        assert_eq!([1, 3000].map(|tokens| Sequences::Tiles(729).packed(tokens)), [(1, 729), (4, 729)]);
        let images = Sequences::Images(2);
        assert_eq!([7, 100, 600].map(|tokens| images.packed(tokens)), [(1, 4), (1, 100), (2, 256)]);
        assert_eq!(images.snap_length(1000), 1024);
        let grids = Media::Grids(vec![[1, 10, 10]; 3]);
        assert_eq!(images.media(3, 100), Some(grids));
    }
}
