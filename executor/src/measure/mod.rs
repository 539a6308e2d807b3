//! Measures what a model's stages take on this device, into the profile that the cost model predicts from.
//!
//! [`measure`] runs parts of each module through the executor at shapes that [`adaptive`] chooses and returns a
//! [`dflop_costmodel::profile::ProfileFile`]. [`check`] draws microbatches of mixed samples, runs them as training does
//! and holds predictions against what they took, with and without the adaptive correction. [`clock`] says what time is.
//!
//! Everything here computes on [`crate::device::Cpu`].

pub mod adaptive;
pub mod check;
pub mod clock;
mod document;
mod drawn;
mod inputs;
mod peak;
mod profile;
mod room;
mod sequences;
mod subject;

use dflop_costmodel::{ModelSpec, Module};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::model::encoder::EncoderConfig;
use crate::model::layer::LayerSpec;
use crate::model::model_config::{ModelConfig, ModuleKind};

pub use clock::Clock;
pub use peak::gemm_peak_flops;
pub use profile::{MeasureOptions, MeasuredProfile, ModuleReport, measure};
pub use subject::{Passes, time_optimizer, time_passes};

/// A model as the executor runs it and as the cost model counts it.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredModel {
    /// What runs.
    pub config: ModelConfig,
    /// What is predicted.
    pub spec: ModelSpec,
}

impl MeasuredModel {
    /// Takes a model from its `config.json`.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] or [`Error::Model`] if a field makes no sense or the executor has no counterpart to it.
    pub fn from_config(document: &Value, spec: ModelSpec) -> Result<Self> {
        Self { config: ModelConfig::from_config(document)?, spec }.checked()
    }

    /// Takes a model from its dimensions alone, such as a preset's.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the module which no family here has.
    pub fn from_spec(spec: ModelSpec) -> Result<Self> {
        let vision = document::vision(&spec).map(|document| EncoderConfig::vision(&document)).transpose()?;
        let audio = document::audio(&spec).map(|document| EncoderConfig::audio(&document)).transpose()?;
        let llm = crate::model::llm::LlmConfig::from_config(&document::llm(&spec.llm))?;
        Self { config: ModelConfig { vision: vision.flatten(), audio: audio.flatten(), llm }, spec }.checked()
    }

    /// Holds what runs against what is predicted.
    fn checked(self) -> Result<Self> {
        for (module, encoder, _) in self.spec.encoders() {
            let runs = encoder.layers - encoder.details.unused_layers.min(encoder.layers);
            let found = self.encoder(module)?;
            if found.hidden() != encoder.hidden as usize || found.layers() != runs as usize {
                let problem = format!(
                    "makes {} layers of width {} of {module}, the cost model has {runs} of {}",
                    found.layers(),
                    found.hidden(),
                    encoder.hidden
                );
                return Err(Error::ModelConfig { field: "model_type".to_owned(), problem });
            }
        }
        Ok(self)
    }

    /// Returns the modules, encoders first.
    #[must_use]
    pub fn modules(&self) -> Vec<Module> {
        self.config.modules().into_iter().map(subject::module_of).collect()
    }

    fn encoder(&self, module: Module) -> Result<&EncoderConfig> {
        let encoder = match module {
            Module::Vision => &self.config.vision,
            Module::Audio => &self.config.audio,
            Module::Llm => &None,
        };
        encoder.as_ref().ok_or_else(|| Error::ModelConfig {
            field: "model_type".to_owned(),
            problem: format!("has no encoder {module} here"),
        })
    }

    /// What the first layers of a module are made of.
    fn layer_specs(&self, module: Module, layers: usize) -> Result<Vec<LayerSpec>> {
        if module == Module::Llm {
            return Ok((0..layers.min(self.config.llm.layers()))
                .map(|layer| self.config.llm.layer(layer))
                .collect());
        }
        Ok(self.encoder(module)?.layer_specs().iter().take(layers).cloned().collect())
    }
}

/// The kind of a module in the executor.
const fn kind_of(module: Module) -> ModuleKind {
    match module {
        Module::Vision => ModuleKind::Vision,
        Module::Audio => ModuleKind::Audio,
        Module::Llm => ModuleKind::Llm,
    }
}
