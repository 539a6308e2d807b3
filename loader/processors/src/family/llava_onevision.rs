//! LLaVA-OneVision: a base tile and a padded tile grid, or a single padded tile per image.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::any_res::{AnyRes, Grid};
use dflop_costmodel::{FamilyId, ImageSize, Result, VideoShape};
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

/// Image placeholder for LLaVA-OneVision.
pub(super) const IMAGE: Placeholder =
    Placeholder { token: "<image>", markers: None, has_markers_in_text: false };
/// Video placeholder for LLaVA-OneVision.
pub(super) const VIDEO: Placeholder =
    Placeholder { token: "<video>", markers: None, has_markers_in_text: false };

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&LlavaOneVisionFamily];

/// LLaVA-OneVision.
#[derive(Debug)]
pub(super) struct LlavaOneVisionFamily;

impl ProcessorFamily for LlavaOneVisionFamily {
    fn id(&self) -> FamilyId {
        FamilyId::new("llava_onevision")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let VisionRule::AnyRes(rule) = vision.rule else { return None };
        let (filter, normalization) = (Filter::Bicubic, Normalization::SIGNED);
        Some(VisionInputs {
            image: IMAGE,
            layout: PixelLayout::PaddedTiles,
            video: VideoText::Whole(VIDEO),
            processor: ImageProcessor::new(LlavaOneVision { rule, filter, normalization }),
        })
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/llava_onevision.jinja")
    }

    fn image_processor_types(&self) -> &[&str] {
        &["LlavaOnevisionImageProcessor"]
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read(fields)?))
    }
}

/// Image processor for LLaVA-OneVision.
///
/// # Source
/// `LlavaOnevisionImageProcessor` in transformers 4.57.1; videos as in the video processor, with Pillow's
/// resizing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlavaOneVision {
    /// Grids, tiles and tokens.
    pub rule: AnyRes,
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values; the mean also pads images if a sample has several.
    pub normalization: Normalization,
}

impl LlavaOneVision {
    /// Creates `[1 + tiles, 3, side, side]`: the whole image stretched onto the base tile, then the grid's
    /// tiles row by row, with the image centered on black.
    fn lone_image<T: Pixel>(&self, image: RgbView<'_>, resampler: &mut Resampler) -> Result<PixelValues> {
        let size = image.size();
        let grid = self.rule.grid(size)?;
        let tokens = self.rule.image(size)?.tokens;
        let side = usize::from(self.rule.tile_pixels);
        let (values, tiles) =
            base_and_grid::<T>(image, side, grid, self.filter, &self.normalization, resampler);
        Ok(self.pixel_values(values, tiles, Some(image), tokens))
    }

    /// Creates `[1, 3, side, side]`: the image padded to a square with the mean color.
    fn one_of_several<T: Pixel>(&self, image: RgbView<'_>, resampler: &mut Resampler) -> Result<PixelValues> {
        let tokens = self.rule.several_images(&[image.size()])?.tokens;
        let side = usize::from(self.rule.tile_pixels);
        let tables = self.normalization.tables::<T>();
        let mut target = Tiles::new(1, side, &tables);
        let place = TilePlacement { first_tile: 0, columns: 1, left: 0, top: 0 };
        let canvas = Canvas::padded_to_square(image, self.normalization.mean_color());
        resampler.resize(&canvas, &Resize::whole(self.filter, side, side), |y, row| {
            target.write_row(place, y, row);
        });
        Ok(self.pixel_values(target.into_values(), 1, Some(image), tokens))
    }

    /// Creates `[frames, 3, side, side]`: every frame stretched onto a tile.
    fn frames<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> PixelValues {
        let taken = frames_taken(frames, self.rule.frames_max);
        let side = usize::from(self.rule.tile_pixels);
        let resize = |_: RgbView<'_>| Resize::whole(self.filter, side, side);
        let values = squares::<T>(&taken, side, &self.normalization, resampler, resize);
        let shape = VideoShape { frames: taken.len() as u32, width: 0, height: 0 };
        self.pixel_values(values, taken.len(), None, self.rule.video(shape).tokens)
    }

    fn pixel_values<T: Pixel>(
        &self,
        values: Vec<T>,
        tiles: usize,
        image: Option<RgbView<'_>>,
        tokens: u64,
    ) -> PixelValues {
        let side = usize::from(self.rule.tile_pixels);
        PixelValues {
            values: T::buffer(values),
            shape: vec![tiles, 3, side, side],
            grid_thw: None,
            image_size: image.map(|image| [image.height, image.width]),
            tokens: positions(tokens),
        }
    }
}

