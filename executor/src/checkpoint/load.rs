//! Loads a checkpoint on any ranks with any stages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::directory;
use super::manifest::Manifest;
use super::save::CheckpointDirectory;
use super::{FORMAT, MASTER, MEAN, RunState, SQUARE, STATE_FILE};
use crate::error::{Error, Result};
use crate::optimizer::JobOptimizer;
use crate::optimizer::{ParameterState, Precision};
use dflop_comm::{Comm, StepContext};
use dflop_device::Device;
use dflop_models::Stage;
use dflop_models::weights::ParameterSpec;
use dflop_models::weights::{Checkpoint, WeightSource};

/// A checkpoint that a run can resume from.
#[derive(Debug)]
pub struct SavedCheckpoint {
    directory: PathBuf,
    step: u64,
    run: RunState,
    weights: Checkpoint,
    optimizer: Checkpoint,
}

impl CheckpointDirectory {
    /// Returns the newest complete checkpoint; `None` if there is none. All ranks of `comm` call it.
    ///
    /// Rank 0 searches and compares all digests. It skips unusable checkpoints, with a warning that has the
    /// reason.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read, [`Error::Saved`] if a rank does not see the
    /// checkpoint that rank 0 found. Then the job ends on all ranks; the others get [`Error::Comm`].
    pub fn latest(&self, comm: &dyn Comm) -> Result<Option<SavedCheckpoint>> {
        let at = StepContext::step(0, "find state");
        let end = |error: Error| {
            comm.abort(at, &error.to_string());
            error
        };
        // Rank 0 alone decides, as ranks may see a shared file system at different times.
        let found = if comm.rank() == 0 { newest(self.root()).map_err(end)? } else { None };
        let name = found.as_ref().and_then(|saved| saved.directory.file_name()?.to_str()).unwrap_or_default();
        let names = crate::optimizer::gather_bytes(comm, at, name.as_bytes())?;
        match (String::from_utf8_lossy(&names[0]), found) {
            (name, None) if !name.is_empty() => {
                SavedCheckpoint::read(&self.root().join(&*name)).map(Some).map_err(end)
            }
            (_, found) => Ok(found),
        }
    }
}

fn newest(root: &Path) -> Result<Option<SavedCheckpoint>> {
    for directory in directory::candidates(root)? {
        match SavedCheckpoint::open(&directory) {
            Ok(saved) => return Ok(Some(saved)),
            Err(error) => {
                tracing::warn!(directory = %directory.display(), reason = %error, "skipped an unusable checkpoint");
            }
        }
    }
    Ok(None)
}

impl SavedCheckpoint {
    /// Opens a checkpoint by its directory and compares all its files with their digests.
    ///
    /// # Errors
    /// [`Error::Saved`] with the missing or damaged file; [`dflop_models::Error::Format`] for an invalid file
    /// of tensors.
    pub fn open(directory: &Path) -> Result<Self> {
        Manifest::read(directory)?.verify(directory)?;
        Self::read(directory)
    }

    /// Opens a checkpoint without comparing digests.
    fn read(directory: &Path) -> Result<Self> {
        let unusable =
            |problem: &str| Error::Saved { path: directory.to_owned(), problem: problem.to_owned() };
        let manifest = Manifest::read(directory)?;
        let text = std::fs::read(directory.join(STATE_FILE)).unwrap_or_default();
        let document: Value = serde_json::from_slice(&text).unwrap_or_default();
        let number = |name: &str| document.get(name).and_then(Value::as_u64);
        if number("format") != Some(FORMAT) || number("step") != Some(manifest.step) {
            return Err(unusable(&format!("`{STATE_FILE}` does not belong to step {}", manifest.step)));
        }
        let value = |name: &str| document.get(name).cloned().unwrap_or_default();
        let seed = number("seed").ok_or_else(|| unusable(&format!("`{STATE_FILE}` has no seed")))?;
        // states of earlier versions have none
        let corrections = document.get("corrections").cloned().unwrap_or_else(|| json!([]));
        let corrections = serde_json::from_value(corrections)
            .map_err(|error| unusable(&format!("`{STATE_FILE}`: corrections: {error}")))?;
        let run = RunState { seed, layout: value("layout"), loader: value("loader"), corrections };
        let optimizer = Checkpoint::open_files(manifest.paths(directory, "optimizer-", ".safetensors"))?;
        let (directory, step) = (directory.to_owned(), manifest.step);
        Ok(Self { weights: Checkpoint::open(&directory)?, optimizer, directory, step, run })
    }

