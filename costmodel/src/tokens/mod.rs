//! Converts a medium's shape to encoder work and LLM length.
//!
//! Sizes and labels for videos whose layers are separate in the text, each after a time label: Qwen3-VL.
//!
//! Every model family cuts media into encoder items by a *token rule*; each file has one rule: [`any_res`]
//! (LLaVA-OneVision), [`listed_grids`] (LLaVA-NeXT), [`scaled_tiles`] (Idefics3, `SmolVLM`),
//! [`dynamic_tiles`] (InternVL), [`fitted_tiles`] (Llama 4), [`native`] (Qwen2-VL) with [`TimedVideo`]
//! (Qwen3-VL), [`longest_edge`] (Pixtral), [`fixed_tile`] (CLIP and SigLIP, LLaVA 1.5), [`pan_and_scan`]
//! (Gemma 3) and [`audio`] (Whisper, Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni); a [`table`] replaces a rule
//! that is not known. All rules return [`EncoderWork`].
//!
//! Rules follow the published preprocessing to the token. Where that rounds in double precision, so do they,
//! only with the IEEE operations `+ - * / sqrt fmod`: these are correctly rounded, hence the same on every
//! machine. Everything else is integer arithmetic.
//!
//! The pixel limits are over all frames in a video, so longer videos have smaller frames. A layer is a label,
//! `<1.2 seconds>`, and its tokens between markers; two more markers enclose the video.

pub mod any_res;
pub mod audio;
pub mod dynamic_tiles;
pub mod fitted_tiles;
pub mod fixed_tile;
pub mod listed_grids;
pub mod longest_edge;
pub mod native;
pub mod pan_and_scan;
pub mod scaled_tiles;
pub mod table;

use super::error::{Error, Result};
use super::interned::Interned;
use crate::{ImageSize, SampleShape, VideoShape};
use any_res::AnyRes;
use audio::AudioRule;
use dynamic_tiles::DynamicTiles;
use fitted_tiles::FittedTiles;
use fixed_tile::FixedTile;
use listed_grids::ListedGrids;
use longest_edge::LongestEdge;
use native::NativeResolution;
use pan_and_scan::PanAndScan;
use scaled_tiles::ScaledTiles;
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;
use table::TokenTable;

/// Media work in an encoder and in the LLM; adds up with `+=`, saturating.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct EncoderWork {
    /// Encoder items: tiles, patches or 30-second windows, depending on the rule.
    pub items: u64,
    /// Positions inside the encoder.
    pub encoder_tokens: u64,
    /// Positions in the LLM, including markers around a medium if the rule counts them.
    pub tokens: u64,
    /// Query-key pairs in one full-attention encoder layer: the sum of squared sequence lengths.
    pub attention_pairs: u64,
    /// Query-key pairs in one layer with windowed attention; equal to `attention_pairs` without windows.
    pub window_pairs: u64,
    /// Additional padding positions that the stem computes and the layers do not get; mostly 0.
    pub padded_tokens: u64,
}

impl EncoderWork {
    /// Returns the work for `count` equal media, saturating.
    #[must_use]
    pub const fn repeat(self, count: u64) -> Self {
        Self {
            items: self.items.saturating_mul(count),
            encoder_tokens: self.encoder_tokens.saturating_mul(count),
            tokens: self.tokens.saturating_mul(count),
            attention_pairs: self.attention_pairs.saturating_mul(count),
            window_pairs: self.window_pairs.saturating_mul(count),
            padded_tokens: self.padded_tokens.saturating_mul(count),
        }
    }

    /// Returns the work for sequences with these lengths, each with full attention within itself, without LLM
    /// tokens; saturating.
    #[must_use]
    pub fn from_sequences(lengths: &[u32]) -> Self {
        let mut work = Self::default();
        for &length in lengths.iter().filter(|length| **length > 0) {
            work += Self::from_items(1, u64::from(length), 0);
        }
        work
    }

