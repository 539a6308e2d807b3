//! Creates a square for an image and a square for each crop, as Gemma 3 does with pan and scan.

use dflop_costmodel::Result;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::pan_and_scan::PanAndScan;
use dflop_samples::inputs::PixelValues;

use super::Square;
use crate::image::resample::Resampler;
use crate::image::{GenericProcessor, Pixel, PixelSettings, RgbView};

/// Image processor with crops.
///
/// # Source
/// `Gemma3ImageProcessorPil` in transformers 5.24.0. `Gemma3ImageProcessor`, on torchvision, cuts the same
/// crops and resizes them with different arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CroppedSquares {
    /// Settings for each square.
    pub(super) square: Square,
    /// Rule for the number of crops.
    pub(super) rule: PanAndScan,
}

impl GenericProcessor for CroppedSquares {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::PanAndScan(self.rule))
    }

    fn settings(&self) -> PixelSettings {
        GenericProcessor::settings(&self.square)
    }

    fn set(&mut self, settings: &PixelSettings) {
        self.square.set(settings);
    }

    fn item_bytes(&self) -> u64 {
        GenericProcessor::item_bytes(&self.square)
    }

    /// Creates `[1 + crops, 3, side, side]`: the whole image, then the crops from left to right or from top
    /// to bottom.
    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        _: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        let crops = crops(image, self.rule.grid(image.size())?);
        let views = crops.iter().map(|(size, pixels)| RgbView { width: size[0], height: size[1], pixels });
        let tiles: Vec<RgbView<'_>> = std::iter::once(image).chain(views).collect();
        Ok(self.square.frames::<T>(&tiles, resampler))
    }

    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> Result<PixelValues> {
        GenericProcessor::video::<T>(&self.square, frames, resampler)
    }
}

/// Cuts an image into columns and rows; returns width and height of each crop and a pixel copy.
fn crops(image: RgbView<'_>, [columns, rows]: [u64; 2]) -> Vec<([u32; 2], Vec<u8>)> {
    if columns * rows == 0 {
        return Vec::new();
    }
    let step = |length: u32, crops: u64| u64::from(length).div_ceil(crops) as usize;
    let (width, height) = (step(image.width, columns), step(image.height, rows));
    let rows_of_image: Vec<&[u8]> = image.pixels.chunks_exact(3 * image.width as usize).collect();
    let mut crops = Vec::with_capacity((columns * rows) as usize);
    for band in rows_of_image.chunks(height) {
        for left in (0..image.width as usize).step_by(width) {
            let right = (left + width).min(image.width as usize);
            let pixels = band.iter().flat_map(|row| &row[3 * left..3 * right]).copied().collect();
            crops.push(([(right - left) as u32, band.len() as u32], pixels));
        }
    }
    crops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crops_are_in_order_and_the_last_one_is_what_remains() {
        let pixels: Vec<u8> = (0..3 * 5 * 2).collect();
        let image = RgbView { width: 5, height: 2, pixels: &pixels };
        let cut = crops(image, [2, 1]);
        assert_eq!(cut[0], ([3, 2], [&pixels[..9], &pixels[15..24]].concat()));
        assert_eq!(cut[1], ([2, 2], [&pixels[9..15], &pixels[24..]].concat()));
        let upright = RgbView { width: 2, height: 5, pixels: &pixels };
        let cut = crops(upright, [1, 3]);
        assert_eq!(
            cut,
            [
                ([2, 2], pixels[..12].to_vec()),
                ([2, 2], pixels[12..24].to_vec()),
                ([2, 1], pixels[24..].to_vec())
            ]
        );
        assert!(crops(image, [0, 0]).is_empty());
    }
}
