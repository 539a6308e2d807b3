//! Converts sampled video frames to a family's tensors, and counts tokens and duration.
//!
//! [`VideoSampling`](dflop_samples::media::VideoSampling) selected the frames. If the model's token rule
//! allows fewer, frames are selected again, evenly spread. Callers that decode videos themselves may pass a
//! [`Video`] as well.

use std::fmt::Debug;
use std::sync::Arc;

use dflop_costmodel::VideoShape;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::native::NativeResolution;
use dflop_samples::BoxError;
use dflop_samples::inputs::{PixelValues, VideoValues};
use dflop_samples::media::{PixelType, Video};

use crate::image::{ImageProcessor, places_taken};

/// Frames per second if neither the video nor the time stamps define a rate; the default in `transformers`.
const UNKNOWN_RATE: f64 = 24.0;

/// Creates tensors from videos.
pub trait VideoTensors: Debug + Send + Sync {
    /// Processes a video.
    ///
    /// # Errors
    /// The reason why the model rejects the video.
    fn video(&self, video: &Video) -> Result<VideoValues, BoxError>;

    /// Estimates the size of a video's tensors in bytes.
    fn tensor_bytes(&self, shape: VideoShape) -> u64;

    /// Returns the same processor with a different pixel type; `None` if the processor supports a single
    /// type.
    fn with_pixel_type(&self, pixels: PixelType) -> Option<Arc<dyn VideoTensors>> {
        let _ = pixels;
        None
    }
}

/// Counts video tokens without creating pixels.
#[derive(Debug, Clone, Copy)]
pub struct CountedVideos(
    /// Token rule, the same as for planning.
    pub VisionRule,
);

impl VideoTensors for CountedVideos {
    fn video(&self, video: &Video) -> Result<VideoValues, BoxError> {
        let shape = video_shape(video)?;
        let (frames, frames_per_layer) = frames_of_rule(&self.0, shape.frames);
        let work = self.0.video(shape)?;
        let mut pixels = PixelValues::default();
        let tokens = match self.0 {
            VisionRule::AnyRes(_)
            | VisionRule::ListedGrids(_)
            | VisionRule::ScaledTiles(_)
            | VisionRule::FittedTiles(_)
            | VisionRule::LongestEdge(_)
            | VisionRule::Fixed(_)
            | VisionRule::PanAndScan(_)
            | VisionRule::Table(_) => work.tokens,
            VisionRule::DynamicTiles(rule) => work.items * u64::from(rule.tile_tokens),
            VisionRule::Native(rule) => {
                let patch = u64::from(rule.patch_pixels.get());
                let [columns, rows] = rule.resized_video(shape)?.map(|pixels| pixels / patch);
                let layers = frames.div_ceil(frames_per_layer);
                pixels.grid_thw = Some([layers, u32::try_from(rows)?, u32::try_from(columns)?]);
                work.encoder_tokens / u64::from(rule.merge.get()).pow(2)
            }
        };
        pixels.tokens = u32::try_from(tokens)?;
        Ok(VideoValues {
            pixels,
            frames,
            seconds_per_grid: seconds_per_grid(video, frames, frames_per_layer),
            layer_seconds: layer_seconds(&self.0, video),
        })
    }

    fn tensor_bytes(&self, _: VideoShape) -> u64 {
        0
    }

    fn with_pixel_type(&self, _: PixelType) -> Option<Arc<dyn VideoTensors>> {
        Some(Arc::new(*self))
    }
}

impl ImageProcessor {
    /// Processes a video, with a pixel type.
    pub(super) fn video_as(&self, video: &Video, pixels: PixelType) -> Result<VideoValues, BoxError> {
        let shape = video_shape(video)?;
        let rule = self.rule();
        let (frames, frames_per_layer) =
            rule.map_or((shape.frames, 1), |rule| frames_of_rule(&rule, shape.frames));
        let pixels = self.sampled_video_as(video, pixels)?;
        Ok(VideoValues {
            pixels,
            frames,
            seconds_per_grid: seconds_per_grid(video, frames, frames_per_layer),
            layer_seconds: rule.map(|rule| layer_seconds(&rule, video)).unwrap_or_default(),
        })
    }
}

fn video_shape(video: &Video) -> Result<VideoShape, BoxError> {
    let frames = u32::try_from(video.frames())?;
    if frames == 0 {
        return Err("the video has no frames".into());
    }
    Ok(VideoShape { frames, width: video.width, height: video.height })
}

/// Returns how many of `frames` frames a rule uses, and how many frames form a layer.
fn frames_of_rule(rule: &VisionRule, frames: u32) -> (u32, u32) {
    let (frames_max, frames_per_layer) = match rule {
        VisionRule::AnyRes(rule) => (rule.frames_max, 1),
        VisionRule::Fixed(rule) => (rule.frames_max, 1),
        VisionRule::PanAndScan(rule) => (rule.tile.frames_max, 1),
        VisionRule::ListedGrids(_)
        | VisionRule::ScaledTiles(_)
        | VisionRule::FittedTiles(_)
        | VisionRule::LongestEdge(_)
        | VisionRule::Table(_) => (0, 1),
        VisionRule::DynamicTiles(rule) => (rule.frames_max, 1),
        VisionRule::Native(rule) => (rule.frames_max, u32::from(rule.frames_per_patch.get())),
    };
    (frames.min(frames_max.max(1)), frames_per_layer)
}

