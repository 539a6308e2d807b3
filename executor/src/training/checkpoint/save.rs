//! Writing a state, all ranks together.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Value, json};

use super::super::optimizer::Precision;
use super::super::schedule::Decay;
use super::super::trainer::Trainer;
use super::directory;
use super::manifest::{FileDigest, Manifest, write_file};
use super::tensors::{Numbers, Row, write};
use super::{FORMAT, MASTER, MEAN, RunState, SQUARE, STATE_FILE};
use crate::comm::{Comm, StepContext};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stage::Stage;
use crate::weights::ParameterSpec;
use crate::weights::{INDEX_FILE, Tensor, WEIGHTS_FILE};

/// Words in what a rank says of its files.
const WORDS: usize = 6;

/// A directory of states.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    root: PathBuf,
    kept: usize,
    companions: Vec<(String, Vec<u8>)>,
    others: Vec<Tensor>,
}

/// What a rank wrote.
#[derive(Debug, Clone, Copy)]
struct Written {
    weights: FileDigest,
    /// Of the tensors, without header.
    weight_bytes: u64,
    optimizer: FileDigest,
}

impl Checkpoints {
    /// Names a directory, which need not be there; the last two states are kept.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), kept: 2, companions: Vec::new(), others: Vec::new() }
    }

    /// Sets how many states are kept, at least 1. Default: 2.
    #[must_use]
    pub fn kept(mut self, states: usize) -> Self {
        self.kept = states.max(1);
        self
    }

    /// Adds a file that every state gets as it is, such as `config.json`.
    #[must_use]
    pub fn companion(mut self, name: impl Into<String>, bytes: Vec<u8>) -> Self {
        self.companions.push((name.into(), bytes));
        self
    }

    /// Sets tensors that the model does not read but its checkpoint had ([`crate::weights::Checkpoint::others`]); they
    /// are written along, as `f32`.
    #[must_use]
    pub fn others(mut self, tensors: Vec<Tensor>) -> Self {
        self.others = tensors;
        self
    }

    /// Returns the directory of states.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Moves what other runs saved into a directory `earlier-N` beside it, for a run that begins anew: its states have lower
    /// steps, and are neither removed as old ones nor passed over for others; all ranks of `comm` call it.
    ///
    /// - returns the directory, on rank 0, if there was something to move
    ///
    /// # Errors
    /// [`Error::File`] on rank 0, [`Error::NotSaved`] on the others; [`Error::Comm`].
    pub fn set_aside(&self, comm: &dyn Comm) -> Result<Option<PathBuf>> {
        let moved = if comm.rank() == 0 { directory::set_aside(&self.root) } else { Ok(None) };
        let mut earlier = None;
        let own = moved.map(|directory| {
            earlier = directory;
            [0; WORDS]
        });
        agree(comm, 0, "set earlier states aside", own)?;
        Ok(earlier)
    }

    /// Writes a state between two steps, and removes old ones; all ranks of the trainer call it.
    ///
    /// - `stages`: as they come to [`Trainer::update`]
    /// - returns the state's directory, which is on disk when this returns
    ///
    /// # Errors
    /// What went wrong on this rank: [`Error::File`], [`Error::Replicas`] if ranks that share a tensor hold
    /// other bits of it; on the others [`Error::NotSaved`] that names it. Then nothing has changed but a hidden directory, and the run can go on.
    /// [`Error::Comm`] if the job is over.
    pub fn save<'a, D: Device>(
        &self,
        trainer: &Trainer<D>,
        stages: impl IntoIterator<Item = &'a Stage<D>>,
        run: &RunState,
    ) -> Result<PathBuf> {
        let (step, comm) = (trainer.steps(), &*trainer.comm);
        let prepared = if comm.rank() == 0 { directory::prepare(&self.root, step) } else { Ok(()) };
        agree(comm, step, "prepare state", prepared.map(|()| [0; WORDS]))?;
        let stages: Vec<&Stage<D>> = stages.into_iter().collect();
        let written = self.write_part(trainer, &stages);
        let all = agree(comm, step, "write state", written.map(Written::words))?;
        let published = if comm.rank() == 0 { self.publish(trainer, run, &all) } else { Ok(()) };
        agree(comm, step, "rename state", published.map(|()| [0; WORDS]))?;
        Ok(directory::of_step(&self.root, step))
    }

    /// This rank's files; none if it answers for no parameter.
    fn write_part<D: Device>(&self, trainer: &Trainer<D>, stages: &[&Stage<D>]) -> Result<Written> {
        // Ranks without a piece help to put tensors together.
        let (mut weights, optimizer) = rows(trainer, stages)?;
        let pieces = Pieces::of(trainer);
        let Some(piece) = pieces.owners.iter().position(|&owner| owner == trainer.comm.rank()) else {
            return Ok(Written::NONE);
        };
        let partial = directory::partial(&self.root, trainer.steps());
        if piece == 0 {
            weights.extend(self.others.iter().map(Row::host));
        }
        Ok(Written {
            weights: write(&partial.join(pieces.weights(piece)), &weights)?,
            weight_bytes: weights.iter().map(Row::bytes).sum(),
            optimizer: write(&partial.join(pieces.optimizer(piece)), &optimizer)?,
        })
    }

    /// The files of rank 0, the manifest, and the name.
    fn publish<D: Device>(&self, trainer: &Trainer<D>, run: &RunState, all: &[[u64; WORDS]]) -> Result<()> {
        let (step, pieces) = (trainer.steps(), Pieces::of(trainer));
        let partial = directory::partial(&self.root, step);
        let mut manifest = Manifest { step, ..Manifest::default() };
        let mut total_size = 0;
        for (piece, &owner) in pieces.owners.iter().enumerate() {
            let written = Written::of_words(all[owner]);
            manifest.files.insert(pieces.weights(piece), written.weights);
            manifest.files.insert(pieces.optimizer(piece), written.optimizer);
            total_size += written.weight_bytes;
        }
        let mut files = self.companions.clone();
        files.push((STATE_FILE.to_owned(), text(&state(trainer, run))));
        if pieces.owners.len() > 1 {
            files.push((INDEX_FILE.to_owned(), text(&self.index(trainer, &pieces, total_size))));
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

    /// Which tensor is in which piece.
    fn index<D: Device>(&self, trainer: &Trainer<D>, pieces: &Pieces, total_size: u64) -> Value {
        let piece = |owner: usize| pieces.owners.iter().position(|&other| other == owner).unwrap_or(0);
        let own = trainer.ownership.writers().map(|(name, owner)| (name, piece(owner)));
        let others = self.others.iter().map(|tensor| (tensor.name.as_str(), 0));
        let file = |(name, piece): (&str, usize)| (name.to_owned(), pieces.weights(piece).into());
        let map: serde_json::Map<String, Value> = own.chain(others).map(file).collect();
        json!({"metadata": {"total_size": total_size}, "weight_map": map})
    }
}

/// The ranks that write something, ascending: one piece each.
struct Pieces {
    owners: Vec<usize>,
}

impl Pieces {
    fn of<D: Device>(trainer: &Trainer<D>) -> Self {
        let mut owners: Vec<usize> = trainer.ownership.writers().map(|(_, owner)| owner).collect();
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

impl Written {
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

/// Rows of weights, and of the optimizer.
type Rows<'a, D> = (Vec<Row<'a, D>>, Vec<Row<'a, D>>);

/// Tensors that this rank writes. Parts are brought together by all ranks of the tensor-parallel group.
fn rows<'a, D: Device>(trainer: &'a Trainer<D>, stages: &[&'a Stage<D>]) -> Result<Rows<'a, D>> {
    let dtype = match trainer.optimizer.settings().precision {
        Precision::F32 => Dtype::F32,
        Precision::Bf16 => Dtype::BF16,
    };
    let mut seen = BTreeSet::new();
    let (mut weights, mut optimizer) = (Vec::new(), Vec::new());
    for (index, stage) in stages.iter().enumerate() {
        for (spec, values) in stage.parameters().owned() {
            let mut buffers = vec![("", values, dtype)];
            if let Some(state) = trainer.optimizer.state(index, &spec.name) {
                buffers.extend([(MEAN, &state.mean, Dtype::F32), (SQUARE, &state.square, Dtype::F32)]);
                buffers.extend(state.master.as_ref().map(|master| (MASTER, master, Dtype::F32)));
            }
            let is_written = trainer.ownership.own(spec).is_some() && seen.insert(&spec.name);
            for (prefix, buffer, dtype) in buffers {
                let Some(numbers) = whole(stage, spec, buffer)?.filter(|_| is_written) else { continue };
                let (name, shape) = (format!("{prefix}{}", spec.name), spec.shape.clone());
                let rows = if prefix.is_empty() { &mut weights } else { &mut optimizer };
                rows.push(Row { name, shape, numbers, dtype });
            }
        }
    }
    Ok((weights, optimizer))
}

/// A whole tensor: where it is, or put together; `None` on all ranks of a tensor-parallel group but the first.
fn whole<'a, D: Device>(
    stage: &'a Stage<D>,
    spec: &ParameterSpec,
    buffer: &'a D::Floats,
) -> Result<Option<Numbers<'a, D>>> {
    match stage.tensor_parallel() {
        Some(group) if !spec.shard.is_whole() => {
            let part = stage.device().download(buffer)?;
            Ok(group.assemble(spec, &part)?.map(|values| Numbers::Host(Cow::Owned(values))))
        }
        _ => Ok(Some(Numbers::Device(stage.device(), buffer))),
    }
}

/// Where the run stands, as JSON.
fn state<D: Device>(trainer: &Trainer<D>, run: &RunState) -> Value {
    let settings = trainer.settings();
    let rate = &settings.learning_rate;
    let decay = match rate.decay {
        Decay::Constant => json!("constant"),
        Decay::Cosine { minimum, steps } => json!({"minimum": minimum, "steps": steps}),
    };
    let (step, precision) = (trainer.steps(), format!("{:?}", settings.optimizer.precision).to_lowercase());
    let schedule =
        json!({"peak": rate.peak, "warmup_steps": rate.warmup_steps, "decay": decay, "next": rate.at(step)});
    json!({"format": FORMAT, "step": step, "seed": run.seed, "precision": precision, "learning_rate": schedule,
        "layout": run.layout, "loader": run.loader})
}

fn text(document: &Value) -> Vec<u8> {
    format!("{document:#}\n").into_bytes()
}

/// Brings what every rank did to all, the first word 0; if one failed, all do.
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
