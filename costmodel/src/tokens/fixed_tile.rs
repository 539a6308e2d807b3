//! Converts every image to one tile, the rule for CLIP and SigLIP before an LLM, as in LLaVA 1.5, and for
//! Gemma 3.
//!
//! Every image becomes a square: stretched (SigLIP) or cut to the center (CLIP). Every patch is an LLM token,
//! without markers; Gemma 3 pools blocks of patches to a single token, and two marker tokens enclose each
//! image.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::{EncoderWork, require_pixels};
use crate::error::Result;
use crate::{ImageSize, VideoShape};

/// Rule settings; encoder items are tiles.
///
/// # Source
/// `CLIPImageProcessor` and `SiglipImageProcessor` in transformers 4.57.1, `Gemma3Processor` in 5.24.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FixedTile {
    /// Square side in pixels.
    pub tile_pixels: u16,
    /// Patches per square, each an encoder token.
    pub tile_patches: u32,
    /// Number of patches that become one LLM token.
    #[serde(default = "one")]
    pub pooled_patches: NonZeroU32,
    /// Marker tokens around an image or a frame.
    #[serde(default)]
    pub marker_tokens: u8,
    /// Whether the image center is cropped; otherwise the whole image is stretched.
    pub is_cropped: bool,
    /// Maximum number of frames; longer videos are sampled down to this number. 0 if the model does not
    /// support videos.
    pub frames_max: u32,
}

/// Returns one patch per token, as in specifications without pooling.
const fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

impl FixedTile {
    /// Returns the work for an image.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        require_pixels(image)?;
        Ok(self.tiles(1))
    }

    /// Returns the work for a video: one tile per frame of any size.
    #[must_use]
    pub fn video(&self, video: VideoShape) -> EncoderWork {
        self.tiles(u64::from(video.frames.min(self.frames_max)))
    }

    /// Returns the LLM tokens per tile.
    #[must_use]
    pub const fn pooled_tokens(&self) -> u32 {
        self.tile_patches / self.pooled_patches.get()
    }

    /// Returns the work for this many tiles.
    pub(super) fn tiles(&self, tiles: u64) -> EncoderWork {
        let patches = u64::from(self.tile_patches);
        let of_tile = u64::from(self.pooled_tokens()) + u64::from(self.marker_tokens);
        EncoderWork::from_items(tiles, patches, tiles.saturating_mul(of_tile))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: FixedTile = FixedTile {
        tile_pixels: 336,
        tile_patches: 576,
        pooled_patches: NonZeroU32::MIN,
        marker_tokens: 0,
        is_cropped: true,
        frames_max: 32,
    };

    #[test]
    fn pooled_patches_are_fewer_tokens_between_markers() {
        let pooled_patches = NonZeroU32::new(16).unwrap();
        let rule =
            FixedTile { tile_pixels: 896, tile_patches: 4096, pooled_patches, marker_tokens: 2, ..RULE };
        let work = rule.image(ImageSize { width: 640, height: 480 }).unwrap();
        assert_eq!((work.items, work.encoder_tokens, work.tokens), (1, 4096, 258));
    }

    #[test]
    fn every_image_and_every_frame_is_one_tile() {
        for (width, height) in [(1, 1), (1, 100_000), (4961, 7016)] {
            let work = RULE.image(ImageSize { width, height }).unwrap();
            assert_eq!((work.items, work.encoder_tokens, work.tokens), (1, 576, 576));
            assert_eq!(work.attention_pairs, 576 * 576);
            for (frames, tiles) in [(0, 0), (8, 8), (972, 32)] {
                let work = RULE.video(VideoShape { frames, width, height });
                assert_eq!((work.items, work.tokens), (tiles, 576 * tiles));
            }
        }
    }
}
