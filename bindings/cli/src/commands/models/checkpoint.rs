//! Explains a model: the files read, the parameters, the tokens for example media, and the support level.
//!
//! Lists the built-in families with support levels.

use super::description::{DescriptionReport, description_report};
use super::level::{Level, Support, model_support, transformers_version};
use crate::failure::Failure;
use dflop_costmodel::config::{DESCRIBED, Documents, PartialModelSpec};
use dflop_costmodel::{
    AudioLength, ImageSize, ModelFamilies, ModelFamily, ModelSpec, Module, SampleShape, VideoShape,
};
use dflop_loader::model::model_directory;
use serde::Serialize;
use serde_json::{Value, json};

/// Model explanation.
#[derive(Debug, Serialize)]
pub(super) struct CheckpointReport {
    pub(super) model: String,
    pub(super) family: String,
    /// Files that were read; the word `preset` for a preset.
    pub(super) files: Vec<String>,
    pub(super) parameters: u64,
    /// Parameters that a token goes through: without the experts that it is not routed to.
    pub(super) active_parameters: u64,
    pub(super) modules: Vec<ModuleParameters>,
    /// What a description was counted with; `None` for other models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) description: Option<DescriptionReport>,
    pub(super) examples: Vec<Example>,
    #[serde(flatten)]
    pub(super) support: Support,
    pub(super) transformers: Option<&'static str>,
}

/// Number of parameters in a module, projector included.
#[derive(Debug, Serialize)]
pub(super) struct ModuleParameters {
    pub(super) module: Module,
    pub(super) parameters: u64,
}

/// Token count for an example medium.
#[derive(Debug, Serialize)]
pub(super) struct Example {
    pub(super) medium: &'static str,
    pub(super) tokens: u64,
    pub(super) encoder_tokens: u64,
    pub(super) refused: Option<String>,
}

/// - `names`: model names, by which the files are found
pub(super) fn checkpoint_report(names: &[String], spec: &ModelSpec) -> Result<CheckpointReport, Failure> {
    let mut files = Vec::new();
    let mut config = None;
    for name in names {
        match model_directory(name)? {
            Some(directory) => {
                files.extend(directory.files());
                config = Some(directory.documents().config.clone());
            }
            None => files.push("preset".to_owned()),
        }
    }
    let config = config.filter(|_| names.len() == 1);
    let description = config.as_ref().map(description_report).transpose()?.flatten();
    let encoders = spec.encoder_parameters().into_iter();
    let encoders = encoders.map(|(module, encoder)| ModuleParameters { module, parameters: encoder.total() });
    let idle = spec.llm_parameters().total() - spec.llm_parameters().active();
    let llm = ModuleParameters { module: Module::Llm, parameters: spec.llm_parameters().total() };
    Ok(CheckpointReport {
        model: spec.name.clone(),
        family: spec.family.to_string(),
        files,
        parameters: spec.parameters(),
        active_parameters: spec.parameters() - idle,
        modules: encoders.chain([llm]).collect(),
        description,
        examples: examples(spec),
        support: model_support(spec, config.as_ref()),
        transformers: transformers_version(spec.family.as_str()),
    })
}

/// Counts the tokens for example media, for each kind that the model has an encoder for.
fn examples(spec: &ModelSpec) -> Vec<Example> {
    let mut examples = Vec::new();
    let mut add = |medium, shape: SampleShape| {
        let (mut tokens, mut encoder_tokens, mut refused) = (0, 0, None);
        for (_, _, rule) in spec.encoders() {
            match rule.work(&shape) {
                Ok(work) => {
                    tokens += work.tokens;
                    encoder_tokens += work.encoder_tokens;
                }
                Err(error) => refused = Some(error.to_string()),
            }
        }
        examples.push(Example { medium, tokens, encoder_tokens, refused });
    };
    if spec.vision.is_some() {
        let images = vec![ImageSize { width: 640, height: 480 }];
        add("640 x 480", SampleShape { images, ..SampleShape::default() });
        let images = vec![ImageSize { width: 2480, height: 3508 }];
        add("2480 x 3508", SampleShape { images, ..SampleShape::default() });
        let videos = vec![VideoShape { frames: 8, width: 640, height: 480 }];
        add("8 frames", SampleShape { videos, ..SampleShape::default() });
    }
    if spec.audio.is_some() {
        let audio = vec![AudioLength { frames: 160_000, sample_rate_hz: 16_000 }];
        add("10 s", SampleShape { audio, ..SampleShape::default() });
    }
    examples
}

/// Support facts for a family.
#[derive(Debug, Serialize)]
pub(super) struct FamilyRow {
    /// Family id.
    pub(super) family: String,
    /// `model_type` values in the family's checkpoints.
    pub(super) model_types: Vec<String>,
    pub(super) presets: Vec<&'static str>,
    #[serde(flatten)]
    pub(super) support: Support,
    /// Version of transformers that tokens, inputs and parameters were compared with.
    pub(super) transformers: Option<&'static str>,
}

/// Returns all families, ordered by id.
pub(super) fn family_rows() -> Vec<FamilyRow> {
    let families = ModelFamilies::default();
    let mut rows: Vec<FamilyRow> =
        families.all().filter(|family| family.id().as_str() != DESCRIBED).map(row).collect();
    rows.sort_by(|one, two| one.family.cmp(&two.family));
    rows
}

fn row(family: &dyn ModelFamily) -> FamilyRow {
    FamilyRow {
        family: family.id().to_string(),
        model_types: family.model_types().iter().map(|&name| name.to_owned()).collect(),
        presets: family.presets().iter().map(|preset| preset.name).collect(),
        support: best_support(family),
        transformers: transformers_version(family.id().as_str()),
    }
}

