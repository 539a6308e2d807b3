//! CLIP and SigLIP: one square per image. CLIP scales the shorter side and crops, SigLIP stretches the whole
//! image.

use std::num::NonZeroU32;

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::fixed_tile::FixedTile;
use dflop_costmodel::{FamilyId, Result};
use dflop_samples::inputs::PixelValues;

use super::llava_onevision::LlavaOneVisionFamily;
use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{PixelLayout, VideoText, llava_onevision};
use crate::image::processor::{PATCH_PIXELS, filter, normalization, square_side};
use crate::image::resample::{Canvas, Resampler, Resize};
use crate::image::tiles::canvases;
use crate::image::{
    Filter, GenericProcessor, ImageProcessor, Normalization, Pixel, PixelSettings, RgbView, SquareResize,
    frames_taken, positions, square_bytes,
};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&Clip, &Siglip];

/// CLIP, with LLaVA's placeholders and template.
#[derive(Debug)]
struct Clip;

/// SigLIP, with LLaVA's placeholders and template.
#[derive(Debug)]
struct Siglip;

impl ProcessorFamily for Clip {
    fn id(&self) -> FamilyId {
        FamilyId::new("clip")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        inputs(vision)
    }

    fn chat_template(&self) -> &'static str {
        LlavaOneVisionFamily.chat_template()
    }

    fn image_processor_types(&self) -> &[&str] {
        &["CLIPImageProcessor", "CLIPFeatureExtractor"]
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read_clip(fields)?))
    }
}

impl ProcessorFamily for Siglip {
    fn id(&self) -> FamilyId {
        FamilyId::new("siglip")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        inputs(vision)
    }

    fn chat_template(&self) -> &'static str {
        LlavaOneVisionFamily.chat_template()
    }

    fn image_processor_types(&self) -> &[&str] {
        &["SiglipImageProcessor"]
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read_siglip(fields)?))
    }
}

fn inputs(vision: &VisionSpec) -> Option<VisionInputs> {
    let VisionRule::Fixed(rule) = vision.rule else { return None };
    Some(VisionInputs {
        image: llava_onevision::IMAGE,
        layout: PixelLayout::Tiles,
        video: VideoText::Whole(llava_onevision::VIDEO),
        processor: ImageProcessor::new(Square::from_rule(rule)),
    })
}

/// Settings for a processor that converts an image to a single square.
///
/// # Source
/// `CLIPImageProcessor` and `SiglipImageProcessor` of transformers 4.57.1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Square {
    /// Length of the shorter side in pixels before the crop, at least `side`; `None` stretches the whole
    /// image.
    pub shortest_side: Option<u16>,
    /// Whether the image is first padded to a centered square with the mean color.
    pub is_padded: bool,
    /// Side length of the square in pixels.
    pub side: u16,
    /// Number of LLM positions for the square.
    pub tokens: u32,
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
    /// Maximum number of frames per video; longer videos are sampled down to it.
    pub frames_max: u32,
}

impl Square {
    /// CLIP ViT-L/14 at 336 pixels, LLaVA 1.5's vision encoder.
    pub const CLIP_336: Self = Self {
        shortest_side: Some(336),
        is_padded: false,
        side: 336,
        tokens: 576,
        filter: Filter::Bicubic,
        normalization: Normalization::CLIP,
        frames_max: u32::MAX,
    };
    /// SigLIP-so400m/14 at 384 pixels.
    pub const SIGLIP_384: Self = Self {
        shortest_side: None,
        is_padded: false,
        side: 384,
        tokens: 729,
        filter: Filter::Bicubic,
        normalization: Normalization::SIGNED,
        frames_max: u32::MAX,
    };

    /// Returns the published CLIP processor for a rule that crops, the SigLIP processor for a rule that
    /// stretches.
    #[must_use]
    pub const fn from_rule(rule: FixedTile) -> Self {
        let square = if rule.is_cropped { Self::CLIP_336 } else { Self::SIGLIP_384 };
        let shortest_side = if rule.is_cropped { Some(rule.tile_pixels) } else { None };
        let tokens = rule.pooled_tokens();
        let FixedTile { tile_pixels, frames_max, .. } = rule;
        Self { shortest_side, side: tile_pixels, tokens, frames_max, ..square }
    }

