//! Graph tensors: packed rows, numbers per row, scores, indices, host values.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;
use cudarc::cudnn::sys::cudnnDataType_t as DataType;

use super::super::descriptor::Descriptor;
use super::super::error::Result;
use super::super::library::Library;
use super::super::plan_key::PlanKey;
use super::form::Form;

/// Alignment of tensor addresses in bytes.
const ALIGNMENT_BYTES: i64 = 16;
/// Axes for segments, heads, rows and columns.
const SEGMENT: usize = 0;
const ROW: usize = 2;
const COLUMN: usize = 3;

/// Identifiers for tensors with an address in the call arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Id {
    Queries = 1,
    Keys,
    Values,
    Output,
    LogSums,
    DOutput,
    DQueries,
    DKeys,
    DValues,
    QueryLengths,
    KeyLengths,
    RowOffsets,
    OutputOffsets,
    KeyOffsets,
    LogSumOffsets,
    /// Score factor.
    Scale,
    /// Scores for row pairs after a segment, and for a query and a later key.
    Padding,
    Later,
    One,
    /// Sum of the output times its gradient, for every row and head.
    RowSums,
    /// Query gradient in f32.
    DQuerySums,
    /// Key and value gradients for every query head.
    DKeysOfHeads,
    DValuesOfHeads,
    /// First tensor that exists only within a graph.
    Inner,
}

/// Creates the tensors in the graph for a key.
pub(super) struct Tensors<'a> {
    pub(super) library: &'a Arc<Library>,
    pub(super) key: &'a PlanKey,
    pub(super) form: Form,
    inner: i64,
}

/// Numbers of segments, heads, rows and columns, and strides in elements.
#[derive(Clone, Copy)]
struct Layout {
    dims: [i64; 4],
    strides: [i64; 4],
}

impl Layout {
    /// Packed rows, with `heads` heads of `columns` columns each.
    fn packed(key: &PlanKey, heads: u32, columns: u32, row: u32) -> Self {
        let [segments, heads, longest] = [key.segments, heads, key.longest].map(i64::from);
        let [columns, row] = [columns, row].map(i64::from);
        Self { dims: [segments, heads, longest, columns], strides: [longest * row, columns, row, 1] }
    }

    /// Heads in sequence, padded to the longest segment.
    fn dense(key: &PlanKey, columns: u32) -> Self {
        let [segments, heads, longest] = [key.segments, key.heads, key.longest].map(i64::from);
        let columns = i64::from(columns);
        let strides = [heads * longest * columns, longest * columns, columns, 1];
        Self { dims: [segments, heads, longest, columns], strides }
    }

    fn transposed(mut self) -> Self {
        self.dims.swap(ROW, COLUMN);
        self.strides.swap(ROW, COLUMN);
        self
    }
}

impl<'a> Tensors<'a> {
    pub(super) const fn new(library: &'a Arc<Library>, key: &'a PlanKey, form: Form) -> Self {
        Self { library, key, form, inner: Id::Inner as i64 }
    }

