//! Loads a checkpoint on any ranks with any stages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dflop_comm::{Comm, StepContext};
use dflop_device::Device;
use dflop_loader::store::file;
use dflop_models::Stage;
use dflop_models::weights::{Checkpoint, ParameterSpec, WeightSource};
use serde_json::{Value, json};

use super::manifest::Manifest;
use super::{
    CheckpointDirectory, FORMAT, MANIFEST_FILE, MASTER, MEAN, RunState, SQUARE, STATE_FILE, directory,
};
use crate::error::{Error, Result};
use crate::optimizer::{JobOptimizer, ParameterState, Precision};

/// A checkpoint that a run can resume from.
#[derive(Debug)]
pub struct SavedCheckpoint {
    directory: PathBuf,
    step: u64,
    /// Number of steps that updated nothing.
    skipped_updates: u64,
    run: RunState,
    weights: Checkpoint,
    optimizer: Checkpoint,
}

impl CheckpointDirectory {
    /// Returns the newest complete checkpoint; `None` if there is none. All ranks in `comm` call it.
    ///
    /// Rank 0 chooses candidates, newest first, and compares file sizes. All ranks then compare digests, each
    /// for a share of the files, so that no rank reads everything. An unusable checkpoint is skipped, with a
    /// warning from the rank that found the reason.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read, [`Error::Saved`] if a rank cannot read a checkpoint
    /// that all other ranks found complete. Then the job ends on all ranks; the other ranks get
    /// [`Error::Comm`].
    pub fn latest(&self, comm: &dyn Comm) -> Result<Option<SavedCheckpoint>> {
        let at = StepContext::step(0, "find state");
        let end = |error: Error| {
            comm.abort(at, &error.to_string());
            error
        };
        // Only rank 0 decides, as ranks may see a shared file system at different times.
        let mut candidates =
            if comm.rank() == 0 { directory::candidates(self.root()).map_err(end)? } else { Vec::new() }
                .into_iter();
        loop {
            let candidate = Candidate::find(&mut candidates);
            let chosen = crate::optimizer::gather_bytes(comm, at, &candidate.to_bytes())?.swap_remove(0);
            let Some(Candidate { directory, manifest }) = Candidate::from_bytes(self.root(), &chosen) else {
                return Ok(None);
            };
            if !directory.is_dir() {
                let problem = "this rank does not see what rank 0 found; ranks must share the file system";
                return Err(end(Error::Saved { path: directory, problem: problem.to_owned() }));
            }
            let share = Manifest::from_text(&directory, &manifest)
                .and_then(|manifest| manifest.verify_share(&directory, comm.rank(), comm.size()));
            if let Err(error) = &share {
                skip(&directory, error);
            }
            let mut damaged = [u64::from(share.is_err())];
            comm.all_reduce(at.action("verify state"), damaged.as_mut_slice().into())?;
            if damaged == [0] {
                return SavedCheckpoint::read(&directory).map(Some).map_err(end);
            }
        }
    }

    /// Returns the newest checkpoint whose files have the right sizes; `None` if there is none.
    ///
    /// For inspection without a job: digests, which [`Self::latest`] compares, are not read.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    pub fn newest(&self) -> Result<Option<SavedCheckpoint>> {
        let Candidate { directory, .. } =
            Candidate::find(&mut directory::candidates(self.root())?.into_iter());
        if directory.as_os_str().is_empty() {
            return Ok(None);
        }
        SavedCheckpoint::read(&directory).map(Some)
    }
}

/// Checkpoint that rank 0 found, whose files have the right sizes.
struct Candidate {
    directory: PathBuf,
    /// Manifest text.
    manifest: Vec<u8>,
}