    /// Creates `[frames, 3, side, side]`; an image is a single frame.
    pub(super) fn frames<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> PixelValues {
        let side = usize::from(self.side);
        let color = self.normalization.mean_color();
        let canvas = |frame| {
            if self.is_padded { Canvas::padded_to_square(frame, color) } else { Canvas::from_image(frame) }
        };
        let resize = |frame: RgbView<'_>| {
            if self.is_padded { Resize::whole(self.filter, side, side) } else { self.resize(frame) }
        };
        let values = canvases::<T>(frames, side, &self.normalization, resampler, canvas, resize);
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

impl GenericProcessor for Square {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::Fixed(FixedTile {
            tile_pixels: self.side,
            tile_patches: self.tokens,
            pooled_patches: NonZeroU32::MIN,
            marker_tokens: 0,
            is_cropped: self.shortest_side.is_some(),
            frames_max: self.frames_max,
        }))
    }

    fn settings(&self) -> PixelSettings {
        let square = match self.shortest_side {
            _ if self.is_padded => SquareResize::Padded,
            Some(shortest_side) => SquareResize::Cropped { shortest_side },
            None => SquareResize::Stretched,
        };
        PixelSettings { filter: self.filter, normalization: self.normalization, square: Some(square) }
    }

    fn set(&mut self, settings: &PixelSettings) {
        (self.filter, self.normalization) = (settings.filter, settings.normalization);
        if let Some(square) = settings.square {
            self.is_padded = square == SquareResize::Padded;
        }
        match settings.square {
            Some(SquareResize::Stretched) => self.shortest_side = None,
            Some(SquareResize::Cropped { shortest_side }) => {
                self.shortest_side = Some(shortest_side.max(self.side));
            }
            Some(SquareResize::Padded) | None => {}
        }
    }

    fn item_bytes(&self) -> u64 {
        square_bytes(self.side)
    }

    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        _: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        Ok(self.frames::<T>(&[image], resampler))
    }

    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> Result<PixelValues> {
        Ok(self.frames::<T>(&frames_taken(frames, self.frames_max), resampler))
    }
}

pub(super) fn read_clip(fields: &ConfigFields<'_>) -> Result<Square> {
    let is_cropped = fields.flag("do_center_crop", true)?;
    let shortest_side = match fields.value("size") {
        Some(size) if size.is_number() || size.get("shortest_edge").is_some() => {
            Some(square_side(fields, "size", 224)?)
        }
        Some(_) => None,
        None => Some(224),
    };
    let side = match (shortest_side, is_cropped) {
        (Some(_), true) => square_side(fields, "crop_size", 224)?,
        (None, false) => square_side(fields, "size", 224)?,
        (None, true) => {
            let side = square_side(fields, "size", 224)?;
            if square_side(fields, "crop_size", 224)? != side {
                return Err(fields.invalid("crop_size", "must equal a square `size`"));
            }
            side
        }
        (Some(_), false) => {
            return Err(fields.invalid("do_center_crop", "must be true, or images would differ in size"));
        }
    };
    if shortest_side.is_some_and(|shortest| shortest < side) {
        return Err(fields.invalid("crop_size", "must not exceed `size`"));
    }
    read_square(fields, shortest_side, side, Normalization::CLIP)
}

fn read_siglip(fields: &ConfigFields<'_>) -> Result<Square> {
    let side = square_side(fields, "size", 224)?;
    read_square(fields, None, side, Normalization::SIGNED)
}

fn read_square(
    fields: &ConfigFields<'_>,
    shortest_side: Option<u16>,
    side: u16,
    default: Normalization,
) -> Result<Square> {
    let tokens = (u32::from(side) / PATCH_PIXELS as u32).pow(2);
    let (filter, normalization) = (filter(fields)?, normalization(fields, default)?);
    Ok(Square { shortest_side, is_padded: false, side, tokens, filter, normalization, frames_max: u32::MAX })
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::VideoShape;
    use dflop_samples::media::Video;

    use super::*;
    use crate::tensors::VideoTensors;

    #[test]
    fn as_many_frames_are_made_as_are_planned() {
        let video = |frames: usize| Video {
            width: 8,
            height: 4,
            times_seconds: (0..frames).map(|frame| frame as f64).collect(),
            frames_per_second: 1.0,
            pixels: vec![0; frames * 8 * 4 * 3],
        };
        for (is_cropped, frames_max) in [(true, 32), (false, 48), (false, 1)] {
            let rule = FixedTile {
                tile_pixels: 28,
                tile_patches: 4,
                pooled_patches: NonZeroU32::MIN,
                marker_tokens: 0,
                is_cropped,
                frames_max,
            };
            let processor = ImageProcessor::new(Square::from_rule(rule));
            for frames in [1, 32, 40, 100] {
                let planned = rule.video(VideoShape { frames, width: 8, height: 4 });
                let made = VideoTensors::video(&processor, &video(frames as usize)).expect("pixels");
                assert_eq!(u64::from(made.pixels.tokens), planned.tokens, "{frames} of {frames_max}");
                assert_eq!(made.pixels.shape[0] as u64, planned.items);
            }
        }
    }
}
