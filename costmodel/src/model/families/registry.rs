//! Finds a checkpoint's or preset's family, among the built-in families and your own.

use std::cmp::Reverse;
use std::sync::{Arc, LazyLock};

use super::{BUILT_IN, DESCRIBE, ModelFamily, Preset, language_models};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::model::config::{CheckpointFields, Documents, PartialModelSpec};
use crate::model::description::{self, Description};

/// Document about models without a family, for messages.
const ANY_MODEL: &str = "docs/any-model.md";
/// Minimum common prefix of two similar types, in bytes.
const COMMON_BYTES_MIN: usize = 4;

/// Model families by `model_type` and by preset: the built-in ones and your own.
#[derive(Debug, Clone, Default)]
pub struct ModelFamilies {
    own: Vec<Arc<dyn ModelFamily>>,
}

impl ModelFamilies {
    /// Adds a family; if names are taken, the last added family has precedence.
    #[must_use]
    pub fn with(mut self, family: impl ModelFamily + 'static) -> Self {
        self.own.insert(0, Arc::new(family));
        self
    }

    /// Iterates over all families, your own first.
    pub fn all(&self) -> impl Iterator<Item = &dyn ModelFamily> {
        let text = language_models::ALL.iter().map(|family| family as &dyn ModelFamily);
        let built_in = BUILT_IN.iter().copied().flatten().copied();
        self.own.iter().map(|family| &**family).chain(built_in).chain(text)
    }

    /// Reads a checkpoint's modules by the family for the `model_type`, or those of a
    /// [description](Description).
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or the `model_type` is unknown.
    pub fn read(&self, documents: &Documents) -> Result<PartialModelSpec> {
        if Description::is_format(&documents.config) {
            return description::read(&documents.config);
        }
        let files = CheckpointFields::new(documents)?;
        let Some(model_type) = files.config.text("model_type")? else {
            return Err(files.config.invalid("model_type", format!("is missing, {}", self.known())));
        };
        let Some(family) = self.all().find(|family| family.model_types().contains(&model_type)) else {
            let nearest = self.nearest_model_type(model_type);
            let nearest = nearest.map(|known| format!("the nearest is \"{known}\", ")).unwrap_or_default();
            let known = self.known();
            let problem = format!(
                "= \"{model_type}\" is unknown: {DESCRIBE}; {nearest}{known}; {ANY_MODEL} shows other ways"
            );
            return Err(files.config.invalid("model_type", problem));
        };
        family.read(&files)
    }

    /// Reads a model from checkpoint files; a language model without encoders is a text model.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or the `model_type` is unknown, [`Error::Composition`]
    /// if the checkpoint is an encoder only.
    pub fn model(&self, name: &str, documents: &Documents) -> Result<ModelSpec> {
        ModelSpec::compose(name, &[self.read(documents)?])
    }

    /// Returns the preset with this name.
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the known names, if the name is unknown.
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

    /// Finds the known `model_type` most similar to an unknown type: by the longest common prefix, at least
    /// four letters, otherwise by the fewest edits, at most a third of the unknown type's letters.
    #[must_use]
    pub fn nearest_model_type(&self, unknown: &str) -> Option<&str> {
        let edits_max = unknown.chars().count() / 3;
        let rank = |known: &&str| {
            let common = unknown.bytes().zip(known.bytes()).take_while(|(one, two)| one == two).count();
            let common = if common >= COMMON_BYTES_MIN { common } else { 0 };
            (Reverse(common), edits(unknown, known))
        };
        let known = self.all().flat_map(ModelFamily::model_types).copied();
        let (Reverse(common), edits, known) =
            known.map(|known| (rank(&known).0, rank(&known).1, known)).min()?;
        (common > 0 || edits <= edits_max).then_some(known)
    }

    fn known(&self) -> String {
        let mut known: Vec<&str> = self.all().flat_map(ModelFamily::model_types).copied().collect();
        known.sort_unstable();
        known.dedup();
        format!("known are {}", known.join(", "))
    }
}

/// Counts the letters to insert, delete or replace between two words (Levenshtein 1966).
fn edits(one: &str, two: &str) -> usize {
    let two: Vec<char> = two.chars().collect();
    let mut row: Vec<usize> = (0..=two.len()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for column in 0..two.len() {
            let replaced = diagonal + usize::from(two[column] != letter);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[two.len()]
}

impl PartialModelSpec {
    /// Reads the modules of a checkpoint of a built-in family; [`ModelFamilies::read`] also knows others.
    ///
    /// # Errors
    /// [`Error::Configuration`] if a field is invalid or the `model_type` is
    /// unknown.
    pub fn from_hugging_face(documents: &Documents) -> Result<Self> {
        ModelFamilies::default().read(documents)
    }
}

impl ModelSpec {
    /// Reads a model of a built-in family from the files of its checkpoint; a language model without encoders
    /// is a model of text. [`ModelFamilies::model`] also knows other families.
    ///
    /// # Errors
    /// [`Error::Configuration`](crate::Error::Configuration) if a field is invalid or the `model_type` is
    /// unknown, [`Error::Composition`](crate::Error::Composition) if the checkpoint is an encoder only.
    pub fn from_hugging_face(name: &str, documents: &Documents) -> Result<Self> {
        ModelFamilies::default().model(name, documents)
    }

    /// Returns the preset of this name, one of [`ModelSpec::preset_names`].
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the known names, if the name is unknown.
    ///
    /// # Source
    /// Sizes: the published configurations. SigLIP-so400m has all 27 layers and no pooling head, InternViT-6B
    /// the 45 layers in the published model (48 less the 3 that are discarded). `internvl3-8b` joins
    /// InternViT-300M with the Qwen2.5-7B LLM; InternVL3.5 has the Qwen3 LLMs. `omni-7b` and `tiny` are
    /// composed for this project, not published models.
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
    use crate::model::{FamilyId, LlmDetails};
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
        for preset in ModelFamilies::default().all().flat_map(ModelFamily::presets) {
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
    fn an_unknown_type_is_answered_with_the_nearest() {
        let families = ModelFamilies::default();
        for (unknown, nearest) in [
            ("qwen2_5_vll", Some("qwen2_5_vl")),
            ("qwen2_vll", Some("qwen2_vl")),
            ("llava_onevision1_5", Some("llava_onevision")),
            ("lama", Some("llama")),
            ("gpt2", None),
            ("", None),
        ] {
            assert_eq!(families.nearest_model_type(unknown), nearest, "{unknown}");
        }
        let config = serde_json::json!({"model_type": "llava_onevision1_5"});
        let error = families.read(&Documents { config, ..Documents::default() }).unwrap_err().to_string();
        assert!(error.contains(&format!("is unknown: {DESCRIBE}; ")), "{error}");
        assert!(error.contains("; the nearest is \"llava_onevision\", known are "), "{error}");
        assert!(error.ends_with("docs/any-model.md shows other ways"), "{error}");
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
