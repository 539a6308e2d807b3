//! Measures model stages on this device, as a profile that the cost model predicts from.
//!
//! [`measure`] runs parts of each module at shapes that [`dflop_costmodel::measure`] chooses and returns a
//! [`dflop_costmodel::profile::ProfileFile`]. [`check`] draws microbatches with mixed samples, runs them as
//! training does and compares predictions with measured times, with and without the adaptive correction.
//! [`clock`] measures time.
//!
//! Everything here computes on any device, on the CPU by default.

pub mod check;
pub mod clock;
mod measure;
mod module_under_test;
mod random_batches;
mod shape_source;

pub use clock::{Clock, gemm_peak_flops};
pub use measure::{MeasureOptions, MeasuredProfile, ModuleReport, measure};
pub use module_under_test::{PassDurations, time_optimizer, time_passes};

use dflop_costmodel::{ModelSpec, Module};
use dflop_models::encoder::EncoderConfig;
use dflop_models::{LayerSpec, ModelConfig, ModuleKind};
use serde_json::Value;

use crate::error::{Error, Result};

/// Model for the executor and for the cost model.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredModel {
    /// Model that runs.
    pub config: ModelConfig,
    /// Model that times are predicted for.
    pub spec: ModelSpec,
}

impl MeasuredModel {
    /// Reads a model from `config.json`.
    ///
    /// # Errors
    /// [`dflop_models::Error::ModelConfig`] or [`Error::Model`] if a field is invalid or the executor does
    /// not support it.
    pub fn from_config(document: &Value, spec: ModelSpec) -> Result<Self> {
        Self { config: ModelConfig::from_config(document)?, spec }.checked()
    }

    /// Builds a model only from sizes, such as preset sizes.
    ///
    /// # Errors
    /// [`dflop_models::Error::ModelConfig`] that names the module that no supported family has.
    pub fn from_spec(spec: ModelSpec) -> Result<Self> {
        Self { config: ModelConfig::from_spec(&spec)?, spec }.checked()
    }

    /// Checks that the running model and the predicted model have the same sizes.
    fn checked(self) -> Result<Self> {
        for (module, encoder, _) in self.spec.encoders() {
            let runs = encoder.layers - encoder.details.unused_layers.min(encoder.layers);
            let found = self.encoder(module)?;
            if found.hidden() != encoder.hidden as usize || found.layers() != runs as usize {
                let problem = format!(
                    "gives {module} {} layers of width {}, expected {runs} of {}",
                    found.layers(),
                    found.hidden(),
                    encoder.hidden
                );
                return Err(model_type(problem));
            }
        }
        Ok(self)
    }

    /// Returns the modules, encoders first.
    #[must_use]
    pub fn modules(&self) -> Vec<Module> {
        self.config.modules().into_iter().map(module_under_test::cost_module).collect()
    }

    fn encoder(&self, module: Module) -> Result<&EncoderConfig> {
        let encoder = match module {
            Module::Vision => &self.config.vision,
            Module::Audio => &self.config.audio,
            Module::Llm => &None,
        };
        let missing = || model_type(format!("has no encoder for {module} that the executor supports"));
        encoder.as_ref().ok_or_else(missing)
    }

    /// Returns the specs for the first layers in a module.
    fn layer_specs(&self, module: Module, layers: usize) -> Result<Vec<LayerSpec>> {
        if module == Module::Llm {
            let llm = &self.config.llm;
            let sparse = (0..llm.spec.layers).filter(|&layer| llm.spec.has_experts(layer)).count();
            if sparse != 0 && sparse != llm.layers() {
                let problem = format!("has experts in {sparse} of {} layers, expected all", llm.layers());
                return Err(model_type(format!("{problem} or none: layers of two kinds are not measured")));
            }
            return Ok((0..layers.min(llm.layers())).map(|layer| llm.layer(layer)).collect());
        }
        Ok(self.encoder(module)?.layer_specs().iter().take(layers).cloned().collect())
    }
}

/// Returns the executor kind of a module.
const fn module_kind(module: Module) -> ModuleKind {
    match module {
        Module::Vision => ModuleKind::Vision,
        Module::Audio => ModuleKind::Audio,
        Module::Llm => ModuleKind::Llm,
    }
}

/// Returns the error for a model type.
fn model_type(problem: String) -> Error {
    dflop_models::Error::ModelConfig { field: "model_type".to_owned(), problem }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_with_blocks_runs_with_its_dimensions() {
        let mut without_blocks = 0;
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            let model = match MeasuredModel::from_spec(spec.clone()) {
                Ok(model) => model,
                Err(error) => {
                    let problem = error.to_string();
                    assert!(
                        problem.contains(&format!("`{}` has no blocks", spec.family)),
                        "{name}: {problem}"
                    );
                    without_blocks += 1;
                    continue;
                }
            };
            assert_eq!(model.config.llm.spec.layers, spec.llm.layers, "{name}");
            assert_eq!(model.config.llm.spec.head_dim, spec.llm.head_dim, "{name}");
            assert_eq!(model.config.llm.spec.details, spec.llm.details, "{name}");
            let windowed = |spec: &ModelSpec| spec.vision.map_or(0, |vision| vision.encoder.windowed_layers);
            let layers = model.config.vision.iter().flat_map(EncoderConfig::layer_specs);
            let found = layers.filter(|layer| layer.attention.mask == dflop_models::AttentionMask::Window);
            assert_eq!(found.count(), windowed(&spec) as usize, "{name}");
        }
        assert!(without_blocks < ModelSpec::preset_names().len() / 2, "{without_blocks} have no blocks");
    }
}
