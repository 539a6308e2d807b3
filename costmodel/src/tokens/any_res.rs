//! Cuts images into any-resolution tiles, the LLaVA-OneVision rule ("any-res, max 9").
//!
//! A single image is scaled onto the tile grid that keeps most of its pixels and wastes least, and a *base
//! tile* shows it whole. In the LLM, the tile features form a single map: the grid's padding is cut off, a
//! map above the token limit is scaled down, each row ends in a newline token, and the base tile follows.
//! Several images in a sample take one padded tile each; a video takes one tile per frame, pooled 2 x 2.

use serde::{Deserialize, Serialize};

use super::{EncoderWork, require_pixels};
use crate::error::Result;
use crate::{ImageSize, VideoShape};

/// Rule settings; encoder items are tiles.
///
/// # Source
/// Li et al., "LLaVA-OneVision: Easy Visual Task Transfer", 2024, arXiv:2408.03326; token counts as in the
/// Hugging Face transformers 4.57.1 processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AnyRes {
    /// Side of a square tile in pixels.
    pub tile_pixels: u16,
    /// Number of encoder tokens along a tile side.
    pub patches_per_side: u16,
    /// Maximum number of grid columns, and of grid rows.
    pub grid_side_max: u8,
    /// Maximum feature map size, in tiles; larger maps are scaled down.
    pub feature_tiles_max: u8,
    /// Maximum number of frames; longer videos are sampled down to this number.
    pub frames_max: u32,
    /// Newline token placement in a video.
    pub video_newline: VideoNewline,
}

/// Newline token placement in a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VideoNewline {
    /// A single newline at the end of the video, as in LLaVA-OneVision: 196 tokens per frame and 1 per video.
    Once,
    /// A newline at the end of each pooled row, as in LLaVA-Video: 210 tokens per frame.
    EveryRow,
}

/// Columns and rows, in tiles or feature tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "columns and rows need no words")]
pub struct Grid {
    pub columns: u64,
    pub rows: u64,
}

impl AnyRes {
    /// Published setting: 384-pixel tiles with 27 x 27 tokens, grids up to 6 x 6, features with at most 9
    /// tiles, 32 frames.
    pub const LLAVA_ONEVISION: Self = Self {
        tile_pixels: 384,
        patches_per_side: 27,
        grid_side_max: 6,
        feature_tiles_max: 9,
        frames_max: 32,
        video_newline: VideoNewline::Once,
    };

    /// Returns the work for a single image in a sample.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        require_pixels(image)?;
        let tiles = self.best_grid(image);
        let features = self.limit(unpad(self.patches_per_side, image, tiles));
        let tokens = features.rows * (features.columns + 1) + self.tile_tokens();
        Ok(EncoderWork::from_items(1 + tiles.columns * tiles.rows, self.tile_tokens(), tokens))
    }

    /// Returns the work for images in the same sample: one padded tile and one newline token each.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if an image has no pixels.
    pub fn several_images(&self, images: &[ImageSize]) -> Result<EncoderWork> {
        for &image in images {
            require_pixels(image)?;
        }
        let tokens = images.len() as u64 * (self.tile_tokens() + 1);
        Ok(EncoderWork::from_items(images.len() as u64, self.tile_tokens(), tokens))
    }

    /// Returns the work for a video: one tile per frame of any size.
    #[must_use]
    pub fn video(&self, video: VideoShape) -> EncoderWork {
        let frames = u64::from(video.frames.min(self.frames_max));
        let pooled_side = u64::from(self.patches_per_side).div_ceil(2);
        let tokens = match self.video_newline {
            VideoNewline::Once => frames * pooled_side * pooled_side + u64::from(frames > 0),
            VideoNewline::EveryRow => frames * pooled_side * (pooled_side + 1),
        };
        EncoderWork::from_items(frames, self.tile_tokens(), tokens)
    }

    /// Returns the tile grid for a single image in a sample, the base tile not counted.
    ///
    /// # Errors
    /// [`crate::Error::EmptyImage`] if the image has no pixels.
    pub fn grid(&self, image: ImageSize) -> Result<Grid> {
        require_pixels(image)?;
        Ok(self.best_grid(image))
    }

    fn tile_tokens(&self) -> u64 {
        u64::from(self.patches_per_side).pow(2)
    }

    /// Chooses the grid that keeps most image pixels, then wastes least, then comes first.
    fn best_grid(&self, image: ImageSize) -> Grid {
        let mut choice = GridChoice::new(image, self.tile_pixels);
        for columns in 1..=u64::from(self.grid_side_max) {
            for rows in 1..=u64::from(self.grid_side_max) {
                let [scale_x, scale_y] = choice.consider(Grid { columns, rows });
                // From here on the width limits the scale: more rows keep the same pixels and waste more.
                if scale_y >= scale_x {
                    break;
                }
            }
        }
        choice.best()
    }

    /// Scales the feature map down to the token limit if the sides are more than 1.1 times too long.
    fn limit(&self, features: Grid) -> Grid {
        let limit = u64::from(self.feature_tiles_max) * self.tile_tokens();
        let ratio = ((features.columns * features.rows) as f64 / limit as f64).sqrt();
        if ratio > 1.1 {
            return Grid {
                columns: floor_divide(features.columns, ratio),
                rows: floor_divide(features.rows, ratio),
            };
        }
        features
    }
}

/// Choice of the grid that keeps most image pixels, then wastes least, then was considered first.
#[derive(Debug)]
pub(super) struct GridChoice {
    image: ImageSize,
    tile: u64,
    best: Grid,
    kept: u64,
    waste: u64,
}

