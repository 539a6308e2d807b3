//! Gemma 3: a square per image, written between line breaks with begin and end; with pan and scan also a
//! square per crop, with words around them.

use std::num::NonZeroU32;

use dflop_costmodel::config::{ConfigFields, pan_and_scan};
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::fixed_tile::FixedTile;
use dflop_costmodel::{FamilyId, Result};

use super::cropped_squares::CroppedSquares;
use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{CropWords, ImageWord, PixelLayout, Placeholder, Square, VideoText};
use crate::image::config::{filter_or, normalization, square_side};
use crate::image::normalize::Normalization;
use crate::image::{Filter, ImageProcessor};

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

/// Gemma 3 with images.
#[derive(Debug)]
pub(super) struct Gemma3;

/// Gemma 3 without images.
#[derive(Debug)]
pub(super) struct Gemma3Text;

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