impl Candidate {
    /// Finds the next usable directory; an empty candidate if there is none.
    fn find(directories: &mut impl Iterator<Item = PathBuf>) -> Self {
        for directory in directories {
            let check = || {
                Manifest::read(&directory)?.verify_sizes(&directory)?;
                SavedCheckpoint::read(&directory)
            };
            match check().map(|_| file::read(&directory.join(MANIFEST_FILE)).unwrap_or_default()) {
                Ok(manifest) => return Self { directory, manifest },
                Err(error) => skip(&directory, &error),
            }
        }
        Self { directory: PathBuf::new(), manifest: Vec::new() }
    }

    /// Returns the directory name, a line break, and the manifest.
    fn to_bytes(&self) -> Vec<u8> {
        let name = self.directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        [name.as_bytes(), b"\n", &self.manifest].concat()
    }

    /// Inverse of [`to_bytes`](Self::to_bytes); `None` for an empty candidate.
    fn from_bytes(root: &Path, bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|&byte| byte == b'\n').filter(|&end| end > 0)?;
        let directory = root.join(String::from_utf8_lossy(&bytes[..end]).as_ref());
        Some(Self { directory, manifest: bytes[end + 1..].to_vec() })
    }
}

fn skip(directory: &Path, reason: &Error) {
    tracing::warn!(directory = %directory.display(), %reason, "skipped an unusable checkpoint");
}

/// Opens the weights in a directory to start a run with. In a run checkpoint these are the weights listed in
/// the manifest, whose sizes are compared; in any other directory, the weights found by [`Checkpoint::open`].
///
/// # Errors
/// [`Error::Saved`] for a file that is not in the manifest but would be loaded, or a file that is missing or
/// has the wrong size; errors from [`Checkpoint::open`].
pub fn open_weights(directory: &Path) -> Result<Checkpoint> {
    let is_ours = [MANIFEST_FILE, STATE_FILE].iter().all(|name| directory.join(name).exists());
    if !is_ours {
        return Ok(Checkpoint::open(directory)?);
    }
    let manifest = Manifest::read(directory)?;
    manifest.verify_sizes(directory)?;
    manifest.weights(directory)
}

impl SavedCheckpoint {
    /// Opens a checkpoint by directory and compares all files with the recorded digests.
    ///
    /// # Errors
    /// [`Error::Saved`] with the missing or damaged file, or with a file that is not in the manifest but
    /// would be loaded; [`dflop_models::Error::Format`] for an invalid tensor file.
    pub fn open(directory: &Path) -> Result<Self> {
        let manifest = Manifest::read(directory)?;
        manifest.verify_sizes(directory)?;
        manifest.verify_share(directory, 0, 1)?;
        Self::read(directory)
    }

