//! Writes, packs and indexes datasets, in this process or in parts for tasks on other machines.
//!
//! `dflop._native.ShardWriter`: writes samples with encoded fields to shards; `dflop.Writer` encodes the
//! values.

use super::dataset::PyDataset;
use super::error::{DflopError, to_python};
use super::runtime;
use arrow_array::RecordBatch;
use bytes::Bytes;
use dflop_import::{
    ColumnMap, LabelSource, PackOptions, Packed, PackedPart, Row, SourceFormat, SourcePart, finish_parts,
    list_parts, pack_batches, pack_part,
};
use dflop_loader::error::excerpt;
use dflop_loader::flow::NoProgress;
use dflop_loader::index::Index;
use dflop_loader::store::Stores;
use dflop_loader::write::{SHARD_BYTES, ShardCompression, ShardWriter, ZSTD_LEVEL};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyString};
use pythonize::Depythonizer;
use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Reads some shards in a dataset for the index; returns bytes for `merge_index`.
#[pyfunction]
pub(crate) fn index_part<'py>(
    py: Python<'py>,
    dataset: &PyDataset,
    shards: Vec<String>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut chosen = Vec::new();
    for url in &shards {
        let shard = dataset.shard_list().iter().find(|shard| *shard.url == **url);
        let unknown =
            || DflopError::config("shards", format!("expected shards of the dataset, found `{url}`"));
        chosen.push(shard.ok_or_else(unknown)?.clone());
    }
    let options = dataset.index_options().clone();
    let part = runtime::run(py, move || Index::build_part(&chosen, &options).map_err(DflopError::from))?;
    Ok(PyBytes::new(py, &part))
}

/// Joins results from `index_part`, in any order, into the dataset index.
#[pyfunction]
pub(crate) fn merge_index(py: Python<'_>, dataset: &PyDataset, parts: Vec<PyBackedBytes>) -> PyResult<()> {
    let (shards, options) = (dataset.shard_list().to_vec(), dataset.index_options().clone());
    runtime::run(py, move || {
        let parts = parts.into_iter().map(Bytes::from_owner);
        Index::merge_parts(shards, parts, &options).map(drop).map_err(DflopError::from)
    })?;
    dataset.mark_rebuilt();
    Ok(())
}

/// Maximum number of characters for a value in a message.
const SHOWN_MAX: usize = 80;

/// Packing settings, an argument of all functions below.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct PackSettings {
    shard_bytes: Option<u64>,
    shard_samples: Option<u64>,
    index: bool,
    zstd: bool,
    format: Option<String>,
    split: Option<String>,
    columns: Option<BTreeMap<String, String>>,
    label_from: Option<String>,
    root: Option<PathBuf>,
    allow_outside: bool,
}

impl PackSettings {
    fn options(self) -> PyResult<PackOptions> {
        let labels = match self.label_from.as_deref() {
            None => LabelSource::Source,
            Some("directory") => LabelSource::Directory,
            Some(other) => {
                let reason = format!("expected `directory`, found `{}`", excerpt(other, SHOWN_MAX));
                return Err(DflopError::config("label_from", reason).into());
            }
        };
        let format = self.format.as_deref().map(str::parse::<SourceFormat>).transpose();
        Ok(PackOptions {
            shard_bytes: self.shard_bytes.unwrap_or(SHARD_BYTES),
            shard_samples: self.shard_samples,
            is_indexed: self.index,
            is_zstd: self.zstd,
            format: format.map_err(DflopError::from)?,
            split: self.split,
            map: ColumnMap::new(self.columns.unwrap_or_default()).map_err(DflopError::from)?,
            labels,
            root: self.root,
            is_outside_allowed: self.allow_outside,
            stores: Stores::default(),
            progress: Arc::new(NoProgress),
        })
    }
}

/// Packs sources in this process.
#[pyfunction]
pub(crate) fn pack_all(
    py: Python<'_>,
    sources: Vec<PathBuf>,
    out: PathBuf,
    settings: PackSettings,
) -> PyResult<Bound<'_, PyDict>> {
    let options = settings.options()?;
    let packed =
        runtime::run(py, move || dflop_import::pack_all(&sources, &out, &options).map_err(DflopError::from))?;
    report(py, packed)
}

/// Packs table rows, each table an Arrow IPC stream in bytes, from an iterator.
///
/// - `name`: used instead of a file name in the documents of the rows
#[pyfunction]
pub(crate) fn pack_tables(
    py: Python<'_>,
    tables: Py<PyAny>,
    name: String,
    out: PathBuf,
    settings: PackSettings,
) -> PyResult<Bound<'_, PyDict>> {
    let options = settings.options()?;
    let tables = tables.bind(py).try_iter()?.unbind();
    let mut failure = None;
    let batches = items(&tables, &mut failure, read_batches).flat_map(|batches| match batches {
        Ok(batches) => batches.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    });
    // On this thread, because the iterator is a Python object, and may depend on the thread.
    let packed = py.detach(|| pack_batches(batches, &name, &out, &options));
    match failure {
        Some(error) => Err(error),
        None => report(py, packed.map_err(DflopError::from)?),
    }
}

