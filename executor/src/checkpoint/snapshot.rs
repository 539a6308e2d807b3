//! Copies a rank's part of a checkpoint to host memory, and writes the tensors to files.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use dflop_device::Device;
use dflop_models::Stage;
use dflop_models::weights::{ParameterSpec, Tensor, WEIGHTS_FILE};
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};

use super::manifest::{DigestWriter, FileDigest};
use super::{MASTER, MEAN, SQUARE, WORDS, failed};
use crate::error::Result;
use crate::optimizer::{JobOptimizer, Ownership, ParameterState, Precision};

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

/// Ranks that write files, ascending: each writes one checkpoint piece.
pub(super) struct Pieces {
    owners: Vec<usize>,
}

impl Pieces {
    pub(super) fn of(ownership: &Ownership) -> Self {
        let mut owners: Vec<usize> = ownership.writers().map(|(_, owner)| owner).collect();
        owners.sort_unstable();
        owners.dedup();
        Self { owners }
    }

    /// Returns the ranks that write pieces, by piece.
    pub(super) fn owners(&self) -> &[usize] {
        &self.owners
    }

    /// Returns the piece that a rank writes, if any.
    pub(super) fn rank_piece(&self, rank: usize) -> Option<usize> {
        self.owners.iter().position(|&owner| owner == rank)
    }

    pub(super) fn weights(&self, piece: usize) -> String {
        match self.owners.len() {
            1 => WEIGHTS_FILE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", piece + 1),
        }
    }

    pub(super) fn optimizer(&self, piece: usize) -> String {
        format!("optimizer-{:05}-of-{:05}.safetensors", piece + 1, self.owners.len())
    }

    /// Returns the map from tensors to weight files, for the index.
    ///
    /// - `others`: names of tensors that the model does not use, which are in the first piece
    pub(super) fn weight_map<'a>(
        &self,
        ownership: &Ownership,
        others: impl Iterator<Item = &'a str>,
    ) -> serde_json::Map<String, Value> {
        let own =
            ownership.writers().map(|(name, owner)| (name.to_owned(), self.rank_piece(owner).unwrap_or(0)));
        let others = others.map(|name| (name.to_owned(), 0));
        own.chain(others).map(|(name, piece)| (name, json!(self.weights(piece)))).collect()
    }
}

/// Number of elements that are converted and written at a time.
const ELEMENTS: usize = 1 << 18;

/// A tensor to be written to a file.
pub(super) struct HostTensor<'a> {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) values: Cow<'a, [f32]>,
    /// Stored type, `F32` or `BF16`.
    pub(super) dtype: Dtype,
}

impl<'a> HostTensor<'a> {
    /// Describes a tensor to be stored as `f32`.
    pub(super) fn of(tensor: &'a Tensor) -> Self {
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Self { name, shape, values: Cow::Borrowed(&tensor.values), dtype: Dtype::F32 }
    }

    /// Returns the tensor with owned values.
    pub(super) fn into_owned(self) -> HostTensor<'static> {
        let Self { name, shape, values, dtype } = self;
        HostTensor { name, shape, values: Cow::Owned(values.into_owned()), dtype }
    }

    /// Returns the number of bytes in the file.
    pub(super) fn bytes(&self) -> usize {
        self.values.len() * if self.dtype == Dtype::BF16 { 2 } else { 4 }
    }

    fn write(&self, file: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(4 * ELEMENTS.min(self.values.len()));
        for values in self.values.chunks(ELEMENTS) {
            bytes.clear();
            if self.dtype == Dtype::BF16 {
                bytes.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()));
            } else {
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            file.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// Writes a file, flushes it to disk, and returns size and digest; nothing is read back.
///
/// # Errors
/// [`dflop_models::Error::TensorShape`] if a shape does not match the number of values;
/// [`crate::Error::File`], also once `is_cancelled` is set.
pub(super) fn write(
    path: &Path,
    tensors: &[HostTensor<'_>],
    is_cancelled: &AtomicBool,
) -> Result<FileDigest> {
    for tensor in tensors {
        if tensor.shape.iter().product::<usize>() != tensor.values.len() {
            let (name, expected, found) =
                (tensor.name.clone(), vec![tensor.values.len()], tensor.shape.clone());
            return Err(dflop_models::Error::TensorShape { tensor: name, expected, found }.into());
        }
    }
    // Order required by the format: larger types first, so that all tensors are aligned; then by name.
    let mut tensors: Vec<&HostTensor<'_>> = tensors.iter().collect();
    tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let write = || {
        let mut file = DigestWriter::create(path, is_cancelled)?;
        let header = header(&tensors)?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        tensors.iter().try_for_each(|tensor| tensor.write(&mut file))?;
        file.finish()
    };
    write().map_err(failed("write", path))
}

/// Returns a file header: tensor names, types, shapes and offsets, padded to a multiple of 8 bytes.
fn header(tensors: &[&HostTensor<'_>]) -> io::Result<Vec<u8>> {
    let (mut infos, mut start) = (Vec::with_capacity(tensors.len()), 0);
    for tensor in tensors {
        let end = start + tensor.bytes();
        let info =
            TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
        infos.push((tensor.name.clone(), info));
        start = end;
    }
    // `transformers` rejects a file without this entry.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(metadata), infos).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    /// Files from earlier versions were written by the format's own crate.
    #[test]
    fn a_file_has_the_bytes_that_the_formats_own_crate_writes() {
        let values: Vec<f32> = (0..ELEMENTS + 3).map(|at| at as f32 / 7.0 - 11.0).collect();
        let tensor = |name: &str, length: usize, dtype| HostTensor {
            name: name.to_owned(),
            shape: vec![1, length],
            values: Cow::Borrowed(&values[..length]),
            dtype,
        };
        let tensors = [
            tensor("b", 5, Dtype::BF16),
            tensor("c", ELEMENTS + 3, Dtype::F32),
            tensor("a", 3, Dtype::F32),
            tensor("none", 0, Dtype::F32),
        ];
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let digest = write(&path, &tensors, &AtomicBool::new(false)).unwrap();
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|tensor| {
                let mut bytes = Vec::new();
                tensor.write(&mut bytes).unwrap();
                bytes
            })
            .collect();
        let views = tensors.iter().zip(&bytes).map(|(tensor, bytes)| {
            (tensor.name.as_str(), TensorView::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap())
        });
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let expected = safetensors::serialize(views, Some(metadata)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        assert_eq!(digest, FileDigest::of(&path).unwrap());
    }
}
