//! Writes tensors from host memory to a safetensors file, and computes the digest on the way.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::digest::{DigestWriter, FileDigest};
use super::files::failed;
use crate::error::Result;
use dflop_models::weights::Tensor;

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
