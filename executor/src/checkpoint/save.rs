//! Checkpoint directory and settings.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::agreement::agree_on_success;
use super::directory;
use crate::error::Result;
use dflop_comm::Comm;
use dflop_models::weights::Tensor;

/// Checkpoint directory.
#[derive(Debug, Clone)]
pub struct CheckpointDirectory {
    pub(super) root: PathBuf,
    pub(super) kept: usize,
    pub(super) kept_earlier: Option<usize>,
    pub(super) companions: Vec<(String, Vec<u8>)>,
    pub(super) others: Arc<[Tensor]>,
}

impl CheckpointDirectory {
    /// Creates a handle for a directory, which need not exist; keeps the last two checkpoints, and
    /// checkpoints from all earlier runs.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            kept: 2,
            kept_earlier: None,
            companions: Vec::new(),
            others: Arc::default(),
        }
    }

    /// Sets the number of checkpoints to keep, at least 1. Default: 2.
    #[must_use]
    pub fn kept(mut self, states: usize) -> Self {
        self.kept = states.max(1);
        self
    }

    /// Sets the number of earlier runs whose checkpoints are kept ([`set_aside`](Self::set_aside));
    /// checkpoints from older runs are removed when this run has saved its first checkpoint. Default: all.
    #[must_use]
    pub fn kept_earlier(mut self, runs: usize) -> Self {
        self.kept_earlier = Some(runs);
        self
    }

    /// Adds a file that is copied into every checkpoint unchanged, such as `config.json`.
    #[must_use]
    pub fn companion(mut self, name: impl Into<String>, bytes: Vec<u8>) -> Self {
        self.companions.push((name.into(), bytes));
        self
    }

    /// Sets tensors that the model does not read but the checkpoint has
    /// ([`dflop_models::weights::Checkpoint::others`]); they are also saved, as `f32`.
    #[must_use]
    pub fn others(mut self, tensors: Vec<Tensor>) -> Self {
        self.others = tensors.into();
        self
    }

    /// Returns the checkpoint directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory for the checkpoint after this number of steps, whether or not it exists.
    #[must_use]
    pub fn for_step(&self, steps: u64) -> PathBuf {
        directory::for_step(&self.root, steps)
    }

    /// Moves checkpoints from other runs into a subdirectory `earlier-N`, for a run that starts from scratch:
    /// its checkpoints have lower steps, and must neither be removed as old nor ignored in favor of newer
    /// checkpoints. All ranks in `comm` call it.
    ///
    /// - returns the subdirectory, on rank 0, if any checkpoint was moved
    ///
    /// # Errors
    /// [`crate::Error::File`] on rank 0, [`crate::Error::NotSaved`] on all other ranks;
    /// [`crate::Error::Comm`].
    pub fn set_aside(&self, comm: &dyn Comm) -> Result<Option<PathBuf>> {
        let moved = if comm.rank() == 0 { directory::set_aside(&self.root) } else { Ok(None) };
        agree_on_success(comm, 0, "set earlier checkpoints aside", moved)
    }
}
