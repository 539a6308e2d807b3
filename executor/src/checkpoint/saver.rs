//! Saves checkpoints while training continues, and publishes each once all ranks are done.
//!
//! A save copies each rank's tensors to host memory between two steps. A thread on each rank then writes
//! them. At the end of later steps the ranks compare progress; once all ranks have written, a thread on rank
//! 0 completes the checkpoint. Until the rename there is no checkpoint, so a process killed at any moment
//! leaves the previous checkpoint.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use dflop_comm::Comm;
use dflop_device::Device;
use dflop_models::Stage;
use dflop_models::weights::INDEX_FILE;
use serde_json::{Value, json};

use super::manifest::{Manifest, write_file};
use super::snapshot::{Pieces, Snapshot, WrittenFiles};
use super::{
    CheckpointDirectory, FORMAT, RunState, STATE_FILE, SaveProgress, WORDS, agree, agree_on_success,
    directory, failed,
};
use crate::error::Result;
use crate::optimizer::{Decay, JobOptimizer};

/// Saves checkpoints while training continues, one at a time. All ranks call the methods together.
///
/// Holds a copy of this rank's weights and optimizer state in host memory until it is written. Dropping the
/// saver abandons a save in progress.
#[derive(Debug)]
pub struct CheckpointSaver {
    directory: Arc<CheckpointDirectory>,
    pending: Option<PendingSave>,
}

/// Save in progress.
#[derive(Debug)]
struct PendingSave {
    step: u64,
    phase: Phase,
}

enum Phase {
    /// All ranks write files.
    Writing { task: Task<WrittenFiles>, publication: Option<Publication> },
    /// Rank 0 completes the checkpoint; all other ranks have nothing to do.
    Publishing { task: Option<Task<()>> },
}

impl CheckpointSaver {
    /// Creates a saver for a checkpoint directory.
    #[must_use]
    pub fn new(directory: CheckpointDirectory) -> Self {
        Self { directory: Arc::new(directory), pending: None }
    }

    /// Snapshots the state after a step and starts an asynchronous save. Waits for a save in progress first.
    ///
    /// - `stages`: same order as in [`JobOptimizer::update`]
    ///
    /// # Errors
    /// Errors from [`finish`](Self::finish) for the previous save. For this save
    /// [`dflop_models::Error::Replicas`] if ranks that share a tensor hold different bits;
    /// [`crate::Error::File`] on the rank that could not prepare, [`crate::Error::NotSaved`] on all other
    /// ranks. [`crate::Error::Comm`] if the job has ended.
    pub fn start<'a, D: Device, S: Stage<D> + ?Sized + 'a>(
        &mut self,
        optimizer: &JobOptimizer<D>,
        stages: impl IntoIterator<Item = &'a S>,
        run: &RunState,
    ) -> Result<()> {
        let (step, comm) = (optimizer.steps(), &*optimizer.comm);
        self.finish(comm)?;
        let (root, is_first) = (&self.directory.root, comm.rank() == 0);
        let prepared = if is_first { directory::prepare(root, step) } else { Ok(()) };
        agree_on_success(comm, step, "prepare state", prepared)?;
        let stages: Vec<&S> = stages.into_iter().collect();
        let (snapshot, directory) = (Snapshot::take(optimizer, &stages), self.directory.clone());
        let task = snapshot.and_then(|snapshot| {
            let write = move |is_cancelled: &AtomicBool| {
                let partial = directory::partial(&directory.root, step);
                snapshot.write(&partial, &directory.others, is_cancelled)
            };
            Task::start(write).map_err(failed("start to write", root))
        });
        let task = agree_on_success(comm, step, "copy state", task)?;
        let publication = is_first.then(|| Publication::new(&self.directory, optimizer, run));
        self.pending = Some(PendingSave { step, phase: Phase::Writing { task, publication } });
        Ok(())
    }

    /// Returns the progress of the current save on this rank.
    pub fn progress(&mut self) -> SaveProgress {
        let Some(pending) = &mut self.pending else { return SaveProgress::default() };
        let outcome = match &mut pending.phase {
            Phase::Writing { task, .. } => task.outcome(),
            Phase::Publishing { task: Some(task) } => task.outcome(),
            Phase::Publishing { task: None } => Some(true),
        };
        SaveProgress { done: u64::from(outcome == Some(true)), failed: u64::from(outcome == Some(false)) }
    }

