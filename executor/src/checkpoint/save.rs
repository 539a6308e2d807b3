//! Saves a checkpoint, all ranks together.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Value, json};

use super::directory;
use super::manifest::{FileDigest, Manifest, write_file};
use super::tensors::{FileTensor, TensorData, write};
use super::{FORMAT, MASTER, MEAN, RunState, SQUARE, STATE_FILE};
use crate::error::{Error, Result};
use crate::optimizer::Decay;
use crate::optimizer::JobOptimizer;
use crate::optimizer::Precision;
use dflop_comm::{Comm, StepContext};
use dflop_device::Device;
use dflop_models::Stage;
use dflop_models::weights::ParameterSpec;
use dflop_models::weights::{INDEX_FILE, Tensor, WEIGHTS_FILE};

/// Number of words in which a rank reports its files.
const WORDS: usize = 6;

/// A directory of checkpoints.
#[derive(Debug, Clone)]
pub struct CheckpointDirectory {
    root: PathBuf,
    kept: usize,
    companions: Vec<(String, Vec<u8>)>,
    others: Vec<Tensor>,
}

/// Files written by a rank.
#[derive(Debug, Clone, Copy)]
struct WrittenFiles {
    weights: FileDigest,
    /// Bytes of the tensors, without header.
    weight_bytes: u64,
    optimizer: FileDigest,
}

