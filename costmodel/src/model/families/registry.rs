//! Finds the family of a checkpoint or a preset, among the built-in ones and your own.

use std::fmt::Debug;
use std::sync::{Arc, LazyLock};

use super::{BUILT_IN, language_models};
use crate::error::{Error, Result};
use crate::model::config::{CheckpointFields, Documents, PartialModelSpec};
use crate::model::{AudioSpec, FamilyId, LlmSpec, ModelSpec, VisionSpec};

/// Model family: reads the sizes and the token rules of its checkpoints.
///
/// A family outside this crate implements this trait and goes into [`ModelFamilies::with`]. Its token rule is
/// one of [`VisionRule`](crate::tokens::VisionRule) and [`AudioRule`](crate::tokens::audio::AudioRule), with
/// sizes of its own.
pub trait ModelFamily: Debug + Send + Sync {
    /// Returns the id that its models carry.
    fn id(&self) -> FamilyId;

    /// Returns the values of `model_type` of its checkpoints.
    fn model_types(&self) -> &[&str];

    /// Reads the modules of a checkpoint, with the family in each of them.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or not supported.
    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec>;

    /// Returns the published models that can be had by name. Default: none.
    fn presets(&self) -> &[Preset] {
        &[]
    }
}

/// Model that can be had by name.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Name for [`ModelSpec::preset`].
    pub name: &'static str,
    /// Encoder of images and videos.
    pub vision: Option<VisionSpec>,
    /// Encoder of audio.
    pub audio: Option<AudioSpec>,
    /// Language model.
    pub llm: LlmSpec,
}

/// Model families by `model_type` and by preset: the built-in ones and your own.
#[derive(Debug, Clone, Default)]
pub struct ModelFamilies {
    own: Vec<Arc<dyn ModelFamily>>,
}

impl ModelFamilies {
    /// Adds a family; where names are taken, the family that was added last has precedence.
    #[must_use]
    pub fn with(mut self, family: impl ModelFamily + 'static) -> Self {
        self.own.insert(0, Arc::new(family));
        self
    }

    /// Iterates over all families, your own first.
    pub fn all(&self) -> impl Iterator<Item = &dyn ModelFamily> {
        let text = language_models::ALL.iter().map(|family| family as &dyn ModelFamily);
        self.own.iter().map(|family| &**family).chain(BUILT_IN).chain(text)
    }

    /// Reads the modules of a checkpoint by the family of its `model_type`.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or the `model_type` is unknown.
    pub fn read(&self, documents: &Documents) -> Result<PartialModelSpec> {
        let files = CheckpointFields::new(documents)?;
        let Some(model_type) = files.config.text("model_type")? else {
            return Err(files.config.invalid("model_type", format!("is missing, {}", self.known())));
        };
        let Some(family) = self.all().find(|family| family.model_types().contains(&model_type)) else {
            let problem = format!("= \"{model_type}\" is unknown, {}", self.known());
            return Err(files.config.invalid("model_type", problem));
        };
        family.read(&files)
    }

    /// Reads a model from the files of its checkpoint; a language model without encoders is a model of text.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or the `model_type` is unknown, [`Error::Composition`]
    /// if the checkpoint is an encoder only.
    pub fn model(&self, name: &str, documents: &Documents) -> Result<ModelSpec> {
        ModelSpec::compose(name, &[self.read(documents)?])
    }

    /// Returns the preset of this name.
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the known names, if there is none.
    pub fn preset(&self, name: &str) -> Result<ModelSpec> {
        for family in self.all() {
            if let Some(preset) = family.presets().iter().find(|preset| preset.name == name) {
                let Preset { vision, audio, llm, .. } = *preset;
                return Ok(ModelSpec { name: name.to_owned(), family: family.id(), vision, audio, llm });
            }
        }
        Err(Error::UnknownModel { name: name.to_owned(), known: self.preset_names().join(", ") })
    }

