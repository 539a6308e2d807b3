//! Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches at native resolution, in merge order.

use std::num::NonZeroU16;

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::native::{NativeResolution, PixelRange};
use dflop_costmodel::{FamilyId, ImageSize, Result, VideoShape};
use dflop_samples::inputs::PixelValues;

use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{LayerTime, PixelLayout, Placeholder, VideoText};
use crate::image::processor::{filter, normalization};
use crate::image::resample::{Canvas, Resampler, Resize};
use crate::image::{
    Filter, GenericProcessor, ImageProcessor, Normalization, Pixel, PixelSettings, RgbView, Tables,
    frames_taken, positions, square_bytes,
};

/// Image placeholder.
pub(super) const IMAGE: Placeholder = Placeholder {
    token: "<|image_pad|>",
    markers: Some(["<|vision_start|>", "<|vision_end|>"]),
    has_markers_in_text: true,
};
/// Video placeholder.
pub(super) const VIDEO: Placeholder = Placeholder { token: "<|video_pad|>", ..IMAGE };
/// Video positions per second in the released Qwen2.5-VL checkpoints.
const TOKENS_PER_SECOND: u32 = 2;
/// Maximum value for `max_pixels`.
const PIXELS_MAX: u32 = 1 << 26;
/// Maximum value for `min_pixels`, to which the smallest image is enlarged.
const PIXELS_MIN_MAX: u32 = 1 << 24;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] =
    &[&QwenVlFamily::QWEN2, &QwenVlFamily::QWEN2_5, &QwenVlFamily::QWEN3, &QwenVlFamily::QWEN3_MOE];

/// Qwen2-VL, Qwen2.5-VL or Qwen3-VL.
#[derive(Debug)]
struct QwenVlFamily {
    id: FamilyId,
    image_processor_types: &'static [&'static str],
    /// Positions of video layers.
    time: LayerTime,
    normalization: Normalization,
    chat_template: &'static str,
}

impl QwenVlFamily {
    const QWEN2: Self = Self {
        id: FamilyId::new("qwen2_vl"),
        image_processor_types: &["Qwen2VLImageProcessor"],
        time: LayerTime::Counted,
        normalization: Normalization::CLIP,
        chat_template: include_str!("templates/qwen2_vl.jinja"),
    };
    const QWEN2_5: Self = Self {
        id: FamilyId::new("qwen2_5_vl"),
        image_processor_types: &["Qwen2_5_VLImageProcessor"],
        time: LayerTime::TypedSeconds { positions: TOKENS_PER_SECOND },
        ..Self::QWEN2
    };
    /// Qwen3-VL, whose checkpoints name the Qwen2-VL image processor.
    const QWEN3: Self = Self {
        id: FamilyId::new("qwen3_vl"),
        image_processor_types: &[],
        time: LayerTime::Counted,
        normalization: Normalization::SIGNED,
        chat_template: include_str!("templates/qwen3_vl.jinja"),
    };
    const QWEN3_MOE: Self = Self { id: FamilyId::new("qwen3_vl_moe"), ..Self::QWEN3 };
}

impl ProcessorFamily for QwenVlFamily {
    fn id(&self) -> FamilyId {
        self.id
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        patches(vision, [IMAGE, VIDEO], self.time, self.normalization)
    }

    fn chat_template(&self) -> &'static str {
        self.chat_template
    }

    fn image_processor_types(&self) -> &[&str] {
        self.image_processor_types
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read(fields)?))
    }
}

/// Returns the inputs for a patch encoder; `None` for any other token rule.
pub(super) fn patches(
    vision: &VisionSpec,
    [image, video]: [Placeholder; 2],
    time: LayerTime,
    normalization: Normalization,
) -> Option<VisionInputs> {
    let VisionRule::Native(rule) = vision.rule else { return None };
    let filter = Filter::Bicubic;
    let video = if rule.timed_video.is_some() { VideoText::Timed(video) } else { VideoText::Whole(video) };
    Some(VisionInputs {
        image,
        layout: PixelLayout::Patches { merge: u32::from(rule.merge.get()), time },
        video,
        processor: ImageProcessor::new(QwenVl { rule, filter, normalization }),
    })
}

/// Image processor for Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
///
/// # Source
/// `Qwen2VLImageProcessor` in transformers 4.57.1, also for videos, with the video processor's frame sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QwenVl {
    /// Patches, sizes and tokens.
    pub rule: NativeResolution,
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
}

