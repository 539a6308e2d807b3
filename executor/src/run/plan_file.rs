//! Plan that `dflop plan --json` printed: reads it, and replaces a run's layout by it.

use super::config::{ModuleTable, PlacementName, RunConfig};
use crate::{Error, Result};
use dflop_loader::store::file;
use serde::Deserialize;
use std::path::Path;

/// Plan fields that describe a run; all other fields are left out.
#[derive(Debug, Clone, Deserialize)]
pub struct PlanFile {
    /// Model that the plan was made for; missing in a plan from elsewhere.
    #[serde(default)]
    pub model: Option<String>,
    /// Modules, the LLM last.
    pub modules: Vec<PlannedModule>,
    /// Number of microbatches per LLM DP rank.
    pub microbatches: usize,
    /// Encoder placement relative to the LLM.
    pub placement: PlacementName,
    /// Schedule name, rounds ahead included.
    pub schedule: String,
    /// Number of rounds that the encoders run ahead of 1F1B.
    #[serde(default)]
    pub rounds_ahead: u16,
    /// Whether the executor runs the plan.
    pub is_run: bool,
}

/// Module in a plan file.
#[derive(Debug, Clone, Deserialize)]
pub struct PlannedModule {
    /// `vision`, `audio` or `llm`; `encoder` for a model's only encoder.
    pub name: String,
    /// TP degree.
    pub tp: usize,
    /// DP degree.
    pub dp: usize,
    /// DP ranks that divide the experts among themselves; missing for 1.
    #[serde(default)]
    pub ep: Option<usize>,
    /// Number of layers in each stage.
    pub layers: Vec<usize>,
    /// Whether the backward pass recomputes the layers.
    pub recompute: bool,
}

impl RunConfig {
    /// Replaces layout, schedule and number of microbatches by values from a plan that `dflop plan --json`
    /// printed.
    ///
    /// # Errors
    /// [`Error::Named`] if the file cannot be read or is no plan; [`Error::Config`] if the executor does not
    /// run the plan.
    pub fn read_plan(&mut self, path: &Path) -> Result<()> {
        PlanFile::read(path)?.apply(self)
    }
}

impl PlanFile {
    /// Reads a plan.
    ///
    /// # Errors
    /// [`Error::Named`] if the file cannot be read or is no plan.
    pub fn read(path: &Path) -> Result<Self> {
        let text = file::read_named_text(path).map_err(|error| Error::from(error).in_file(path))?;
        serde_json::from_str(&text).map_err(|error| {
            Error::Config(format!("is no plan of `dflop plan --json`: {error}")).in_file(path)
        })
    }

    /// Replaces the configuration's layout, schedule and number of microbatches by the plan's.
    ///
    /// # Errors
    /// [`Error::Config`] if the executor does not run the plan.
    fn apply(self, config: &mut RunConfig) -> Result<()> {
        let refuse = |reason: &str| Err(Error::Config(format!("`--plan`: {reason}")));
        let mut recomputed = self.modules.iter().map(|module| module.recompute);
        let is_recomputed = recomputed.next().unwrap_or(false);
        if let Some(ep) = self.modules.iter().find_map(|module| module.ep).filter(|ep| *ep > 1) {
            return refuse(&format!(
                "the plan divides experts over {ep} ranks, which is planned and simulated only; plan with `--ep 1`"
            ));
        }
        if !self.is_run {
            return refuse(
                "the plan recomputes some layers of a module, which is planned and simulated only",
            );
        }
        if recomputed.any(|other| other != is_recomputed) {
            return refuse(
                "the plan recomputes the layers of some modules only; a run recomputes all or none",
            );
        }
        config.model.recompute_layers = is_recomputed;
        let parallel = &mut config.parallel;
        for module in self.modules {
            let table = ModuleTable {
                stages: module.layers.len(),
                layers: Some(module.layers),
                dp: module.dp,
                tp: module.tp,
            };
            match module.name.as_str() {
                "llm" => parallel.llm = table,
                "vision" => parallel.vision = table,
                "audio" => parallel.audio = table,
                // The model has one of them.
                "encoder" => (parallel.vision, parallel.audio) = (table.clone(), table),
                other => return refuse(&format!("the executor has no module `{other}`")),
            }
        }
        (parallel.placement, parallel.schedule) = (self.placement, self.schedule);
        parallel.microbatches = self.microbatches;
        Ok(())
    }
}
