//! Saved states that survive a crash at any moment.
//!
//! A state is a directory `step-00000040` with
//! - `config.json`, tokenizer and whatever else came with the model, as it was;
//! - `model.safetensors`, or pieces with `model.safetensors.index.json`, under the names of Hugging Face: `transformers` loads
//!   the directory;
//! - `optimizer-00001-of-00002.safetensors`: `exp_avg.NAME` and `exp_avg_sq.NAME` of every trained parameter, and
//!   `master.NAME` where weights are bf16;
//! - `state.json`: step, seed, learning rate, layout, and the state of the loader;
//! - `manifest.json`, the last: sizes and digests of all others.
//!
//! Every rank writes the parameters that it answers for ([`super::Ownership`]) into `.step-00000040.partial`, brought to
//! disk file by file; when all are there, rank 0 writes the manifest, renames the directory and brings that to disk. A process
//! that is killed leaves a directory that no one takes for a state, which the next [`CheckpointDirectory::save`] removes.
//!
//! A run that begins anew in a directory with states moves them into `earlier-1` ([`CheckpointDirectory::set_aside`]): nothing removes
//! what it did not write, and the newest state is always that of the run that was begun last.
//!
//! Reading goes by name: any rank takes what its stages have, or their parts, so stages, replicas and the tensor-parallel
//! degree may be others than before. Tensors that ranks share are put together in the memory of the one that writes them.
//! Ranks share the file system.

mod directory;
mod load;
mod manifest;
mod save;
mod tensors;

pub use load::SavedCheckpoint;
pub use save::CheckpointDirectory;

use serde_json::Value;

/// Sizes and digests of all other files.
const MANIFEST_FILE: &str = "manifest.json";
/// Where the run stands.
const STATE_FILE: &str = "state.json";
/// Version of both.
const FORMAT: u64 = 1;
/// Names of the tensors of the optimizer.
const MEAN: &str = "exp_avg.";
const SQUARE: &str = "exp_avg_sq.";
const MASTER: &str = "master.";

/// What a run needs to go on, besides weights and optimizer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunState {
    /// Seed of the run.
    pub seed: u64,
    /// How the model was cut and replicated, for information.
    pub layout: Value,
    /// State of the loader, as it gave it.
    pub loader: Value,
}
