//! Fits an image onto a tile grid without distortion, the Llama 4 rule.
//!
//! Among all grids up to a number of tiles, the rule selects the grid that enlarges the image least, or else
//! shrinks it least, and among ties the smallest. Several tiles are followed by a *global tile* that shows
//! the whole image. In the LLM, a token follows each tile, a further token starts the global tile, and two
//! enclose the image. There are no videos.

use serde::{Deserialize, Serialize};

use super::{EncoderWork, require_pixels};
use crate::ImageSize;
use crate::error::Result;

/// Rule settings; encoder items are tiles.
///
/// # Source
/// `Llama4ImageProcessor` and `Llama4Processor` in transformers 5.24.0, single precision included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FittedTiles {
    /// Side of a square tile in pixels.
    pub tile_pixels: u16,
    /// Encoder tokens per tile.
    pub tile_patches: u32,
    /// LLM tokens per tile, for the tile features.
    pub tile_tokens: u32,
    /// Maximum number of tiles in an image, without the global tile; 0 counts as 1.
    pub tiles_max: u8,
    /// Whether the rule selects the grid that enlarges an image most.
    pub is_enlarged: bool,
}

/// Grid considered for an image.
#[derive(Clone, Copy)]
struct Candidate {
    rows: u32,
    columns: u32,
    scale: f32,
}

impl FittedTiles {
    /// Returns the work for an image, with the tokens between tiles.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        let [columns, rows] = self.grid(image)?;
        let tiles = columns * rows;
        let cut = if tiles > 1 { tiles } else { 0 };
        let features = u64::from(self.tile_tokens);
        // A token after each tile; the start tokens for the image and its global tile, and the end token.
        let tokens = cut * (features + 1) + features + 3;
        Ok(EncoderWork::from_items(1 + cut, u64::from(self.tile_patches), tokens))
    }

    /// Returns the tile columns and rows, the global tile not counted.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn grid(&self, image: ImageSize) -> Result<[u64; 2]> {
        require_pixels(image)?;
        let mut best = self.candidate(image, 1, 1);
        for candidate in self.grids().map(|[rows, columns]| self.candidate(image, rows, columns)) {
            let is_smaller = candidate.rows * candidate.columns < best.rows * best.columns;
            let is_equal = !self.is_better(best.scale, candidate.scale);
            if self.is_better(candidate.scale, best.scale) || (is_equal && is_smaller) {
                best = candidate;
            }
        }
        Ok([best.columns, best.rows].map(u64::from))
    }

    /// Iterates over the rows and columns in all grids. The order does not matter: if two grids with as many
    /// tiles scale an image equally, a smaller grid does too.
    fn grids(&self) -> impl Iterator<Item = [u32; 2]> {
        let most = u32::from(self.tiles_max.max(1));
        let of = |tiles: u32| {
            (1..=tiles).filter(move |rows| tiles.is_multiple_of(*rows)).map(move |rows| [rows, tiles / rows])
        };
        (1..=most).rev().flat_map(of)
    }

    fn candidate(&self, image: ImageSize, rows: u32, columns: u32) -> Candidate {
        let tile = u32::from(self.tile_pixels);
        let scale = |tiles: u32, side: u32| (tiles * tile) as f32 / side as f32;
        Candidate { rows, columns, scale: scale(columns, image.width).min(scale(rows, image.height)) }
    }

    /// Returns whether the first scale factor is better than the second.
    fn is_better(&self, scale: f32, than: f32) -> bool {
        match (scale >= 1.0, than >= 1.0) {
            (true, true) if !self.is_enlarged => scale < than,
            (true, false) => true,
            (false, true) => false,
            _ => scale > than,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: FittedTiles = FittedTiles {
        tile_pixels: 336,
        tile_patches: 576,
        tile_tokens: 144,
        tiles_max: 16,
        is_enlarged: false,
    };

    /// By hand: 640 x 480 fits two tiles per side, 1920 x 1080 shrinks least onto 5 x 3 tiles.
    #[test]
    fn images_take_the_grid_that_changes_them_least() {
        for (width, height, columns, rows) in [
            (640, 480, 2, 2),
            (336, 336, 1, 1),
            (1, 1, 1, 1),
            (337, 10, 2, 1),
            (1920, 1080, 5, 3),
            (100_000, 1, 16, 1),
        ] {
            let image = ImageSize { width, height };
            assert_eq!(RULE.grid(image), Ok([columns, rows]), "{width} x {height}");
            let work = RULE.image(image).unwrap();
            let tiles = columns * rows;
            let expected = if tiles > 1 { (tiles + 1, tiles * 145 + 147) } else { (1, 147) };
            assert_eq!((work.items, work.tokens), expected, "{width} x {height}");
        }
        let enlarged = FittedTiles { is_enlarged: true, ..RULE };
        assert_eq!(enlarged.grid(ImageSize { width: 336, height: 336 }), Ok([4, 4]));
    }
}
