//! InternVL: an image stretched onto a grid of tiles, then a thumbnail.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::dynamic_tiles::DynamicTiles;
use dflop_costmodel::{FamilyId, Result};
use dflop_samples::inputs::PixelValues;

use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{PixelLayout, Placeholder, VideoText};
use crate::image::processor::{PATCH_PIXELS, filter, normalization, square_side};
use crate::image::resample::{Canvas, Resampler, Resize};
use crate::image::tiles::{TilePlacement, Tiles, squares};
use crate::image::{
    Filter, GenericProcessor, ImageProcessor, Normalization, Pixel, PixelSettings, RgbView, frames_taken,
    positions, square_bytes,
};

/// Image placeholder, in the spelling of converted checkpoints.
const IMAGE: Placeholder =
    Placeholder { token: "<IMG_CONTEXT>", markers: Some(["<img>", "</img>"]), has_markers_in_text: false };

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&InternVlFamily];

/// InternVL.
#[derive(Debug)]
struct InternVlFamily;

impl ProcessorFamily for InternVlFamily {
    fn id(&self) -> FamilyId {
        FamilyId::new("internvl")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let VisionRule::DynamicTiles(rule) = vision.rule else { return None };
        let (filter, normalization) = (Filter::Bicubic, Normalization::IMAGENET);
        Some(VisionInputs {
            image: IMAGE,
            layout: PixelLayout::Tiles,
            video: VideoText::Frames { word: "<video>" },
            processor: ImageProcessor::new(InternVl { rule, filter, normalization }),
        })
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/internvl.jinja")
    }

    fn image_processor_types(&self) -> &[&str] {
        &["GotOcr2ImageProcessor"]
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read(fields)?))
    }
}

/// Image processor for InternVL.
///
/// # Source
/// `GotOcr2ImageProcessor` in transformers 4.57.1 with `crop_to_patches`, the InternVL 3 processor there. The
/// remote code of InternVL 2.5 resizes in the same way; grids with equal tile count, whose order the remote
/// code leaves unspecified, are ordered as in transformers. A video frame is a single tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InternVl {
    /// Grids, tiles and tokens.
    pub rule: DynamicTiles,
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
}

impl InternVl {
    /// Creates `[tiles, 3, side, side]`: the grid's tiles row by row, and the thumbnail if there is more than
    /// one tile.
    fn tiles<T: Pixel>(&self, image: RgbView<'_>, resampler: &mut Resampler) -> Result<PixelValues> {
        let size = image.size();
        let [columns, rows] = self.rule.grid(size)?.map(|length| length as usize);
        let tiles = self.rule.image(size)?.items as usize;
        let side = usize::from(self.rule.tile_pixels);
        let tables = self.normalization.tables::<T>();
        let mut target = Tiles::new(tiles, side, &tables);
        let canvas = Canvas::from_image(image);
        let grid = TilePlacement { first_tile: 0, columns, left: 0, top: 0 };
        resampler.resize(&canvas, &Resize::whole(self.filter, columns * side, rows * side), |y, row| {
            target.write_row(grid, y, row);
        });
        if tiles > columns * rows {
            let thumbnail = TilePlacement { first_tile: columns * rows, columns: 1, left: 0, top: 0 };
            resampler.resize(&canvas, &Resize::whole(self.filter, side, side), |y, row| {
                target.write_row(thumbnail, y, row);
            });
        }
        Ok(self.pixel_values(target.into_values(), tiles))
    }

    /// Creates `[frames, 3, side, side]`: every frame stretched onto a tile.
    fn frames<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> PixelValues {
        let taken = frames_taken(frames, self.rule.frames_max);
        let side = usize::from(self.rule.tile_pixels);
        let resize = |_: RgbView<'_>| Resize::whole(self.filter, side, side);
        let values = squares::<T>(&taken, side, &self.normalization, resampler, resize);
        self.pixel_values(values, taken.len())
    }

    fn pixel_values<T: Pixel>(&self, values: Vec<T>, tiles: usize) -> PixelValues {
        let side = usize::from(self.rule.tile_pixels);
        PixelValues {
            values: T::buffer(values),
            shape: vec![tiles, 3, side, side],
            grid_thw: None,
            image_size: None,
            tokens: positions(tiles as u64 * u64::from(self.rule.tile_tokens)),
        }
    }
}

impl GenericProcessor for InternVl {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::DynamicTiles(self.rule))
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
        self.tiles::<T>(image, resampler)
    }

    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> Result<PixelValues> {
        Ok(self.frames::<T>(frames, resampler))
    }
}

/// Reads the processor from a configuration file; missing settings have defaults.
pub(super) fn read(fields: &ConfigFields<'_>) -> Result<InternVl> {
    let tile_pixels = square_side(fields, "size", 384)?;
    if fields.count("min_patches", 1)? != 1 {
        return Err(fields.invalid("min_patches", "must be 1"));
    }
    // A model's own configuration lacks the key; InternVL's processor splits unless the key is false.
    let is_cut = fields.flag("crop_to_patches", true)?;
    let tiles_max = if is_cut { fields.count("max_patches", 12)? } else { 1 };
    let patches = (u64::from(tile_pixels) / PATCH_PIXELS).pow(2);
    let too_large = |key| move |_| fields.invalid(key, "is too large");
    let rule = DynamicTiles {
        tile_pixels,
        tile_patches: u16::try_from(patches).map_err(too_large("size"))?,
        tile_tokens: u16::try_from(patches / 4).map_err(too_large("size"))?,
        tiles_max: u8::try_from(tiles_max).map_err(too_large("max_patches"))?,
        frames_max: u32::MAX,
        ..DynamicTiles::INTERN_VL
    };
    let normalization = normalization(fields, Normalization::CLIP)?;
    Ok(InternVl { rule, filter: filter(fields)?, normalization })
}
