//! LLaVA 1.5: a square per image, cropped by CLIP's processor or padded by LLaVA's own.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::{FamilyId, Result};

use super::clip_siglip::{self, Square};
use super::llava_onevision;
use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{PixelLayout, VideoText};
use crate::image::ImageProcessor;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&LlavaFamily];

/// LLaVA 1.5.
#[derive(Debug)]
pub(super) struct LlavaFamily;

impl ProcessorFamily for LlavaFamily {
    fn id(&self) -> FamilyId {
        FamilyId::new("llava")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let VisionRule::Fixed(rule) = vision.rule else { return None };
        Some(VisionInputs {
            image: llava_onevision::IMAGE,
            layout: PixelLayout::Tiles,
            video: VideoText::None,
            processor: ImageProcessor::new(Square::from_rule(rule)),
        })
    }

    /// Returns LLaVA's training format, without the system prompt.
    fn chat_template(&self) -> &'static str {
        include_str!("templates/llava.jinja")
    }

    fn turn_token(&self) -> Option<&'static str> {
        None
    }

    fn image_processor_types(&self) -> &[&str] {
        &["LlavaImageProcessor"]
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        let mut square = clip_siglip::read_clip(fields)?;
        square.is_padded = fields.flag("do_pad", false)?;
        if square.is_padded && square.shortest_side != Some(square.side) {
            return Err(fields.invalid("crop_size", "must equal `size`, as images are padded to squares"));
        }
        Ok(ImageProcessor::new(square))
    }
}
