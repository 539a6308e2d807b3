//! Reads the layout of a run from a plan that `dflop plan --json` printed.

use std::path::Path;

use dflop_loader::store::file;
use serde::Deserialize;

use super::config::{ModuleTable, PlacementName, RunConfig};
use crate::{Error, Result};

/// Plan fields that describe a run; all other fields are left out.
#[derive(Debug, Clone, Deserialize)]
struct PlanFile {
    modules: Vec<PlannedModule>,
    microbatches: usize,
    placement: PlacementName,
    schedule: String,
    is_run: bool,
}

#[derive(Debug, Clone, Deserialize)]
struct PlannedModule {
    /// `vision`, `audio` or `llm`; `encoder` for a model's only encoder.
    name: String,
    tp: usize,
    dp: usize,
    /// DP ranks that divide the experts among themselves; missing for 1.
    #[serde(default)]
    ep: Option<usize>,
    layers: Vec<usize>,
    recompute: bool,
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
    fn read(path: &Path) -> Result<Self> {
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
