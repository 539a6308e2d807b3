//! Converts an image to a tile for the whole image and a tile per crop, the Gemma 3 rule with pan and scan.
//!
//! An image that is wide or high enough is cut along the longer side into crops about as long as the shorter
//! side; the image and every crop become a square each, with separate markers. The words that the processor
//! writes between them are text, and are counted with it. Nearly square images and small images are not cut.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::fixed_tile::FixedTile;
use super::{EncoderWork, require_pixels};
use crate::error::Result;
use crate::{ImageSize, VideoShape};

/// Rule settings; encoder items are tiles.
///
/// # Source
/// Gemma Team: "Gemma 3 Technical Report", 2025, arXiv:2503.19786, section 2; numbers of crops as in
/// `Gemma3ImageProcessor` in transformers 5.24.0, with equal results on Pillow and torchvision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PanAndScan {
    /// Square that the image and each crop become.
    pub tile: FixedTile,
    /// Minimum side of a crop in pixels; an image whose crops would be smaller is not cut.
    pub crop_pixels_min: NonZeroU32,
    /// Maximum number of crops in an image.
    pub crops_max: NonZeroU32,
    /// Minimum ratio of the longer to the shorter side for which an image is cut.
    pub aspect_min: AspectRatio,
}

/// Ratio between two lengths: above 0 and finite.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct AspectRatio(f64);

impl PanAndScan {
    /// Default minimum side of a crop in pixels.
    pub const CROP_PIXELS_MIN: NonZeroU32 = NonZeroU32::new(256).unwrap();
    /// Default maximum number of crops.
    pub const CROPS_MAX: NonZeroU32 = NonZeroU32::new(4).unwrap();
    /// Default minimum side ratio for which an image is cut.
    pub const ASPECT_MIN: AspectRatio = AspectRatio(1.2);

    /// Returns the work for an image.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        let [columns, rows] = self.grid(image)?;
        Ok(self.tile.tiles(1 + columns * rows))
    }

    /// Returns the work for a video: one tile per frame of any size.
    #[must_use]
    pub fn video(&self, video: VideoShape) -> EncoderWork {
        self.tile.video(video)
    }

    /// Returns the crop columns and rows in addition to the image itself, 0 if it is not cut. Crops are as
    /// long as the image divided by the number of crops, rounded up; the last crop is what remains.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn grid(&self, image: ImageSize) -> Result<[u64; 2]> {
        require_pixels(image)?;
        let is_wide = image.width >= image.height;
        let [shorter, longer] =
            if is_wide { [image.height, image.width] } else { [image.width, image.height] };
        let crops = self.crops([shorter, longer].map(u64::from));
        Ok(match crops {
            0 => [0, 0],
            crops if is_wide => [crops, 1],
            crops => [1, crops],
        })
    }

    /// Returns the number of crops along the longer side.
    fn crops(&self, [shorter, longer]: [u64; 2]) -> u64 {
        let aspect = longer as f64 / shorter as f64;
        if aspect < self.aspect_min.0 {
            return 0;
        }
        let smallest = u64::from(self.crop_pixels_min.get());
        // Half is rounded up, as in the original.
        let crops = ((aspect + 0.5).floor() as u64).min(longer / smallest).max(2);
        let crops = crops.min(u64::from(self.crops_max.get()));
        let length = longer.div_ceil(crops);
        // The last crop would have no pixels for a short side and many crops, for which the original fails.
        let is_cut = length.min(shorter) >= smallest && length * (crops - 1) < longer;
        if is_cut { crops } else { 0 }
    }
}

impl AspectRatio {
    /// Creates a ratio; `None` unless it is above 0 and finite.
    #[must_use]
    pub fn new(ratio: f64) -> Option<Self> {
        (ratio > 0.0 && ratio.is_finite()).then_some(Self(ratio))
    }

    /// Returns the ratio.
    #[must_use]
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl Eq for AspectRatio {}

impl std::hash::Hash for AspectRatio {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl TryFrom<f64> for AspectRatio {
    type Error = String;

    fn try_from(ratio: f64) -> std::result::Result<Self, String> {
        Self::new(ratio).ok_or_else(|| format!("expected a ratio above 0, found {ratio}"))
    }
}

impl From<AspectRatio> for f64 {
    fn from(ratio: AspectRatio) -> Self {
        ratio.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: PanAndScan = PanAndScan {
        tile: FixedTile {
            tile_pixels: 896,
            tile_patches: 4096,
            pooled_patches: NonZeroU32::new(16).unwrap(),
            marker_tokens: 2,
            is_cropped: false,
            frames_max: 0,
        },
        crop_pixels_min: PanAndScan::CROP_PIXELS_MIN,
        crops_max: PanAndScan::CROPS_MAX,
        aspect_min: PanAndScan::ASPECT_MIN,
    };

    fn grid(rule: &PanAndScan, width: u32, height: u32) -> [u64; 2] {
        rule.grid(ImageSize { width, height }).unwrap()
    }

    /// By hand: 900 / 600 is rounded up to 2 crops, 1499 / 600 is 2, 1500 / 600 is 3, with 500 pixels each.
    #[test]
    fn images_are_cut_along_their_longer_side() {
        for (width, height, crops) in [
            (640, 480, 2),
            (719, 600, 0),
            (720, 600, 2),
            (1499, 600, 2),
            (1500, 600, 3),
            (4000, 600, 4),
            (600, 600, 0),
            (512, 256, 2),
            (511, 256, 2),
            (510, 256, 0),
            (4000, 255, 0),
            (4000, 1, 0),
        ] {
            let [wide, high] = if crops == 0 { [[0, 0]; 2] } else { [[crops, 1], [1, crops]] };
            assert_eq!(grid(&RULE, width, height), wide, "{width} x {height}");
            let turned = if width == height { wide } else { high };
            assert_eq!(grid(&RULE, height, width), turned, "{height} x {width}");
            let work = RULE.image(ImageSize { width, height }).unwrap();
            let tiles = 1 + crops;
            assert_eq!((work.items, work.encoder_tokens, work.tokens), (tiles, tiles * 4096, tiles * 258));
        }
    }

    #[test]
    fn no_crop_is_without_pixels() {
        let (crop_pixels_min, crops_max) = (NonZeroU32::MIN, NonZeroU32::new(9).unwrap());
        let rule = PanAndScan { crop_pixels_min, crops_max, ..RULE };
        for width in 1..300_u32 {
            for height in 1..20 {
                let [columns, rows] = grid(&rule, width, height);
                for (crops, length) in [(columns, width), (rows, height)] {
                    let last = crops.saturating_sub(1) * u64::from(length).div_ceil(crops.max(1));
                    assert!(last < u64::from(length), "{width} x {height}");
                }
            }
        }
        assert_eq!(grid(&rule, 6, 1), [6, 1]);
        let four = PanAndScan { crops_max: PanAndScan::CROPS_MAX, ..rule };
        assert_eq!(grid(&four, 6, 1), [0, 0], "crops of 2 pixels: the fourth begins at the end");
    }

    #[test]
    fn ratios_are_positive() {
        assert_eq!([0.0, -1.0, f64::NAN, f64::INFINITY].map(AspectRatio::new), [None; 4]);
        let refused = serde_json::from_str::<AspectRatio>("0.0").unwrap_err().to_string();
        assert!(refused.contains("above 0"), "{refused}");
        assert_eq!(serde_json::from_str::<AspectRatio>("1.2").unwrap(), PanAndScan::ASPECT_MIN);
    }
}
