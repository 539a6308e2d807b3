//! Borrows the pixels of an image or a video frame.

use dflop_costmodel::ImageSize;
use dflop_samples::media::{RgbImage, Video};

/// Borrowed pixels, `[height, width, 3]`.
#[derive(Clone, Copy, Debug)]
pub struct RgbView<'a> {
    /// Number of columns.
    pub width: u32,
    /// Number of rows.
    pub height: u32,
    /// Red, green and blue for every pixel, row by row.
    pub pixels: &'a [u8],
}

impl<'a> RgbView<'a> {
    /// Returns the frames in a video; the last frame may lack pixels.
    pub(crate) fn video_frames(video: &'a Video) -> Vec<Self> {
        let (width, height) = (video.width, video.height);
        let bytes = 3 * width as usize * height as usize;
        video.pixels.chunks(bytes.max(1)).map(|pixels| Self { width, height, pixels }).collect()
    }

    /// Returns columns and rows.
    #[must_use]
    pub const fn size(self) -> ImageSize {
        ImageSize { width: self.width, height: self.height }
    }
}

impl<'a> From<&'a RgbImage> for RgbView<'a> {
    fn from(image: &'a RgbImage) -> Self {
        Self { width: image.width, height: image.height, pixels: &image.pixels }
    }
}
