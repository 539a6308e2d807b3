//! Finds the family for a model or an image processor, among built-in and user-defined families.

use std::sync::Arc;

use dflop_costmodel::config::{ConfigFields, PREPROCESSOR_FILE};
use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::{FamilyId, ModelSpec};
use dflop_samples::{Error, Result};
use serde_json::Value;

use super::processor_family::{AudioInputs, CHATML, CHATML_TOKEN, ProcessorFamily, VisionInputs};
use super::{Arrangement, BUILT_IN, Family};
use crate::image::ImageProcessor;

/// Token that begins a turn in the format of Llama 3.
const HEADER_TOKEN: &str = "<|start_header_id|>";
/// Families of processors by [`FamilyId`]: the built-in ones and your own.
#[derive(Debug, Clone, Default)]
pub struct ProcessorFamilies {
    own: Vec<Arc<dyn ProcessorFamily>>,
}

impl ProcessorFamilies {
    /// Adds a family; for equal ids or processor types, the family added last has precedence.
    #[must_use]
    pub fn with(mut self, family: impl ProcessorFamily + 'static) -> Self {
        self.own.insert(0, Arc::new(family));
        self
    }

    /// Returns the family with an id.
    #[must_use]
    pub fn get(&self, id: FamilyId) -> Option<&dyn ProcessorFamily> {
        self.iter().find(|family| family.id() == id)
    }

    /// Returns the inputs for a model's vision encoder; `None` for a model without vision encoder.
    ///
    /// # Errors
    /// [`Error::Config`] if no family has the encoder's id, or the family does not support the token rule.
    pub fn vision(&self, model: &ModelSpec) -> Result<Option<VisionInputs>> {
        let Some(vision) = &model.vision else { return Ok(None) };
        let inputs = self.known(vision.family)?.vision(vision);
        inputs.map(Some).ok_or_else(|| other_rule(vision.family, "vision"))
    }

    /// Returns the inputs for a model's audio encoder; `None` for a model without audio encoder.
    ///
    /// # Errors
    /// [`Error::Config`] if no family has the encoder's id, or the family does not support the token rule.
    pub fn audio(&self, model: &ModelSpec) -> Result<Option<AudioInputs>> {
        let Some(audio) = &model.audio else { return Ok(None) };
        let inputs = self.known(audio.family)?.audio(audio);
        inputs.map(Some).ok_or_else(|| other_rule(audio.family, "audio"))
    }

    /// Returns the chat templates to use if the model's files contain none, the preferred template first:
    /// each with the token that the vocabulary must have, if any.
    #[must_use]
    pub fn chat_templates(&self, model: &ModelSpec) -> Vec<(Option<&'static str>, &'static str)> {
        let llama3 = (Some(HEADER_TOKEN), include_str!("templates/llama3.jinja"));
        let chatml = (Some(CHATML_TOKEN), CHATML);
        match self.get(model.family).map(|family| (family.turn_token(), family.chat_template())) {
            Some((None, own)) => vec![chatml, llama3, (None, own)],
            Some(own) => vec![own, llama3],
            None => vec![chatml, llama3],
        }
    }

    /// Reads a Hugging Face `preprocessor_config.json` by `image_processor_type`, including the variants on
    /// torchvision (`Fast`) and Pillow (`Pil`); missing settings have the processor's defaults.
    ///
    /// # Errors
    /// [`Error::Config`] if the processor is unknown or a setting is not supported.
    pub fn read_image_processor(&self, json: &Value) -> Result<ImageProcessor> {
        let read = || {
            let fields = ConfigFields::new(PREPROCESSOR_FILE, json)?;
            let key = "image_processor_type";
            let named = fields.text(key)?;
            let Some(name) =
                named.map_or_else(|| fields.text("feature_extractor_type"), |name| Ok(Some(name)))?
            else {
                return Err(fields.invalid(key, "is required"));
            };
            check_steps(&fields)?;
            let short = ["Fast", "Pil"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
            match self.iter().find(|family| family.image_processor_types().contains(&short)) {
                Some(family) => family.read_image_processor(&fields),
                None => Err(fields.invalid(key, format!("= \"{name}\" is unknown"))),
            }
        };
        read().map_err(|error| refused(error.to_string()))
    }

    fn iter(&self) -> impl Iterator<Item = &dyn ProcessorFamily> {
        let built_in = BUILT_IN.iter().copied().flatten().copied();
        self.own.iter().map(|family| &**family).chain(built_in)
    }

    fn known(&self, id: FamilyId) -> Result<&dyn ProcessorFamily> {
        self.get(id).ok_or_else(|| {
            let known: Vec<String> = self.iter().map(|family| family.id().to_string()).collect();
            let known = known.join(", ");
            let reason = format!(
                "the model's family `{id}` has no processor, known are {known}; docs/any-model.md shows the use of your own"
            );
            Error::Config { setting: "family", reason }
        })
    }
}

/// Checks the steps: every processor here resizes, rescales and normalizes, so none of them may be disabled.
fn check_steps(fields: &ConfigFields<'_>) -> dflop_costmodel::Result<()> {
    for step in ["do_resize", "do_rescale", "do_normalize"] {
        if !fields.flag(step, true)? {
            return Err(fields.invalid(step, "must be true"));
        }
    }
    Ok(())
}

fn other_rule(id: FamilyId, modality: &str) -> Error {
    let reason = format!("the family `{id}` has no {modality} encoder with the model's token rule");
    Error::Config { setting: "family", reason }
}

fn refused(reason: String) -> Error {
    Error::Config { setting: "preprocessor_config", reason }
}

impl Family {
    /// Returns a model's family; a model without encoders is a text model.
    ///
    /// # Errors
    /// [`Error::Config`] if an encoder's family is unknown.
    pub fn for_model(families: &ProcessorFamilies, model: &ModelSpec) -> Result<Self> {
        let (vision, audio) = (families.vision(model)?, families.audio(model)?);
        let audio = audio.map(|inputs| inputs.clip);
        let own = |spec: &VisionSpec| {
            let family = families.get(spec.family)?;
            Some((family.arrangement(spec), family.image_word(spec)))
        };
        let of_images = model.vision.as_ref().and_then(own);
        let (arrangement, image_word) = of_images.unwrap_or((Arrangement::Run, None));
        Ok(match vision {
            Some(VisionInputs { image, layout, video, .. }) => {
                Self { image: Some((image, layout)), arrangement, image_word, video: Some(video), audio }
            }
            None => Self { audio, ..Self::text() },
        })
    }
}

impl ImageProcessor {
    /// Returns the processor for a model in a built-in family, with the statistics from the published
    /// checkpoints; `None` for a model without vision or in any other family, which
    /// [`ProcessorFamilies::vision`] supports.
    #[must_use]
    pub fn for_model(model: &ModelSpec) -> Option<Self> {
        let inputs = ProcessorFamilies::default().vision(model).ok()?;
        inputs.map(|inputs| inputs.processor)
    }

    /// Reads a built-in family's `preprocessor_config.json`, such as LLaVA-OneVision, InternVL (`GotOcr2`),
    /// Qwen2-VL, Pixtral, CLIP and SigLIP; [`ProcessorFamilies::read_image_processor`] also reads
    /// user-defined families.
    ///
    /// # Errors
    /// [`Error::Config`] if the processor is unknown or a setting is not supported.
    pub fn from_preprocessor_config(json: &Value) -> Result<Self> {
        ProcessorFamilies::default().read_image_processor(json)
    }
}

#[cfg(test)]
mod tests;
