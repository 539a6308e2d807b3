//! Reads Hugging Face checkpoints: one safetensors file, or several with an index.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rustix::fs::OFlags;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::{INDEX_FILE, ParameterSpec, Tensor, WEIGHTS_FILE, WeightSource, spellings};
use crate::error::{Error, Result};

/// Maximum header length in bytes; the format has the same limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Tensor location.
#[derive(Debug, Clone)]
struct Stored {
    file: usize,
    /// Byte offset in the file.
    start: u64,
    info: TensorInfo,
}

impl Stored {
    fn elements(&self) -> usize {
        self.info.shape.iter().product()
    }
}

/// Checkpoint file headers; values are read on request.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Stored>,
}

impl Checkpoint {
    /// Opens a file, or a directory with [`WEIGHTS_FILE`] or [`INDEX_FILE`].
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be read, [`Error::Format`] if it is invalid.
    pub fn open(path: &Path) -> Result<Self> {
        let files = if !path.is_dir() {
            vec![path.to_owned()]
        } else if path.join(WEIGHTS_FILE).exists() {
            vec![path.join(WEIGHTS_FILE)]
        } else {
            index_files(path)?
        };
        Self::open_files(files)
    }

    /// Opens several files that together contain all tensors.
    ///
    /// # Errors
    /// See [`Checkpoint::open`].
    pub fn open_files(files: Vec<PathBuf>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (file, path) in files.iter().enumerate() {
            for (name, (start, info)) in header(path)? {
                if tensors.insert(name.clone(), Stored { file, start, info }).is_some() {
                    let problem = format!("tensor `{name}` is also in another file");
                    return Err(Error::Format { path: path.clone(), problem });
                }
            }
        }
        Ok(Self { files, tensors })
    }

    /// Iterates over the tensor names in the files, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Checks that the files contain exactly the model tensors, except names that start with an `ignored`
    /// prefix.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::SurplusTensor`].
    pub fn check(&self, specs: &[ParameterSpec], ignored: &[String]) -> Result<()> {
        let mut used = BTreeSet::new();
        for spec in specs.iter().filter(|spec| spec.shares.is_none()) {
            used.insert(self.find(spec)?.0);
        }
        let is_known =
            |name: &&str| used.contains(name) || ignored.iter().any(|prefix| name.starts_with(prefix));
        match self.names().find(|name| !is_known(name)) {
            Some(tensor) => Err(Error::SurplusTensor { tensor: tensor.to_owned() }),
            None => Ok(()),
        }
    }

    /// Reads the tensors that a model does not use, so that they can be written along with it.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::TensorShape`] if the files do not match the model;
    /// [`Error::TensorType`], [`Error::File`].
    pub fn others(&self, specs: &[ParameterSpec]) -> Result<Vec<Tensor>> {
        let own = specs.iter().filter(|spec| spec.shares.is_none());
        let used: BTreeSet<&str> = own.map(|spec| Ok(self.find(spec)?.0)).collect::<Result<_>>()?;
        let others = self.tensors.iter().filter(|(name, _)| !used.contains(name.as_str()));
        let read = |(name, stored): (&String, &Stored)| {
            let (name, shape) = (name.clone(), stored.info.shape.clone());
            Ok(Tensor { values: self.read_all(&name, stored)?, name, shape })
        };
        others.map(read).collect()
    }

    /// Finds name and location of a parameter in the files.
    fn find(&self, spec: &ParameterSpec) -> Result<(&str, &Stored)> {
        let found = spellings(&spec.name).find_map(|name| self.tensors.get_key_value(&name));
        let Some((name, stored)) = found else {
            return Err(Error::MissingTensor { tensor: spec.name.clone() });
        };
        if stored.info.shape != spec.shape && !is_turned(spec, &stored.info.shape) {
            return Err(Error::TensorShape {
                tensor: name.clone(),
                expected: spec.shape.clone(),
                found: stored.info.shape.clone(),
            });
        }
        Ok((name, stored))
    }

    /// Reads shape and values of a tensor by the name in the files.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorType`], [`Error::File`].
    pub fn tensor(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let Some(stored) = self.tensors.get(name) else {
            return Err(Error::MissingTensor { tensor: name.to_owned() });
        };
        Ok((stored.info.shape.clone(), self.read_all(name, stored)?))
    }

    /// Reads shape and values of an integer tensor.
    ///
    /// # Errors
    /// See [`Checkpoint::tensor`].
    pub fn integers(&self, name: &str) -> Result<(Vec<usize>, Vec<i64>)> {
        let Some(stored) = self.tensors.get(name) else {
            return Err(Error::MissingTensor { tensor: name.to_owned() });
        };
        if stored.info.dtype != Dtype::I64 {
            let found = format!("{:?}", stored.info.dtype);
            return Err(Error::TensorType { tensor: name.to_owned(), found });
        }
        let bytes = self.bytes(stored, &[0..stored.elements()], 8)?;
        let values = bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect();
        Ok((stored.info.shape.clone(), values))
    }