    /// Returns the work for `items` sequences with equal lengths, each with full attention within itself.
    const fn from_items(items: u64, encoder_tokens_per_item: u64, tokens: u64) -> Self {
        let item = Self {
            items: 1,
            encoder_tokens: encoder_tokens_per_item,
            tokens: 0,
            attention_pairs: encoder_tokens_per_item.saturating_mul(encoder_tokens_per_item),
            window_pairs: encoder_tokens_per_item.saturating_mul(encoder_tokens_per_item),
            padded_tokens: 0,
        };
        Self { tokens, ..item.repeat(items) }
    }
}

impl AddAssign for EncoderWork {
    fn add_assign(&mut self, other: Self) {
        self.items = self.items.saturating_add(other.items);
        self.encoder_tokens = self.encoder_tokens.saturating_add(other.encoder_tokens);
        self.tokens = self.tokens.saturating_add(other.tokens);
        self.attention_pairs = self.attention_pairs.saturating_add(other.attention_pairs);
        self.window_pairs = self.window_pairs.saturating_add(other.window_pairs);
        self.padded_tokens = self.padded_tokens.saturating_add(other.padded_tokens);
    }
}

/// Rule that converts images and videos to encoder items and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VisionRule {
    /// Tiles in the grid that wastes least, LLaVA-OneVision.
    AnyRes(AnyRes),
    /// Tiles in one of a few listed grids, LLaVA-NeXT.
    ListedGrids(ListedGrids),
    /// Tiles in an image whose longer side is scaled to a fixed length, Idefics3.
    ScaledTiles(ScaledTiles),
    /// Tiles in the grid with the nearest aspect ratio, InternVL.
    DynamicTiles(DynamicTiles),
    /// Tiles in the grid that changes an image least, Llama 4.
    FittedTiles(FittedTiles),
    /// Native resolution in patches, Qwen2-VL.
    Native(NativeResolution),
    /// Native resolution up to a longest side, in rows of patches, Pixtral.
    LongestEdge(LongestEdge),
    /// One tile per image, CLIP and SigLIP.
    Fixed(FixedTile),
    /// A tile for the image and for each crop, Gemma 3 with pan and scan.
    PanAndScan(PanAndScan),
    /// Counted sizes, for a model that was described.
    Table(Interned<TokenTable>),
}

impl VisionRule {
    /// Returns the work for all images in a sample.
    ///
    /// Requires all images at once, because LLaVA-OneVision treats a single image unlike several.
    ///
    /// # Errors
    /// [`Error::EmptyImage`] for an image without pixels, [`Error::AspectRatio`] for an image that the rule
    /// does not support.
    pub fn images(&self, images: &[ImageSize]) -> Result<EncoderWork> {
        if let (Self::AnyRes(rule), [_, _, ..]) = (self, images) {
            return rule.several_images(images);
        }
        let mut work = EncoderWork::default();
        for &image in images {
            work += match self {
                Self::AnyRes(rule) => rule.image(image)?,
                Self::ListedGrids(rule) => rule.image(image)?,
                Self::ScaledTiles(rule) => rule.image(image)?,
                Self::DynamicTiles(rule) => rule.image(image)?,
                Self::FittedTiles(rule) => rule.image(image)?,
                Self::Native(rule) => rule.image(image)?,
                Self::LongestEdge(rule) => rule.image(image)?,
                Self::Fixed(rule) => rule.image(image)?,
                Self::PanAndScan(rule) => rule.image(image)?,
                Self::Table(table) => table.image(image)?,
            };
        }
        Ok(work)
    }

