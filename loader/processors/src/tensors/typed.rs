//! Image processor on videos, and with pixels of another type than single precision.

use std::sync::Arc;

use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::{ImageSize, VideoShape};
use dflop_samples::BoxError;
use dflop_samples::inputs::{PixelValues, VideoValues};
use dflop_samples::media::{PixelType, RgbImage, Video};

use super::{ImageTensors, VideoTensors};
use crate::image::{ImageProcessor, Normalization};

/// A processor with a pixel type.
#[derive(Debug, Clone)]
pub(crate) struct TypedProcessor {
    pub(crate) processor: ImageProcessor,
    pub(crate) pixels: PixelType,
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
