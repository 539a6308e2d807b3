//! Finds the support level of a model, from what the crates have for the model family.
//!
//! Versions of transformers that the families were compared with, as the recordings note them.
//!
//! The table is generated from `tests/golden/versions/`, which `common.run` in `tests/record/` writes (`make
//! docs-update`).

use dflop_costmodel::{DevicePreset, FamilyId, ModelSpec};
use dflop_executor::models::families::BlockFamilies;
use dflop_loader::processors::ProcessorFamilies;
use dflop_planner::ModelCostsBuilder;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::fmt;

/// Support level for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Tokens are counted and costs predicted: batches are balanced. Every known model has it.
    Cost,
    /// `dflop plan` finds parallelism for it.
    Plan,
    /// Samples are prepared as the model's own processor prepares them.
    Inputs,
    /// The executor trains it; this needs the inputs.
    Train,
}

/// Levels that a model has, and why it lacks the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Support {
    /// Last level.
    pub(super) level: Level,
    /// In ascending order.
    pub(super) levels: Vec<Level>,
    pub(super) lacks: Vec<Lack>,
}

/// Level that a model lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Lack {
    pub(super) level: Level,
    pub(super) because: String,
}

impl Level {
    /// Levels that a known model may lack.
    pub(super) const LACKING: [Self; 3] = [Self::Plan, Self::Inputs, Self::Train];

    fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::Plan => "plan",
            Self::Inputs => "inputs",
            Self::Train => "train",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Level {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Support {
    /// Collects levels: `Err` is the reason why a level is missing.
    pub(super) fn new(found: impl IntoIterator<Item = (Level, Result<(), String>)>) -> Self {
        let (mut levels, mut lacks) = (vec![Level::Cost], Vec::new());
        for (level, result) in found {
            match result {
                Ok(()) => levels.push(level),
                Err(because) => lacks.push(Lack { level, because }),
            }
        }
        Self { level: levels.iter().copied().max().unwrap_or(Level::Cost), levels, lacks }
    }

    /// Lists the levels, separated by commas.
    pub(super) fn names(&self) -> String {
        self.levels.iter().map(|level| level.name()).collect::<Vec<_>>().join(", ")
    }
}

/// Returns the support levels for a model.
///
/// - `config`: the `config.json`, from which blocks are made; without one, from the sizes
pub(super) fn model_support(spec: &ModelSpec, config: Option<&Value>) -> Support {
    let inputs = has_inputs(spec);
    let train = match &inputs {
        Ok(()) => has_blocks(spec, config),
        Err(_) => Err("it takes the inputs".to_owned()),
    };
    Support::new([(Level::Plan, is_planned(spec)), (Level::Inputs, inputs), (Level::Train, train)])
}

/// Runs the planner with times from a stated rate.
fn is_planned(spec: &ModelSpec) -> Result<(), String> {
    let device = DevicePreset::named("a100").map_err(|error| error.to_string())?;
    match ModelCostsBuilder::new(spec).device(device).build() {
        Ok(_) => Ok(()),
        Err(dflop_balancer::Error::Config { reason, .. }) => Err(reason),
        Err(error) => Err(error.to_string()),
    }
}

fn has_inputs(spec: &ModelSpec) -> Result<(), String> {
    let families = ProcessorFamilies::default();
    if is_described(spec.family) {
        return Err("its processor is yours: docs/any-model.md".to_owned());
    }
    let of_encoders = [spec.vision.map(|vision| vision.family), spec.audio.map(|audio| audio.family)];
    if let Some(family) = of_encoders.into_iter().flatten().find(|family| families.get(*family).is_none()) {
        return Err(format!("`{family}` has no processor: docs/any-model.md shows the use of your own"));
    }
    families.vision(spec).map_err(|error| error.to_string())?;
    families.audio(spec).map_err(|error| error.to_string())?;
    Ok(())
}

fn has_blocks(spec: &ModelSpec, config: Option<&Value>) -> Result<(), String> {
    let families = BlockFamilies::default();
    // The decoder for a family without blocks would be a Llama, and a different architecture is no Llama.
    if spec.family != FamilyId::COMPOSED && families.get(spec.family).is_none() {
        return Err(format!("the executor has no blocks of `{}`", spec.family));
    }
    let made = match config {
        Some(config) => families.model(config).map(drop),
        None => families.model_from_spec(spec).map(drop),
    };
    made.map_err(|error| error.to_string())
}

fn is_described(family: FamilyId) -> bool {
    family.as_str() == dflop_costmodel::config::DESCRIBED
}

/// `family,version` lines, ordered by family.
const VERSIONS: &str = include_str!("versions.csv");

/// Returns the version of transformers that a family was compared with; `None` without a recording.
pub(super) fn transformers_version(family: &str) -> Option<&'static str> {
    VERSIONS
        .lines()
        .filter_map(|line| line.split_once(','))
        .find(|(of, _)| *of == family)
        .map(|(_, version)| version)
}
