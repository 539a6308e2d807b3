//! Cuts images into patches at native resolution, the Qwen2-VL, Qwen2.5-VL and Qwen3-VL rule.
//!
//! An image keeps its native size, rounded to a multiple of patch x merge and scaled into a pixel range. The
//! encoder processes every patch; `merge` x `merge` patches become one LLM token; two marker tokens enclose
//! an image or a video. Video frames are processed in pairs, with a last single frame repeated, and a still
//! image is such a pair. The encoder attends only within a pair, in windowed layers within a window. Qwen3-VL
//! videos are cut into pairs in the text as well: [`TimedVideo`].

use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

pub use super::PixelRange;
use super::{EncoderWork, LABEL_TOKENS, TimedVideo, area, require_pixels, round_half_even};
use crate::error::{Error, Result};
use crate::{ImageSize, VideoShape};

/// Maximum ratio of the longer to the shorter side.
const ASPECT_MAX: u32 = 200;

/// Rule settings; encoder items are patches.
///
/// # Source
/// Wang et al., "Qwen2-VL", 2024, arXiv:2409.12191; resizing as in the processor's `smart_resize`, double
/// precision included. Windows: Bai et al., "Qwen2.5-VL Technical Report", 2025, arXiv:2502.13923.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NativeResolution {
    /// Patch side in pixels.
    pub patch_pixels: NonZeroU16,
    /// Number of patches along the side of the square that becomes one LLM token.
    pub merge: NonZeroU16,
    /// Attention window side in patches, for models that have windowed layers.
    pub window_patches: Option<NonZeroU16>,
    /// Number of frames that become one layer of patches.
    pub frames_per_patch: NonZeroU16,
    /// Allowed pixels in an image.
    pub image: PixelRange,
    /// Allowed pixels in a video frame.
    pub frame: PixelRange,
    /// Maximum number of frames; longer videos are sampled down to this number.
    pub frames_max: u32,
    /// Marker tokens around an image or a video.
    pub marker_tokens: u8,
    /// Rule for videos whose layers are separate in the text (Qwen3-VL); without it a video is a single
    /// medium with the `frame` limits for each frame.
    #[serde(default)]
    pub timed_video: Option<TimedVideo>,
    /// Whether an image with a side shorter than a token's square is first enlarged to it (GLM-4.1V).
    #[serde(default)]
    pub enlarges_thin: bool,
}

const fn at_least_one(value: u16) -> NonZeroU16 {
    match NonZeroU16::new(value) {
        Some(value) => value,
        None => NonZeroU16::MIN,
    }
}

impl NativeResolution {
    /// Qwen2-VL as released: 14-pixel patches, merged 2 x 2; images with 3136 to 12,845,056 pixels; up to 768
    /// video frames with 100,352 to 602,112 pixels.
    pub const QWEN2_VL: Self = Self {
        patch_pixels: at_least_one(14),
        merge: at_least_one(2),
        window_patches: None,
        frames_per_patch: at_least_one(2),
        image: PixelRange { min: 3136, max: 12_845_056 },
        frame: PixelRange { min: 100_352, max: 602_112 },
        frames_max: 768,
        marker_tokens: 2,
        timed_video: None,
        enlarges_thin: false,
    };

    /// Qwen2.5-VL: as Qwen2-VL, with 112-pixel windows, that is 8 patches.
    pub const QWEN2_5_VL: Self = Self { window_patches: Some(at_least_one(8)), ..Self::QWEN2_VL };

    /// Qwen3-VL as released: 16-pixel patches; images with 65,536 to 16,777,216 pixels; videos with the time
    /// of every two frames.
    pub const QWEN3_VL: Self = Self {
        patch_pixels: at_least_one(16),
        image: PixelRange { min: 65_536, max: 16_777_216 },
        timed_video: Some(TimedVideo::QWEN3_VL),
        ..Self::QWEN2_VL
    };