impl QwenVl {
    fn layers<T: Pixel>(
        &self,
        frames: &[RgbView<'_>],
        size: [u64; 2],
        resampler: &mut Resampler,
    ) -> PixelValues {
        let [width, height] = size.map(|length| length as usize);
        let layout = PatchLayout {
            patch: usize::from(self.rule.patch_pixels.get()),
            merge: usize::from(self.rule.merge.get()),
            frames: usize::from(self.rule.frames_per_patch.get()),
            width,
        };
        let layer_values = 3 * layout.frames * width * height;
        let layers = frames.len().div_ceil(layout.frames);
        let mut values = vec![T::default(); layers * layer_values];
        let tables = self.normalization.tables::<T>();
        for (group, layer) in frames.chunks(layout.frames).zip(values.chunks_exact_mut(layer_values)) {
            for (frame, image) in group.iter().enumerate() {
                // The last frame fills the rest of an incomplete group.
                let end = if frame + 1 == group.len() { layout.frames } else { frame + 1 };
                resampler.resize(
                    &Canvas::from_image(*image),
                    &Resize::whole(self.filter, width, height),
                    |y, row| {
                        layout.write_row(layer, frame..end, y, row, &tables);
                    },
                );
            }
        }
        let patches = [width, height].map(|length| length / layout.patch);
        let merged = layers * patches[0] * patches[1] / (layout.merge * layout.merge);
        PixelValues {
            values: T::buffer(values),
            shape: vec![layers * patches[0] * patches[1], 3 * layout.frames * layout.patch * layout.patch],
            grid_thw: Some([layers as u32, patches[1] as u32, patches[0] as u32]),
            image_size: None,
            tokens: positions(merged as u64),
        }
    }
}

impl GenericProcessor for QwenVl {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::Native(self.rule))
    }

    fn settings(&self) -> PixelSettings {
        PixelSettings { filter: self.filter, normalization: self.normalization, square: None }
    }

    fn set(&mut self, settings: &PixelSettings) {
        (self.filter, self.normalization) = (settings.filter, settings.normalization);
    }

    fn item_bytes(&self) -> u64 {
        u64::from(self.rule.frames_per_patch.get()) * square_bytes(self.rule.patch_pixels.get())
    }

    /// Creates `[patches, 3 * frames_per_patch * patch²]`: the image is repeated for every frame in a patch.
    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        _: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        let size = self.rule.resized_image(image.size())?;
        Ok(self.layers::<T>(&[image], size, resampler))
    }

    /// Creates the same from frame groups, whose last frame is repeated; all frames are resized like the
    /// first.
    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], resampler: &mut Resampler) -> Result<PixelValues> {
        let taken = frames_taken(frames, self.rule.frames_max);
        let ImageSize { width, height } = taken[0].size();
        let size = self.rule.resized_video(VideoShape { frames: taken.len() as u32, width, height })?;
        Ok(self.layers::<T>(&taken, size, resampler))
    }
}

/// Reads the processor from a configuration file; missing settings have defaults.
pub(super) fn read(fields: &ConfigFields<'_>) -> Result<QwenVl> {
    let released = NativeResolution::QWEN2_VL;
    let size = fields.value("size").filter(|size| size.is_object());
    let limit = |key: &str, edge: &str, default: u32| match (fields.optional_count(key)?, fields.has("size"))
    {
        (Some(pixels), _) => Ok(pixels),
        (None, false) => Ok(default),
        (None, true) => {
            let pixels = size
                .and_then(|size| size.get(edge))
                .map(|value| fields.child_or_empty("size")?.whole_number(edge, value, 1));
            pixels.unwrap_or_else(|| {
                let problem = format!("must have `{edge}`, or `{key}` must be given next to it");
                Err(fields.invalid("size", problem))
            })
        }
    };
    let least = limit("min_pixels", "shortest_edge", 56 * 56)?;
    let most = limit("max_pixels", "longest_edge", 28 * 28 * 1280)?;
    let side = |key: &str, default: NonZeroU16| {
        let value = fields.count(key, u32::from(default.get()))?;
        let side = u16::try_from(value).ok().and_then(NonZeroU16::new);
        side.ok_or_else(|| fields.invalid(key, format!("= {value} is out of range")))
    };
    if least > most || least > PIXELS_MIN_MAX || most > PIXELS_MAX {
        let problem = format!(
            "must be at most {PIXELS_MIN_MAX}, and `max_pixels` at most {PIXELS_MAX} and no less than it, found \
             {least} and {most}"
        );
        return Err(fields.invalid("min_pixels", problem));
    }
    let rule = NativeResolution {
        patch_pixels: side("patch_size", released.patch_pixels)?,
        merge: side("merge_size", released.merge)?,
        frames_per_patch: side("temporal_patch_size", released.frames_per_patch)?,
        image: PixelRange { min: least, max: most },
        frames_max: u32::MAX,
        ..released
    };
    let normalization = normalization(fields, Normalization::CLIP)?;
    Ok(QwenVl { rule, filter: filter(fields)?, normalization })
}

