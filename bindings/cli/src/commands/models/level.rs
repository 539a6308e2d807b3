//! Finds how far a model is supported, from what the crates have for its family.

use std::fmt;

use dflop_costmodel::{FamilyId, ModelSpec};
use dflop_executor::models::families::BlockFamilies;
use dflop_loader::processors::ProcessorFamilies;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// Level that the support of a model reaches; each contains those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Tokens are counted and costs predicted.
    Cost,
    /// Samples are prepared as the model's own processor prepares them.
    Inputs,
    /// The executor trains it.
    Train,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cost => "cost",
            Self::Inputs => "inputs",
            Self::Train => "train",
        })
    }
}

impl Serialize for Level {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Returns the level of a model, and why it ends there.
///
/// - `config`: the `config.json`, from which blocks are made; without one, from the sizes
pub(super) fn level_of(spec: &ModelSpec, config: Option<&Value>) -> (Level, Option<String>) {
    if let Err(reason) = has_inputs(spec) {
        return (Level::Cost, Some(reason));
    }
    match has_blocks(spec, config) {
        Err(reason) => (Level::Inputs, Some(reason)),
        Ok(()) => (Level::Train, None),
    }
}

fn has_inputs(spec: &ModelSpec) -> Result<(), String> {
    let families = ProcessorFamilies::default();
    if is_described(spec.family) {
        return Err("its processor is yours: docs/any-model.md".to_owned());
    }
    let encoders = [spec.vision.map(|vision| vision.family), spec.audio.map(|audio| audio.family)];
    if let Some(family) = encoders.into_iter().flatten().find(|family| families.get(*family).is_none()) {
        return Err(format!("the loader has no processor of `{family}`: docs/any-model.md"));
    }
    families.vision(spec).map_err(|error| error.to_string())?;
    families.audio(spec).map_err(|error| error.to_string())?;
    Ok(())
}

fn has_blocks(spec: &ModelSpec, config: Option<&Value>) -> Result<(), String> {
    let families = BlockFamilies::default();
    // The decoder of a family without blocks would be a Llama, which another architecture is not.
    if spec.family != FamilyId::COMPOSED && families.get(spec.family).is_none() {
        return Err(format!("the executor has no blocks of `{}`", spec.family));
    }
    let made = match config {
        Some(config) => families.model(config).map(drop),
        None => families.model_of(spec).map(drop),
    };
    made.map_err(|error| error.to_string())
}

fn is_described(family: FamilyId) -> bool {
    family.as_str() == dflop_costmodel::config::DESCRIBED
}