    /// Returns the work for an image.
    ///
    /// # Errors
    /// [`Error::EmptyImage`] if the image has no pixels; [`Error::AspectRatio`] if a side is more than 200
    /// times the other.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        let layer = self.layer(self.resize(image, self.image)?);
        Ok(self.enclosed(layer))
    }

    /// Returns the patch columns and rows in an image.
    ///
    /// # Errors
    /// The errors of [`NativeResolution::image`].
    pub fn grid(&self, image: ImageSize) -> Result<[u64; 2]> {
        let patch = u64::from(self.patch_pixels.get());
        Ok(self.resize(image, self.image)?.map(|pixels| pixels / patch))
    }

    /// Returns the work for a video; a video without frames has none.
    ///
    /// # Errors
    /// The errors of [`NativeResolution::image`], for the frames.
    pub fn video(&self, video: VideoShape) -> Result<EncoderWork> {
        if video.frames == 0 {
            return Ok(EncoderWork::default());
        }
        let layer = self.layer(self.resized_video(video)?);
        let [layers, ..] = self.video_grid(video)?;
        if self.timed_video.is_none() {
            return Ok(self.enclosed(layer.repeat(layers)));
        }
        let mut layer = self.enclosed(layer);
        layer.tokens = layer.tokens.saturating_add(LABEL_TOKENS);
        Ok(self.enclosed(layer.repeat(layers)))
    }

    /// Returns the patch layers, rows and columns in a video; layers hold several frames.
    ///
    /// # Errors
    /// The errors of [`NativeResolution::image`], for the frames.
    pub fn video_grid(&self, video: VideoShape) -> Result<[u64; 3]> {
        let [width, height] = self.resized_video(video)?;
        let frames = video.frames.min(self.frames_max);
        let layers = frames.div_ceil(u32::from(self.frames_per_patch.get()));
        let patch = u64::from(self.patch_pixels.get());
        Ok([u64::from(layers), height / patch, width / patch])
    }

    /// Returns width and height in pixels that an image is resized to, multiples of patch x merge.
    ///
    /// # Errors
    /// The errors of [`NativeResolution::image`].
    pub fn resized_image(&self, image: ImageSize) -> Result<[u64; 2]> {
        self.resize(image, self.image)
    }

    /// Returns width and height in pixels that video frames are resized to; frames beyond the maximum number
    /// do not count.
    ///
    /// # Errors
    /// The errors of [`NativeResolution::image`], for the frames.
    pub fn resized_video(&self, video: VideoShape) -> Result<[u64; 2]> {
        let Some(timed) = self.timed_video else {
            return self.resize(ImageSize { width: video.width, height: video.height }, self.frame);
        };
        let taken = VideoShape { frames: video.frames.min(self.frames_max), ..video };
        let factor = u64::from(self.patch_pixels.get()) * u64::from(self.merge.get());
        timed.resize(taken, factor, self.frames_per_patch.get().into())
    }

    fn enclosed(&self, work: EncoderWork) -> EncoderWork {
        EncoderWork { tokens: work.tokens.saturating_add(u64::from(self.marker_tokens)), ..work }
    }

    /// Returns the work for a layer of patches over a resized image, `[width, height]` in pixels.
    fn layer(&self, size: [u64; 2]) -> EncoderWork {
        let patch = u64::from(self.patch_pixels.get());
        let merge = u64::from(self.merge.get());
        let [columns, rows] = size.map(|pixels| pixels / patch);
        let patches = columns.saturating_mul(rows);
        let attention_pairs = patches.saturating_mul(patches);
        let window_pairs = self.window_patches.map_or(attention_pairs, |window| {
            let window = u64::from(window.get());
            squared_runs(columns, window).saturating_mul(squared_runs(rows, window))
        });
        let tokens = (columns / merge).saturating_mul(rows / merge);
        EncoderWork {
            items: patches,
            encoder_tokens: patches,
            tokens,
            attention_pairs,
            window_pairs,
            ..EncoderWork::default()
        }
    }

    /// Resizes to width and height in pixels, both multiples of patch x merge.
    fn resize(&self, size: ImageSize, range: PixelRange) -> Result<[u64; 2]> {
        require_pixels(size)?;
        let factor = u64::from(self.patch_pixels.get()) * u64::from(self.merge.get());
        let mut sides = [size.width, size.height].map(u64::from);
        if self.enlarges_thin && sides[0].min(sides[1]) < factor {
            let scales = sides.map(|side| factor as f64 / side as f64);
            let scale = scales[0].max(scales[1]);
            sides = sides.map(|side| (side as f64 * scale) as u64);
        }
        if sides[0].max(sides[1]) > u64::from(ASPECT_MAX).saturating_mul(sides[0].min(sides[1])) {
            return Err(Error::AspectRatio {
                width: size.width,
                height: size.height,
                aspect_max: ASPECT_MAX,
            });
        }
        let rounded = sides.map(|side| round_half_even(side, factor) * factor);
        // The limits apply to the rounded sides, but the original sides are scaled, as in the original.
        let pixels = rounded[0].saturating_mul(rounded[1]);
        if pixels > u64::from(range.max) {
            let ratio = (area(sides) / f64::from(range.max)).sqrt();
            let shrink = |side: u64| (side as f64 / ratio / factor as f64).floor() as u64 * factor;
            return Ok(sides.map(|side| shrink(side).max(factor)));
        }
        if pixels < u64::from(range.min) {
            let ratio = (f64::from(range.min) / area(sides)).sqrt();
            let grow = |side: u64| (side as f64 * ratio / factor as f64).ceil() as u64 * factor;
            return Ok(sides.map(grow));
        }
        Ok(rounded)
    }
}

