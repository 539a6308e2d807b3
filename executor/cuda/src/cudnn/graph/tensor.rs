//! Tensors of the graphs: packed rows, numbers of every row, indices, values of the host.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;
use cudarc::cudnn::sys::cudnnDataType_t as DataType;

use super::super::descriptor::Descriptor;
use super::super::error::Result;
use super::super::library::Library;
use super::super::plan_key::PlanKey;

/// Bytes that the address of every tensor is a multiple of.
const ALIGNMENT_BYTES: i64 = 16;

/// Identifiers of tensors with an address in the arguments of a call.
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
    Lengths,
    RowOffsets,
    OutputOffsets,
    LogSumOffsets,
    Scale,
    Masked,
    One,
    /// First of the tensors that exist within a graph only.
    Inner,
}

/// Makes the tensors of the graph of a key.
pub(super) struct Tensors<'a> {
    pub(super) library: &'a Arc<Library>,
    pub(super) key: &'a PlanKey,
    pub(super) inner: i64,
}

/// Places of elements: strides of segment, head, row and column.
type Strides = [i64; 4];

impl<'a> Tensors<'a> {
    pub(super) const fn new(library: &'a Arc<Library>, key: &'a PlanKey) -> Self {
        Self { library, key, inner: Id::Inner as i64 }
    }

    /// Columns of the matrix of queries, keys and values: `heads` heads of its packed rows.
    pub(super) fn of_row(&self, id: Id, heads: u32, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        self.packed(id, heads, self.key.row(), offsets)
    }

    /// Packed rows of the output.
    pub(super) fn of_output(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        self.packed(id, self.key.heads, self.key.heads * self.key.head_dim, offsets)
    }

    fn packed(&self, id: Id, heads: u32, row: u32, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let (longest, head_dim) = (i64::from(self.key.longest), i64::from(self.key.head_dim));
        let dims = [i64::from(self.key.segments), i64::from(heads), longest, head_dim];
        let strides = [longest * i64::from(row), head_dim, i64::from(row), 1];
        let mut tensor = self.tensor(id as i64, DataType::CUDNN_DATA_BFLOAT16, dims, strides)?;
        tensor.link(Attribute::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, &[offsets])?;
        tensor.finalize()
    }

    /// A number of every packed row and head, `[tokens, heads]`.
    pub(super) fn of_rows(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let (heads, longest) = (i64::from(self.key.heads), i64::from(self.key.longest));
        let dims = [i64::from(self.key.segments), heads, longest, 1];
        let strides = [longest * heads, 1, heads, 1];
        let mut tensor = self.tensor(id as i64, DataType::CUDNN_DATA_FLOAT, dims, strides)?;
        tensor.link(Attribute::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, &[offsets])?;
        tensor.finalize()
    }

    /// Rows of every segment.
    pub(super) fn lengths(&self) -> Result<Arc<Descriptor>> {
        let dims = [i64::from(self.key.segments), 1, 1, 1];
        self.tensor(Id::Lengths as i64, DataType::CUDNN_DATA_INT32, dims, [1; 4])?.finalize()
    }

    /// First element of every segment, and the element behind the last.
    pub(super) fn offsets(&self, id: Id) -> Result<Arc<Descriptor>> {
        let dims = [i64::from(self.key.segments) + 1, 1, 1, 1];
        self.tensor(id as i64, DataType::CUDNN_DATA_INT64, dims, [1; 4])?.finalize()
    }

    /// A value that the host gives in the arguments of a call.
    pub(super) fn host_value(&self, id: Id) -> Result<Arc<Descriptor>> {
        let mut tensor = self.tensor(id as i64, DataType::CUDNN_DATA_FLOAT, [1; 4], [1; 4])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true])?;
        tensor.finalize()
    }

    /// Scores, which exist within a graph only.
    pub(super) fn scores(&mut self, kind: DataType) -> Result<(i64, Arc<Descriptor>)> {
        let (heads, longest) = (i64::from(self.key.heads), i64::from(self.key.longest));
        let dims = [i64::from(self.key.segments), heads, longest, longest];
        let strides = [heads * longest * longest, longest * longest, longest, 1];
        let id = self.inner;
        self.inner += 1;
        let mut tensor = self.tensor(id, kind, dims, strides)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[true])?;
        Ok((id, tensor.finalize()?))
    }

    fn tensor(&self, id: i64, kind: DataType, dims: [i64; 4], strides: Strides) -> Result<Descriptor> {
        let mut tensor = Descriptor::new(self.library, DescriptorType::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, &[kind])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &dims)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &strides)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT_BYTES])?;
        Ok(tensor)
    }
}
