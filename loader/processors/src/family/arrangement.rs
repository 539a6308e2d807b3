//! Arranges the features of an image in the text.

/// Arrangement of the tokens that stand for one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// Copies of the placeholder in one run.
    Run,
    /// Rows of copies, as many as the grid of the image has: Pixtral.
    Rows {
        /// Token after each row but the last.
        row_end: &'static str,
        /// Token after the last row.
        image_end: &'static str,
    },
    /// Tiles, each after a token and one that names its row and column, with a line break after each row;
    /// then a blank line and a tile of the whole image: Idefics3.
    NamedTiles {
        /// Copies of the placeholder in a tile.
        tile_tokens: u32,
        /// Token before each tile and after the last.
        edge: &'static str,
        /// Token that names the tile of the whole image.
        whole: &'static str,
    },
}
