//! Image, audio and video tensors: the interface between media processors and text.
//!
//! A processor converts decoded media to a family's tensors and returns the number of LLM tokens for each:
//! [`ImageProcessor`], also for videos, and [`AudioProcessor`]. [`CountedImages`], [`CountedAudio`] and
//! [`CountedVideos`] only count, by the planning token rules: a pipeline stage that holds only the language
//! model needs ids, grids and labels, but no pixels.

mod video;

use std::fmt::Debug;
use std::sync::Arc;

use dflop_costmodel::tokens::audio::{AudioRule, whisper_windows};
use dflop_costmodel::tokens::{EncoderWork, VisionRule};
use dflop_costmodel::{AudioLength, ImageSize, VideoShape};
use dflop_samples::BoxError;
use dflop_samples::inputs::{AudioFeatures, PixelValues, VideoValues};
use dflop_samples::media::{Audio, PixelType, RgbImage, Video};

use crate::audio::{AudioProcessor, ClipProcessor, WINDOW_FRAMES};
use crate::image::{ImageProcessor, Normalization};

pub use self::video::{CountedVideos, VideoTensors};

/// Creates tensors from images.
pub trait ImageTensors: Debug + Send + Sync {
    /// Processes all images in a sample; some families treat several images differently from a single image.
    ///
    /// # Errors
    /// The reason why the model rejects an image.
    fn images(&self, images: &[&RgbImage]) -> Result<Vec<PixelValues>, BoxError>;

    /// Estimates the size of a sample's image tensors in bytes, so that memory can be bounded before they are
    /// created.
    fn tensor_bytes(&self, sizes: &[ImageSize]) -> u64;

    /// Returns the same processor with a different pixel type; `None` if the processor supports a single
    /// type.
    fn with_pixel_type(&self, pixels: PixelType) -> Option<Arc<dyn ImageTensors>> {
        let _ = pixels;
        None
    }

    /// Returns the conversion from bytes to pixel values, if the processor has a conversion.
    fn normalization(&self) -> Option<Normalization> {
        None
    }

    /// Returns whether the processor reads pixels; if not, images are neither read nor decoded, and only have
    /// a size.
    fn reads_pixels(&self) -> bool {
        true
    }
}

/// Creates tensors from audio clips.
pub trait AudioTensors: Debug + Send + Sync {
    /// Processes an audio clip.
    ///
    /// # Errors
    /// The reason why the model rejects the clip.
    fn clip(&self, audio: &Audio) -> Result<AudioFeatures, BoxError>;

    /// Estimates the feature size of an audio clip in bytes.
    fn tensor_bytes(&self, length: AudioLength) -> u64;
}

/// Counts image tokens without creating pixels.
#[derive(Debug, Clone, Copy)]
pub struct CountedImages(
    /// Token rule, the same as for planning.
    pub VisionRule,
);

impl ImageTensors for CountedImages {
    fn images(&self, images: &[&RgbImage]) -> Result<Vec<PixelValues>, BoxError> {
        let size = |image: &&RgbImage| ImageSize { width: image.width, height: image.height };
        let sizes: Vec<ImageSize> = images.iter().map(size).collect();
        let works = self.works(&sizes)?;
        let values = |(size, work): (&ImageSize, EncoderWork)| -> Result<PixelValues, BoxError> {
            let markers = self.0.total_marker_tokens(1, &work);
            let tokens = u32::try_from(work.tokens.saturating_sub(markers))?;
            let mut values = PixelValues { tokens, ..PixelValues::default() };
            match self.0 {
                VisionRule::AnyRes(_) | VisionRule::ListedGrids(_) => {
                    values.image_size = Some([size.height, size.width]);
                }
                VisionRule::Native(rule) => {
                    let [columns, rows] = rule.grid(*size)?;
                    values.grid_thw = Some([1, u32::try_from(rows)?, u32::try_from(columns)?]);
                }
                VisionRule::LongestEdge(rule) => {
                    let [columns, rows] = rule.grid(*size)?;
                    let [width, height] = rule.resized(*size)?;
                    values.grid_thw = Some([1, u32::try_from(rows)?, u32::try_from(columns)?]);
                    values.image_size = Some([u32::try_from(height)?, u32::try_from(width)?]);
                }
                VisionRule::ScaledTiles(rule) => {
                    let [columns, rows] = rule.grid(*size)?;
                    values.grid_thw = Some([1, u32::try_from(rows)?, u32::try_from(columns)?]);
                }
                VisionRule::DynamicTiles(_)
                | VisionRule::FittedTiles(_)
                | VisionRule::Fixed(_)
                | VisionRule::PanAndScan(_)
                | VisionRule::Table(_) => {}
            }
            Ok(values)
        };
        sizes.iter().zip(works).map(values).collect()
    }