/// Returns the sum of squared lengths of the runs into which windows cut `length` patches.
fn squared_runs(length: u64, window: u64) -> u64 {
    let rest = length % window;
    (length / window).saturating_mul(window * window).saturating_add(rest * rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: NativeResolution = NativeResolution::QWEN2_5_VL;
    const LIBRARY_DEFAULT: PixelRange = PixelRange { min: 3136, max: 1_003_520 };

    /// Width and height as given, as resized, and as resized under the library's default range; computed with
    /// an independent transcription of the published Python.
    const TABLE: [([u32; 2], [u64; 2], [u64; 2]); 19] = [
        ([1, 1], [56, 56], [56, 56]),
        ([14, 14], [56, 56], [56, 56]),
        ([70, 70], [56, 56], [56, 56]),
        ([27, 28], [56, 84], [56, 84]),
        ([200, 1], [812, 28], [812, 28]),
        ([1, 200], [28, 812], [28, 812]),
        ([2000, 30], [1988, 28], [1988, 28]),
        ([300, 500], [308, 504], [308, 504]),
        ([384, 384], [392, 392], [392, 392]),
        ([640, 480], [644, 476], [644, 476]),
        ([640, 399], [644, 392], [644, 392]),
        ([463, 1013], [476, 1008], [476, 1008]),
        ([1344, 700], [1344, 700], [1344, 700]),
        ([1920, 1080], [1932, 1092], [1316, 728]),
        ([1920, 1920], [1932, 1932], [980, 980]),
        ([2480, 3508], [2492, 3500], [840, 1176]),
        ([4961, 7016], [2996, 4256], [840, 1176]),
        ([5000, 5000], [3556, 3556], [980, 980]),
        ([u32::MAX, u32::MAX], [3584, 3584], [980, 980]),
    ];

    #[test]
    fn resizing_follows_the_published_table() {
        for ([width, height], released, default) in TABLE {
            let size = ImageSize { width, height };
            assert_eq!(RULE.resized_image(size), Ok(released), "{width} x {height}");
            assert_eq!(RULE.resize(size, LIBRARY_DEFAULT), Ok(default), "{width} x {height}");
        }
    }

    /// Width, height, patches, tokens without markers, window pairs.
    #[test]
    fn patches_tokens_and_windows_follow_the_resized_image() {
        for (width, height, patches, tokens, window_pairs) in [
            (1, 1, 16, 4, 256),
            (448, 448, 1024, 256, 65_536),
            (640, 480, 1564, 391, 92_560),
            (463, 1013, 2448, 612, 149_760),
            (1920, 1080, 10_764, 2691, 668_304),
            (200, 1, 116, 29, 1808),
        ] {
            let work = RULE.image(ImageSize { width, height }).unwrap();
            assert_eq!((work.items, work.encoder_tokens), (patches, patches));
            assert_eq!(work.tokens, tokens + 2);
            assert_eq!(work.attention_pairs, patches * patches);
            assert_eq!(work.window_pairs, window_pairs);
        }
    }

    #[test]
    fn a_model_without_windows_attends_fully_everywhere() {
        let work = NativeResolution::QWEN2_VL.image(ImageSize { width: 640, height: 480 }).unwrap();
        assert_eq!(work.window_pairs, work.attention_pairs);
    }

    #[test]
    fn thin_images_are_errors() {
        for (width, height) in [(201, 1), (1, 201), (100_000, 1), (u32::MAX, 1)] {
            let refused = Error::AspectRatio { width, height, aspect_max: 200 };
            assert_eq!(RULE.image(ImageSize { width, height }), Err(refused.clone()));
            assert_eq!(RULE.video(VideoShape { frames: 2, width, height }), Err(refused));
        }
    }

    #[test]
    fn halves_round_to_the_even_multiple() {
        for (value, rounded) in [(0, 0), (13, 0), (14, 0), (15, 1), (41, 1), (42, 2), (70, 2), (98, 4)] {
            assert_eq!(round_half_even(value, 28), rounded, "{value} / 28");
        }
    }

    /// 1920 x 1080 frames become 1008 x 560: 72 x 40 patches, 720 tokens per pair.
    #[test]
    fn video_frames_are_paired_and_limited() {
        for (frames, pairs) in [(1, 1), (2, 1), (3, 2), (16, 8), (768, 384), (5395, 384)] {
            let video = VideoShape { frames, width: 1920, height: 1080 };
            assert_eq!(RULE.video_grid(video), Ok([pairs, 40, 72]));
            let work = RULE.video(video).unwrap();
            assert_eq!((work.items, work.tokens), (2880 * pairs, 720 * pairs + 2));
            assert_eq!(work.attention_pairs, 2880 * 2880 * pairs);
            assert_eq!(work.window_pairs, 2880 * 64 * pairs);
        }
    }
}