    /// Returns the names that [`preset`](Self::preset) knows.
    #[must_use]
    pub fn preset_names(&self) -> Vec<&'static str> {
        self.all().flat_map(ModelFamily::presets).map(|preset| preset.name).collect()
    }

    fn known(&self) -> String {
        let mut known: Vec<&str> = self.all().flat_map(ModelFamily::model_types).copied().collect();
        known.sort_unstable();
        known.dedup();
        format!("known are {}", known.join(", "))
    }
}

impl ModelSpec {
    /// Returns the preset of this name, one of [`ModelSpec::preset_names`].
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the known names, if there is none.
    ///
    /// # Source
    /// Sizes: the published configurations. SigLIP-so400m has all its 27 layers and no pooling head,
    /// InternViT-6B the 45 layers of the published model (48 less the 3 that are discarded). `internvl3-8b`
    /// joins InternViT-300M with the LLM of Qwen2.5-7B; InternVL3.5 has the LLMs of Qwen3. `omni-7b` and `tiny`
    /// are compositions of this project, not published models.
    pub fn preset(name: &str) -> Result<Self> {
        ModelFamilies::default().preset(name)
    }

    /// Returns the names that [`ModelSpec::preset`] knows.
    #[must_use]
    pub fn preset_names() -> &'static [&'static str] {
        static NAMES: LazyLock<Vec<&'static str>> = LazyLock::new(|| ModelFamilies::default().preset_names());
        &NAMES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::LlmDetails;
    use crate::tokens::audio::AudioRule;

    #[test]
    fn every_preset_name_leads_to_its_preset() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            assert_eq!(spec.name, *name);
            assert!(spec.vision.is_some() || spec.audio.is_some());
        }
    }

    #[test]
    fn heads_divide_the_width_of_every_preset() {
        for preset in BUILT_IN.iter().flat_map(|family| family.presets()) {
            // Families that normalize queries and keys choose the width of a head freely.
            let is_divided = preset.llm.heads * preset.llm.head_dim == preset.llm.hidden;
            assert!(is_divided || preset.llm.details.has_qk_norm, "{}", preset.name);
            assert_eq!(preset.llm.heads % preset.llm.kv_heads, 0, "{}", preset.name);
            let encoders = [preset.vision.map(|v| v.encoder), preset.audio.map(|a| a.encoder)];
            for encoder in encoders.into_iter().flatten() {
                assert_eq!(encoder.hidden % encoder.heads, 0, "{}", preset.name);
                assert!(encoder.windowed_layers <= encoder.layers);
            }
        }
    }

    #[test]
    fn presets_survive_json() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            let json = serde_json::to_string(&spec).unwrap();
            assert_eq!(serde_json::from_str::<ModelSpec>(&json).unwrap(), spec);
        }
    }

    #[test]
    fn a_specification_without_details_is_read() {
        let mut json = serde_json::to_value(ModelSpec::preset("qwen2-audio-7b").unwrap()).unwrap();
        json.as_object_mut().unwrap().remove("family");
        json["audio"].as_object_mut().unwrap().remove("family");
        json["audio"].as_object_mut().unwrap().remove("rule");
        json["audio"]["encoder"].as_object_mut().unwrap().remove("details");
        json["llm"].as_object_mut().unwrap().remove("details");
        let spec: ModelSpec = serde_json::from_value(json).unwrap();
        assert_eq!(spec.audio.unwrap().rule, AudioRule::QWEN2_AUDIO);
        assert_eq!(spec.llm.details, LlmDetails::default());
        assert_eq!((spec.family, spec.audio.unwrap().family), (FamilyId::UNKNOWN, FamilyId::UNKNOWN));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = ModelSpec::preset("gpt-5").unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("unknown model `gpt-5`, known are llava-ov-qwen2.5-7b, "), "{message}");
        for name in ModelSpec::preset_names() {
            assert!(message.contains(name));
        }
    }
}
