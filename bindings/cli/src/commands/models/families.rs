//! Lists the built-in families with their level.

use dflop_costmodel::config::{DESCRIBED, Documents, PartialModelSpec};
use dflop_costmodel::{ModelFamilies, ModelFamily, ModelSpec};
use serde::Serialize;
use serde_json::{Value, json};

use super::level::{Level, level_of};
use super::versions::transformers_of;

/// What is known of a family.
#[derive(Debug, Serialize)]
pub(super) struct FamilyRow {
    /// Id of the family.
    pub(super) family: String,
    /// Values of `model_type` of its checkpoints.
    pub(super) model_types: Vec<String>,
    pub(super) presets: Vec<&'static str>,
    pub(super) level: Level,
    /// Why the level is not the last one.
    pub(super) ends_because: Option<String>,
    /// Version of transformers that tokens, inputs and parameters were compared with.
    pub(super) transformers: Option<&'static str>,
}

/// Returns all families, in the order of their ids.
pub(super) fn family_rows() -> Vec<FamilyRow> {
    let families = ModelFamilies::default();
    let mut rows: Vec<FamilyRow> =
        families.all().filter(|family| family.id().as_str() != DESCRIBED).map(row).collect();
    rows.sort_by(|one, two| one.family.cmp(&two.family));
    rows
}

fn row(family: &dyn ModelFamily) -> FamilyRow {
    let (level, ends_because) = best_level(family);
    FamilyRow {
        family: family.id().to_string(),
        model_types: family.model_types().iter().map(|&name| name.to_owned()).collect(),
        presets: family.presets().iter().map(|preset| preset.name).collect(),
        level,
        ends_because,
        transformers: transformers_of(family.id().as_str()),
    }
}

/// Returns the highest level of the family's presets and of checkpoints that have all defaults.
fn best_level(family: &dyn ModelFamily) -> (Level, Option<String>) {
    let of_presets = family.presets().iter().filter_map(|preset| ModelSpec::preset(preset.name).ok());
    let of_defaults = family.model_types().iter().filter_map(|model_type| {
        let config = json!({ "model_type": model_type });
        with_defaults(model_type, config).or_else(|| with_defaults(model_type, with_sizes(model_type)))
    });
    let levels = of_presets.map(|spec| level_of(&spec, None));
    let levels = levels.chain(of_defaults.map(|(spec, config)| level_of(&spec, config.as_ref())));
    let unknown = (Level::Cost, Some("it has no published model, and none by defaults".to_owned()));
    levels.max_by_key(|(level, _)| *level).unwrap_or(unknown)
}

/// Returns a `config.json` with the sizes that some architectures have no fitting default of.
fn with_sizes(model_type: &str) -> Value {
    json!({ "model_type": model_type, "num_experts_per_tok": 8, "head_dim": 128 })
}

/// Returns the model of a checkpoint whose `config.json` has a type and hardly anything else; an encoder is
/// joined with a language model, as which it cannot be read back from one file.
fn with_defaults(model_type: &str, config: Value) -> Option<(ModelSpec, Option<Value>)> {
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
    use super::*;

    #[test]
    fn levels_follow_from_what_the_crates_have() {
        let rows = family_rows();
        let level = |family: &str| rows.iter().find(|row| row.family == family).map(|row| row.level);
        for family in
            ["llama", "qwen2_vl", "qwen2_5_vl", "llava_onevision", "internvl", "qwen2_audio", "siglip"]
        {
            assert_eq!(level(family), Some(Level::Train), "{family}");
        }
        for family in ["deepseek_v2", "glm4_moe", "llama4_text"] {
            assert_eq!(level(family), Some(Level::Train), "{family}, with sizes that have no default");
        }
        assert_eq!(level("qwen3_omni_moe"), Some(Level::Inputs));
        assert_eq!(level("llava_onevision_1_5"), Some(Level::Cost));
        // Its text is prepared by the tokenizer alone, but no blocks have its names.
        assert_eq!(level("internlm2"), Some(Level::Inputs));
        assert_eq!(level("described"), None);
    }

    #[test]
    fn a_level_before_the_last_has_a_reason() {
        for row in family_rows() {
            assert_eq!(row.ends_because.is_none(), row.level == Level::Train, "{}", row.family);
        }
    }
}
