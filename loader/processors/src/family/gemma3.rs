//! Gemma 3: one square per image, written between line breaks with begin and end.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::{FamilyId, Result};

use super::registry::{ProcessorFamily, VisionInputs};
use super::{ImageWord, PixelLayout, Placeholder, Square, VideoText};
use crate::image::config::{filter_or, normalization, square_side};
use crate::image::normalize::Normalization;
use crate::image::{Filter, ImageProcessor};

const IMAGE: Placeholder = Placeholder {
    token: "<image_soft_token>",
    markers: Some(["<start_of_image>", "<end_of_image>"]),
    has_markers_in_text: true,
};
/// The model takes no videos: no vocabulary has this token.
const VIDEO: Placeholder =
    Placeholder { token: "<video_soft_token>", markers: None, has_markers_in_text: false };
const WORD: ImageWord =
    ImageWord { word: "<start_of_image>", text: "\n\n<start_of_image><image_soft_token><end_of_image>\n\n" };

/// Side of an image in pixels, if no file has it.
const SIDE_PIXELS: u16 = 224;
/// Pixels along the side of the square that becomes a token: 4 patches of 14.
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
        let VisionRule::Fixed(rule) = vision.rule else { return None };
        let square = Square { filter: Filter::Bilinear, ..Square::from_rule(rule) };
        Some(VisionInputs {
            image: IMAGE,
            layout: PixelLayout::TypedTiles,
            video: VideoText::Whole(VIDEO),
            processor: ImageProcessor::new(square),
        })
    }

    fn image_word(&self) -> Option<ImageWord> {
        Some(WORD)
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/gemma3.jinja")
    }

    fn image_processor_types(&self) -> &[&str] {
        &["Gemma3ImageProcessor"]
    }

    /// # Source
    /// `Gemma3ImageProcessorPil` of transformers 5.24.0.
    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        if fields.flag("do_pan_and_scan", false)? {
            return Err(
                fields.invalid("do_pan_and_scan", "must be false, crops of an image are not supported")
            );
        }
        let side = square_side(fields, "size", SIDE_PIXELS)?;
        Ok(ImageProcessor::new(Square {
            shortest_side: None,
            side,
            tokens: (u32::from(side) / TOKEN_PIXELS).pow(2),
            filter: filter_or(fields, Filter::Bilinear)?,
            normalization: normalization(fields, Normalization::SIGNED)?,
        }))
    }
}

impl ProcessorFamily for Gemma3Text {
    fn id(&self) -> FamilyId {
        FamilyId::new("gemma3_text")
    }

    fn chat_template(&self) -> &'static str {
        Gemma3.chat_template()
    }
}
