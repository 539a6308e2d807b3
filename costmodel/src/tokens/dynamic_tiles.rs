//! Cuts images into dynamic tiles, the InternVL rule.
//!
//! An image is stretched onto the tile grid with the nearest aspect ratio; on a tie the larger grid wins if
//! the image has more than half the grid's pixels. Two or more tiles are followed by a *thumbnail*, a tile
//! that shows the whole image. Pixel shuffle merges 2 x 2 encoder tokens into one LLM token, and two marker
//! tokens enclose each image. A video is a line of text per frame, `Frame1: ` and a one-tile image.

use serde::{Deserialize, Serialize};

use super::{EncoderWork, require_pixels};
use crate::error::Result;
use crate::{ImageSize, VideoShape};

/// Rule settings; encoder items are tiles, thumbnails included.
///
/// Grids with equal tile counts, which the original tries in unspecified order, are ordered by columns.
///
/// # Source
/// Chen et al., "How Far Are We to GPT-4V?", 2024, arXiv:2404.16821, section 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DynamicTiles {
    /// Side of a square tile in pixels.
    pub tile_pixels: u16,
    /// Encoder tokens per tile.
    pub tile_patches: u16,
    /// LLM tokens per tile.
    pub tile_tokens: u16,
    /// Maximum number of tiles in an image, without the thumbnail; 0 counts as 1.
    pub tiles_max: u8,
    /// Maximum number of frames; longer videos are sampled down to this number.
    pub frames_max: u32,
    /// Marker tokens around an image or a frame.
    pub marker_tokens: u8,
}

/// Grid considered for an image.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    tiles: u64,
    columns: u64,
    /// Distance between the image and grid aspect ratios.
    distance: f64,
}

impl DynamicTiles {
    /// Published training setting: 1 to 12 tiles with 448 pixels per side, 1024 patches, 256 tokens.
    pub const INTERN_VL: Self = Self {
        tile_pixels: 448,
        tile_patches: 1024,
        tile_tokens: 256,
        tiles_max: 12,
        frames_max: 32,
        marker_tokens: 2,
    };

    /// Returns the work for an image.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        require_pixels(image)?;
        let grid_tiles = self.best_grid(image).tiles;
        let thumbnails = u64::from(grid_tiles > 1);
        Ok(self.tiles(grid_tiles + thumbnails, 1))
    }

    /// Returns the work for a video: one tile per frame of any size, each between markers and after a label.
    #[must_use]
    pub fn video(&self, video: VideoShape) -> EncoderWork {
        let frames = u64::from(video.frames.min(self.frames_max));
        let work = self.tiles(frames, frames);
        EncoderWork { tokens: work.tokens.saturating_add(label_tokens(frames)), ..work }
    }

    /// Returns the tile columns and rows that an image is stretched onto, the thumbnail not counted.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn grid(&self, image: ImageSize) -> Result<[u64; 2]> {
        require_pixels(image)?;
        let best = self.best_grid(image);
        Ok([best.columns, best.tiles / best.columns])
    }

    fn tiles(&self, tiles: u64, images: u64) -> EncoderWork {
        let tokens = tiles * u64::from(self.tile_tokens) + images * u64::from(self.marker_tokens);
        EncoderWork::from_items(tiles, u64::from(self.tile_patches), tokens)
    }

    fn best_grid(&self, image: ImageSize) -> Candidate {
        let tiles_max = u64::from(self.tiles_max);
        let aspect = f64::from(image.width) / f64::from(image.height);
        let tile_pixels = u64::from(self.tile_pixels) * u64::from(self.tile_pixels);
        let twice_pixels = 2 * u128::from(image.width) * u128::from(image.height);
        let is_filled = |tiles: u64| twice_pixels > u128::from(tile_pixels * tiles);
        let mut best = Candidate { tiles: 1, columns: 1, distance: (aspect - 1.0).abs() };
        for columns in 1..=tiles_max {
            for rows in 1..=tiles_max / columns {
                let distance = (aspect - columns as f64 / rows as f64).abs();
                // On a tie the larger grid may win, so equal distances are compared below.
                if distance > best.distance {
                    continue;
                }
                let candidate = Candidate { tiles: columns * rows, columns, distance };
                if candidate.beats(&best, is_filled) {
                    best = candidate;
                }
            }
        }
        best
    }
}

/// Counts the text tokens in the lines `Frame1: `, `Frame2: `… and in the breaks between them.
///
/// The Qwen2 tokenizer splits them into a word, each digit, a colon and a blank; and a break.
///
/// # Source
/// `InternVLProcessor` in Hugging Face transformers 4.57.1.
#[must_use]
pub fn label_tokens(frames: u64) -> u64 {
    let powers = std::iter::successors(Some(1_u64), |power| power.checked_mul(10));
    let digits: u64 = powers.take_while(|&power| power <= frames).map(|power| frames - power + 1).sum();
    (3 * frames + digits + frames).saturating_sub(1)
}