/// Returns the support for the best supported model in the family, among presets and checkpoints with
/// defaults.
fn best_support(family: &dyn ModelFamily) -> Support {
    let of_presets = family.presets().iter().filter_map(|preset| ModelSpec::preset(preset.name).ok());
    let of_defaults = family.model_types().iter().filter_map(|model_type| with_defaults(model_type));
    let found = of_presets.map(|spec| model_support(&spec, None));
    let found = found.chain(of_defaults.map(|(spec, config)| model_support(&spec, config.as_ref())));
    // Of equally supported ones the first.
    let unknown = || Level::LACKING.map(|level| (level, Err("no model of it is known".to_owned())));
    found.min_by_key(|support| support.lacks.len()).unwrap_or_else(|| Support::new(unknown()))
}

/// Fields that a `config.json` needs in addition to the type, with published values: there is no default, or
/// the defaults do not fit each other.
const PUBLISHED: [(&str, &str); 4] = [
    ("deepseek_v2", r#"{"num_experts_per_tok": 6}"#),
    ("glm4_moe", r#"{"head_dim": 128}"#),
    ("glm4v_moe_text", r#"{"head_dim": 128}"#),
    ("qwen3_omni_moe_text", r#"{"num_attention_heads": 32, "head_dim": 128}"#),
];

/// Returns the model for a checkpoint whose `config.json` has a type and only the required fields; an encoder
/// is joined with a language model, and a joined model cannot be read back from one file.
fn with_defaults(model_type: &str) -> Option<(ModelSpec, Option<Value>)> {
    let mut config = json!({ "model_type": model_type });
    if let Some((_, fields)) = PUBLISHED.iter().find(|(name, _)| *name == model_type) {
        let fields: serde_json::Map<String, Value> = serde_json::from_str(fields).ok()?;
        config.as_object_mut()?.extend(fields);
    }
    let part =
        PartialModelSpec::from_hugging_face(&Documents { config: config.clone(), ..Documents::default() })
            .ok()?;
    if part.llm.is_some() {
        return Some((ModelSpec::compose(model_type, &[part]).ok()?, Some(config)));
    }
    let llm = ModelSpec::preset("tiny").ok()?.llm;
    let llm = PartialModelSpec { llm: Some(llm), ..PartialModelSpec::default() };
    Some((ModelSpec::compose(model_type, &[part, llm]).ok()?, None))
}

#[cfg(test)]
mod tests {
    use super::super::level::Lack;
    use super::*;

    #[test]
    fn a_preset_is_explained() {
        let spec = ModelSpec::preset("qwen2-vl-7b").expect("a preset");
        let report = checkpoint_report(&["qwen2-vl-7b".to_owned()], &spec).expect("it is explained");
        assert_eq!(report.files, ["preset"]);
        assert_eq!(report.parameters, report.modules.iter().map(|module| module.parameters).sum::<u64>());
        let tokens: Vec<u64> = report.examples.iter().map(|example| example.tokens).collect();
        assert_eq!(tokens[0], 391 + 2);
        assert_eq!(report.support.names(), "cost, plan, inputs, train");
        assert_eq!(report.support.lacks, []);
    }

    #[test]
    fn a_description_ends_where_the_processor_of_the_user_begins() {
        let text = r#"{"model_type": "described", "name": "kite", "llm": {"model_type": "llama"}}"#;
        let names = [text.to_owned()];
        let spec = dflop_loader::model::spec_from_names(&names).expect("a model");
        let report = checkpoint_report(&names, &spec).expect("it is explained");
        assert_eq!((report.model.as_str(), report.support.names().as_str()), ("kite", "cost"));
        let because = |at: usize| report.support.lacks[at].because.as_str();
        assert!(because(0).contains("has no encoder"), "{}", because(0));
        assert!(because(1).contains("docs/any-model.md"), "{}", because(1));
    }

    #[test]
    fn levels_follow_from_what_the_crates_have() {
        let rows = family_rows();
        let levels = |family: &str| {
            rows.iter().find(|row| row.family == family).map(|row| row.support.names()).unwrap_or_default()
        };
        for family in
            ["qwen2_vl", "qwen2_5_vl", "llava_onevision", "internvl", "qwen2_audio", "siglip", "gemma3"]
        {
            assert_eq!(levels(family), "cost, plan, inputs, train", "{family}");
        }
        // The planner requires an encoder.
        for family in ["llama", "qwen3_moe", "mixtral"] {
            assert_eq!(levels(family), "cost, inputs, train", "{family}");
        }
        for family in ["glm4v", "glm4v_moe", "idefics3", "smolvlm", "llava"] {
            assert_eq!(levels(family), "cost, plan, inputs", "{family}");
        }
        for family in ["deepseek_v2", "glm4_moe", "llama4_text"] {
            assert_eq!(levels(family), "cost, inputs, train", "{family}, with sizes that have no default");
        }
        assert_eq!(levels("qwen3_omni_moe"), "cost, plan, inputs");
        assert_eq!(levels("llava_onevision_1_5"), "cost, plan");
        // The tokenizer is enough to prepare text, but no blocks have these names.
        assert_eq!(levels("internlm2"), "cost, inputs");
        assert_eq!(levels("described"), "");
    }

    #[test]
    fn a_level_that_is_lacking_has_a_reason() {
        for FamilyRow { family, support, .. } in family_rows() {
            assert_eq!(support.levels.len() + support.lacks.len(), 4, "{family}");
            let is_found = |lack: &Lack| !lack.because.is_empty() && !lack.because.contains("no model");
            assert!(support.lacks.iter().all(is_found), "{family}");
            assert_eq!(support.levels.iter().max(), Some(&support.level), "{family}");
        }
    }
}