    fn tensor_bytes(&self, _: &[ImageSize]) -> u64 {
        0
    }

    fn with_pixel_type(&self, _: PixelType) -> Option<Arc<dyn ImageTensors>> {
        Some(Arc::new(*self))
    }

    fn reads_pixels(&self) -> bool {
        false
    }
}

impl CountedImages {
    fn works(&self, sizes: &[ImageSize]) -> Result<Vec<EncoderWork>, dflop_costmodel::Error> {
        let alone = |size: &ImageSize| self.0.images(std::slice::from_ref(size));
        if let (VisionRule::AnyRes(rule), [_, _, ..]) = (self.0, sizes) {
            let each = |size: &ImageSize| rule.several_images(std::slice::from_ref(size));
            return sizes.iter().map(each).collect();
        }
        sizes.iter().map(alone).collect()
    }
}

/// Counts audio clip tokens without creating features.
#[derive(Debug, Clone, Copy)]
pub struct CountedAudio(
    /// Token rule, the same as for planning.
    pub AudioRule,
);

impl AudioTensors for CountedAudio {
    fn clip(&self, audio: &Audio) -> Result<AudioFeatures, BoxError> {
        let length = AudioLength { frames: audio.frames() as u64, sample_rate_hz: audio.sample_rate_hz };
        let markers = if length.frames > 0 { u64::from(self.0.marker_tokens()) } else { 0 };
        let tokens = u32::try_from(self.0.clip(length)?.tokens.saturating_sub(markers))?;
        Ok(AudioFeatures { tokens, ..AudioFeatures::default() })
    }

    fn tensor_bytes(&self, _: AudioLength) -> u64 {
        0
    }
}

impl ImageTensors for ImageProcessor {
    fn images(&self, images: &[&RgbImage]) -> Result<Vec<PixelValues>, BoxError> {
        Ok(ImageProcessor::images(self, images)?)
    }

    fn with_pixel_type(&self, pixels: PixelType) -> Option<Arc<dyn ImageTensors>> {
        Some(Arc::new(TypedProcessor { processor: self.clone(), pixels }))
    }

    fn normalization(&self) -> Option<Normalization> {
        Some(ImageProcessor::normalization(self))
    }

    fn tensor_bytes(&self, sizes: &[ImageSize]) -> u64 {
        let of_rule = |rule: VisionRule| rule.images(sizes).map_or(0, |work| work.items);
        let items = self.rule().map_or(sizes.len() as u64, of_rule);
        items.saturating_mul(self.item_bytes())
    }
}

impl AudioTensors for AudioProcessor {
    fn clip(&self, audio: &Audio) -> Result<AudioFeatures, BoxError> {
        Ok(AudioProcessor::clip(self, audio)?)
    }

    fn tensor_bytes(&self, length: AudioLength) -> u64 {
        let windows = whisper_windows(length).map_or(0, |work| work.items);
        windows.saturating_mul(u64::from(self.mels) * WINDOW_FRAMES as u64 * size_of::<f32>() as u64)
    }
}

impl AudioTensors for ClipProcessor {
    fn clip(&self, audio: &Audio) -> Result<AudioFeatures, BoxError> {
        Ok(ClipProcessor::clip(self, audio)?)
    }

    fn tensor_bytes(&self, length: AudioLength) -> u64 {
        let spectrogram = u64::from(self.rule.spectrogram_frames.max(1));
        let frames = self.rule.frames(length).unwrap_or(0);
        // A clip with several spectrograms has full spectrograms.
        let frames = if frames > spectrogram { frames.next_multiple_of(spectrogram) } else { frames };
        frames.saturating_mul(u64::from(self.mels) * size_of::<f32>() as u64)
    }
}