/// Layer layout: `[rows / merge, columns / merge, merge, merge, 3, frames, patch, patch]`.
#[derive(Clone, Copy, Debug)]
struct PatchLayout {
    patch: usize,
    merge: usize,
    frames: usize,
    width: usize,
}

impl PatchLayout {
    /// Writes a resized image row as one or more frames.
    fn write_row<T: Pixel>(
        self,
        layer: &mut [T],
        frames: std::ops::Range<usize>,
        y: usize,
        row: &[u8],
        tables: &Tables<T>,
    ) {
        let plane = self.patch * self.patch;
        let merged = self.patch * self.merge;
        let first_block = y / merged * (self.width / merged);
        let row_of_block = y / self.patch % self.merge;
        for (column, pixels) in row.chunks_exact(3 * self.patch).enumerate() {
            let block = first_block + column / self.merge;
            let patch = (block * self.merge + row_of_block) * self.merge + column % self.merge;
            let start = patch * 3 * self.frames * plane + y % self.patch * self.patch;
            for (channel, table) in tables.iter().enumerate() {
                let first = start + (channel * self.frames + frames.start) * plane;
                let bytes = pixels.iter().skip(channel).step_by(3);
                for (value, byte) in layer[first..first + self.patch].iter_mut().zip(bytes) {
                    *value = table[usize::from(*byte)];
                }
                // A still image has the same pixels in every frame of a patch, so they are copied.
                for repeat in 1..frames.len() {
                    layer.copy_within(first..first + self.patch, first + repeat * plane);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_samples::media::RgbImage;
    use std::num::NonZeroU16;

    const SMALL: QwenVl = QwenVl {
        rule: NativeResolution {
            patch_pixels: NonZeroU16::new(2).unwrap(),
            frames_per_patch: NonZeroU16::new(2).unwrap(),
            image: dflop_costmodel::tokens::native::PixelRange { min: 1, max: 1 << 20 },
            frame: dflop_costmodel::tokens::native::PixelRange { min: 1, max: 1 << 20 },
            ..NativeResolution::QWEN2_VL
        },
        filter: Filter::Bicubic,
        normalization: Normalization { scale: 1.0, mean: [0.0; 3], deviation: [1.0; 3] },
    };

    /// Creates 8 x 4 pixels whose red channel numbers the pixels.
    fn counting() -> RgbImage {
        let pixels = (0..32).flat_map(|pixel| [pixel, 100, 200]).collect();
        RgbImage { width: 8, height: 4, pixels, is_truncated: false }
    }

    #[test]
    fn patches_stand_in_the_order_of_their_merging() {
        let taken = SMALL.image::<f32>(RgbView::from(&counting()), 1, &mut Resampler::default()).unwrap();
        assert_eq!((taken.shape, taken.grid_thw, taken.tokens), (vec![8, 24], Some([1, 2, 4]), 2));
        // Upper left, upper right, lower left, lower right; then the next block.
        let corners: Vec<f32> = taken.values.f32().chunks(24).map(|patch| patch[0]).collect();
        assert_eq!(corners, [0.0, 2.0, 16.0, 18.0, 4.0, 6.0, 20.0, 22.0]);
        assert_eq!(taken.values.f32()[..8], [0.0, 1.0, 8.0, 9.0, 0.0, 1.0, 8.0, 9.0]);
        assert_eq!(taken.values.f32()[8..24], [[100.0; 8], [200.0; 8]].concat());
    }

    #[test]
    fn a_lone_last_frame_is_repeated() {
        let image = counting();
        let mut dark = image.clone();
        dark.pixels.fill(0);
        let video = SMALL
            .video::<f32>(&[&image, &dark, &image].map(RgbView::from), &mut Resampler::default())
            .unwrap();
        assert_eq!((video.grid_thw, video.tokens), (Some([2, 2, 4]), 4));
        assert_eq!(video.values.f32()[..8], [0.0, 1.0, 8.0, 9.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(video.values.f32()[192..200], [0.0, 1.0, 8.0, 9.0, 0.0, 1.0, 8.0, 9.0]);
    }
}