    /// Returns the work for a video; a video without frames has none.
    ///
    /// # Errors
    /// [`Error::EmptyImage`] for frames without pixels, [`Error::AspectRatio`] for frames that the rule does
    /// not support, [`Error::Video`] if it supports no videos.
    pub fn video(&self, video: VideoShape) -> Result<EncoderWork> {
        if video.frames == 0 {
            return Ok(EncoderWork::default());
        }
        require_pixels(ImageSize { width: video.width, height: video.height })?;
        if self.frames_max() == 0 {
            return Err(Error::Video { frames: video.frames });
        }
        match self {
            Self::AnyRes(rule) => Ok(rule.video(video)),
            Self::DynamicTiles(rule) => Ok(rule.video(video)),
            Self::Native(rule) => rule.video(video),
            Self::ListedGrids(_)
            | Self::ScaledTiles(_)
            | Self::FittedTiles(_)
            | Self::LongestEdge(_)
            | Self::Table(_) => Err(Error::Video { frames: video.frames }),
            Self::Fixed(rule) => Ok(rule.video(video)),
            Self::PanAndScan(rule) => Ok(rule.video(video)),
        }
    }

    /// Returns the maximum number of frames in a video; 0 if the model does not support videos.
    #[must_use]
    pub const fn frames_max(&self) -> u32 {
        match self {
            Self::AnyRes(rule) => rule.frames_max,
            Self::DynamicTiles(rule) => rule.frames_max,
            Self::Native(rule) => rule.frames_max,
            Self::ListedGrids(_)
            | Self::ScaledTiles(_)
            | Self::FittedTiles(_)
            | Self::LongestEdge(_)
            | Self::Table(_) => 0,
            Self::Fixed(rule) => rule.frames_max,
            Self::PanAndScan(rule) => rule.tile.frames_max,
        }
    }

    /// Returns whether images keep the native resolution, so that encoder sequences differ in length and
    /// encoder items are patches.
    #[must_use]
    pub const fn is_native(&self) -> bool {
        match self {
            Self::Native(_) | Self::LongestEdge(_) => true,
            Self::Table(table) => table.get().item_tokens.is_none(),
            _ => false,
        }
    }

    /// Returns the patch layers, rows and columns in the only medium of a shape; `None` if the encoder does
    /// not process media in native resolution in layers of patches.
    ///
    /// # Errors
    /// The errors of [`VisionRule::images`] and [`VisionRule::video`].
    pub fn patch_grid(&self, medium: &SampleShape) -> Result<Option<[u64; 3]>> {
        let Self::Native(rule) = self else { return Ok(None) };
        match (medium.images.as_slice(), medium.videos.as_slice()) {
            ([image], []) => rule.grid(*image).map(|[columns, rows]| Some([1, rows, columns])),
            ([], [video]) => rule.video_grid(*video).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the number of equal parts in the only medium of a shape that the encoder processes apart from
    /// each other, so that ranks may share them: tiles, frames, or layers of patches in a video. 1 for a
    /// medium whose encoder positions all see each other, and for a medium that the rule does not support.
    #[must_use]
    pub fn parts(&self, medium: &SampleShape) -> u64 {
        let items = || match (medium.images.as_slice(), medium.videos.as_slice()) {
            ([_], []) => self.images(&medium.images).map(|work| work.items),
            ([], [video]) => self.video(*video).map(|work| work.items),
            _ => Ok(1),
        };
        let parts = match (self, medium.videos.as_slice()) {
            (Self::Native(rule), [video]) => rule.video_grid(*video).map(|[layers, ..]| layers),
            (Self::Native(_) | Self::LongestEdge(_), _) => Ok(1),
            (Self::Table(table), _) if table.get().item_tokens.is_none() => Ok(1),
            _ => items(),
        };
        parts.unwrap_or(1).max(1)
    }

    /// Returns the marker tokens around an image, or around each tile if tiles have separate markers, in
    /// addition to the feature tokens.
    #[must_use]
    pub const fn marker_tokens(&self) -> u8 {
        match self {
            Self::AnyRes(_)
            | Self::ListedGrids(_)
            | Self::ScaledTiles(_)
            | Self::FittedTiles(_)
            | Self::LongestEdge(_) => 0,
            Self::Fixed(rule) => rule.marker_tokens,
            Self::PanAndScan(rule) => rule.tile.marker_tokens,
            Self::DynamicTiles(rule) => rule.marker_tokens,
            Self::Native(rule) => rule.marker_tokens,
            Self::Table(table) => table.get().marker_tokens,
        }
    }

    /// Returns the number of marker tokens among the tokens for `images` images with the work `work`.
    #[must_use]
    pub fn total_marker_tokens(&self, images: u64, work: &EncoderWork) -> u64 {
        let enclosed = if matches!(self, Self::PanAndScan(_)) { work.items } else { images };
        enclosed.saturating_mul(u64::from(self.marker_tokens()))
    }
}

/// Encoder token rule, by kind of media.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaRule {
    /// Images and videos.
    Vision(VisionRule),
    /// Audio clips.
    Audio(AudioRule),
}

impl MediaRule {
    /// Returns the work for all media in a sample that the encoder processes.
    ///
    /// # Errors
    /// [`Error::EmptyImage`], [`Error::AspectRatio`] or [`Error::SampleRate`] for a medium that the rule does
    /// not support.
    pub fn work(&self, shape: &SampleShape) -> Result<EncoderWork> {
        let mut work = EncoderWork::default();
        match self {
            Self::Vision(rule) => {
                work += rule.images(&shape.images)?;
                for &video in &shape.videos {
                    work += rule.video(video)?;
                }
            }
            Self::Audio(rule) => {
                for &clip in &shape.audio {
                    work += rule.clip(clip)?;
                }
            }
        }
        Ok(work)
    }