/// A processor with a pixel type.
#[derive(Debug, Clone)]
struct TypedProcessor {
    processor: ImageProcessor,
    pixels: PixelType,
}

impl TypedProcessor {
    /// Scales an estimate for single precision.
    fn scaled(&self, bytes: u64) -> u64 {
        bytes / PixelType::Float32.bytes() * self.pixels.bytes()
    }
}

impl ImageTensors for TypedProcessor {
    fn images(&self, images: &[&RgbImage]) -> Result<Vec<PixelValues>, BoxError> {
        Ok(self.processor.images_as(images, self.pixels)?)
    }

    fn tensor_bytes(&self, sizes: &[ImageSize]) -> u64 {
        self.scaled(ImageTensors::tensor_bytes(&self.processor, sizes))
    }

    fn with_pixel_type(&self, pixels: PixelType) -> Option<Arc<dyn ImageTensors>> {
        ImageTensors::with_pixel_type(&self.processor, pixels)
    }

    fn normalization(&self) -> Option<Normalization> {
        Some(self.processor.normalization())
    }
}

impl VideoTensors for ImageProcessor {
    fn video(&self, video: &Video) -> Result<VideoValues, BoxError> {
        self.video_as(video, PixelType::Float32)
    }

    fn with_pixel_type(&self, pixels: PixelType) -> Option<Arc<dyn VideoTensors>> {
        Some(Arc::new(TypedProcessor { processor: self.clone(), pixels }))
    }

    fn tensor_bytes(&self, shape: VideoShape) -> u64 {
        let of_rule = |rule: VisionRule| rule.video(shape).map_or(0, |work| work.items);
        let items = self.rule().map_or(u64::from(shape.frames), of_rule);
        items.saturating_mul(self.item_bytes())
    }
}

impl VideoTensors for TypedProcessor {
    fn video(&self, video: &Video) -> Result<VideoValues, BoxError> {
        self.processor.video_as(video, self.pixels)
    }

    fn tensor_bytes(&self, shape: VideoShape) -> u64 {
        self.scaled(VideoTensors::tensor_bytes(&self.processor, shape))
    }

    fn with_pixel_type(&self, pixels: PixelType) -> Option<Arc<dyn VideoTensors>> {
        VideoTensors::with_pixel_type(&self.processor, pixels)
    }
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::ModelSpec;
    use half::bf16;

    use super::*;
    use dflop_samples::media::PixelBuffer;

    #[test]
    fn pixels_of_all_types_are_those_of_single_precision() {
        let pixels = (0..3 * 60 * 90_u32).map(|value| ((value * 7_919) >> 5) as u8).collect();
        let image = RgbImage { width: 60, height: 90, pixels, is_truncated: false };
        for family in ["qwen2.5-vl-7b", "llava-ov-qwen2.5-7b", "internvl3-8b"] {
            let processor = ImageProcessor::for_model(&ModelSpec::preset(family).unwrap()).unwrap();
            let made = |pixels| {
                let typed = ImageTensors::with_pixel_type(&processor, pixels).unwrap();
                let bytes = typed.tensor_bytes(&[ImageSize { width: 60, height: 90 }]);
                let made = typed.images(&[&image]).unwrap().pop().unwrap();
                assert_eq!(made.values.len() as u64 * pixels.bytes(), bytes, "{family}");
                made
            };
            let floats = made(PixelType::Float32);
            let PixelBuffer::Bf16(halves) = made(PixelType::BFloat16).values else { panic!("{family}") };
            let PixelBuffer::U8(bytes) = made(PixelType::UInt8).values else { panic!("{family}") };
            let rounded = floats.values.f32().iter().map(|value| bf16::from_f32(*value));
            assert!(rounded.eq(halves), "{family}");
            let Normalization { scale, mean, deviation } = processor.normalization();
            let per_row = floats.shape[1..].iter().product::<usize>();
            for (at, (byte, value)) in bytes.iter().zip(floats.values.f32()).enumerate() {
                let channel = at % per_row / (per_row / 3);
                let normalized = (f64::from(*byte) * scale - mean[channel]) / deviation[channel];
                assert!((normalized - f64::from(*value)).abs() < 1e-6, "{family} at {at}");
            }
        }
    }
}
