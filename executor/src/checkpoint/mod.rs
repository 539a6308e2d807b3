//! Saves and loads checkpoints that survive a crash at any moment.
//!
//! A checkpoint is a directory `step-00000040` with
//! - `config.json`, the tokenizer and other files of the model, unchanged;
//! - `model.safetensors`, or several files with `model.safetensors.index.json`, under the names of Hugging
//!   Face: `transformers` loads the directory;
//! - `optimizer-00001-of-00002.safetensors`: `exp_avg.NAME` and `exp_avg_sq.NAME` of every trained parameter,
//!   and `master.NAME` if weights are bf16;
//! - `state.json`: step, seed, learning rate, layout, the state of the loader, and correction tables;
//! - `manifest.json`, written last: sizes and digests of all other files.
//!
//! Every rank copies the parameters that it owns ([`crate::optimizer::Ownership`]) to host memory, and a
//! thread writes them into `.step-00000040.partial`, hashes them on the way, and flushes each file to disk,
//! while training goes on ([`CheckpointSaver`]). When all are done, which ranks compare at the end of their
//! steps, rank 0 writes the manifest, renames the directory and flushes that. A killed process leaves a
//! directory that is never taken for a checkpoint, and that the next save removes.
//!
//! A run that starts from scratch in a directory with checkpoints moves them into `earlier-1`
//! ([`CheckpointDirectory::set_aside`]): a run removes only its own checkpoints, and the newest one always
//! belongs to the run that was started last. Those of older runs are removed if asked for
//! ([`CheckpointDirectory::kept_earlier`]). A running job claims its directory
//! ([`CheckpointDirectory::claim`]), so that a second one is refused.
//!
//! Before a checkpoint is loaded, the ranks compare its files with the digests, each a share of them. Exactly
//! those are loaded; other weights beside them make the checkpoint unusable. Loading
//! goes by tensor name: every rank reads the tensors of its stages, or its parts of them, so stages,
//! replicas and tensor-parallel degree may differ from those of the run that saved. Tensors that ranks share
//! are assembled in the memory of the rank that writes them. All ranks must share the file system.

mod agreement;
mod aside;
mod claim;
mod digest;
mod directory;
mod load;
mod manifest;
mod pieces;
mod publication;
mod save;
mod saver;
mod snapshot;
mod tensors;
mod verify;

pub use claim::DirectoryClaim;
pub use load::{SavedCheckpoint, open_weights};
pub use save::CheckpointDirectory;
pub use saver::CheckpointSaver;

use dflop_costmodel::correction::CorrectionTable;
use serde_json::Value;

/// File with sizes and digests of all other files.
const MANIFEST_FILE: &str = "manifest.json";
/// File with the progress of the run.
const STATE_FILE: &str = "state.json";
/// Format version of both.
const FORMAT: u64 = 1;
/// Prefixes of optimizer tensors.
const MEAN: &str = "exp_avg.";
const SQUARE: &str = "exp_avg_sq.";
const MASTER: &str = "master.";

/// State that a run needs to resume, in addition to weights and optimizer state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunState {
    /// Seed of the run.
    pub seed: u64,
    /// Layout of the model over ranks, for information.
    pub layout: Value,
    /// State of the loader, as JSON.
    pub loader: Value,
    /// Correction tables that plans of the next steps may need, in order.
    pub corrections: Vec<CorrectionTable>,
}

/// Progress of a save, as one rank reports it or as the sum over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveProgress {
    /// Ranks whose part of the current phase is done.
    pub done: u64,
    /// Ranks whose part has failed.
    pub failed: u64,
}
