//! Writes tensors of a device to a file, with one at a time in host memory.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use half::bf16;
use safetensors::{Dtype, View};

use super::directory::failed;
use super::manifest::FileDigest;
use crate::error::{Error, Result};
use dflop_device::Device;
use dflop_models::weights::Tensor;

/// Location of the numbers of a tensor.
pub(super) enum TensorData<'a, D: Device> {
    /// In a device's memory.
    Device(&'a D, &'a dflop_device::Tensor<D>),
    /// In host memory.
    Host(Cow<'a, [f32]>),
}

/// A tensor to be written to a file.
pub(super) struct FileTensor<'a, D: Device> {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) numbers: TensorData<'a, D>,
    /// Stored format, `F32` or `BF16`.
    pub(super) dtype: Dtype,
}

impl<'a, D: Device> FileTensor<'a, D> {
    /// Describes a tensor in host memory, to be stored as `f32`.
    pub(super) fn host(tensor: &'a Tensor) -> Self {
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Self { name, shape, numbers: TensorData::Host(Cow::Borrowed(&tensor.values)), dtype: Dtype::F32 }
    }

    fn elements(&self) -> usize {
        match self.numbers {
            TensorData::Device(_, buffer) => buffer.len(),
            TensorData::Host(ref values) => values.len(),
        }
    }

    /// Returns the number of bytes in the file.
    pub(super) fn bytes(&self) -> u64 {
        (self.elements() * if self.dtype == Dtype::BF16 { 2 } else { 4 }) as u64
    }

    fn read(&self) -> Result<Vec<u8>> {
        let downloaded;
        let values = match &self.numbers {
            TensorData::Host(values) => values.as_ref(),
            TensorData::Device(device, buffer) => {
                downloaded = device.download(buffer)?;
                downloaded.as_slice()
            }
        };
        Ok(if self.dtype == Dtype::BF16 {
            values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
        } else {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        })
    }
}

/// Adapter for the format's crate, whose trait cannot fail: the first error is kept aside.
struct Lazy<'a, D: Device>(&'a FileTensor<'a, D>, &'a RefCell<Option<Error>>);

impl<D: Device> View for Lazy<'_, D> {
    fn dtype(&self) -> Dtype {
        self.0.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.0.read().unwrap_or_else(|error| {
            self.1.borrow_mut().get_or_insert(error);
            Vec::new()
        });
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.0.bytes() as usize
    }
}

/// Writes a file, flushes it to disk, and returns its size and digest.
///
/// # Errors
/// [`dflop_models::Error::TensorShape`] if a shape does not fit the numbers, [`Error::File`], and errors of
/// the device.
pub(super) fn write<D: Device>(path: &Path, rows: &[FileTensor<'_, D>]) -> Result<FileDigest> {
    for row in rows {
        if row.shape.iter().product::<usize>() != row.elements() {
            let (tensor, expected, found) = (row.name.clone(), vec![row.elements()], row.shape.clone());
            return Err(dflop_models::Error::TensorShape { tensor, expected, found }.into());
        }
    }
    let failure = RefCell::new(None);
    let views = rows.iter().map(|row| (row.name.as_str(), Lazy(row, &failure)));
    // `transformers` refuses a file without this entry.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let written = safetensors::serialize_to_file(views, Some(metadata), path);
    // An error of the device comes first; an error of the file may only follow from it.
    if let Some(error) = failure.take() {
        return Err(error);
    }
    let sync = || {
        written.map_err(io_error)?;
        File::open(path)?.sync_all()
    };
    sync().map_err(failed("write", path))?;
    FileDigest::of(path)
}

fn io_error(error: safetensors::SafeTensorError) -> std::io::Error {
    match error {
        safetensors::SafeTensorError::IoError(error) => error,
        other => std::io::Error::other(other),
    }
}
