//! Saves and loads checkpoints that survive a crash at any moment.
//!
//! A checkpoint is a directory `step-00000040` with
//! - `config.json`, the tokenizer and other model files, unchanged;
//! - `model.safetensors`, or several files with `model.safetensors.index.json`, under the names that Hugging
//!   Face uses: `transformers` loads the directory;
//! - `optimizer-00001-of-00002.safetensors`: `exp_avg.NAME` and `exp_avg_sq.NAME` for every trained
//!   parameter, and `master.NAME` if weights are bf16;
//! - `state.json`: step, seed, learning rate, layout, loader state, and correction tables;
//! - `manifest.json`, written last: sizes and digests of all other files.
//!
//! Every rank copies the parameters that it owns ([`crate::optimizer::Ownership`]) to host memory, and a
//! thread writes them into `.step-00000040.partial`, hashes them on the way, and flushes each file to disk,
//! while training continues ([`CheckpointSaver`]). When all ranks are done, as compared at the end of each
//! step, rank 0 writes the manifest, renames the directory and flushes the rename. A killed process leaves a
//! directory that is never mistaken for a checkpoint, and that the next save removes.
//!
//! A run that starts from scratch in a directory with checkpoints moves them into `earlier-1`
//! ([`CheckpointDirectory::set_aside`]): a run removes only its own checkpoints, and the newest checkpoint
//! always belongs to the run that was started last. Checkpoints from older runs are removed on request
//! ([`CheckpointDirectory::kept_earlier`]). A running job claims its directory
//! ([`CheckpointDirectory::claim`]), so that a second job is rejected.
//!
//! Before a checkpoint is loaded, the ranks compare its files with the digests, each rank a share. Exactly
//! these files are loaded; additional weights in the directory make the checkpoint unusable. Loading goes by
//! tensor name: every rank reads the tensors in its stages, or its parts of them, so stages, replicas and
//! tensor-parallel degree may differ from the run that saved. Tensors that ranks share are assembled in
//! memory on the writing rank. All ranks must share the file system.

mod directory;
mod load;
mod manifest;
mod run_directory;
mod saver;
mod snapshot;

pub use load::{SavedCheckpoint, open_weights};
pub use run_directory::{CheckpointDirectory, DirectoryClaim};
pub use saver::CheckpointSaver;

use std::fs::File;
use std::io;
use std::path::Path;

use dflop_comm::{Comm, StepContext};
use dflop_costmodel::correction::CorrectionTable;
use serde_json::Value;

use crate::error::{Error, Result};

/// File with sizes and digests of all other files.
const MANIFEST_FILE: &str = "manifest.json";
/// File with the progress of the run.
const STATE_FILE: &str = "state.json";
/// Format version of both files.
const FORMAT: u64 = 1;
/// Prefixes for optimizer tensors.
const MEAN: &str = "exp_avg.";
const SQUARE: &str = "exp_avg_sq.";
const MASTER: &str = "master.";

/// State that a run needs to resume, in addition to weights and optimizer state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunState {
    /// Run seed.
    pub seed: u64,
    /// Model layout over ranks, for information.
    pub layout: Value,
    /// Loader state, as JSON.
    pub loader: Value,
    /// Correction tables that plans for the next steps may need, in order.
    pub corrections: Vec<CorrectionTable>,
}

/// Progress of a save, from one rank or summed over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveProgress {
    /// Number of ranks whose part in the current phase is done.
    pub done: u64,
    /// Number of ranks whose part has failed.
    pub failed: u64,
}

/// Flushes directory entries to disk.
fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Adds action and path to an I/O error.
fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path: path.clone(), source }
}

/// Number of words in which a rank reports its outcome: 0 for success, then the reported values.
const WORDS: usize = 6;

/// Returns this rank's value if all ranks succeeded; fails on all ranks if any rank failed.
fn agree_on_success<T>(comm: &dyn Comm, step: u64, action: &str, own: Result<T>) -> Result<T> {
    let mut value = None;
    let words = own.map(|own| {
        value = Some(own);
        [0; WORDS]
    });
    agree(comm, step, action, words)?;
    Ok(value.unwrap_or_else(|| unreachable!("ranks agree only if this one succeeded")))
}

/// Exchanges the words of all ranks, which start with 0 for success; fails on all ranks if any rank failed.
fn agree(comm: &dyn Comm, step: u64, action: &str, own: Result<[u64; WORDS]>) -> Result<Vec<[u64; WORDS]>> {
    let mut words = vec![0; WORDS * comm.size()];
    let row = &mut words[WORDS * comm.rank()..][..WORDS];
    match &own {
        Ok(own) => row.copy_from_slice(own),
        Err(_) => row[0] = 1,
    }
    let gathered = comm.all_gather(
        StepContext::step(step, action),
        words.as_mut_slice().into(),
        &vec![WORDS; comm.size()],
    );
    own?;
    gathered?;
    let all = words.as_chunks::<WORDS>().0.to_vec();
    match all.iter().position(|row| row[0] != 0) {
        Some(rank) => Err(Error::NotSaved { step, rank }),
        None => Ok(all),
    }
}