    /// Opens a checkpoint without comparing digests.
    fn read(directory: &Path) -> Result<Self> {
        let unusable =
            |problem: &str| Error::Saved { path: directory.to_owned(), problem: problem.to_owned() };
        let manifest = Manifest::read(directory)?;
        if !manifest.files.contains_key(STATE_FILE) {
            return Err(unusable(&format!("its manifest does not list `{STATE_FILE}`")));
        }
        let text = file::read(&directory.join(STATE_FILE)).unwrap_or_default();
        let document: Value = serde_json::from_slice(&text).unwrap_or_default();
        let number = |name: &str| document.get(name).and_then(Value::as_u64);
        if number("format") != Some(FORMAT) || number("step") != Some(manifest.step) {
            return Err(unusable(&format!("`{STATE_FILE}` does not belong to step {}", manifest.step)));
        }
        // states from earlier versions have none
        let skipped_updates = number("skipped_updates").unwrap_or(0);
        if skipped_updates > manifest.step {
            return Err(unusable(&format!("`{STATE_FILE}`: skipped_updates: {skipped_updates}")));
        }
        let value = |name: &str| document.get(name).cloned().unwrap_or_default();
        let seed = number("seed").ok_or_else(|| unusable(&format!("`{STATE_FILE}` has no seed")))?;
        // states from earlier versions have none
        let corrections = document.get("corrections").cloned().unwrap_or_else(|| json!([]));
        let corrections = serde_json::from_value(corrections)
            .map_err(|error| unusable(&format!("`{STATE_FILE}`: corrections: {error}")))?;
        let run = RunState { seed, layout: value("layout"), loader: value("loader"), corrections };
        let optimizer = Checkpoint::open_files(manifest.paths(directory, "optimizer-", ".safetensors"))?;
        let (weights, step) = (manifest.weights(directory)?, manifest.step);
        Ok(Self { weights, optimizer, directory: directory.to_owned(), step, skipped_updates, run })
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

    /// Returns seed, layout and loader state.
    #[must_use]
    pub const fn run(&self) -> &RunState {
        &self.run
    }

    /// Returns the weights, to build stages from.
    #[must_use]
    pub const fn weights(&self) -> &Checkpoint {
        &self.weights
    }

    /// Returns the values of an optimizer tensor, or of this rank's part; `None` if it is missing.
    fn values(&self, kind: &str, spec: &ParameterSpec) -> Result<Option<Vec<f32>>> {
        let name = format!("{kind}{}", spec.name);
        match self.optimizer.tensor(&name) {
            Ok((shape, values)) if shape == spec.shape => Ok(Some(spec.cut_part(&values))),
            Ok((found, _)) => {
                let expected = spec.shape.clone();
                Err(dflop_models::Error::TensorShape { tensor: name, expected, found }.into())
            }
            Err(dflop_models::Error::MissingTensor { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the optimizer state and weights of a parameter.
    fn restore(
        &self,
        spec: &ParameterSpec,
        precision: Precision,
    ) -> Result<(ParameterState<Vec<f32>>, Vec<f32>)> {
        let moment = |kind: &str| -> Result<Vec<f32>> {
            let missing = || dflop_models::Error::MissingTensor { tensor: format!("{kind}{}", spec.name) };
            Ok(self.values(kind, spec)?.ok_or_else(missing)?)
        };
        // Master weights have the bits that bf16 rounds off, from which a run with f32 weights also resumes.
        let exact = match self.values(MASTER, spec)? {
            Some(master) => master,
            None => self.weights.values(spec)?,
        };
        let master = match precision {
            Precision::F32 => None,
            Precision::Bf16 => Some(exact.clone()),
        };
        let (mean, square) = (moment(MEAN)?, moment(SQUARE)?);
        Ok((ParameterState { mean, square, master }, exact))
    }
}

impl<D: Device> JobOptimizer<D> {
    /// Resumes from a checkpoint: sets the step, the optimizer state and the trained weights. Frozen
    /// weights come from [`SavedCheckpoint::weights`], which the stages are built from.
    ///
    /// With the layout that wrote the checkpoint, training continues with the same bits as an uninterrupted
    /// run.
    ///
    /// # Errors
    /// [`dflop_models::Error::MissingTensor`], [`dflop_models::Error::TensorShape`] if a trained parameter
    /// has no state, or a state with another shape. Then stages and optimizer must not be used.
    pub fn restore<'a, S: Stage<D> + ?Sized + 'a>(
        &mut self,
        stages: impl IntoIterator<Item = &'a mut S>,
        saved: &SavedCheckpoint,
    ) -> Result<()> {
        let precision = self.adamw.settings().precision;
        let mut stages: Vec<&mut S> = stages.into_iter().collect();
        let mut states = Vec::new();
        for stage in &mut stages {
            let (device, mut of_stage) = (stage.device().clone(), BTreeMap::new());
            for (spec, weights, _) in stage.parameters_mut().trained_mut() {
                // Before the first update there is no optimizer state.
                if saved.step == 0 {
                    device.write(&saved.weights.values(spec)?, weights)?;
                    continue;
                }
                let (state, values) = saved.restore(spec, precision)?;
                device.write(&values, weights)?;
                of_stage.insert(spec.name.clone(), state);
            }
            states.push(of_stage);
        }
        self.adamw.restore((saved.step, saved.skipped_updates), stages.iter().map(|stage| &**stage), states)
    }
}