    /// Returns the number of equal parts in the only medium of a shape that ranks may share, see
    /// [`VisionRule::parts`]; 1 for audio.
    #[must_use]
    pub fn parts(&self, medium: &SampleShape) -> u64 {
        match self {
            Self::Vision(rule) => rule.parts(medium),
            Self::Audio(_) => 1,
        }
    }
}

fn require_pixels(size: ImageSize) -> Result<()> {
    if size.width == 0 || size.height == 0 {
        return Err(Error::EmptyImage { width: size.width, height: size.height });
    }
    Ok(())
}

/// Range of pixels (width x height) into which an image is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PixelRange {
    /// Smallest number of pixels; smaller images are scaled up.
    pub min: u32,
    /// Largest number of pixels; larger images are scaled down, which has precedence over `min`.
    pub max: u32,
}

fn area(sides: [u64; 2]) -> f64 {
    sides[0] as f64 * sides[1] as f64
}

/// Divides and rounds to the nearest integer, halves to the even one, as Python does.
fn round_half_even(value: u64, divisor: u64) -> u64 {
    let (quotient, twice_rest) = (value / divisor, 2 * (value % divisor));
    let is_up = twice_rest > divisor || (twice_rest == divisor && quotient % 2 == 1);
    quotient + u64::from(is_up)
}