/// Returns the time of every frame layer, for a rule whose videos have times in the text.
fn layer_seconds(rule: &VisionRule, video: &Video) -> Vec<f64> {
    let VisionRule::Native(NativeResolution { timed_video: Some(_), frames_per_patch, frames_max, .. }) =
        rule
    else {
        return Vec::new();
    };
    let times = &video.times_seconds;
    let taken: Vec<f64> = places_taken(times.len(), *frames_max).map(|place| times[place]).collect();
    // A single last frame is repeated, so that it is both first and last in the layer.
    let mean = |layer: &[f64]| f64::midpoint(layer[0], layer[layer.len() - 1]);
    taken.chunks(usize::from(frames_per_patch.get())).map(mean).collect()
}

fn seconds_per_grid(video: &Video, taken: u32, frames_per_layer: u32) -> f32 {
    let rate = frames_per_second(video) * (f64::from(taken) / video.frames() as f64);
    (f64::from(frames_per_layer) / rate) as f32
}

fn frames_per_second(video: &Video) -> f64 {
    if video.frames_per_second > 0.0 && video.frames_per_second.is_finite() {
        return video.frames_per_second;
    }
    let times = &video.times_seconds;
    let seconds = times.last().zip(times.first()).map_or(0.0, |(last, first)| last - first);
    if seconds > 0.0 { (times.len() - 1) as f64 / seconds } else { UNKNOWN_RATE }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::ModelSpec;

    fn video(frames: usize, width: u32, height: u32) -> Video {
        Video {
            width,
            height,
            times_seconds: (0..frames).map(|frame| frame as f64 / 4.0).collect(),
            frames_per_second: 0.0,
            pixels: (0..frames * 3 * width as usize * height as usize).map(|byte| byte as u8).collect(),
        }
    }

    #[test]
    fn counted_videos_are_those_that_are_made_and_planned() {
        for model in ["qwen2-vl-7b", "qwen2.5-vl-7b", "qwen3-vl-2b", "llava-ov-qwen2.5-7b", "internvl3-8b"] {
            let spec = ModelSpec::preset(model).unwrap();
            let rule = spec.vision.unwrap().rule;
            let processor = ImageProcessor::for_model(&spec).unwrap();
            for (frames, width, height) in [(1, 60, 40), (3, 40, 60), (4, 64, 64), (40, 30, 20)] {
                let video = video(frames, width, height);
                let shape = VideoShape { frames: frames as u32, width, height };
                let made = VideoTensors::video(&processor, &video).unwrap();
                let counted = CountedVideos(rule).video(&video).unwrap();
                let bytes = 4 * made.pixels.values.len() as u64;
                assert_eq!(
                    processor.tensor_bytes(shape).max(bytes),
                    processor.tensor_bytes(shape),
                    "{model}"
                );
                assert_eq!(made.pixels.shape.iter().product::<usize>(), made.pixels.values.len());
                let PixelValues { grid_thw, tokens, .. } = made.pixels;
                assert_eq!(counted.pixels, PixelValues { grid_thw, tokens, ..PixelValues::default() });
                assert_eq!(
                    (counted.frames, counted.seconds_per_grid, counted.layer_seconds),
                    (made.frames, made.seconds_per_grid, made.layer_seconds),
                    "{model}"
                );
            }
        }
    }

    #[test]
    fn a_layer_lasts_as_long_as_its_frames() {
        let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
        let counted = CountedVideos(spec.vision.unwrap().rule);
        let at_two = |video| Video { frames_per_second: 2.0, ..video };
        for (video, seconds) in [
            (video(4, 28, 28), 0.5),
            (at_two(video(4, 28, 28)), 1.0),
            (video(1, 28, 28), 2.0 / 24.0),
            // 768 of 1,536 frames are selected, which halves the rate.
            (at_two(video(1_536, 1, 1)), 2.0),
        ] {
            let found = counted.video(&video).unwrap().seconds_per_grid;
            assert!((found - seconds).abs() < 1e-7, "{found} {seconds}");
        }
    }

    #[test]
    fn a_layer_has_the_mean_time_of_its_frames() {
        let rule = ModelSpec::preset("qwen3-vl-2b").unwrap().vision.unwrap().rule;
        let seconds = |frames| CountedVideos(rule).video(&video(frames, 32, 32)).unwrap().layer_seconds;
        assert_eq!(seconds(5), [0.125, 0.625, 1.0]);
        assert_eq!(seconds(1), [0.0]);
        // The first and the last of 2,000 frames are selected.
        assert_eq!((seconds(2_000).len(), seconds(2_000)[383]), (384, (1_996.0 + 1_999.0) / 8.0));
    }

    #[test]
    fn videos_that_do_not_fit_themselves_are_refused() {
        let processor = ImageProcessor::for_model(&ModelSpec::preset("internvl3-8b").unwrap()).unwrap();
        let refusal = |video: &Video| {
            let error = VideoTensors::video(&processor, video).unwrap_err();
            dflop_samples::error_reason(&*error)
        };
        assert!(refusal(&Video::default()).contains("no frames"));
        let mut short = video(2, 4, 4);
        short.pixels.pop();
        assert!(refusal(&short).contains("do not match"), "{}", refusal(&short));
        short.pixels.truncate(48);
        assert!(refusal(&short).contains("expected the pixels of 2 frames, got 1"), "{}", refusal(&short));
    }
}
