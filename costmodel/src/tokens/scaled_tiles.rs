//! Scales an image's longer side to a fixed length and cuts it into tiles, the Idefics3 and `SmolVLM` rule.
//!
//! Both sides are then stretched to multiples of the tile. Tiles and a *global tile* that shows the whole
//! image follow each other in the text, each between tokens that name its row and column; a line break ends a
//! row. An image that fits a tile is only that tile. There are no videos.

use serde::{Deserialize, Serialize};

use super::{EncoderWork, require_pixels};
use crate::ImageSize;
use crate::error::Result;

/// Maximum image side in pixels, whatever the settings.
const SIDE_MAX: u64 = 4096;

/// Rule settings; encoder items are tiles.
///
/// # Source
/// Laurençon et al., "Building and better understanding vision-language models", 2024, arXiv:2408.12637,
/// section 2; sizes and tokens as in `Idefics3ImageProcessor` and `Idefics3Processor` in transformers 5.24.0,
/// with a tokenizer that encodes two line breaks as one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ScaledTiles {
    /// Side of a square tile in pixels.
    pub tile_pixels: u16,
    /// Encoder tokens per tile.
    pub tile_patches: u32,
    /// LLM tokens per tile, for the tile features.
    pub tile_tokens: u32,
    /// Length in pixels that an image's longer side is scaled to; at most 4096 counts.
    pub side_pixels: u16,
    /// Whether images are cut; otherwise every image is a single tile.
    pub is_cut: bool,
}

impl ScaledTiles {
    /// Maximum number of rows and of columns for which the published vocabularies have tokens.
    pub const GRID_SIDE_MAX: u64 = 6;

    /// Returns the work for an image, with the tokens that name the tiles.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        let [columns, rows] = self.grid(image)?;
        let features = u64::from(self.tile_tokens);
        // The global tile is enclosed and named: 3 tokens more.
        let tokens = rows * ((features + 2) * columns + 1) + features + 3;
        Ok(EncoderWork::from_items(1 + columns * rows, u64::from(self.tile_patches), tokens))
    }

    /// Returns the tile columns and rows in addition to the global tile, 0 for a single-tile image.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn grid(&self, image: ImageSize) -> Result<[u64; 2]> {
        let tile = u64::from(self.tile_pixels).max(1);
        let canvas = self.canvas(image)?;
        let is_one = !self.is_cut || canvas == [tile, tile];
        Ok(if is_one { [0, 0] } else { canvas.map(|side| side / tile) })
    }

    /// Returns width and height that an image is scaled to first.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn scaled(&self, image: ImageSize) -> Result<[u64; 2]> {
        require_pixels(image)?;
        let longer = u64::from(self.side_pixels);
        let even = |side: u64| (side + side % 2).max(1);
        let [width, height] = scaled_to(longer, [image.width, image.height].map(u64::from), even);
        if width.max(height) <= SIDE_MAX {
            return Ok([width, height]);
        }
        Ok(scaled_to(SIDE_MAX, [width, height], |side| side.max(1)))
    }

    /// Returns width and height that the scaled image is stretched to, multiples of the tile.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn canvas(&self, image: ImageSize) -> Result<[u64; 2]> {
        let tile = u64::from(self.tile_pixels).max(1);
        let sides = self.scaled(image)?;
        if !self.is_cut {
            return Ok([tile, tile]);
        }
        let longer = sides[0].max(sides[1]).next_multiple_of(tile);
        Ok(scaled_to(longer, sides, |side| side).map(|side| side.next_multiple_of(tile).max(tile)))
    }
}

/// Scales `[width, height]` to a length for the longer side; the shorter side is truncated and passed through
/// `round`. If both sides are equal, the width counts as longer.
fn scaled_to(longer: u64, [width, height]: [u64; 2], round: impl Fn(u64) -> u64) -> [u64; 2] {
    // The ratio is rounded once before it is used, as in the original.
    let aspect = width as f64 / height as f64;
    if width >= height {
        return [longer, round((longer as f64 / aspect) as u64)];
    }
    [round((longer as f64 * aspect) as u64), longer]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `SmolVLM2` with 2.2 billion parameters.
    const RULE: ScaledTiles =
        ScaledTiles { tile_pixels: 384, tile_patches: 729, tile_tokens: 81, side_pixels: 1536, is_cut: true };

    /// By hand: 640 x 480 becomes 1536 x 1152, 4 x 3 tiles.
    #[test]
    fn images_of_any_size_are_scaled_and_cut() {
        for (width, height, scaled, columns, rows) in [
            (640, 480, [1536, 1152], 4, 3),
            (300, 500, [922, 1536], 3, 4),
            (1, 1, [1536, 1536], 4, 4),
            (5000, 10, [1536, 4], 4, 1),
        ] {
            let image = ImageSize { width, height };
            assert_eq!(RULE.scaled(image), Ok(scaled), "{width} x {height}");
            assert_eq!(RULE.grid(image), Ok([columns, rows]), "{width} x {height}");
            let work = RULE.image(image).unwrap();
            let tokens = rows * (83 * columns + 1) + 84;
            assert_eq!((work.items, work.tokens), (1 + rows * columns, tokens), "{width} x {height}");
            let whole = ScaledTiles { is_cut: false, ..RULE }.image(image).unwrap();
            assert_eq!((whole.items, whole.tokens), (1, 84));
        }
    }

    #[test]
    fn an_image_of_one_tile_has_no_grid() {
        let rule = ScaledTiles { side_pixels: 384, ..RULE };
        let image = ImageSize { width: 700, height: 600 };
        assert_eq!((rule.grid(image), rule.image(image).unwrap().tokens), (Ok([0, 0]), 84));
    }
}