/// Maximum ratio of the longer to the shorter side.
const ASPECT_MAX: u32 = 200;
/// Tokens per label within the first ten seconds, by the Qwen2 tokenizer: `<`, `0`, `.`, `5`, ` seconds` and
/// `>`. Counting a sample's texts with its tokenizer includes the further digits in later layers.
const LABEL_TOKENS: u64 = 6;

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
    fn resize(&self, video: VideoShape, factor: u64, frames_per_layer: u64) -> Result<[u64; 2]> {
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
    use crate::tokens::native::{NativeResolution, PixelRange};
    use proptest::prelude::*;
    use std::num::NonZeroU32;

    const FIXED: FixedTile = FixedTile {
        tile_pixels: 384,
        tile_patches: 729,
        pooled_patches: NonZeroU32::MIN,
        marker_tokens: 0,
        is_cropped: false,
        frames_max: 32,
    };

    const RULES: [VisionRule; 4] = [
        VisionRule::AnyRes(AnyRes::LLAVA_ONEVISION),
        VisionRule::DynamicTiles(DynamicTiles::INTERN_VL),
        VisionRule::Native(NativeResolution::QWEN2_VL),
        VisionRule::Fixed(FIXED),
    ];

    #[test]
    fn empty_images_and_frames_are_errors() {
        for rule in RULES {
            for (width, height) in [(0, 0), (0, 9), (9, 0)] {
                let refused = Error::EmptyImage { width, height };
                let image = ImageSize { width, height };
                assert_eq!(rule.images(&[image]), Err(refused.clone()));
                assert_eq!(rule.images(&[image, image]), Err(refused.clone()));
                assert_eq!(rule.video(VideoShape { frames: 1, width, height }), Err(refused));
            }
        }
    }

    #[test]
    fn nothing_costs_nothing() {
        for rule in RULES {
            assert_eq!(rule.images(&[]), Ok(EncoderWork::default()));
            let no_frames = VideoShape { frames: 0, width: 0, height: 0 };
            assert_eq!(rule.video(no_frames), Ok(EncoderWork::default()));
        }
    }

    /// Parts are equal, and no position sees another part.
    #[test]
    fn attention_stays_inside_of_parts() {
        let mut divided = 0;
        for rule in RULES {
            for (frames, width, height) in [(1, 640, 480), (7, 320, 900), (64, 1920, 1080)] {
                let image =
                    SampleShape { images: vec![ImageSize { width, height }], ..SampleShape::default() };
                let videos = vec![VideoShape { frames, width, height }];
                let video = SampleShape { videos, ..SampleShape::default() };
                for shape in [image, video] {
                    let (parts, work) = (rule.parts(&shape), MediaRule::Vision(rule).work(&shape).unwrap());
                    assert!(work.encoder_tokens.is_multiple_of(parts), "{rule:?}, {shape:?}");
                    let own = work.encoder_tokens / parts;
                    assert_eq!(work.attention_pairs, parts * own * own, "{rule:?}, {shape:?}");
                    divided += u32::from(parts > 1);
                }
            }
        }
        assert!(divided > 10, "{divided}");
        assert_eq!(RULES[2].parts(&SampleShape::default()), 1);
    }

    #[test]
    fn pixel_ranges_of_zero_do_not_panic() {
        let nothing = PixelRange { min: 0, max: 0 };
        let rule = NativeResolution { image: nothing, frame: nothing, ..NativeResolution::QWEN2_VL };
        for (width, height) in [(1, 1), (1, 200), (500, 400), (u32::MAX, u32::MAX)] {
            assert!(rule.image(ImageSize { width, height }).is_ok());
        }
    }

    proptest! {
        #[test]
        fn any_size_gives_bounded_work_or_an_error(
            width in any::<u32>(), height in any::<u32>(), shift in 0u32..32, frames in any::<u32>(),
        ) {
            let image = ImageSize { width: (width >> shift).max(1), height: height.max(1) };
            for rule in RULES {
                match rule.images(&[image]) {
                    Ok(work) => {
                        prop_assert!(work.items >= 1 && work.tokens >= 1);
                        prop_assert!(work.encoder_tokens <= 100_000 && work.tokens <= 20_000);
                        prop_assert!(work.attention_pairs <= work.encoder_tokens.pow(2));
                        prop_assert!(work.window_pairs <= work.attention_pairs);
                    }
                    Err(error) => prop_assert!(
                        matches!(error, Error::AspectRatio { .. }), "unexpected {error}"),
                }
                let video = VideoShape { frames, width: image.width, height: image.height };
                if let Ok(work) = rule.video(video) {
                    prop_assert!(work.encoder_tokens < 1 << 31);
                }
            }
        }

        #[test]
        fn a_turned_image_takes_as_many_tiles_or_patches(width in 1u32..5000, height in 1u32..5000) {
            for rule in [RULES[0], RULES[2]] {
                let upright = rule.images(&[ImageSize { width, height }]);
                let turned = rule.images(&[ImageSize { width: height, height: width }]);
                prop_assert_eq!(upright.map(|work| work.items).ok(), turned.map(|work| work.items).ok());
            }
        }
    }

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
