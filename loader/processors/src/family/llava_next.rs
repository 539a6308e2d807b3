//! LLaVA-NeXT: a base tile and a padded tile grid for every image.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::listed_grids::{GridList, ListedGrids};
use dflop_costmodel::{Error, FamilyId, Result};
use dflop_samples::inputs::PixelValues;

use super::llava::LlavaFamily;
use super::llava_onevision::{self, base_and_grid};
use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{PixelLayout, VideoText};
use crate::image::processor::{PATCH_PIXELS, filter, normalization, square_side};
use crate::image::resample::Resampler;
use crate::image::{
    Filter, GenericProcessor, ImageProcessor, Normalization, Pixel, PixelSettings, RgbView, positions,
    square_bytes,
};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&LlavaNextFamily];

/// LLaVA-NeXT.
#[derive(Debug)]
struct LlavaNextFamily;

impl ProcessorFamily for LlavaNextFamily {
    fn id(&self) -> FamilyId {
        FamilyId::new("llava_next")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let VisionRule::ListedGrids(rule) = vision.rule else { return None };
        let (filter, normalization) = (Filter::Bicubic, Normalization::CLIP);
        Some(VisionInputs {
            image: llava_onevision::IMAGE,
            layout: PixelLayout::SizedTiles,
            video: VideoText::None,
            processor: ImageProcessor::new(LlavaNext { rule, filter, normalization }),
        })
    }

    /// Returns the format for Vicuna checkpoints; Mistral checkpoints have a template in their files.
    fn chat_template(&self) -> &'static str {
        LlavaFamily.chat_template()
    }

    fn turn_token(&self) -> Option<&'static str> {
        LlavaFamily.turn_token()
    }

    fn image_processor_types(&self) -> &[&str] {
        &["LlavaNextImageProcessor"]
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read(fields)?))
    }
}

/// Image processor for LLaVA-NeXT.
///
/// # Source
/// `LlavaNextImageProcessor` in transformers 5.24.0 with the Pillow backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlavaNext {
    /// Grids, tiles and tokens.
    pub rule: ListedGrids,
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
}

impl GenericProcessor for LlavaNext {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::ListedGrids(self.rule))
    }

    fn settings(&self) -> PixelSettings {
        PixelSettings { filter: self.filter, normalization: self.normalization, square: None }
    }

    fn set(&mut self, settings: &PixelSettings) {
        (self.filter, self.normalization) = (settings.filter, settings.normalization);
    }

    fn item_bytes(&self) -> u64 {
        square_bytes(self.rule.tile_pixels)
    }

    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        _: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        let grid = self.rule.grid(image.size())?;
        let side = usize::from(self.rule.tile_pixels);
        let (values, tiles) =
            base_and_grid::<T>(image, side, grid, self.filter, &self.normalization, resampler);
        Ok(PixelValues {
            values: T::buffer(values),
            shape: vec![tiles, 3, side, side],
            grid_thw: None,
            image_size: Some([image.height, image.width]),
            tokens: positions(self.rule.image(image.size())?.tokens),
        })
    }

    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], _: &mut Resampler) -> Result<PixelValues> {
        Err(Error::Video { frames: positions(frames.len() as u64) })
    }
}

/// Reads the processor from a configuration file; missing settings have defaults. Grids come from the model.
fn read(fields: &ConfigFields<'_>) -> Result<LlavaNext> {
    let tile_pixels = square_side(fields, "size", 224)?;
    if square_side(fields, "crop_size", 224)? != tile_pixels || !fields.flag("do_center_crop", true)? {
        return Err(fields.invalid("crop_size", "must equal `size`, and `do_center_crop` be true"));
    }
    let patches_per_side = (u64::from(tile_pixels) / PATCH_PIXELS) as u16;
    let rule = ListedGrids { tile_pixels, patches_per_side, grids: GridList::LLAVA_NEXT };
    let normalization = normalization(fields, Normalization::CLIP)?;
    Ok(LlavaNext { rule, filter: filter(fields)?, normalization })
}
