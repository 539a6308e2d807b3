//! GLM-4.1V and GLM-4.5V: patches at native resolution, as in Qwen2-VL, with other sizes.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::{FamilyId, Result};

use super::processor_family::{ProcessorFamily, VisionInputs};
use super::qwen_vl::{self, QwenVl};
use super::{LayerTime, PixelLayout, Placeholder, VideoText};
use crate::image::{Filter, ImageProcessor, Normalization};

/// Image placeholder.
const IMAGE: Placeholder = Placeholder {
    token: "<|image|>",
    markers: Some(["<|begin_of_image|>", "<|end_of_image|>"]),
    has_markers_in_text: true,
};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&Glm4vFamily::DENSE, &Glm4vFamily::EXPERTS];

/// GLM-4.1V or GLM-4.5V; rejects videos, whose frame times are in the text.
#[derive(Debug)]
struct Glm4vFamily {
    id: FamilyId,
    image_processor_types: &'static [&'static str],
}

impl Glm4vFamily {
    const DENSE: Self = Self { id: FamilyId::new("glm4v"), image_processor_types: &["Glm4vImageProcessor"] };
    const EXPERTS: Self = Self { id: FamilyId::new("glm4v_moe"), image_processor_types: &[] };
}

impl ProcessorFamily for Glm4vFamily {
    fn id(&self) -> FamilyId {
        self.id
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let VisionRule::Native(rule) = vision.rule else { return None };
        let merge = u32::from(rule.merge.get());
        let (filter, normalization) = (Filter::Bicubic, Normalization::CLIP);
        Some(VisionInputs {
            image: IMAGE,
            layout: PixelLayout::Patches { merge, time: LayerTime::Counted },
            video: VideoText::None,
            processor: ImageProcessor::new(QwenVl { rule, filter, normalization }),
        })
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/glm4v.jinja")
    }

    fn turn_token(&self) -> Option<&'static str> {
        Some("<|user|>")
    }

    fn image_processor_types(&self) -> &[&str] {
        self.image_processor_types
    }

    /// Reads filter and statistics; the pixel limits, which mean another size here, come from the model.
    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> Result<ImageProcessor> {
        let mut processor = qwen_vl::read(fields)?;
        processor.rule.enlarges_thin = true;
        Ok(ImageProcessor::new(processor))
    }
}
