//! Pixtral and Mistral Small 3: images at native resolution, in patch rows.

use std::num::NonZeroU16;

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::longest_edge::LongestEdge;
use dflop_costmodel::{Error, FamilyId, Result};
use dflop_samples::inputs::PixelValues;

use super::processor_family::{ProcessorFamily, VisionInputs};
use super::{Arrangement, PixelLayout, Placeholder, VideoText};
use crate::image::processor::{filter, normalization};
use crate::image::resample::{Canvas, Resampler, Resize};
use crate::image::{
    Filter, GenericProcessor, ImageProcessor, Normalization, Pixel, PixelSettings, RgbView, positions,
    square_bytes,
};

/// Image placeholder.
const IMAGE: Placeholder = Placeholder { token: "[IMG]", markers: None, has_markers_in_text: false };
/// Tokens after image rows.
const ROWS: Arrangement = Arrangement::Rows { row_end: "[IMG_BREAK]", image_end: "[IMG_END]" };
/// Maximum image side in pixels; a file comes with a model and must not cause an allocation of gigabytes.
const SIDE_MAX: u16 = 8_192;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&PixtralFamily::PIXTRAL, &PixtralFamily::MISTRAL3];

/// Pixtral or Mistral Small 3.
#[derive(Debug)]
struct PixtralFamily {
    id: FamilyId,
    chat_template: &'static str,
    image_processor_types: &'static [&'static str],
}

impl PixtralFamily {
    const PIXTRAL: Self = Self {
        id: FamilyId::new("pixtral"),
        chat_template: include_str!("templates/pixtral.jinja"),
        image_processor_types: &["PixtralImageProcessor"],
    };
    /// Mistral Small 3, without the system prompt that Mistral's template adds to conversations without a
    /// system prompt.
    const MISTRAL3: Self = Self {
        id: FamilyId::new("mistral3"),
        chat_template: include_str!("templates/mistral3.jinja"),
        image_processor_types: &[],
    };
}

impl ProcessorFamily for PixtralFamily {
    fn id(&self) -> FamilyId {
        self.id
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let VisionRule::LongestEdge(rule) = vision.rule else { return None };
        let (filter, normalization) = (Filter::Bicubic, Normalization::CLIP);
        Some(VisionInputs {
            image: IMAGE,
            layout: PixelLayout::PaddedImages,
            video: VideoText::None,
            processor: ImageProcessor::new(Pixtral { rule, filter, normalization }),
        })
    }

    fn arrangement(&self, _: &VisionSpec) -> Arrangement {
        ROWS
    }

    fn chat_template(&self) -> &'static str {
        self.chat_template
    }

    fn turn_token(&self) -> Option<&'static str> {
        Some("[INST]")
    }

    fn image_processor_types(&self) -> &[&str] {
        self.image_processor_types
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        Ok(ImageProcessor::new(read(fields)?))
    }
}

/// Image processor for Pixtral and Mistral Small 3.
///
/// # Source
/// `PixtralImageProcessor` in transformers 5.24.0 with the Pillow backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pixtral {
    /// Patches, sizes and tokens.
    pub rule: LongestEdge,
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
}

impl GenericProcessor for Pixtral {
    fn rule(&self) -> Option<VisionRule> {
        Some(VisionRule::LongestEdge(self.rule))
    }

    fn settings(&self) -> PixelSettings {
        PixelSettings { filter: self.filter, normalization: self.normalization, square: None }
    }

    fn set(&mut self, settings: &PixelSettings) {
        (self.filter, self.normalization) = (settings.filter, settings.normalization);
    }

    fn item_bytes(&self) -> u64 {
        square_bytes(self.rule.patch_pixels.get())
    }

    /// Creates `[3, height, width]`, with the feature grid.
    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        _: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        let [width, height] = self.rule.resized(image.size())?.map(|length| length as usize);
        let [columns, rows] = self.rule.grid(image.size())?.map(|length| length as u32);
        let tables = self.normalization.tables::<T>();
        let mut values = vec![T::default(); 3 * width * height];
        let resize = Resize::whole(self.filter, width, height);
        resampler.resize(&Canvas::from_image(image), &resize, |y, row| {
            for (channel, table) in tables.iter().enumerate() {
                let first = (channel * height + y) * width;
                let bytes = row.iter().skip(channel).step_by(3);
                for (value, byte) in values[first..first + width].iter_mut().zip(bytes) {
                    *value = table[usize::from(*byte)];
                }
            }
        });
        Ok(PixelValues {
            values: T::buffer(values),
            shape: vec![3, height, width],
            grid_thw: Some([1, rows, columns]),
            image_size: Some([height as u32, width as u32]),
            tokens: positions(self.rule.image(image.size())?.tokens),
        })
    }

    fn video<T: Pixel>(&self, frames: &[RgbView<'_>], _: &mut Resampler) -> Result<PixelValues> {
        Err(Error::Video { frames: positions(frames.len() as u64) })
    }
}

/// Reads the processor from a configuration file; missing settings have defaults.
fn read(fields: &ConfigFields<'_>) -> Result<Pixtral> {
    let side = |fields: &ConfigFields<'_>, key: &str, value: u32| {
        let side = u16::try_from(value).ok().filter(|side| *side <= SIDE_MAX).and_then(NonZeroU16::new);
        let problem = || format!("= {value} must be at most {SIDE_MAX} pixels");
        side.ok_or_else(|| fields.invalid(key, problem()))
    };
    let square = |key: &str, edge: &str, default: u32| match fields.value(key) {
        Some(value) if value.is_object() => {
            let sides = fields.child_or_empty(key)?;
            if let Some(longest) = sides.optional_count(edge)? {
                return side(&sides, edge, longest);
            }
            let [height, width] = [sides.optional_count("height")?, sides.optional_count("width")?];
            match height.filter(|_| height == width) {
                Some(length) => side(&sides, "height", length),
                None => Err(fields.invalid(key, format!("must have `{edge}`, or equal height and width"))),
            }
        }
        _ => side(fields, key, fields.count(key, default)?),
    };
    let rule = LongestEdge {
        patch_pixels: square("patch_size", "height", 16)?,
        merge: NonZeroU16::MIN,
        side_max: square("size", "longest_edge", 1024)?,
    };
    if fields.flag("do_center_crop", false)? {
        return Err(fields.invalid("do_center_crop", "must be false"));
    }
    let normalization = normalization(fields, Normalization::CLIP)?;
    Ok(Pixtral { rule, filter: filter(fields)?, normalization })
}
