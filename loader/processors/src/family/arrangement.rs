//! Arranges image features in the text.

/// Arrangement of the tokens that represent an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// A single run of placeholder copies.
    Run,
    /// Rows of copies, with the number of rows in the image grid: Pixtral.
    Rows {
        /// Token after each row but the last.
        row_end: &'static str,
        /// Token after the last row.
        image_end: &'static str,
    },
    /// Tiles, each after a token and a token that names the tile's row and column, with a line break after
    /// each row; then a blank line and a tile with the whole image: Idefics3.
    NamedTiles {
        /// Number of placeholder copies per tile.
        tile_tokens: u32,
        /// Token before each tile and after the last.
        edge: &'static str,
        /// Token that names the tile with the whole image.
        whole: &'static str,
    },
}