    /// Returns columns in the query-key-value matrix: `heads` heads in the packed rows.
    pub(super) fn row_columns(
        &self,
        id: Id,
        heads: u32,
        offsets: &Arc<Descriptor>,
    ) -> Result<Arc<Descriptor>> {
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, self.row(heads), offsets)
    }

    /// Returns keys or values in the matrix, with rows and columns exchanged.
    pub(super) fn transposed_of_row(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let layout = self.row(self.key.kv_heads).transposed();
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, layout, offsets)
    }

    /// Returns the keys in the matrix, as a tensor within a graph.
    pub(super) fn inner_of_row(&mut self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let layout = self.row(self.key.kv_heads);
        let (_, mut tensor) = self.inner(DataType::CUDNN_DATA_BFLOAT16, layout)?;
        tensor.link(Attribute::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, &[offsets])?;
        tensor.finalize()
    }

    /// Returns the query gradient in f32, in the workspace.
    pub(super) fn query_sums(&self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let kind = DataType::CUDNN_DATA_FLOAT;
        if self.form.is_bounded(self.key) {
            return self.ragged(Id::DQuerySums, kind, self.row(self.key.heads), offsets);
        }
        self.tensor(Id::DQuerySums as i64, kind, Layout::dense(self.key, self.key.head_dim))?.finalize()
    }

    /// Returns the segment offsets in the key and value gradients.
    pub(super) fn gradient_offsets(&self, rows: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let is_apart = self.form.has_gradients_apart(self.key);
        if is_apart { self.offsets(Id::KeyOffsets) } else { Ok(Arc::clone(rows)) }
    }

    /// Returns the key or value gradient: columns in the matrix, or a separate matrix in the workspace.
    pub(super) fn gradient(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let layout = if self.form.has_gradients_apart(self.key) {
            self.keys(self.key.kv_heads)
        } else {
            self.row(self.key.kv_heads)
        };
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, layout, offsets)
    }

    /// Returns the key or value gradient for every query head: in the workspace, with row length scaled by
    /// the same factor as the number of heads, by which the engine multiplies the gradient offsets; or within
    /// the graph.
    pub(super) fn query_head_gradient(
        &mut self,
        id: Id,
        offsets: &Arc<Descriptor>,
    ) -> Result<Arc<Descriptor>> {
        let kind = DataType::CUDNN_DATA_BFLOAT16;
        if !self.form.has_gradients_apart(self.key) {
            let layout = Layout::dense(self.key, self.key.head_dim);
            return self.inner(kind, layout)?.1.finalize();
        }
        let mut layout = self.keys(self.key.heads);
        for axis in [SEGMENT, ROW] {
            layout.strides[axis] *= i64::from(self.key.heads / self.key.kv_heads);
        }
        self.ragged(id, kind, layout, offsets)
    }

    /// Returns the packed output rows.
    pub(super) fn output_rows(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let row = self.key.heads * self.key.head_dim;
        let layout = Layout::packed(self.key, self.key.heads, self.key.head_dim, row);
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, layout, offsets)
    }

    /// Returns a number for every output element, within a graph.
    pub(super) fn output_numbers(&mut self) -> Result<Arc<Descriptor>> {
        let layout = Layout::dense(self.key, self.key.head_dim);
        self.inner(DataType::CUDNN_DATA_FLOAT, layout)?.1.finalize()
    }

    /// Returns the log-sum-exp for every row and head: packed, `[tokens, heads]`, or padded,
    /// `[segments, heads, longest]`.
    pub(super) fn log_sums(&self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        self.numbers(Id::LogSums, self.form != Form::Padded, offsets)
    }

    /// Returns a number for every row and head, in the workspace.
    pub(super) fn row_sums(&self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        self.numbers(Id::RowSums, self.form.is_bounded(self.key), offsets)
    }

    fn numbers(&self, id: Id, is_packed: bool, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let kind = DataType::CUDNN_DATA_FLOAT;
        if is_packed {
            return self.ragged(
                id,
                kind,
                Layout::packed(self.key, self.key.heads, 1, self.key.heads),
                offsets,
            );
        }
        self.tensor(id as i64, kind, Layout::dense(self.key, 1))?.finalize()
    }

    /// Returns a number for every row and head, within a graph.
    pub(super) fn row_numbers(&mut self) -> Result<Arc<Descriptor>> {
        self.inner(DataType::CUDNN_DATA_FLOAT, Layout::dense(self.key, 1))?.1.finalize()
    }

    /// Returns scores with an identifier, within a graph.
    pub(super) fn scores(&mut self, kind: DataType) -> Result<(i64, Arc<Descriptor>)> {
        let (id, tensor) = self.inner(kind, Layout::dense(self.key, self.key.longest))?;
        Ok((id, tensor.finalize()?))
    }

    /// Returns scores with keys as rows and queries as columns, within a graph.
    pub(super) fn transposed_scores(&mut self, kind: DataType) -> Result<Arc<Descriptor>> {
        let layout = Layout::dense(self.key, self.key.longest).transposed();
        self.inner(kind, layout)?.1.finalize()
    }

    /// Returns the number of rows in every segment.
    pub(super) fn lengths(&self, id: Id) -> Result<Arc<Descriptor>> {
        self.list(id, DataType::CUDNN_DATA_INT32, i64::from(self.key.segments))
    }

    /// Returns the first element in every segment, and the end of the last segment.
    pub(super) fn offsets(&self, id: Id) -> Result<Arc<Descriptor>> {
        self.list(id, DataType::CUDNN_DATA_INT64, i64::from(self.key.segments) + 1)
    }

    /// Returns a host value in the call arguments.
    pub(super) fn host_value(&self, id: Id) -> Result<Arc<Descriptor>> {
        let layout = Layout { dims: [1; 4], strides: [1; 4] };
        let mut tensor = self.tensor(id as i64, DataType::CUDNN_DATA_FLOAT, layout)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true])?;
        tensor.finalize()
    }

    fn row(&self, heads: u32) -> Layout {
        Layout::packed(self.key, heads, self.key.head_dim, self.key.row())
    }

    fn keys(&self, heads: u32) -> Layout {
        Layout::packed(self.key, heads, self.key.head_dim, self.key.kv_heads * self.key.head_dim)
    }

    fn list(&self, id: Id, kind: DataType, len: i64) -> Result<Arc<Descriptor>> {
        self.tensor(id as i64, kind, Layout { dims: [len, 1, 1, 1], strides: [1; 4] })?.finalize()
    }

    fn ragged(
        &self,
        id: Id,
        kind: DataType,
        layout: Layout,
        offsets: &Arc<Descriptor>,
    ) -> Result<Arc<Descriptor>> {
        let mut tensor = self.tensor(id as i64, kind, layout)?;
        tensor.link(Attribute::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, &[offsets])?;
        tensor.finalize()
    }

    fn inner(&mut self, kind: DataType, layout: Layout) -> Result<(i64, Descriptor)> {
        let id = self.inner;
        self.inner += 1;
        let mut tensor = self.tensor(id, kind, layout)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[true])?;
        Ok((id, tensor))
    }

    fn tensor(&self, id: i64, kind: DataType, layout: Layout) -> Result<Descriptor> {
        let mut tensor = Descriptor::new(self.library, DescriptorType::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, &[kind])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &layout.dims)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &layout.strides)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT_BYTES])?;
        Ok(tensor)
    }
}
