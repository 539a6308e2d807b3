//! Prepares images for InternVL: an image stretched onto a grid of tiles, then a thumbnail.

use dflop_costmodel::Result;
use dflop_costmodel::tokens::dynamic_tiles::DynamicTiles;

use super::Pixel;
use super::filter::Filter;
use super::normalize::Normalization;
use super::resample::{Canvas, Resampler, Resize};
use super::rgb_view::RgbView;
use super::squares::squares;
use super::tiles::{TilePlacement, Tiles};
use super::{PixelValues, frames_taken, positions};

/// Image processor of InternVL.
///
/// # Source
/// `GotOcr2ImageProcessor` of transformers 4.57.1 with `crop_to_patches`, the processor of InternVL 3 there.
/// The remote code of InternVL 2.5 resizes in the same way; grids of equal tile count, whose order it leaves
/// unspecified, are ordered as in the former. A frame of a video is one tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InternVl {
    /// Grids, tiles and tokens.
    pub rule: DynamicTiles,
    /// The resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
}

impl InternVl {
    /// Makes `[tiles, 3, side, side]`: the grid's tiles row by row, and the thumbnail if there is more than
    /// one tile.
    pub(super) fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
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

    /// Makes `[frames, 3, side, side]`: every frame stretched onto one tile.
    pub(super) fn video<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> PixelValues {
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