impl GridChoice {
    pub(super) const fn new(image: ImageSize, tile_pixels: u16) -> Self {
        let best = Grid { columns: 1, rows: 1 };
        Self { image, tile: tile_pixels as u64, best, kept: 0, waste: u64::MAX }
    }

    /// Considers a grid; returns the scales at which the image is as wide and as high as the grid.
    pub(super) fn consider(&mut self, grid: Grid) -> [f64; 2] {
        let (width, height) = (f64::from(self.image.width), f64::from(self.image.height));
        let pixels = u64::from(self.image.width) * u64::from(self.image.height);
        let scale_x = (self.tile * grid.columns) as f64 / width;
        let scale_y = (self.tile * grid.rows) as f64 / height;
        let scale = scale_x.min(scale_y);
        // Truncated to whole pixels, as in the original.
        let scaled = (width * scale) as u64 * (height * scale) as u64;
        let kept = scaled.min(pixels);
        let waste = (self.tile * self.tile * grid.columns * grid.rows).saturating_sub(kept);
        if kept > self.kept || (kept == self.kept && waste < self.waste) {
            (self.best, self.kept, self.waste) = (grid, kept, waste);
        }
        [scale_x, scale_y]
    }

    pub(super) const fn best(&self) -> Grid {
        self.best
    }
}

/// Removes the padding that the image's aspect ratio left in the grid's feature map, equal on both sides.
pub(super) fn unpad(patches_per_side: u16, image: ImageSize, tiles: Grid) -> Grid {
    let side = u64::from(patches_per_side);
    let (columns, rows) = (side * tiles.columns, side * tiles.rows);
    let (width, height) = (u64::from(image.width), u64::from(image.height));
    // Compares the aspect ratios without dividing.
    if width * rows > height * columns {
        let filled = height * columns / width;
        return Grid { columns, rows: rows - 2 * ((rows - filled) / 2) };
    }
    let filled = width * rows / height;
    Grid { columns: columns - 2 * ((columns - filled) / 2), rows }
}

/// Computes Python's `int(length // ratio)`: the floor of the exact quotient.
///
/// `(length / ratio).floor()` is one too large where the division rounds up to an integer.
fn floor_divide(length: u64, ratio: f64) -> u64 {
    let length = length as f64;
    ((length - length % ratio) / ratio).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: AnyRes = AnyRes::LLAVA_ONEVISION;

    /// Width, height, columns, rows, tokens; computed with a transcription of the published Python.
    const TABLE: [(u32, u32, u64, u64, u64); 22] = [
        (1, 1, 1, 1, 1485),
        (384, 384, 1, 1, 1485),
        (448, 448, 2, 2, 3699),
        (300, 500, 1, 2, 2017),
        (640, 480, 2, 2, 2929),
        (480, 640, 2, 2, 2943),
        (640, 399, 2, 2, 2599),
        (463, 1013, 2, 3, 3888),
        (896, 448, 3, 2, 4009),
        (1024, 768, 3, 2, 4725),
        (1920, 1080, 5, 3, 7269),
        (1080, 1920, 3, 5, 7317),
        (2480, 3508, 5, 6, 7353),
        (4961, 7016, 5, 6, 7353),
        (1920, 1920, 5, 5, 7209),
        (5000, 5000, 6, 6, 7371),
        (2304, 384, 6, 1, 5130),
        (2000, 30, 6, 1, 1218),
        (1, 100_000, 1, 1, 783),
        (100_000, 1, 1, 1, 757),
        (u32::MAX, u32::MAX, 6, 6, 7371),
        (u32::MAX, 1, 1, 1, 757),
    ];

    #[test]
    fn single_images_follow_the_published_table() {
        for (width, height, columns, rows, tokens) in TABLE {
            let image = ImageSize { width, height };
            assert_eq!(RULE.best_grid(image), Grid { columns, rows }, "{width} x {height}");
            let work = RULE.image(image).unwrap();
            let tiles = 1 + columns * rows;
            assert_eq!((work.items, work.tokens), (tiles, tokens), "{width} x {height}");
            assert_eq!(work.encoder_tokens, 729 * tiles);
            assert_eq!(work.attention_pairs, 531_441 * tiles);
            assert_eq!(work.window_pairs, work.attention_pairs);
        }
    }

    /// 135 rows over a ratio of 5/3 are 81 on paper, but 80 in double precision and in the model.
    #[test]
    fn scaling_down_floors_like_python() {
        assert_eq!(floor_divide(135, (25.0_f64 / 9.0).sqrt()), 80);
        assert_eq!(floor_divide(162, 2.0), 81);
        assert_eq!(floor_divide(108, (16.0_f64 / 9.0).sqrt()), 81);
    }

    #[test]
    fn several_images_take_one_tile_each() {
        let images = [ImageSize { width: 5000, height: 5000 }, ImageSize { width: 1, height: 1 }];
        let work = RULE.several_images(&images).unwrap();
        assert_eq!((work.items, work.encoder_tokens, work.tokens), (2, 1458, 1460));
    }

    #[test]
    fn video_frames_are_pooled_and_limited() {
        let every_row = AnyRes { video_newline: VideoNewline::EveryRow, ..RULE };
        for (frames, tiles, once, rows) in
            [(0, 0, 0, 0), (1, 1, 197, 210), (32, 32, 6273, 6720), (5395, 32, 6273, 6720)]
        {
            let video = VideoShape { frames, width: 640, height: 480 };
            assert_eq!((RULE.video(video).items, RULE.video(video).tokens), (tiles, once));
            assert_eq!(every_row.video(video).tokens, rows);
        }
    }
}