impl CheckpointDirectory {
    /// Creates a handle for a directory, which need not exist; the last two checkpoints are kept.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), kept: 2, companions: Vec::new(), others: Vec::new() }
    }

    /// Sets the number of checkpoints to keep, at least 1. Default: 2.
    #[must_use]
    pub fn kept(mut self, states: usize) -> Self {
        self.kept = states.max(1);
        self
    }

    /// Adds a file that is copied into every checkpoint unchanged, such as `config.json`.
    #[must_use]
    pub fn companion(mut self, name: impl Into<String>, bytes: Vec<u8>) -> Self {
        self.companions.push((name.into(), bytes));
        self
    }

    /// Sets tensors that the model does not read but its checkpoint has
    /// ([`dflop_models::weights::Checkpoint::others`]); they are saved as well, as `f32`.
    #[must_use]
    pub fn others(mut self, tensors: Vec<Tensor>) -> Self {
        self.others = tensors;
        self
    }

    /// Returns the directory of checkpoints.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Moves checkpoints of other runs into a subdirectory `earlier-N`, for a run that starts from scratch:
    /// its checkpoints have lower steps, and must neither be removed as old ones nor ignored for newer ones.
    /// All ranks of `comm` call it.
    ///
    /// - returns the subdirectory, on rank 0, if there was something to move
    ///
    /// # Errors
    /// [`Error::File`] on rank 0, [`Error::NotSaved`] on the others; [`Error::Comm`].
    pub fn set_aside(&self, comm: &dyn Comm) -> Result<Option<PathBuf>> {
        let moved = if comm.rank() == 0 { directory::set_aside(&self.root) } else { Ok(None) };
        agree_on_success(comm, 0, "set earlier checkpoints aside", moved)
    }

    /// Saves a checkpoint between two steps and removes old ones; all ranks of the optimizer call it.
    ///
    /// - `stages`: in the order of [`JobOptimizer::update`]
    /// - returns the checkpoint's directory, which is on disk when this returns
    ///
    /// # Errors
    /// The failure of this rank: [`Error::File`], or [`dflop_models::Error::Replicas`] if ranks that share a
    /// tensor hold different bits of it; on all others [`Error::NotSaved`] that names the rank. Then only a
    /// hidden directory has changed, and the run can continue. [`Error::Comm`] if the job has ended.
    pub fn save<'a, D: Device>(
        &self,
        optimizer: &JobOptimizer<D>,
        stages: impl IntoIterator<Item = &'a Stage<D>>,
        run: &RunState,
    ) -> Result<PathBuf> {
        let (step, comm) = (optimizer.steps(), &*optimizer.comm);
        let prepared = if comm.rank() == 0 { directory::prepare(&self.root, step) } else { Ok(()) };
        // Ranks agree three times: the directory exists, all files are written, the checkpoint is published.
        agree_on_success(comm, step, "prepare state", prepared)?;
        let stages: Vec<&Stage<D>> = stages.into_iter().collect();
        let written = self.write_part(optimizer, &stages);
        let all = agree(comm, step, "write state", written.map(WrittenFiles::words))?;
        let published = if comm.rank() == 0 { self.publish(optimizer, run, &all) } else { Ok(()) };
        agree_on_success(comm, step, "rename state", published)?;
        Ok(directory::of_step(&self.root, step))
    }

    /// Writes this rank's files; none if it owns no parameter.
    fn write_part<D: Device>(
        &self,
        optimizer: &JobOptimizer<D>,
        stages: &[&Stage<D>],
    ) -> Result<WrittenFiles> {
        // A collective: ranks that write no file still send their parts of tensors.
        let (mut weights, states) = rows(optimizer, stages)?;
        let pieces = Pieces::of(optimizer);
        let Some(piece) = pieces.owners.iter().position(|&owner| owner == optimizer.comm.rank()) else {
            return Ok(WrittenFiles::NONE);
        };
        let partial = directory::partial(&self.root, optimizer.steps());
        if piece == 0 {
            weights.extend(self.others.iter().map(FileTensor::host));
        }
        Ok(WrittenFiles {
            weights: write(&partial.join(pieces.weights(piece)), &weights)?,
            weight_bytes: weights.iter().map(FileTensor::bytes).sum(),
            optimizer: write(&partial.join(pieces.optimizer(piece)), &states)?,
        })
    }

    /// Writes the files of rank 0 and the manifest, and renames the directory.
    fn publish<D: Device>(
        &self,
        optimizer: &JobOptimizer<D>,
        run: &RunState,
        all: &[[u64; WORDS]],
    ) -> Result<()> {
        let (step, pieces) = (optimizer.steps(), Pieces::of(optimizer));
        let partial = directory::partial(&self.root, step);
        let mut manifest = Manifest { step, ..Manifest::default() };
        let mut total_size = 0;
        for (piece, &owner) in pieces.owners.iter().enumerate() {
            let written = WrittenFiles::of_words(all[owner]);
            manifest.files.insert(pieces.weights(piece), written.weights);
            manifest.files.insert(pieces.optimizer(piece), written.optimizer);
            total_size += written.weight_bytes;
        }
        let mut files = self.companions.clone();
        files.push((STATE_FILE.to_owned(), text(&state(optimizer, run))));
        if pieces.owners.len() > 1 {
            files.push((INDEX_FILE.to_owned(), text(&self.index(optimizer, &pieces, total_size))));
        }
        for (name, bytes) in files {
            let path = partial.join(&name);
            write_file(&path, &bytes)?;
            manifest.files.insert(name, FileDigest::of(&path)?);
        }
        manifest.write(&partial)?;
        directory::publish(&self.root, step)?;
        directory::prune(&self.root, self.kept)
    }

    /// Returns the index of tensors by file.
    fn index<D: Device>(&self, optimizer: &JobOptimizer<D>, pieces: &Pieces, total_size: u64) -> Value {
        let piece = |owner: usize| pieces.owners.iter().position(|&other| other == owner).unwrap_or(0);
        let own = optimizer.ownership.writers().map(|(name, owner)| (name, piece(owner)));
        let others = self.others.iter().map(|tensor| (tensor.name.as_str(), 0));
        let file = |(name, piece): (&str, usize)| (name.to_owned(), pieces.weights(piece).into());
        let map: serde_json::Map<String, Value> = own.chain(others).map(file).collect();
        json!({"metadata": {"total_size": total_size}, "weight_map": map})
    }
}

/// Ranks that write files, ascending: one piece of the checkpoint each.
struct Pieces {
    owners: Vec<usize>,
}

impl Pieces {
    fn of<D: Device>(optimizer: &JobOptimizer<D>) -> Self {
        let mut owners: Vec<usize> = optimizer.ownership.writers().map(|(_, owner)| owner).collect();
        owners.sort_unstable();
        owners.dedup();
        Self { owners }
    }

    fn weights(&self, piece: usize) -> String {
        match self.owners.len() {
            1 => WEIGHTS_FILE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", piece + 1),
        }
    }