impl GenericProcessor for LlavaOneVision {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::AnyRes(self.rule))
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
        images: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        if images == 1 {
            return self.lone_image::<T>(image, resampler);
        }
        self.one_of_several::<T>(image, resampler)
    }

    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> Result<PixelValues> {
        Ok(self.frames::<T>(frames, resampler))
    }
}

/// Reads the processor from a configuration file; missing settings have defaults.
pub(super) fn read(fields: &ConfigFields<'_>) -> Result<LlavaOneVision> {
    let tile_pixels = square_side(fields, "size", 384)?;
    let rule = AnyRes {
        tile_pixels,
        patches_per_side: (u64::from(tile_pixels) / PATCH_PIXELS) as u16,
        grid_side_max: grid_side_max(fields, u64::from(tile_pixels))?,
        frames_max: u32::MAX,
        ..AnyRes::LLAVA_ONEVISION
    };
    let normalization = normalization(fields, Normalization::CLIP)?;
    Ok(LlavaOneVision { rule, filter: filter(fields)?, normalization })
}

/// Returns the longest grid side; the rule has all grids with 1 to n columns and rows, so the file must list
/// all.
fn grid_side_max(fields: &ConfigFields<'_>, tile: u64) -> Result<u8> {
    let key = "image_grid_pinpoints";
    let Some(listed) = fields.value(key) else { return Ok(6) };
    let listed: Vec<[u64; 2]> = serde_json::from_value(listed.clone())
        .map_err(|error| fields.invalid(key, format!("must be a list of heights and widths: {error}")))?;
    let side = listed.len().isqrt() as u64;
    let every = (1..=side).flat_map(|rows| (1..=side).map(move |columns| [rows * tile, columns * tile]));
    if listed.is_empty() || side * side != listed.len() as u64 || !every.eq(listed) {
        return Err(fields.invalid(key, "must list every grid of 1 to n tiles per side, in order"));
    }
    u8::try_from(side).map_err(|_| fields.invalid(key, "has too many grids"))
}

/// Creates `[1 + tiles, 3, side, side]`, and returns the number of tiles: the whole image stretched onto the
/// base tile, then the grid's tiles row by row, with the image centered on black.
pub(super) fn base_and_grid<T: Pixel>(
    image: RgbView<'_>,
    side: usize,
    grid: Grid,
    filter: Filter,
    normalization: &Normalization,
    resampler: &mut Resampler,
) -> (Vec<T>, usize) {
    let size = image.size();
    let (columns, rows) = (grid.columns as usize, grid.rows as usize);
    let tiles = 1 + columns * rows;
    let tables = normalization.tables::<T>();
    let mut target = Tiles::new(tiles, side, &tables);
    let canvas = Canvas::from_image(image);
    let base = TilePlacement { first_tile: 0, columns: 1, left: 0, top: 0 };
    resampler.resize(&canvas, &Resize::whole(filter, side, side), |y, row| {
        target.write_row(base, y, row);
    });

    let [width, height] = fitted(size, [columns * side, rows * side]);
    let place = TilePlacement {
        first_tile: 1,
        columns,
        left: (columns * side - width) / 2,
        top: (rows * side - height) / 2,
    };
    // An image that fills the grid overwrites every pixel, so blackening would be wasted.
    if [width, height] != [columns * side, rows * side] {
        target.blacken(1..tiles);
    }
    resampler.resize(&canvas, &Resize::whole(filter, width, height), |y, row| {
        target.write_row(place, y, row);
    });
    (target.into_values(), tiles)
}

/// Returns width and height for an image scaled to fit a canvas exactly, rounded up.
fn fitted(size: ImageSize, canvas: [usize; 2]) -> [usize; 2] {
    let (width, height) = (f64::from(size.width), f64::from(size.height));
    let (scale_x, scale_y) = (canvas[0] as f64 / width, canvas[1] as f64 / height);
    if scale_x < scale_y {
        [canvas[0], ((height * scale_x).ceil() as usize).min(canvas[1])]
    } else {
        [((width * scale_y).ceil() as usize).min(canvas[0]), canvas[1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fitted_image_touches_two_sides() {
        for (width, height, canvas, expected) in [
            (640, 480, [768, 768], [768, 576]),
            (100, 1, [384, 384], [384, 4]),
            (1, 5000, [384, 1152], [1, 1152]),
            (384, 384, [384, 384], [384, 384]),
        ] {
            assert_eq!(fitted(ImageSize { width, height }, canvas), expected);
        }
    }
}
