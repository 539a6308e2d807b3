//! Idefics3 and `SmolVLM`: an image scaled and cut into tiles, and a tile that shows the whole image.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::scaled_tiles::ScaledTiles;
use dflop_costmodel::{Error, FamilyId, Result};
use dflop_samples::inputs::PixelValues;

use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{Arrangement, PixelLayout, Placeholder, VideoText};
use crate::image::processor::{PATCH_PIXELS, filter_or, normalization, square_side};
use crate::image::resample::{Canvas, Resampler, Resize};
use crate::image::tiles::{TilePlacement, Tiles};
use crate::image::{
    Filter, GenericProcessor, ImageProcessor, Normalization, Pixel, PixelSettings, RgbView, positions,
    square_bytes,
};

/// Image placeholder.
const IMAGE: Placeholder = Placeholder { token: "<image>", markers: None, has_markers_in_text: false };

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&Idefics3Family::IDEFICS3, &Idefics3Family::SMOLVLM];

/// Idefics3 or `SmolVLM`.
#[derive(Debug)]
struct Idefics3Family {
    id: FamilyId,
    image_processor_types: [&'static str; 1],
}

impl Idefics3Family {
    const IDEFICS3: Self =
        Self { id: FamilyId::new("idefics3"), image_processor_types: ["Idefics3ImageProcessor"] };
    const SMOLVLM: Self =
        Self { id: FamilyId::new("smolvlm"), image_processor_types: ["SmolVLMImageProcessor"] };
}

impl ProcessorFamily for Idefics3Family {
    fn id(&self) -> FamilyId {
        self.id
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let VisionRule::ScaledTiles(rule) = vision.rule else { return None };
        let (filter, normalization) = (Filter::Lanczos, Normalization::SIGNED);
        Some(VisionInputs {
            image: IMAGE,
            layout: PixelLayout::TileRow,
            video: VideoText::None,
            processor: ImageProcessor::new(Idefics3 { rule, filter, normalization }),
        })
    }

    fn arrangement(&self, vision: &VisionSpec) -> Arrangement {
        let VisionRule::ScaledTiles(rule) = vision.rule else { return Arrangement::Run };
        Arrangement::NamedTiles {
            tile_tokens: rule.tile_tokens,
            edge: "<fake_token_around_image>",
            whole: "<global-img>",
        }
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/idefics3.jinja")
    }

    fn turn_token(&self) -> Option<&'static str> {
        Some("<end_of_utterance>")
    }

    fn image_processor_types(&self) -> &[&str] {
        &self.image_processor_types
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read(fields)?))
    }
}

/// Image processor for Idefics3 and `SmolVLM`.
///
/// # Source
/// `Idefics3ImageProcessor` in transformers 5.24.0 with the Pillow backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Idefics3 {
    /// Sizes, tiles and tokens.
    pub rule: ScaledTiles,
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
}

impl Idefics3 {
    /// Resizes an image to `[width, height]` and returns the bytes.
    fn resized(&self, image: RgbView<'_>, size: [u64; 2], resampler: &mut Resampler) -> Vec<u8> {
        let [width, height] = size.map(|length| length as usize);
        let mut pixels = Vec::with_capacity(3 * width * height);
        let resize = Resize::whole(self.filter, width, height);
        resampler.resize(&Canvas::from_image(image), &resize, |_, row| pixels.extend_from_slice(row));
        pixels
    }
}

impl GenericProcessor for Idefics3 {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::ScaledTiles(self.rule))
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

    /// Creates `[tiles, 3, side, side]`: the grid tiles row by row, then the global tile.
    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        _: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        let size = image.size();
        let view = |pixels, [width, height]: [u64; 2]| RgbView {
            width: width as u32,
            height: height as u32,
            pixels,
        };
        // Every step rounds to bytes, as in the original, so each step needs the image from the previous
        // step.
        let scaled = self.rule.scaled(size)?;
        let pixels = self.resized(image, scaled, resampler);
        let canvas = self.rule.canvas(size)?;
        let pixels = self.resized(view(&pixels, scaled), canvas, resampler);
        let [columns, rows] = self.rule.grid(size)?.map(|length| length as usize);
        let side = usize::from(self.rule.tile_pixels);
        let tables = self.normalization.tables::<T>();
        let tiles = 1 + columns * rows;
        let mut target = Tiles::new(tiles, side, &tables);
        if tiles > 1 {
            let grid = TilePlacement { first_tile: 0, columns, left: 0, top: 0 };
            for (y, row) in pixels.chunks_exact(3 * canvas[0] as usize).enumerate() {
                target.write_row(grid, y, row);
            }
        }
        let whole = TilePlacement { first_tile: tiles - 1, columns: 1, left: 0, top: 0 };
        let stretch = Resize::whole(self.filter, side, side);
        resampler.resize(&Canvas::from_image(view(&pixels, canvas)), &stretch, |y, row| {
            target.write_row(whole, y, row);
        });
        Ok(PixelValues {
            values: T::buffer(target.into_values()),
            shape: vec![tiles, 3, side, side],
            grid_thw: Some([1, rows as u32, columns as u32]),
            image_size: None,
            tokens: positions(self.rule.image(size)?.tokens),
        })
    }

    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], _: &mut Resampler) -> Result<PixelValues> {
        Err(Error::Video { frames: positions(frames.len() as u64) })
    }
}

/// Reads the processor from a configuration file; missing settings have defaults.
fn read(fields: &ConfigFields<'_>) -> Result<Idefics3> {
    let edge = |key: &str, default: u16| match fields.value(key) {
        Some(size) if size.get("longest_edge").is_some() => {
            let sides = fields.child_or_empty(key)?;
            square_side(&sides, "longest_edge", default)
        }
        Some(_) => Err(fields.invalid(key, "must have `longest_edge`")),
        None => Ok(default),
    };
    let tile_pixels = edge("max_image_size", 364)?;
    let side = u32::from(tile_pixels) / PATCH_PIXELS as u32;
    let rule = ScaledTiles {
        tile_pixels,
        tile_patches: side * side,
        tile_tokens: (side / 2).pow(2),
        side_pixels: edge("size", 4 * 364)?,
        is_cut: fields.flag("do_image_splitting", true)?,
    };
    let filter = filter_or(fields, Filter::Lanczos)?;
    Ok(Idefics3 { rule, filter, normalization: normalization(fields, Normalization::SIGNED)? })
}
