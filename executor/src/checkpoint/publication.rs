//! Completes a checkpoint after all ranks have written: rank 0 files, manifest, rename.

use std::path::Path;

use serde_json::{Value, json};

use super::agreement::WORDS;
use super::digest::write_file;
use super::directory;
use super::manifest::Manifest;
use super::pieces::Pieces;
use super::save::CheckpointDirectory;
use super::snapshot::WrittenFiles;
use super::{FORMAT, RunState, STATE_FILE};
use crate::error::Result;
use crate::optimizer::{Decay, JobOptimizer};
use dflop_device::Device;
use dflop_models::weights::INDEX_FILE;

/// Data that rank 0 needs to complete a checkpoint, without the tensors.
pub(super) struct Publication {
    step: u64,
    pieces: Pieces,
    state: Value,
    /// Weight files by tensor, for the index.
    weight_map: serde_json::Map<String, Value>,
}

impl Publication {
    pub(super) fn new<D: Device>(
        directory: &CheckpointDirectory,
        optimizer: &JobOptimizer<D>,
        run: &RunState,
    ) -> Self {
        let pieces = Pieces::of(&optimizer.ownership);
        let others = directory.others.iter().map(|tensor| tensor.name.as_str());
        let weight_map = pieces.weight_map(&optimizer.ownership, others);
        Self { step: optimizer.steps(), pieces, state: state(optimizer, run), weight_map }
    }

    /// Writes the rank 0 files and the manifest, renames the directory, and removes old checkpoints.
    ///
    /// - `all`: file words from every rank
    pub(super) fn publish(self, directory: &CheckpointDirectory, all: &[[u64; WORDS]]) -> Result<()> {
        let partial = directory::partial(&directory.root, self.step);
        let mut manifest = Manifest { step: self.step, ..Manifest::default() };
        let mut total_size = 0;
        for (piece, &owner) in self.pieces.owners().iter().enumerate() {
            let written = WrittenFiles::from_words(all[owner]);
            manifest.files.insert(self.pieces.weights(piece), written.weights);
            manifest.files.insert(self.pieces.optimizer(piece), written.optimizer);
            total_size += written.weight_bytes;
        }
        let mut files = directory.companions.clone();
        files.push((STATE_FILE.to_owned(), text(&self.state)));
        if self.pieces.owners().len() > 1 {
            let index = json!({"metadata": {"total_size": total_size}, "weight_map": self.weight_map});
            files.push((INDEX_FILE.to_owned(), text(&index)));
        }
        for (name, bytes) in files {
            let digest = write_file(&partial.join(&name), &bytes)?;
            manifest.files.insert(name, digest);
        }
        manifest.write(&partial)?;
        self.rename(&directory.root)?;
        directory::prune(&directory.root, directory.kept)?;
        directory::prune_earlier(&directory.root, directory.kept_earlier)
    }

    fn rename(&self, root: &Path) -> Result<()> {
        directory::publish(root, self.step).map(drop)
    }
}

/// Returns the progress of the run as JSON.
fn state<D: Device>(optimizer: &JobOptimizer<D>, run: &RunState) -> Value {
    let settings = optimizer.settings();
    let rate = &settings.learning_rate;
    let decay = match rate.decay {
        Decay::Constant => json!("constant"),
        Decay::Cosine { minimum, steps } => json!({"minimum": minimum, "steps": steps}),
    };
    let (step, precision) = (optimizer.steps(), format!("{:?}", settings.adamw.precision).to_lowercase());
    let schedule =
        json!({"peak": rate.peak, "warmup_steps": rate.warmup_steps, "decay": decay, "next": rate.at(step)});
    json!({"format": FORMAT, "step": step, "seed": run.seed, "precision": precision, "learning_rate": schedule,
        "skipped_updates": optimizer.adamw.skipped(), "layout": run.layout, "loader": run.loader, "corrections": run.corrections})
}

fn text(document: &Value) -> Vec<u8> {
    format!("{document:#}\n").into_bytes()
}
