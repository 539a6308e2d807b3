//! `dflop._native.ShardWriter`: writes samples with encoded fields to shards; `dflop.Writer` encodes the
//! values.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use dflop_loader::write::{SHARD_BYTES, ShardCompression, ShardWriter, ZSTD_LEVEL};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

use crate::error::DflopError;
use crate::runtime;

/// Writes samples, each with a key and field payloads, to numbered shards in a directory.
///
/// A shard appears under the final name when it is complete. Index rows are collected meanwhile and written
/// by ``finish``.
///
/// Args:
///     directory (str | PathLike): shard directory or URL.
///     shard_bytes (int): size in bytes at which the next shard starts, before compression. Default: 256 MiB.
///     shard_samples (int): number of samples at which the next shard starts. Default: no limit.
///     zstd (bool): compresses shards. Default: ``False``.
///     index (bool): writes the index. Default: ``True``.
///     append (bool): adds shards to the shards in the directory. Default: ``False``.
///
/// Raises:
///     ConfigError: a setting is invalid.
///     DataError: the directory contains shards.
///     ReadError: the directory cannot be created or listed.
#[pyclass(frozen, name = "ShardWriter", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyShardWriter(Mutex<Option<ShardWriter>>);

#[pymethods]
impl PyShardWriter {
    #[new]
    #[pyo3(signature = (
        directory, *, shard_bytes=None, shard_samples=None, zstd=false, index=true, append=false
    ))]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        shard_bytes: Option<u64>,
        shard_samples: Option<u64>,
        zstd: bool,
        index: bool,
        append: bool,
    ) -> PyResult<Self> {
        let level = ZSTD_LEVEL;
        let compression = if zstd { ShardCompression::Zstd { level } } else { ShardCompression::None };
        let builder = ShardWriter::builder(directory)
            .shard_bytes(shard_bytes.unwrap_or(SHARD_BYTES))
            .shard_samples(shard_samples.unwrap_or(u64::MAX))
            .compression(compression)
            .index(index)
            .append(append);
        let writer = runtime::run(py, move || builder.build().map_err(DflopError::from))?;
        Ok(Self(Mutex::new(Some(writer))))
    }

    /// Appends a sample: the key, and extension and payload for each field, in order.
    fn write(&self, py: Python<'_>, key: &str, fields: Vec<(String, PyBackedBytes)>) -> PyResult<()> {
        let fields: Vec<(&str, &[u8])> = fields.iter().map(|(name, payload)| (&**name, &**payload)).collect();
        py.detach(|| match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(writer) => writer.write(key, &fields).map_err(|error| DflopError::from(error).into()),
            None => Err(closed()),
        })
    }

    /// Completes the last shard and the index; returns ``shards``, ``samples``, ``bytes`` and ``index``.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let writer = self.take().ok_or_else(closed)?;
        let written = runtime::run(py, move || writer.finish().map_err(DflopError::from))?;
        let report = PyDict::new(py);
        let shards: Vec<String> = written.shards.iter().map(|path| path.display().to_string()).collect();
        report.set_item("shards", shards)?;
        report.set_item("samples", written.samples)?;
        report.set_item("bytes", written.bytes)?;
        report.set_item("index", written.index)?;
        Ok(report)
    }

    /// Removes the shard under construction; complete shards stay, without an index.
    fn abort(&self) {
        drop(self.take());
    }
}

impl PyShardWriter {
    fn take(&self) -> Option<ShardWriter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("the writer is closed; open another one, with `append=True` to add to its shards")
}
