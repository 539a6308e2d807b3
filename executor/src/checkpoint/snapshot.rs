//! Copies the tensors that a rank writes to host memory, so that training can continue while they are
//! written.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use safetensors::Dtype;

use super::agreement::WORDS;
use super::digest::FileDigest;
use super::pieces::Pieces;
use super::tensors::{HostTensor, write};
use super::{MASTER, MEAN, SQUARE};
use crate::error::Result;
use crate::optimizer::{JobOptimizer, ParameterState, Precision};
use dflop_device::Device;
use dflop_models::Stage;
use dflop_models::weights::{ParameterSpec, Tensor};

/// Tensors of one rank in host memory, and the file names.
pub(super) struct Snapshot {
    weights: Vec<HostTensor<'static>>,
    optimizer: Vec<HostTensor<'static>>,
    /// Weight file and optimizer file; `None` if this rank owns no parameter.
    files: Option<[String; 2]>,
    /// Whether this rank also writes tensors that the model does not use.
    is_first: bool,
}

/// Files written by a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct WrittenFiles {
    pub(super) weights: FileDigest,
    /// Tensor bytes, without header.
    pub(super) weight_bytes: u64,
    pub(super) optimizer: FileDigest,
}

impl Snapshot {
    /// Copies the tensors of this rank. Collective over tensor-parallel groups, which assemble their parts.
    pub(super) fn take<D: Device, S: Stage<D> + ?Sized>(
        optimizer: &JobOptimizer<D>,
        stages: &[&S],
    ) -> Result<Self> {
        let dtype = match optimizer.adamw.settings().precision {
            Precision::F32 => Dtype::F32,
            Precision::Bf16 => Dtype::BF16,
        };
        let mut seen = BTreeSet::new();
        let (mut weights, mut states) = (Vec::new(), Vec::new());
        for (index, &stage) in stages.iter().enumerate() {
            stage.parameters().wait_all_values()?;
            let specs = stage.parameters().specs();
            // A tied parameter on two stages in this rank is written once.
            let is_written: Vec<bool> = (specs.iter())
                .map(|spec| {
                    let is_owned = spec.shares.is_none() && optimizer.ownership.own(spec).is_some();
                    is_owned && seen.insert(&spec.name)
                })
                .collect();
            let owned = specs.iter().zip(&is_written).filter(|(spec, _)| spec.shares.is_none());
            for ((spec, values), (_, &is_written)) in stage.parameters().owned().zip(owned) {
                if let Some(values) =
                    whole(stage, spec, is_written, || Ok(stage.device().download(values)?))?
                {
                    let (name, shape) = (spec.name.clone(), spec.shape.clone());
                    weights.push(HostTensor { name, shape, values: Cow::Owned(values), dtype });
                }
            }
            for (number, bucket) in stage.parameters().buckets().iter().enumerate() {
                let is_shared = |&index: &usize| !specs[index].shard.is_whole();
                let is_needed = bucket.parameters.iter().any(|index| is_written[*index] || is_shared(index));
                let Some(state) = optimizer.adamw.state((index, stage), number, is_needed)? else { continue };
                let ParameterState { mean, square, master } = state;
                let kinds = [(MEAN, Some(mean)), (SQUARE, Some(square)), (MASTER, master)];
                for (prefix, all) in kinds.iter().filter_map(|(prefix, all)| Some((prefix, all.as_ref()?))) {
                    let mut first = 0;
                    for &parameter in &bucket.parameters {
                        let spec = &specs[parameter];
                        let part = &all[first..first + spec.elements()];
                        first += part.len();
                        let values = whole(stage, spec, is_written[parameter], || Ok(part.to_vec()))?;
                        let Some(values) = values else { continue };
                        let (name, shape) = (format!("{prefix}{}", spec.name), spec.shape.clone());
                        states.push(HostTensor {
                            name,
                            shape,
                            values: Cow::Owned(values),
                            dtype: Dtype::F32,
                        });
                    }
                }
            }
        }
        let pieces = Pieces::of(&optimizer.ownership);
        let piece = pieces.rank_piece(optimizer.comm.rank());
        let files = piece.map(|piece| [pieces.weights(piece), pieces.optimizer(piece)]);
        Ok(Self { weights, optimizer: states, files, is_first: piece == Some(0) })
    }

    /// Writes the files of this rank into a directory; none if the rank owns no parameter.
    ///
    /// - `others`: tensors that the model does not use, which the first rank writes
    pub(super) fn write(
        mut self,
        directory: &Path,
        others: &[Tensor],
        is_cancelled: &AtomicBool,
    ) -> Result<WrittenFiles> {
        let Some([weights, optimizer]) = &self.files else { return Ok(WrittenFiles::NONE) };
        if self.is_first {
            let others = others.iter().map(HostTensor::of).map(HostTensor::into_owned);
            self.weights.extend(others);
        }
        let weight_bytes = self.weights.iter().map(|tensor| tensor.bytes() as u64).sum();
        let weights = write(&directory.join(weights), &self.weights, is_cancelled)?;
        // The weight memory is free while the optimizer state is written.
        self.weights.clear();
        self.weights.shrink_to_fit();
        let optimizer = write(&directory.join(optimizer), &self.optimizer, is_cancelled)?;
        Ok(WrittenFiles { weights, weight_bytes, optimizer })
    }
}

impl WrittenFiles {
    const NONE: Self = {
        let empty = FileDigest { bytes: 0, xxh3: 0 };
        Self { weights: empty, weight_bytes: 0, optimizer: empty }
    };

    pub(super) fn words(self) -> [u64; WORDS] {
        let Self { weights, weight_bytes, optimizer } = self;
        [0, weights.bytes, weights.xxh3, weight_bytes, optimizer.bytes, optimizer.xxh3]
    }

    pub(super) fn from_words(words: [u64; WORDS]) -> Self {
        let [_, bytes, xxh3, weight_bytes, optimizer_bytes, optimizer_xxh3] = words;
        let optimizer = FileDigest { bytes: optimizer_bytes, xxh3: optimizer_xxh3 };
        Self { weights: FileDigest { bytes, xxh3 }, weight_bytes, optimizer }
    }
}

/// Returns the values of a tensor that this rank writes, assembled if it has parts; `None` for a tensor that
/// another rank writes.
fn whole<D: Device>(
    stage: &(impl Stage<D> + ?Sized),
    spec: &ParameterSpec,
    is_written: bool,
    values: impl FnOnce() -> Result<Vec<f32>>,
) -> Result<Option<Vec<f32>>> {
    match stage.tensor_parallel() {
        // A collective over the tensor-parallel group, so it also runs for tensors that another rank writes.
        Some(group) if !spec.shard.is_whole() => Ok(group.assemble(spec, &values()?)?.filter(|_| is_written)),
        _ if is_written => Ok(Some(values()?)),
        _ => Ok(None),
    }
}
