//! Limits an image's longer side and cuts the image into rows of patches, the Pixtral and Mistral Small 3
//! rule.
//!
//! An image keeps its native size unless the longer side exceeds a limit; then it shrinks to the limit. Both
//! sides are stretched up to a multiple of patch x merge. The encoder processes every patch, `merge` x
//! `merge` patches become one LLM token, and an extra token ends each row. There are no videos.

use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use super::{EncoderWork, require_pixels};
use crate::ImageSize;
use crate::error::{Error, Result};

/// Rule settings; encoder items are patches.
///
/// # Source
/// Agrawal et al., "Pixtral 12B", 2024, arXiv:2410.07073, section 2; sizes as in `PixtralImageProcessor` and
/// tokens as in `PixtralProcessor` in transformers 5.24.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LongestEdge {
    /// Patch side in pixels.
    pub patch_pixels: NonZeroU16,
    /// Number of patches along the side of the square that becomes one LLM token.
    pub merge: NonZeroU16,
    /// Maximum image side in pixels, before both sides are stretched to whole patches.
    pub side_max: NonZeroU16,
}

impl LongestEdge {
    /// Returns the work for an image: all features, and a token after each feature row.
    ///
    /// # Errors
    /// [`Error::EmptyImage`] if the image has no pixels, [`Error::AspectRatio`] if a side would shrink to
    /// nothing.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        let [columns, rows] = self.grid(image)?;
        let merge = u64::from(self.merge.get());
        let patches = (columns * merge).saturating_mul(rows * merge);
        let pairs = patches.saturating_mul(patches);
        Ok(EncoderWork {
            items: patches,
            encoder_tokens: patches,
            tokens: (columns + 1) * rows,
            attention_pairs: pairs,
            window_pairs: pairs,
            padded_tokens: 0,
        })
    }

    /// Returns the feature columns and rows for an image, with `merge` x `merge` patches per feature.
    ///
    /// # Errors
    /// The errors of [`LongestEdge::image`].
    pub fn grid(&self, image: ImageSize) -> Result<[u64; 2]> {
        require_pixels(image)?;
        let side_max = f64::from(self.side_max.get());
        let sides = [image.width, image.height].map(f64::from);
        let ratio = sides.map(|side| side / side_max).into_iter().fold(1.0, f64::max);
        let shrunk = sides.map(|side| if ratio > 1.0 { (side / ratio).floor() as u64 } else { side as u64 });
        if shrunk.contains(&0) {
            let aspect_max = u32::from(self.side_max.get());
            return Err(Error::AspectRatio { width: image.width, height: image.height, aspect_max });
        }
        Ok(shrunk.map(|side| side.div_ceil(self.feature_pixels())))
    }

    /// Returns width and height in pixels that an image is resized to.
    ///
    /// # Errors
    /// The errors of [`LongestEdge::image`].
    pub fn resized(&self, image: ImageSize) -> Result<[u64; 2]> {
        Ok(self.grid(image)?.map(|features| features * self.feature_pixels()))
    }

    /// Returns the side of the square that becomes one LLM token, in pixels.
    fn feature_pixels(self) -> u64 {
        u64::from(self.patch_pixels.get()) * u64::from(self.merge.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIXTRAL: LongestEdge = LongestEdge {
        patch_pixels: NonZeroU16::new(16).unwrap(),
        merge: NonZeroU16::MIN,
        side_max: NonZeroU16::new(1024).unwrap(),
    };
    const MISTRAL_SMALL: LongestEdge = LongestEdge {
        patch_pixels: NonZeroU16::new(14).unwrap(),
        merge: NonZeroU16::new(2).unwrap(),
        side_max: NonZeroU16::new(1540).unwrap(),
    };

    /// By hand: 640 x 480 is 40 x 30 patches of 16; 1920 x 1080 shrinks to 1024 x 576.
    #[test]
    fn rows_of_patches_end_in_a_token_each() {
        for (rule, width, height, patches, tokens) in [
            (PIXTRAL, 640, 480, 1200, 41 * 30),
            (PIXTRAL, 1920, 1080, 64 * 36, 65 * 36),
            (PIXTRAL, 1, 1, 1, 2),
            (PIXTRAL, 1024, 1, 64, 65),
            // 23 x 18 features with 28 pixels per side
            (MISTRAL_SMALL, 640, 480, 4 * 23 * 18, 24 * 18),
            (MISTRAL_SMALL, 3080, 1540, 4 * 55 * 28, 56 * 28),
        ] {
            let work = rule.image(ImageSize { width, height }).unwrap();
            assert_eq!((work.items, work.tokens), (patches, tokens), "{width} x {height}");
            assert_eq!((work.encoder_tokens, work.attention_pairs), (patches, patches * patches));
            assert_eq!(work.window_pairs, work.attention_pairs);
        }
    }

    #[test]
    fn a_side_that_shrinks_to_nothing_is_an_error() {
        for (width, height) in [(1, 1025), (2049, 2), (100_000, 3), (u32::MAX, 1)] {
            let refused = Error::AspectRatio { width, height, aspect_max: 1024 };
            assert_eq!(PIXTRAL.image(ImageSize { width, height }), Err(refused));
        }
        assert!(PIXTRAL.image(ImageSize { width: 2, height: 2048 }).is_ok());
    }
}