    fn optimizer(&self, piece: usize) -> String {
        format!("optimizer-{:05}-of-{:05}.safetensors", piece + 1, self.owners.len())
    }
}

impl WrittenFiles {
    const NONE: Self = {
        let empty = FileDigest { bytes: 0, xxh3: 0 };
        Self { weights: empty, weight_bytes: 0, optimizer: empty }
    };

    fn words(self) -> [u64; WORDS] {
        let Self { weights, weight_bytes, optimizer } = self;
        [0, weights.bytes, weights.xxh3, weight_bytes, optimizer.bytes, optimizer.xxh3]
    }

    fn of_words([_, bytes, xxh3, weight_bytes, optimizer_bytes, optimizer_xxh3]: [u64; WORDS]) -> Self {
        let optimizer = FileDigest { bytes: optimizer_bytes, xxh3: optimizer_xxh3 };
        Self { weights: FileDigest { bytes, xxh3 }, weight_bytes, optimizer }
    }
}

/// Tensors of weights, and of the optimizer.
type FileTensors<'a, D> = (Vec<FileTensor<'a, D>>, Vec<FileTensor<'a, D>>);

/// Returns the tensors that this rank writes. All ranks of a tensor-parallel group assemble parts together.
fn rows<'a, D: Device>(
    optimizer: &'a JobOptimizer<D>,
    stages: &[&'a Stage<D>],
) -> Result<FileTensors<'a, D>> {
    let dtype = match optimizer.adamw.settings().precision {
        Precision::F32 => Dtype::F32,
        Precision::Bf16 => Dtype::BF16,
    };
    let mut seen = BTreeSet::new();
    let (mut weights, mut states) = (Vec::new(), Vec::new());
    for (index, stage) in stages.iter().enumerate() {
        for (spec, values) in stage.parameters().owned() {
            let mut buffers = vec![("", values, dtype)];
            if let Some(state) = optimizer.adamw.state(index, &spec.name) {
                buffers.extend([(MEAN, &state.mean, Dtype::F32), (SQUARE, &state.square, Dtype::F32)]);
                buffers.extend(state.master.as_ref().map(|master| (MASTER, master, Dtype::F32)));
            }
            let is_written = optimizer.ownership.own(spec).is_some() && seen.insert(&spec.name);
            // `whole` is a collective of the tensor-parallel group, so it runs also for tensors that others
            // write.
            for (prefix, buffer, dtype) in buffers {
                let Some(numbers) = whole(stage, spec, buffer)?.filter(|_| is_written) else {
                    continue;
                };
                let (name, shape) = (format!("{prefix}{}", spec.name), spec.shape.clone());
                let rows = if prefix.is_empty() { &mut weights } else { &mut states };
                rows.push(FileTensor { name, shape, numbers, dtype });
            }
        }
    }
    Ok((weights, states))
}

/// Returns a whole tensor, assembled if it has parts; `None` on all ranks of a tensor-parallel group but the
/// first.
fn whole<'a, D: Device>(
    stage: &'a Stage<D>,
    spec: &ParameterSpec,
    buffer: &'a D::Floats,
) -> Result<Option<TensorData<'a, D>>> {
    match stage.tensor_parallel() {
        Some(group) if !spec.shard.is_whole() => {
            let part = stage.device().download(buffer)?;
            Ok(group.assemble(spec, &part)?.map(|values| TensorData::Host(Cow::Owned(values))))
        }
        _ => Ok(Some(TensorData::Device(stage.device(), buffer))),
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
        "layout": run.layout, "loader": run.loader, "corrections": run.corrections})
}

fn text(document: &Value) -> Vec<u8> {
    format!("{document:#}\n").into_bytes()
}

/// Returns the value of this rank if all ranks succeeded; fails on all ranks if one failed.
pub(super) fn agree_on_success<T>(comm: &dyn Comm, step: u64, action: &str, own: Result<T>) -> Result<T> {
    let mut value = None;
    let words = own.map(|own| {
        value = Some(own);
        [0; WORDS]
    });
    agree(comm, step, action, words)?;
    Ok(value.unwrap_or_else(|| unreachable!("ranks agree only if this one succeeded")))
}

/// Exchanges the words of all ranks, the first of which is 0 for success; fails on all ranks if one failed.
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
