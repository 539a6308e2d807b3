//! Resizes images to one square: CLIP scales the shorter side and crops, SigLIP stretches the whole image.

use dflop_costmodel::tokens::fixed_tile::FixedTile;

use super::Pixel;
use super::filter::Filter;
use super::normalize::Normalization;
use super::resample::{Resampler, Resize};
use super::rgb_view::RgbView;
use super::squares::squares;
use super::{PixelValues, positions};

/// Settings of a processor that makes one square from an image.
///
/// # Source
/// `CLIPImageProcessor` and `SiglipImageProcessor` of transformers 4.57.1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Square {
    /// Length of the shorter side before the crop, at least `side`; `None` stretches the whole image.
    pub shortest_side: Option<u16>,
    /// Side of the square in pixels.
    pub side: u16,
    /// Encoder tokens of the square, each an LLM position.
    pub tokens: u32,
    /// The resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
}

impl Square {
    /// CLIP ViT-L/14 at 336 pixels, the vision encoder of LLaVA 1.5.
    pub const CLIP_336: Self = Self {
        shortest_side: Some(336),
        side: 336,
        tokens: 576,
        filter: Filter::Bicubic,
        normalization: Normalization::CLIP,
    };
    /// SigLIP-so400m/14 at 384 pixels.
    pub const SIGLIP_384: Self = Self {
        shortest_side: None,
        side: 384,
        tokens: 729,
        filter: Filter::Bicubic,
        normalization: Normalization::SIGNED,
    };

    /// Returns the published processor of CLIP for a rule that crops, of SigLIP for one that stretches.
    #[must_use]
    pub const fn from_rule(rule: FixedTile) -> Self {
        let square = if rule.is_cropped { Self::CLIP_336 } else { Self::SIGLIP_384 };
        let shortest_side = if rule.is_cropped { Some(rule.tile_pixels) } else { None };
        Self { shortest_side, side: rule.tile_pixels, tokens: rule.tile_patches, ..square }
    }

    /// Makes `[frames, 3, side, side]`; an image is one frame.
    pub(super) fn frames<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> PixelValues {
        let side = usize::from(self.side);
        let values = squares::<T>(frames, side, &self.normalization, resampler, |frame| self.resize(frame));
        PixelValues {
            values: T::buffer(values),
            shape: vec![frames.len(), 3, side, side],
            grid_thw: None,
            image_size: None,
            tokens: positions(frames.len() as u64 * u64::from(self.tokens)),
        }
    }

    fn resize(&self, image: RgbView<'_>) -> Resize {
        let side = usize::from(self.side);
        let Some(shortest) = self.shortest_side else {
            return Resize::whole(self.filter, side, side);
        };
        let size = image.size();
        let shorter = u64::from(size.width.min(size.height));
        let resized = [size.width, size.height]
            .map(|length| (u64::from(length) * u64::from(shortest) / shorter) as usize);
        let [columns, rows] = resized.map(|length| {
            let start = (length - side) / 2;
            start..start + side
        });
        Resize { filter: self.filter, width: resized[0], height: resized[1], columns, rows }
    }
}
