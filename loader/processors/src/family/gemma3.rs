//! Gemma 3: a square per image, written between line breaks with begin and end; with pan and scan also a
//! square per crop, with words around them.

use std::num::NonZeroU32;

use dflop_costmodel::config::{ConfigFields, pan_and_scan};
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::fixed_tile::FixedTile;
use dflop_costmodel::tokens::pan_and_scan::PanAndScan;
use dflop_costmodel::{FamilyId, Result};
use dflop_samples::inputs::PixelValues;

use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{CropWords, ImageWord, PixelLayout, Placeholder, Square, VideoText};
use crate::image::processor::{filter_or, normalization, square_side};
use crate::image::resample::Resampler;
use crate::image::{Filter, GenericProcessor, ImageProcessor, Normalization, Pixel, PixelSettings, RgbView};

const IMAGE: Placeholder = Placeholder {
    token: "<image_soft_token>",
    markers: Some(["<start_of_image>", "<end_of_image>"]),
    has_markers_in_text: true,
};
const WORD: ImageWord = ImageWord {
    word: "<start_of_image>",
    text: "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    crops: None,
};
/// Words around crops, including leading and trailing blanks.
const BEFORE_CROPPED: &str = "Here is the original image ";
const BEFORE_CROPS: &str = " and here are some crops to help you see better ";

/// Image side in pixels, if no file defines it.
const SIDE_PIXELS: u16 = 224;
/// Side length in pixels of the square that becomes a token: 4 patches of 14 pixels.
const TOKEN_PIXELS: u32 = 56;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&Gemma3, &Gemma3Text];

/// Gemma 3 with images.
#[derive(Debug)]
struct Gemma3;

/// Gemma 3 without images.
#[derive(Debug)]
struct Gemma3Text;

impl ProcessorFamily for Gemma3 {
    fn id(&self) -> FamilyId {
        FamilyId::new("gemma3")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let square = |tile| Square { filter: Filter::Bilinear, ..Square::from_rule(tile) };
        let processor = match vision.rule {
            VisionRule::Fixed(tile) => ImageProcessor::new(square(tile)),
            VisionRule::PanAndScan(rule) => {
                ImageProcessor::new(CroppedSquares { square: square(rule.tile), rule })
            }
            _ => return None,
        };
        let (layout, video) = (PixelLayout::TypedTiles, VideoText::None);
        Some(VisionInputs { image: IMAGE, layout, video, processor })
    }

    fn image_word(&self, vision: &VisionSpec) -> Option<ImageWord> {
        let crops = match vision.rule {
            VisionRule::PanAndScan(rule) => NonZeroU32::new(rule.tile.pooled_tokens()),
            _ => None,
        };
        let words = |tile_tokens| CropWords {
            before: BEFORE_CROPPED,
            between: BEFORE_CROPS,
            separator: " ",
            tile_tokens,
        };
        Some(ImageWord { crops: crops.map(words), ..WORD })
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/gemma3.jinja")
    }

    fn turn_token(&self) -> Option<&'static str> {
        Some("<start_of_turn>")
    }

    fn image_processor_types(&self) -> &[&str] {
        &["Gemma3ImageProcessor"]
    }

    /// # Source
    /// `Gemma3ImageProcessorPil` in transformers 5.24.0.
    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        let side = square_side(fields, "size", SIDE_PIXELS)?;
        let tokens = (u32::from(side) / TOKEN_PIXELS).pow(2);
        let square = Square {
            shortest_side: None,
            is_padded: false,
            side,
            tokens,
            filter: filter_or(fields, Filter::Bilinear)?,
            normalization: normalization(fields, Normalization::SIGNED)?,
            frames_max: u32::MAX,
        };
        let tile = FixedTile {
            tile_pixels: side,
            tile_patches: tokens,
            pooled_patches: NonZeroU32::MIN,
            marker_tokens: 2,
            is_cropped: false,
            frames_max: u32::MAX,
        };
        Ok(match pan_and_scan(fields, tile)? {
            VisionRule::PanAndScan(rule) => ImageProcessor::new(CroppedSquares { square, rule }),
            _ => ImageProcessor::new(square),
        })
    }
}

impl ProcessorFamily for Gemma3Text {
    fn id(&self) -> FamilyId {
        FamilyId::new("gemma3_text")
    }

    fn chat_template(&self) -> &'static str {
        Gemma3.chat_template()
    }

    fn turn_token(&self) -> Option<&'static str> {
        Gemma3.turn_token()
    }
}

/// Image processor with crops.
///
/// # Source
/// `Gemma3ImageProcessorPil` in transformers 5.24.0. `Gemma3ImageProcessor`, on torchvision, cuts the same
/// crops and resizes them with different arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CroppedSquares {
    /// Settings for each square.
    square: Square,
    /// Rule for the number of crops.
    rule: PanAndScan,
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