/// Packs rows from an iterator: each is the file, the row number in it, and the columns, a list of pairs of
/// name and value, or the reason for skipping the row.
///
/// - `source`: directory that the rows come from
#[pyfunction]
pub(crate) fn pack_rows(
    py: Python<'_>,
    rows: Py<PyAny>,
    source: PathBuf,
    out: PathBuf,
    settings: PackSettings,
) -> PyResult<Bound<'_, PyDict>> {
    let options = settings.options()?;
    let rows = rows.bind(py).try_iter()?.unbind();
    let mut failure = None;
    let read = items(&rows, &mut failure, read_row);
    // On this thread, like tables.
    let packed = py.detach(|| dflop_import::pack_rows(read, &source, &out, &options));
    match failure {
        Some(error) => Err(error),
        None => report(py, packed.map_err(DflopError::from)?),
    }
}

/// Reads the items of a Python iterator. An exception goes to `failure`, and the error in its place ends
/// packing, so that partial rows do not pass for all rows.
fn items<'a, T>(
    iterator: &'a Py<PyIterator>,
    failure: &'a mut Option<PyErr>,
    read: impl Fn(&Bound<'_, PyAny>) -> PyResult<T> + 'a,
) -> impl Iterator<Item = dflop_loader::Result<T>> + 'a {
    std::iter::from_fn(move || {
        let next = Python::attach(|py| {
            let next = iterator.clone_ref(py).into_bound(py).next()?;
            Some(next.and_then(|item| read(&item)))
        });
        next.map(|item| {
            item.map_err(|error| {
                *failure = Some(error);
                dflop_loader::Error::StageEnded { stage: "rows" }
            })
        })
    })
}

/// Returns the record batches in a table.
fn read_batches(table: &Bound<'_, PyAny>) -> PyResult<Vec<RecordBatch>> {
    let bytes: PyBackedBytes = table.extract()?;
    let read = || arrow_ipc::reader::StreamReader::try_new(Cursor::new(bytes), None)?.collect();
    let batches: Result<_, arrow_schema::ArrowError> = read();
    Ok(batches.map_err(|error| DflopError::config("tables", error.to_string()))?)
}

fn read_row(row: &Bound<'_, PyAny>) -> PyResult<Row> {
    let (file, number, columns): (String, u64, Bound<'_, PyAny>) = row.extract()?;
    Ok(match columns.cast::<PyString>() {
        Ok(reason) => Row::skipped(file, number, reason.to_string()),
        Err(_) => Row::read(file, number, &mut Depythonizer::from_object(&columns)),
    })
}

/// Divides a source into parts, each as bytes for `pack_one`.
#[pyfunction]
pub(crate) fn pack_list(
    py: Python<'_>,
    source: PathBuf,
    parts: u32,
    settings: PackSettings,
) -> PyResult<Vec<Bound<'_, PyBytes>>> {
    let options = settings.options()?;
    let listed = runtime::run(py, move || list_parts(&source, parts, &options).map_err(DflopError::from))?;
    listed.iter().map(|part| to_bytes(py, part)).collect()
}

/// Packs part of a source; returns bytes for `pack_finish`.
#[pyfunction]
pub(crate) fn pack_one<'py>(
    py: Python<'py>,
    source: PathBuf,
    out: PathBuf,
    part: &[u8],
    settings: PackSettings,
) -> PyResult<Bound<'py, PyBytes>> {
    let part: SourcePart = from_bytes(part)?;
    let options = settings.options()?;
    let packed =
        runtime::run(py, move || pack_part(&source, &out, &part, &options).map_err(DflopError::from))?;
    to_bytes(py, &packed)
}

/// Joins packed parts.
#[pyfunction]
pub(crate) fn pack_finish(
    py: Python<'_>,
    out: PathBuf,
    parts: Vec<Vec<u8>>,
    settings: PackSettings,
) -> PyResult<Bound<'_, PyDict>> {
    let parts = parts.iter().map(|part| from_bytes(part)).collect::<PyResult<Vec<PackedPart>>>()?;
    let options = settings.options()?;
    let packed = runtime::run(py, move || finish_parts(&out, parts, &options).map_err(DflopError::from))?;
    report(py, packed)
}

/// Serializes a value that is sent between tasks.
fn to_bytes<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyBytes>> {
    let wrong = |error: serde_json::Error| DflopError::config("parts", error.to_string());
    Ok(PyBytes::new(py, &serde_json::to_vec(value).map_err(wrong)?))
}

fn from_bytes<T: serde::de::DeserializeOwned>(part: &[u8]) -> PyResult<T> {
    let wrong = |error: serde_json::Error| DflopError::config("parts", format!("expected a part: {error}"));
    Ok(serde_json::from_slice(part).map_err(wrong)?)
}

fn report(py: Python<'_>, packed: Packed) -> PyResult<Bound<'_, PyDict>> {
    let report = PyDict::new(py);
    let shards: Vec<String> = packed.shards.iter().map(|path| path.display().to_string()).collect();
    report.set_item("shards", shards)?;
    report.set_item("samples", packed.samples)?;
    report.set_item("bytes", packed.bytes)?;
    report.set_item("index", packed.index)?;
    report.set_item("fields", to_python(py, &packed.taken.fields)?)?;
    report.set_item("columns", to_python(py, &packed.taken.columns)?)?;
    report.set_item("classes", to_python(py, &packed.taken.classes)?)?;
    report.set_item("skipped", to_python(py, &packed.skipped)?)?;
    Ok(report)
}

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
