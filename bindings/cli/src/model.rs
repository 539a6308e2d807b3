//! The arguments that say which model costs are predicted for.

use std::path::Path;
use std::sync::Arc;

use clap::Args;
use dflop_costmodel::config::ModelPart;
use dflop_costmodel::{CostModel, DeviceRate, Error, ModelSpec};
use dflop_loader::model_folder::ModelFolder;
use dflop_loader::prepare::image::ImageProcessor;

use crate::output::Failure;

/// The model that costs are predicted for.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Model preset, or the folder of a checkpoint with its `config.json`; an unknown name lists the presets.
    ///
    /// Several are joined: one language model, and encoders such as CLIP, SigLIP or Whisper.
    #[arg(long, value_name = "NAME|DIR", default_value = "omni-7b")]
    model: Vec<String>,
    /// Device preset: a stated rate, not a measurement.
    #[arg(long, value_name = "NAME", default_value = "h100")]
    pub(crate) device: String,
}

impl ModelArgs {
    /// What was asked for, in one word.
    pub(crate) fn name(&self) -> String {
        self.model.join("+")
    }

    pub(crate) fn cost_model(&self) -> Result<CostModel, Failure> {
        Ok(CostModel::new(self.spec()?, DeviceRate::preset(&self.device)?))
    }

    pub(crate) fn spec(&self) -> Result<ModelSpec, Failure> {
        if let [name] = self.model.as_slice() {
            return match folder(name)? {
                Some(folder) => Ok(folder.spec()?),
                None => preset(name),
            };
        }
        let part = |name: &String| match folder(name)? {
            Some(folder) => Ok(folder.part()?),
            None => preset(name).map(ModelPart::from),
        };
        let parts = self.model.iter().map(part).collect::<Result<Vec<_>, Failure>>()?;
        Ok(ModelSpec::compose(&self.name(), &parts)?)
    }

    /// What makes pixel values, where a folder says more of it than the model's family.
    pub(crate) fn image_processor(&self, spec: &ModelSpec) -> Result<Option<Arc<ImageProcessor>>, Failure> {
        for name in &self.model {
            let Some(folder) = folder(name)? else { continue };
            if folder.part()?.vision.is_some() {
                return Ok(folder.image_processor(spec)?.map(Arc::new));
            }
        }
        Ok(None)
    }
}

/// A preset goes before a folder of the same name.
fn folder(name: &str) -> Result<Option<ModelFolder>, Failure> {
    if ModelSpec::preset_names().contains(&name) || !Path::new(name).exists() {
        return Ok(None);
    }
    Ok(Some(ModelFolder::open(name)?))
}

fn preset(name: &str) -> Result<ModelSpec, Failure> {
    ModelSpec::preset(name).map_err(|error| match error {
        Error::UnknownModel { .. } => {
            Failure::Misuse(format!("{error}; or the folder of a checkpoint with its `config.json`"))
        }
        error => error.into(),
    })
}