impl Candidate {
    /// Returns whether the original's search would end with `self` rather than with `best`.
    ///
    /// The original tries grids by tile count and lets a later equal grid win if it is filled; the result
    /// here does not depend on the order in which the two are tried.
    ///
    /// `is_filled`: whether the image has more than half the pixels in a grid with this many tiles
    fn beats(&self, best: &Self, is_filled: impl Fn(u64) -> bool) -> bool {
        if self.distance < best.distance {
            return true;
        }
        let is_later = (self.tiles, self.columns) > (best.tiles, best.columns);
        self.distance <= best.distance
            && if is_later { is_filled(self.tiles) } else { !is_filled(best.tiles) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RULE: DynamicTiles = DynamicTiles::INTERN_VL;

    /// Width, height, tiles with thumbnail for at most 12, 4 and 40 tiles; computed with an independent
    /// transcription of the published Python.
    const TABLE: [(u32, u32, u64, u64, u64); 20] = [
        (1, 1, 1, 1, 1),
        (384, 384, 1, 1, 1),
        (448, 448, 1, 1, 1),
        (450, 448, 1, 1, 1),
        (640, 480, 13, 1, 13),
        (480, 640, 13, 3, 13),
        (640, 399, 7, 3, 41),
        (463, 1013, 3, 3, 37),
        (800, 600, 13, 5, 13),
        (896, 448, 3, 3, 3),
        (1000, 1000, 10, 5, 10),
        (1344, 448, 4, 4, 4),
        (3000, 600, 6, 5, 6),
        (600, 3000, 6, 5, 6),
        (1920, 1080, 9, 3, 29),
        (1080, 1920, 9, 3, 29),
        (2480, 3508, 7, 3, 36),
        (1, 100_000, 13, 5, 41),
        (u32::MAX, 1, 13, 5, 41),
        (u32::MAX, u32::MAX, 10, 5, 37),
    ];

    fn tiles(tiles_max: u8, width: u32, height: u32) -> u64 {
        DynamicTiles { tiles_max, ..RULE }.image(ImageSize { width, height }).unwrap().items
    }

    #[test]
    fn images_follow_the_published_table() {
        for (width, height, of_12, of_4, of_40) in TABLE {
            assert_eq!(tiles(12, width, height), of_12, "{width} x {height}");
            assert_eq!(tiles(4, width, height), of_4, "{width} x {height}");
            assert_eq!(tiles(40, width, height), of_40, "{width} x {height}");
        }
    }

    #[test]
    fn an_image_of_seven_tiles_has_seven_times_the_tokens_and_two_markers() {
        let work = RULE.image(ImageSize { width: 640, height: 399 }).unwrap();
        assert_eq!((work.items, work.encoder_tokens, work.tokens), (7, 7168, 1794));
        assert_eq!(work.attention_pairs, 7_340_032);
    }

    #[test]
    fn grids_have_the_shape_of_the_image() {
        for (width, height, grid) in
            [(448, 448, [1, 1]), (1344, 448, [3, 1]), (600, 3000, [1, 5]), (640, 480, [4, 3])]
        {
            assert_eq!(RULE.grid(ImageSize { width, height }), Ok(grid), "{width} x {height}");
        }
    }

    #[test]
    fn video_takes_a_tile_a_frame() {
        for (frames, tiles) in [(0, 0), (1, 1), (8, 8), (972, 32)] {
            let work = RULE.video(VideoShape { frames, width: 1920, height: 1080 });
            assert_eq!((work.items, work.tokens), (tiles, 258 * tiles + label_tokens(tiles)));
        }
    }

    #[test]
    fn labels_count_their_digits_and_breaks() {
        for (frames, tokens) in [(0, 0), (1, 4), (2, 9), (9, 44), (10, 50), (100, 100 * 3 + 192 + 99)] {
            assert_eq!(label_tokens(frames), tokens, "{frames}");
        }
    }

    /// Searches as the original does: grids in sorted order, later equal grids win if filled.
    fn tiles_in_sorted_order(tiles_max: u64, width: u32, height: u32) -> u64 {
        let mut grids = Vec::new();
        for columns in 1..=tiles_max {
            for rows in 1..=tiles_max / columns {
                grids.push((columns * rows, columns, rows));
            }
        }
        grids.sort_unstable();
        let mut best = (f64::INFINITY, 1);
        for (tiles, columns, rows) in grids {
            let aspect = f64::from(width) / f64::from(height);
            let distance = (aspect - columns as f64 / rows as f64).abs();
            let pixels = f64::from(width) * f64::from(height);
            let is_tie = distance.total_cmp(&best.0).is_eq();
            if distance < best.0 || (is_tie && pixels > 0.5 * 448.0 * 448.0 * tiles as f64) {
                best = (distance, tiles);
            }
        }
        best.1 + u64::from(best.1 > 1)
    }

    proptest! {
        #[test]
        fn order_of_trial_does_not_matter(width in 1u32..6000, height in 1u32..6000, unit in 1u32..1000,
            columns in 1u32..9, rows in 1u32..9, tiles_max in 1u8..41) {
            for (width, height) in [(width, height), (unit * columns, unit * rows)] {
                prop_assert_eq!(
                    tiles(tiles_max, width, height),
                    tiles_in_sorted_order(u64::from(tiles_max), width, height)
                );
            }
        }
    }
}
