//! Sizes and labels for videos whose layers are separate in the text, each after a time label: Qwen3-VL.
//!
//! The pixel limits are over all frames in a video, so longer videos have smaller frames. A layer is a label,
//! `<1.2 seconds>`, and its tokens between markers; two more markers enclose the video.

use serde::{Deserialize, Serialize};

use super::{PixelRange, area, require_pixels, round_half_even};
use crate::error::{Error, Result};
use crate::shape::{ImageSize, VideoShape};

/// Maximum ratio of the longer to the shorter side.
const ASPECT_MAX: u32 = 200;
/// Tokens per label within the first ten seconds, by the Qwen2 tokenizer: `<`, `0`, `.`, `5`, ` seconds` and
/// `>`. Counting a sample's texts with its tokenizer includes the further digits in later layers.
pub(super) const LABEL_TOKENS: u64 = 6;

/// Video settings.
///
/// # Source
/// `Qwen3VLVideoProcessor` and `Qwen3VLProcessor` in transformers 5.24.0; Qwen Team, "Qwen3-VL Technical
/// Report", 2025, arXiv:2511.21631.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TimedVideo {
    /// Allowed pixels over all frames together.
    pub pixels: PixelRange,
    /// Maximum number of tokens per frame, if frames are limited as well (`cap_pixels_per_frame`).
    pub frame_tokens_max: Option<u32>,
}

impl TimedVideo {
    /// Qwen3-VL as released: 4096 to 25,165,824 pixels.
    pub const QWEN3_VL: Self =
        Self { pixels: PixelRange { min: 4096, max: 25_165_824 }, frame_tokens_max: None };

    /// Returns width and height in pixels that frames are resized to, multiples of `factor`.
    ///
    /// A single frame, which the published processor rejects, counts as repeated to a whole layer.
    ///
    /// # Errors
    /// [`Error::EmptyImage`] if frames have no pixels; [`Error::AspectRatio`] if one side is more than 200
    /// times the other.
    pub(super) fn resize(&self, video: VideoShape, factor: u64, frames_per_layer: u64) -> Result<[u64; 2]> {
        let VideoShape { width, height, .. } = video;
        require_pixels(ImageSize { width, height })?;
        let frames = u64::from(video.frames).max(frames_per_layer);
        let mut sides = [width, height].map(u64::from);
        if sides[0].min(sides[1]) < factor {
            let scale = |side: u64| factor as f64 / side as f64;
            let scale = scale(sides[1]).max(scale(sides[0]));
            sides = sides.map(|side| (side as f64 * scale) as u64);
        }
        if sides[0].max(sides[1]) > u64::from(ASPECT_MAX).saturating_mul(sides[0].min(sides[1])) {
            return Err(Error::AspectRatio { width, height, aspect_max: ASPECT_MAX });
        }
        let rounded = sides.map(|side| round_half_even(side, factor).saturating_mul(factor));
        let layered = round_half_even(frames, frames_per_layer).saturating_mul(frames_per_layer);
        // The limits apply to the rounded sizes, but the original sizes are scaled, as in the original.
        let pixels = layered.saturating_mul(rounded[0]).saturating_mul(rounded[1]);
        let (least, most) = (u64::from(self.pixels.min), self.pixels_max(frames, factor));
        if pixels > most {
            let ratio = (frames as f64 * area(sides) / most as f64).sqrt();
            let shrink = |side: u64| (side as f64 / ratio / factor as f64).floor() as u64 * factor;
            return Ok(sides.map(|side| shrink(side).max(factor)));
        }
        if pixels < least {
            let ratio = (least as f64 / (frames as f64 * area(sides))).sqrt();
            let grow = |side: u64| (side as f64 * ratio / factor as f64).ceil() as u64 * factor;
            return Ok(sides.map(grow));
        }
        Ok(rounded)
    }

    /// Returns the maximum number of pixels in a video with `frames` frames.
    fn pixels_max(&self, frames: u64, factor: u64) -> u64 {
        let PixelRange { min, max } = self.pixels;
        let Some(tokens) = self.frame_tokens_max else { return u64::from(max) };
        let of_frame = u64::from(tokens).saturating_mul(factor * factor).min(u64::from(max) / frames);
        // The floor is a twentieth above the minimum number of pixels.
        let floor = (f64::from(min) * 1.05) as u64;
        of_frame.max(floor).saturating_mul(frames)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::native::NativeResolution;

    const RULE: NativeResolution = NativeResolution::QWEN3_VL;

    fn resized(frames: u32, width: u32, height: u32) -> Result<[u64; 2]> {
        RULE.resized_video(VideoShape { frames, width, height })
    }

    #[test]
    fn longer_videos_have_smaller_frames() {
        assert_eq!(resized(4, 1920, 1080), Ok([1920, 1088]));
        assert_eq!(resized(64, 1920, 1080), Ok([832, 448]));
        assert_eq!(resized(768, 1920, 1080), Ok([224, 128]));
    }

    #[test]
    fn thin_and_empty_frames_are_errors() {
        assert!(matches!(resized(4, 10_000, 40), Err(Error::AspectRatio { .. })));
        assert!(matches!(resized(4, 0, 40), Err(Error::EmptyImage { .. })));
    }

    #[test]
    fn frames_may_be_limited_each() {
        let capped = TimedVideo { frame_tokens_max: Some(768), ..TimedVideo::QWEN3_VL };
        let rule = NativeResolution { timed_video: Some(capped), ..RULE };
        let [width, height] =
            rule.resized_video(VideoShape { frames: 4, width: 1920, height: 1080 }).unwrap();
        assert!(width * height <= 768 * 32 * 32 && width * height > 700 * 32 * 32, "{width} x {height}");
    }

    /// 64 x 64 pixel frames: 4 tokens, two markers and a label for each of two layers, and two markers.
    #[test]
    fn every_layer_has_markers_and_a_label() {
        let work = RULE.video(VideoShape { frames: 3, width: 64, height: 64 }).unwrap();
        assert_eq!((work.items, work.tokens), (32, 2 * (4 + 2 + 6) + 2));
        let none = RULE.video(VideoShape { frames: 0, width: 64, height: 64 }).unwrap();
        assert_eq!(none.tokens, 0);
    }
}
