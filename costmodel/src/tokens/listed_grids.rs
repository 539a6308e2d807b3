//! Cuts images into tiles in one of a few listed grids, the LLaVA-NeXT (LLaVA 1.6) rule.
//!
//! An image is scaled onto the grid that keeps most of its pixels and wastes least, the first listed grid on
//! a tie, and a *base tile* shows it whole. In the LLM, the base tile comes first; then the grid features
//! form a single map, without the grid's padding, and each row ends in a newline token. All images in a
//! sample are treated alike. There are no videos.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::any_res::{Grid, GridChoice, unpad};
use super::{EncoderWork, require_pixels};
use crate::ImageSize;
use crate::error::Result;

/// Rule settings; encoder items are tiles.
///
/// # Source
/// Liu et al., "LLaVA-NeXT: Improved reasoning, OCR, and world knowledge", 2024,
/// <https://llava-vl.github.io/blog/2024-01-30-llava-next/>; token counts as in `LlavaNextProcessor` in
/// transformers 5.24.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ListedGrids {
    /// Side of a square tile in pixels.
    pub tile_pixels: u16,
    /// Number of encoder tokens along a tile side.
    pub patches_per_side: u16,
    /// Possible grids.
    pub grids: GridList,
}

impl ListedGrids {
    /// Published setting: 336-pixel tiles with 24 x 24 tokens, five grids with 2 to 4 tiles.
    pub const LLAVA_NEXT: Self = Self { tile_pixels: 336, patches_per_side: 24, grids: GridList::LLAVA_NEXT };

    /// Returns the work for an image.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        let tiles = self.grid(image)?;
        let features = unpad(self.patches_per_side, image, tiles);
        let tile_tokens = u64::from(self.patches_per_side).pow(2);
        let tokens = features.rows * (features.columns + 1) + tile_tokens;
        Ok(EncoderWork::from_items(1 + tiles.columns * tiles.rows, tile_tokens, tokens))
    }

    /// Returns the tile grid that an image is scaled onto, the base tile not counted.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn grid(&self, image: ImageSize) -> Result<Grid> {
        require_pixels(image)?;
        let mut choice = GridChoice::new(image, self.tile_pixels);
        for grid in self.grids.iter() {
            choice.consider(grid);
        }
        Ok(choice.best())
    }
}

/// Ordered tile grids; written as a list of `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GridList {
    sides: [[u8; 2]; Self::GRIDS_MAX],
    len: u8,
}

impl GridList {
    /// Maximum number of grids.
    pub const GRIDS_MAX: usize = 48;
    /// Grids in the published checkpoints: 1 x 2, 2 x 1, 2 x 2, 3 x 1 and 1 x 3 rows and columns.
    pub const LLAVA_NEXT: Self = {
        let mut sides = [[0; 2]; Self::GRIDS_MAX];
        let [a, b, c, d, e] = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]];
        (sides[0], sides[1], sides[2], sides[3], sides[4]) = (a, b, c, d, e);
        Self { sides, len: 5 }
    };

    /// Creates a list of `[rows, columns]`; `None` if it is empty, too long, or a side is 0.
    #[must_use]
    pub fn new(listed: &[[u8; 2]]) -> Option<Self> {
        let is_valid = (1..=Self::GRIDS_MAX).contains(&listed.len()) && !listed.as_flattened().contains(&0);
        let mut sides = [[0; 2]; Self::GRIDS_MAX];
        sides.get_mut(..listed.len())?.copy_from_slice(listed);
        is_valid.then_some(Self { sides, len: listed.len() as u8 })
    }

    /// Iterates over the grids in order.
    pub fn iter(&self) -> impl Iterator<Item = Grid> {
        let listed = self.sides.iter().take(usize::from(self.len));
        listed.map(|&[rows, columns]| Grid { columns: u64::from(columns), rows: u64::from(rows) })
    }
}

impl Serialize for GridList {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.sides[..usize::from(self.len)])
    }
}

impl<'de> Deserialize<'de> for GridList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let listed = Vec::<[u8; 2]>::deserialize(deserializer)?;
        let expected = || format!("expected 1 to {} grids of at least one tile", Self::GRIDS_MAX);
        Self::new(&listed).ok_or_else(|| D::Error::custom(expected()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: a square image fits the first two grids equally and fills 2 x 2 tiles.
    #[test]
    fn an_image_takes_the_best_grid_and_the_first_on_a_tie() {
        for (width, height, rows, columns, tokens) in [
            (336, 336, 1, 2, 576 + 24 * 25),
            (672, 672, 2, 2, 576 + 48 * 49),
            (640, 480, 2, 2, 576 + 36 * 49),
            (2000, 30, 1, 3, 576 + 2 * 73),
            (30, 2000, 3, 1, 576 + 72 * 3),
        ] {
            let image = ImageSize { width, height };
            assert_eq!(ListedGrids::LLAVA_NEXT.grid(image), Ok(Grid { columns, rows }), "{width} x {height}");
            let work = ListedGrids::LLAVA_NEXT.image(image).unwrap();
            assert_eq!((work.items, work.tokens), (1 + rows * columns, tokens), "{width} x {height}");
        }
    }

    #[test]
    fn a_list_survives_json_and_an_empty_one_is_an_error() {
        let json = serde_json::to_string(&GridList::LLAVA_NEXT).unwrap();
        assert_eq!(json, "[[1,2],[2,1],[2,2],[3,1],[1,3]]");
        assert_eq!(serde_json::from_str::<GridList>(&json).unwrap(), GridList::LLAVA_NEXT);
        for refused in ["[]", "[[0,1]]"] {
            assert!(serde_json::from_str::<GridList>(refused).is_err());
        }
        assert_eq!(GridList::new(&[[1, 1]; GridList::GRIDS_MAX + 1]), None);
    }
}
