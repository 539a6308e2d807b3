//! Finds the parameters that `optimizer.groups` and `model.freeze` name: their rates, and what is frozen.
//!
//! A part whose parameters are all frozen is a frozen module, which has no backward pass where nothing before
//! it is trained, and whose costs are predicted accordingly. Other frozen parameters have no gradient and no
//! optimizer state.

use std::collections::{BTreeMap, BTreeSet};

use dflop_costmodel::FrozenParts;
use dflop_loader::shard::matches_name;

use super::config::{GroupTable, OptimizerTable};
use crate::device::Cpu;
use crate::models::encoder::FrozenEncoder;
use crate::models::weights::spellings;
use crate::models::{FrozenModules, ModelConfig, ModuleKind, StageBlocks, StageRange};
use crate::optimizer::ParameterRate;
use crate::{Error, Result};

/// Number of names that an error proposes.
const PROPOSED_MAX: usize = 3;

/// Rates and frozen parameters of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ParameterGroups {
    /// Rates that differ from the optimizer settings, by parameter name.
    pub(super) rates: BTreeMap<String, ParameterRate>,
    /// Parts without a trained parameter.
    pub(super) parts: FrozenParts,
    /// Names of frozen parameters in other parts.
    pub(super) frozen: BTreeSet<String>,
}

/// Parameter with the name of its part.
struct Named {
    name: String,
    part: &'static str,
}

impl ParameterGroups {
    /// Finds the parameters of all groups.
    ///
    /// - `parts`: parts that are frozen in any case
    ///
    /// # Errors
    /// [`Error::Config`] for a group that names no parameter, or only parameters that a later group or a
    /// frozen part covers.
    pub(super) fn find(optimizer: &OptimizerTable, parts: FrozenParts, model: &ModelConfig) -> Result<Self> {
        if optimizer.groups.is_empty() {
            return Ok(Self { parts, ..Self::default() });
        }
        let all = parameters(model)?;
        let fixed = parts.to_string();
        let is_fixed = |part: &str| fixed.split(',').any(|own| own == part);
        let mut uses = vec![0; optimizer.groups.len()];
        let (mut rates, mut frozen) = (BTreeMap::new(), BTreeSet::new());
        for Named { name, part } in &all {
            let is_named = |group: &GroupTable| names(group, name, part);
            let Some(at) = optimizer.groups.iter().rposition(is_named).filter(|_| !is_fixed(part)) else {
                continue;
            };
            uses[at] += 1;
            let group = &optimizer.groups[at];
            if group.frozen {
                frozen.insert(name.clone());
            } else {
                rates.insert(name.clone(), rate(group, optimizer));
            }
        }
        if let Some(at) = uses.iter().position(|&parameters| parameters == 0) {
            return Err(without_effect(&optimizer.groups[at], at, &all));
        }
        let parts = frozen_parts(parts, &frozen, &all);
        let kept = parts.to_string();
        let is_in_module = |named: &&Named| kept.split(',').any(|part| part == named.part);
        for Named { name, .. } in all.iter().filter(is_in_module) {
            frozen.remove(name);
        }
        Ok(Self { rates, parts, frozen })
    }
}

/// Returns whether a group names a parameter, under any name that it has in checkpoints.
fn names(group: &GroupTable, name: &str, part: &str) -> bool {
    let pattern = &group.parameters;
    pattern == part || spellings(name).any(|name| matches_name(pattern, &name))
}

fn rate(group: &GroupTable, optimizer: &OptimizerTable) -> ParameterRate {
    let factor = group.learning_rate.map_or(1.0, |rate| rate / optimizer.learning_rate);
    let weight_decay = group.weight_decay.unwrap_or(optimizer.weight_decay);
    ParameterRate { learning_rate_factor: factor, weight_decay }
}

/// Adds the parts whose parameters are all frozen.
fn frozen_parts(parts: FrozenParts, frozen: &BTreeSet<String>, all: &[Named]) -> FrozenParts {
    let is_frozen = |part: &str| {
        let mut own = all.iter().filter(|named| named.part == part).peekable();
        own.peek().is_some() && own.all(|named| frozen.contains(&named.name))
    };
    FrozenParts {
        vision: parts.vision || is_frozen("vision"),
        audio: parts.audio || is_frozen("audio"),
        projector: parts.projector || is_frozen("projector"),
        llm: parts.llm || is_frozen("llm"),
    }
}

/// Returns the error for a group that sets nothing.
fn without_effect(group: &GroupTable, at: usize, all: &[Named]) -> Error {
    let pattern = &group.parameters;
    if all.iter().any(|Named { name, part }| names(group, name, part)) {
        return Error::Config(format!(
            "`optimizer.groups[{at}]` has no effect: a later group or a frozen module has all parameters of \
             `{pattern}`"
        ));
    }
    let parts = FrozenParts::NAMES.join(", ");
    let near = nearest(pattern, all).join("`, `");
    Error::Config(format!(
        "`optimizer.groups[{at}]`: expected {parts} or a pattern for parameter names, found `{pattern}`, which \
         names none; near names are `{near}`"
    ))
}

/// Returns the names that are most similar to a pattern, with `*` in place of layer numbers.
fn nearest(pattern: &str, all: &[Named]) -> Vec<String> {
    let layers = |name: &str| {
        let parts = name.split('.').map(|part| if part.parse::<u32>().is_ok() { "*" } else { part });
        parts.collect::<Vec<_>>().join(".")
    };
    let names: BTreeSet<String> = all.iter().map(|named| layers(&named.name)).collect();
    let mut near: Vec<(usize, String)> =
        names.into_iter().map(|name| (distance(pattern, &name), name)).collect();
    near.sort();
    near.into_iter().take(PROPOSED_MAX).map(|(_, name)| name).collect()
}