    /// Reads the bytes for element ranges; elements have `width` bytes each.
    fn bytes(&self, stored: &Stored, spans: &[Range<usize>], width: usize) -> Result<Vec<u8>> {
        let path = &self.files[stored.file];
        let mut bytes = vec![0; width * spans.iter().map(Range::len).sum::<usize>()];
        let mut read = || {
            let mut file = open(path)?;
            let mut rest = &mut bytes[..];
            for span in spans {
                let (target, remainder) = rest.split_at_mut(width * span.len());
                file.seek(SeekFrom::Start(stored.start + (width * span.start) as u64))?;
                file.read_exact(target)?;
                rest = remainder;
            }
            Ok(())
        };
        read().map_err(|source| Error::File { action: "read", path: path.clone(), source })?;
        Ok(bytes)
    }

    fn read_all(&self, name: &str, stored: &Stored) -> Result<Vec<f32>> {
        self.read(name, stored, &[0..stored.elements()])
    }

    fn read(&self, name: &str, stored: &Stored, spans: &[Range<usize>]) -> Result<Vec<f32>> {
        let width = match stored.info.dtype {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
            other => {
                return Err(Error::TensorType { tensor: name.to_owned(), found: format!("{other:?}") });
            }
        };
        let bytes = self.bytes(stored, spans, width)?;
        let halves = || bytes.as_chunks::<2>().0.iter();
        Ok(match stored.info.dtype {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
            Dtype::BF16 => halves().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
            _ => halves().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect(),
        })
    }
}

impl WeightSource for Checkpoint {
    fn values(&self, spec: &ParameterSpec) -> Result<Vec<f32>> {
        let (name, stored) = self.find(spec)?;
        if is_turned(spec, &stored.info.shape) {
            return Ok(spec.cut_part(&turned(&self.read_all(name, stored)?, &spec.shape)));
        }
        self.read(name, stored, &spec.spans())
    }
}

/// Returns whether a file stores the matrices for all experts as `[experts, outputs, inputs]`, which
/// transformers 5 writes where published files use `[experts, inputs, outputs]`.
fn is_turned(spec: &ParameterSpec, found: &[usize]) -> bool {
    let [experts, inputs, outputs] = spec.shape[..] else { return false };
    spec.name.contains(".experts.") && inputs != outputs && found == [experts, outputs, inputs]
}

/// Transposes each matrix in `[experts, outputs, inputs]` to a tensor with this shape.
fn turned(values: &[f32], shape: &[usize]) -> Vec<f32> {
    let (inputs, outputs) = (shape[1], shape[2]);
    let element =
        |(matrix, input, output): (usize, usize, usize)| values[(matrix * outputs + output) * inputs + input];
    let places =
        |matrix| (0..inputs).flat_map(move |input| (0..outputs).map(move |output| (matrix, input, output)));
    (0..shape[0]).flat_map(places).map(element).collect()
}

/// Lists the files that an index names, in order.
fn index_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let path = directory.join(INDEX_FILE);
    let mut text = Vec::new();
    open(&path).and_then(|mut file| file.read_to_end(&mut text)).map_err(|source| Error::File {
        action: "read",
        path: path.clone(),
        source,
    })?;
    let format = |problem: String| Error::Format { path: path.clone(), problem };
    let index: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| format(error.to_string()))?;
    let map = index.get("weight_map").and_then(serde_json::Value::as_object);
    let map = map.ok_or_else(|| format("`weight_map` must be an object".to_owned()))?;
    let mut files = BTreeSet::new();
    for (name, file) in map {
        // only plain file names: an index must not point outside the directory
        let file = file.as_str().filter(|file| Path::new(file).file_name() == Some(file.as_ref()));
        files.insert(file.ok_or_else(|| format(format!("tensor `{name}` has no file in the directory")))?);
    }
    Ok(files.into_iter().map(|file| directory.join(file)).collect())
}

/// Opens a regular file without waiting; rejects pipes and devices.
fn open(path: &Path) -> std::io::Result<File> {
    let check = |found: std::fs::Metadata| {
        let refused = || std::io::Error::new(ErrorKind::InvalidInput, "expected a regular file");
        found.is_file().then_some(()).ok_or_else(refused)
    };
    // Checked again when it is open, because the path may name a different file by then.
    check(std::fs::metadata(path)?)?;
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        // Another process holds a lease, which it releases for an open that waits.
        Err(error) if error.kind() == ErrorKind::WouldBlock => File::open(path)?,
        opened => opened?,
    };
    check(file.metadata()?)?;
    Ok(file)
}

/// Reads a file header: tensors with byte offsets.
fn header(path: &Path) -> Result<BTreeMap<String, (u64, TensorInfo)>> {
    let failed = |source| Error::File { action: "read", path: path.to_owned(), source };
    let format = |problem: String| Error::Format { path: path.to_owned(), problem };
    let mut file = open(path).map_err(failed)?;
    let file_bytes = file.metadata().map_err(failed)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    // the length comes from the file: check before allocating
    if length > HEADER_BYTES_MAX || length + 8 > file_bytes {
        return Err(format(format!("header of {length} bytes exceeds the file of {file_bytes} bytes")));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(failed)?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| format(error.to_string()))?;
    let mut tensors = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        if start > end || 8 + length + end as u64 > file_bytes {
            return Err(format(format!("tensor `{name}` exceeds the file")));
        }
        tensors.insert(name, (8 + length + start as u64, info.clone()));
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_experts_are_transposed_one_by_one() {
        let file = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
        let expected = [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 10.0, 12.0, 14.0, 11.0, 13.0, 15.0];
        assert_eq!(turned(&file, &[2, 2, 3]), expected);
    }
}
