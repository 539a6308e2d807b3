//! Exports tables through Arrow's PyCapsule interface: `pyarrow.table(…)`, `polars.DataFrame(…)`, without a
//! copy.
//!
//! # Source
//! Apache Arrow, "The Arrow PyCapsule Interface": a capsule named `arrow_array_stream` whose pointer is a C
//! stream.

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{RecordBatch, RecordBatchIterator};
use arrow_schema::SchemaRef;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Table with the Arrow PyCapsule interface: ``pyarrow.table(table)``, ``polars.DataFrame(table)``.
///
/// Examples:
///     >>> table = dflop.CostModel("model/").annotate(dflop.Dataset("shards/"))
///     >>> len(table), table.column_names[:4]
///     (256, ['sample', 'key', 'refused', 'tokens'])
///     >>> import pyarrow
///     >>> pyarrow.table(table)["tokens"][:3].to_pylist()
///     [132, 90, 47]
#[pyclass(frozen, module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct Table {
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
}

impl Table {
    pub(crate) fn new(schema: SchemaRef, batches: Vec<RecordBatch>) -> Self {
        Self { schema, batches }
    }
}

#[pymethods]
impl Table {
    /// Column names.
    #[getter]
    fn column_names(&self) -> Vec<String> {
        self.schema.fields().iter().map(|field| field.name().clone()).collect()
    }

    fn __len__(&self) -> usize {
        self.batches.iter().map(RecordBatch::num_rows).sum()
    }

    fn __repr__(&self) -> String {
        format!("Table(rows={}, columns={:?})", self.__len__(), self.column_names())
    }

    /// Returns a capsule with a C stream over the record batches; a requested schema is ignored.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        drop(requested_schema);
        stream(py, self.schema.clone(), self.batches.clone())
    }
}

/// Returns a capsule with a C stream, which owns the batches that are not read.
pub(crate) fn stream(
    py: Python<'_>,
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
) -> PyResult<Bound<'_, PyCapsule>> {
    let reader = RecordBatchIterator::new(batches.into_iter().map(Ok), schema);
    let stream = FFI_ArrowArrayStream::new(Box::new(reader));
    PyCapsule::new_with_value(py, stream, c"arrow_array_stream")
}