/// Returns the number of characters to insert, remove or replace (Levenshtein distance); a `*` in the pattern
/// stands for any characters.
fn distance(pattern: &str, name: &str) -> usize {
    let name: Vec<char> = name.chars().collect();
    let mut row: Vec<usize> = (0..=name.len()).collect();
    for character in pattern.chars() {
        let is_star = character == '*';
        let mut diagonal = row[0];
        row[0] += usize::from(!is_star);
        for at in 0..name.len() {
            let replaced = diagonal + usize::from(name[at] != character);
            diagonal = row[at + 1];
            row[at + 1] =
                if is_star { diagonal.min(row[at]) } else { replaced.min(diagonal + 1).min(row[at] + 1) };
        }
    }
    row[name.len()]
}

/// Lists the parameters of a model that can be trained.
fn parameters(model: &ModelConfig) -> Result<Vec<Named>> {
    let mut all = Vec::new();
    for module in model.modules() {
        let range = StageRange { module, layers: 0..model.layers(module) };
        let parts: &[(&'static str, FrozenEncoder)] = match module {
            ModuleKind::Llm => &[("llm", FrozenEncoder { encoder: false, projector: false })],
            ModuleKind::Vision => &[("vision", ENCODER), ("projector", PROJECTOR)],
            ModuleKind::Audio => &[("audio", ENCODER), ("projector", PROJECTOR)],
        };
        for &(part, encoder) in parts {
            let frozen = FrozenModules { vision: encoder, audio: encoder, is_llm_frozen: false };
            let blocks: StageBlocks<Cpu> = model.stage_blocks(&range, frozen, None)?;
            let trained = blocks.into_declaration().into_specs().into_iter();
            let trained = trained.filter(|spec| spec.is_trained && spec.shares.is_none());
            all.extend(trained.map(|spec| Named { name: spec.name, part }));
        }
    }
    Ok(all)
}

/// Trains everything but the projector.
const ENCODER: FrozenEncoder = FrozenEncoder { encoder: false, projector: true };
/// Trains the projector only.
const PROJECTOR: FrozenEncoder = FrozenEncoder { encoder: true, projector: false };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunConfig;

    fn found(groups: &str) -> Result<ParameterGroups> {
        let toml = format!("[model]\n[optimizer]\nlearning_rate = 1e-3\n{groups}");
        let optimizer = RunConfig::from_toml(&toml).unwrap().optimizer;
        let model = serde_json::json!({"model_type": "qwen2_vl", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
            "tie_word_embeddings": true, "vision_config": {"depth": 2, "embed_dim": 16,
            "hidden_act": "quick_gelu", "hidden_size": 16, "in_channels": 3, "mlp_ratio": 2, "num_heads": 2,
            "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}});
        let model = ModelConfig::from_config(&model).unwrap();
        ParameterGroups::find(&optimizer, FrozenParts::default(), &model)
    }

    fn group(parameters: &str, rest: &str) -> String {
        format!("[[optimizer.groups]]\nparameters = \"{parameters}\"\n{rest}\n")
    }

    #[test]
    fn the_last_group_that_names_a_parameter_applies() {
        let groups = group("llm", "learning_rate = 1e-4") + &group("*.bias", "weight_decay = 0.0");
        let found = found(&groups).unwrap();
        let rate =
            |name: &str| found.rates.get(name).map(|rate| (rate.learning_rate_factor, rate.weight_decay));
        assert_eq!(rate("model.layers.0.self_attn.q_proj.weight"), Some((0.1, 0.1)));
        assert_eq!(rate("model.layers.0.self_attn.q_proj.bias"), Some((1.0, 0.0)));
        assert_eq!(rate("visual.blocks.1.attn.proj.bias"), Some((1.0, 0.0)));
        assert_eq!(rate("visual.blocks.1.attn.proj.weight"), None);
        assert!(found.frozen.is_empty() && found.parts == FrozenParts::default());
    }

    #[test]
    fn a_part_without_a_trained_parameter_is_a_frozen_module() {
        let by_part = found(&group("vision", "frozen = true")).unwrap();
        assert_eq!((by_part.parts.to_string().as_str(), by_part.frozen.len()), ("vision", 0));
        let by_name = found(&group("model.visual.[!]*", "frozen = true")).unwrap_err().to_string();
        assert!(by_name.contains("which names none"), "{by_name}");
        // under the name in newer files
        let tower = found(&group("model.visual.*", "frozen = true")).unwrap();
        assert_eq!(tower.parts.to_string(), "vision,projector");
        let some = found(&group("visual.blocks.0.*", "frozen = true")).unwrap();
        assert!(some.parts == FrozenParts::default() && some.frozen.len() == 12, "{some:?}");
    }

    #[test]
    fn a_group_without_a_parameter_is_refused_with_near_names() {
        let error = found(&group("model.layers.*.self_attn.qproj.weight", "frozen = true")).unwrap_err();
        let near = "near names are `model.layers.*.self_attn.q_proj.weight`";
        assert!(error.to_string().contains(near), "{error}");
        let covered = group("llm", "learning_rate = 1e-4") + &group("*", "weight_decay = 0.0");
        let error = found(&covered).unwrap_err().to_string();
        assert!(error.starts_with("`optimizer.groups[0]` has no effect: a later group"), "{error}");
    }

    #[test]
    fn distances_count_changes_outside_of_stars() {
        for (pattern, name, expected) in [
            ("", "", 0),
            ("abc", "abx", 1),
            ("a*", "abcd", 0),
            ("*d", "abcd", 0),
            ("a*x", "abc", 1),
            ("", "ab", 2),
        ] {
            assert_eq!(distance(pattern, name), expected, "{pattern} {name}");
        }
    }
}