    /// Returns the directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the number of steps taken.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Returns seed, layout and state of the loader.
    #[must_use]
    pub const fn run(&self) -> &RunState {
        &self.run
    }

    /// Returns the weights, to build stages from.
    #[must_use]
    pub const fn weights(&self) -> &Checkpoint {
        &self.weights
    }

    /// Returns the values of a tensor of the optimizer, or of this rank's part of it; `None` if it is
    /// missing.
    fn values(&self, kind: &str, spec: &ParameterSpec) -> Result<Option<Vec<f32>>> {
        let name = format!("{kind}{}", spec.name);
        match self.optimizer.tensor(&name) {
            Ok((shape, values)) if shape == spec.shape => Ok(Some(spec.part_of(&values))),
            Ok((found, _)) => {
                let expected = spec.shape.clone();
                Err(dflop_models::Error::TensorShape { tensor: name, expected, found }.into())
            }
            Err(dflop_models::Error::MissingTensor { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns optimizer state and weights of a parameter.
    fn restore<D: Device>(
        &self,
        device: &D,
        spec: &ParameterSpec,
        precision: Precision,
    ) -> Result<(ParameterState<D>, D::Floats)> {
        let moment = |kind: &str| {
            let missing = || dflop_models::Error::MissingTensor { tensor: format!("{kind}{}", spec.name) };
            let values = self.values(kind, spec)?.ok_or_else(missing)?;
            Ok::<_, Error>(device.upload_f32(&values)?)
        };
        // Master weights have the bits that bf16 rounds off, which also a run with f32 weights resumes from.
        let exact = match self.values(MASTER, spec)? {
            Some(master) => master,
            None => self.weights.values(spec)?,
        };
        let master = match precision {
            Precision::F32 => None,
            Precision::Bf16 => Some(device.upload_f32(&exact)?),
        };
        Ok((ParameterState { mean: moment(MEAN)?, square: moment(SQUARE)?, master }, device.upload(&exact)?))
    }
}

impl<D: Device> JobOptimizer<D> {
    /// Resumes from a checkpoint: sets the step, the optimizer state and the trained weights. Frozen
    /// weights come from [`SavedCheckpoint::weights`], which the stages are built from.
    ///
    /// With the layout that wrote the checkpoint, training continues with the bits of an uninterrupted run.
    ///
    /// # Errors
    /// [`dflop_models::Error::MissingTensor`], [`dflop_models::Error::TensorShape`] if a trained parameter
    /// has no state, or one of another shape. Then stages and optimizer must not be used.
    pub fn restore<'a>(
        &mut self,
        stages: impl IntoIterator<Item = &'a mut Stage<D>>,
        saved: &SavedCheckpoint,
    ) -> Result<()> {
        let precision = self.adamw.settings().precision;
        let mut states = Vec::new();
        for stage in stages {
            let (device, mut of_stage) = (stage.device().clone(), BTreeMap::new());
            for (spec, weights, _) in stage.parameters_mut().trained_mut() {
                // Before the first update there is no optimizer state.
                if saved.step == 0 {
                    *weights = device.upload(&saved.weights.values(spec)?)?;
                    continue;
                }
                let (state, values) = saved.restore(&device, spec, precision)?;
                *weights = values;
                of_stage.insert(spec.name.clone(), state);
            }
            states.push(of_stage);
        }
        self.adamw.restore(saved.step, states);
        Ok(())
    }
}