    /// Continues the save in progress, at the end of a step; never waits for a file.
    ///
    /// - `all`: sum of [`progress`](Self::progress) over all ranks
    /// - returns the directory when a checkpoint is complete
    ///
    /// # Errors
    /// See [`finish`](Self::finish).
    pub fn advance(&mut self, comm: &dyn Comm, all: SaveProgress) -> Result<Option<PathBuf>> {
        if all.failed > 0 || all.done == comm.size() as u64 { self.end_phase(comm) } else { Ok(None) }
    }

    /// Waits for the save in progress, if any.
    ///
    /// - returns the checkpoint directory, which is on disk
    ///
    /// # Errors
    /// Failure on this rank: [`crate::Error::File`], [`dflop_models::Error::TensorShape`]; on all other ranks
    /// [`crate::Error::NotSaved`] that names the rank. Then only a hidden directory has changed, and the run
    /// can continue. [`crate::Error::Comm`] if the job has ended.
    pub fn finish(&mut self, comm: &dyn Comm) -> Result<Option<PathBuf>> {
        let mut saved = None;
        while self.pending.is_some() {
            saved = self.end_phase(comm)?;
        }
        Ok(saved)
    }

    /// Ends the save phase on all ranks, and begins the next phase.
    fn end_phase(&mut self, comm: &dyn Comm) -> Result<Option<PathBuf>> {
        let Some(PendingSave { step, phase }) = self.pending.take() else { return Ok(None) };
        match phase {
            Phase::Writing { task, publication } => {
                let all = agree(comm, step, "write state", task.join().map(WrittenFiles::words))?;
                let directory = self.directory.clone();
                let publish = |publication: Publication| {
                    Task::start(move |_: &AtomicBool| publication.publish(&directory, &all))
                };
                let task = publication.map(publish).transpose();
                let task = task.map_err(failed("start to complete", &self.directory.root));
                let task = agree_on_success(comm, step, "start to complete state", task)?;
                self.pending = Some(PendingSave { step, phase: Phase::Publishing { task } });
                Ok(None)
            }
            Phase::Publishing { task } => {
                agree_on_success(comm, step, "rename state", task.map_or(Ok(()), Task::join))?;
                Ok(Some(directory::for_step(&self.directory.root, step)))
            }
        }
    }
}

impl CheckpointDirectory {
    /// Saves a checkpoint between two steps and removes old checkpoints; all optimizer ranks call it.
    /// Training waits; [`CheckpointSaver`] saves while training continues.
    ///
    /// - `stages`: same order as in [`JobOptimizer::update`]
    /// - returns the checkpoint directory, which is on disk when this returns
    ///
    /// # Errors
    /// See [`CheckpointSaver::start`] and [`CheckpointSaver::finish`].
    pub fn save<'a, D: Device, S: Stage<D> + ?Sized + 'a>(
        &self,
        optimizer: &JobOptimizer<D>,
        stages: impl IntoIterator<Item = &'a S>,
        run: &RunState,
    ) -> Result<PathBuf> {
        let mut saver = CheckpointSaver::new(self.clone());
        saver.start(optimizer, stages, run)?;
        saver.finish(&*optimizer.comm)?;
        Ok(self.for_step(optimizer.steps()))
    }
}

impl std::fmt::Debug for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Writing { .. }) { "writing" } else { "publishing" })
    }
}

/// Work on a separate thread, which is abandoned on drop.
struct Task<T> {
    thread: Option<JoinHandle<Result<T>>>,
    result: Option<Result<T>>,
    is_cancelled: Arc<AtomicBool>,
}

impl<T: Send + 'static> Task<T> {
    /// Starts the work, which should end soon once the flag is set.
    fn start(work: impl FnOnce(&AtomicBool) -> Result<T> + Send + 'static) -> io::Result<Self> {
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let flag = is_cancelled.clone();
        let builder = std::thread::Builder::new().name("dflop-checkpoint".to_owned());
        let thread = builder.spawn(move || work(&flag))?;
        Ok(Self { thread: Some(thread), result: None, is_cancelled })
    }

    /// Returns whether the work has succeeded; `None` while it is running.
    fn outcome(&mut self) -> Option<bool> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.wait();
        }
        self.result.as_ref().map(Result::is_ok)
    }

    /// Waits for the result.
    fn join(mut self) -> Result<T> {
        self.wait();
        self.result.take().unwrap_or_else(|| unreachable!("the thread has ended"))
    }

    fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            // a panic in the work is a panic in the rank
            self.result = Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        // the directory must not be written to when another run may have claimed it
        drop(self.thread.take().map(JoinHandle::join));
    }
}

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
