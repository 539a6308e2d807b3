//! Operations in composite graphs: products, sums over rows, element functions.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
    cudnnDataType_t as DataType, cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduction,
};

use super::super::descriptor::Descriptor;
use super::form::{Id, Tensors};
use crate::cudnn::library::Result;

/// Graph tensor.
type Tensor = Arc<Descriptor>;

/// Graph operations, and the tensors between them.
pub(super) struct Operations<'a> {
    pub(super) tensors: Tensors<'a>,
    /// Number of rows in every segment, which bounds the products: queries and keys.
    lengths: (Tensor, Tensor),
    /// Score factor.
    pub(super) scale: Tensor,
    done: Vec<Tensor>,
}

/// Product sizes that are rows in a segment.
#[derive(Clone, Copy)]
pub(super) enum Product {
    /// Rows of the result are queries, columns are keys.
    QueriesByKeys,
    /// Rows of the result are queries; the sum is over keys.
    QueriesOverKeys,
    /// Rows of the result are keys; the sum is over queries.
    KeysOverQueries,
}

/// Score axes.
#[derive(Clone, Copy)]
enum Axis {
    Query = 2,
    Key = 3,
}

impl<'a> Operations<'a> {
    pub(super) fn new(tensors: Tensors<'a>) -> Result<Self> {
        let lengths = (tensors.lengths(Id::QueryLengths)?, tensors.lengths(Id::KeyLengths)?);
        let scale = tensors.host_value(Id::Scale)?;
        Ok(Self { tensors, lengths, scale, done: Vec::new() })
    }

    /// Creates the graph.
    pub(super) fn graph(&self) -> Result<Tensor> {
        let done: Vec<&Tensor> = self.done.iter().collect();
        super::from_operations(self.tensors.library, &done)
    }

    /// Multiplies matrices into `c`.
    pub(super) fn multiply(&mut self, product: Product, a: &Tensor, b: &Tensor, c: &Tensor) -> Result<()> {
        let mut matmul = self.descriptor(DescriptorType::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        matmul.set(Attribute::CUDNN_ATTR_MATMUL_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        let matmul = matmul.finalize()?;
        let mut operation = self.descriptor(DescriptorType::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        let columns = Attribute::CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC;
        let summed = Attribute::CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC;
        let (queries, keys) = (&self.lengths.0, &self.lengths.1);
        let (rows, (other, other_rows)) = match product {
            Product::QueriesByKeys => (queries, (columns, keys)),
            Product::QueriesOverKeys => (queries, (summed, keys)),
            Product::KeysOverQueries => (keys, (summed, queries)),
        };
        operation.link(Attribute::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &[a])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &[b])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &[c])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[&matmul])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, &[rows])?;
        operation.link(other, &[other_rows])?;
        self.add(operation)
    }

    /// Multiplies queries and keys, or output and values, into scores.
    pub(super) fn scores(&mut self, rows: &Tensor, columns: &Tensor) -> Result<Tensor> {
        let scores = self.tensors.scores(DataType::CUDNN_DATA_FLOAT)?.1;
        self.multiply(Product::QueriesByKeys, rows, columns, &scores)?;
        Ok(scores)
    }

    /// Applies a function to the scores, and optionally a second tensor.
    pub(super) fn map(&mut self, mode: Mode, scores: &Tensor, other: Option<&Tensor>) -> Result<Tensor> {
        let mapped = self.tensors.scores(DataType::CUDNN_DATA_FLOAT)?.1;
        self.map_into(mode, scores, other, &mapped)?;
        Ok(mapped)
    }

    /// Applies a function to elements and writes them to `mapped`.
    pub(super) fn map_into(
        &mut self,
        mode: Mode,
        elements: &Tensor,
        other: Option<&Tensor>,
        mapped: &Tensor,
    ) -> Result<()> {
        let function = self.function(mode, DataType::CUDNN_DATA_FLOAT, None)?;
        self.point(&function, elements, other, None, mapped)
    }

    /// Sums or takes the maximum over columns into `reduced`.
    pub(super) fn reduce_into(&mut self, how: Reduction, elements: &Tensor, reduced: &Tensor) -> Result<()> {
        let mut reduction = self.descriptor(DescriptorType::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        reduction.set(Attribute::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        reduction.set(Attribute::CUDNN_ATTR_REDUCTION_OPERATOR, &[how])?;
        let reduction = reduction.finalize()?;
        let mut operation = self.descriptor(DescriptorType::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &[elements])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &[reduced])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[&reduction])?;
        self.add(operation)
    }

    /// Writes the same elements in a different order.
    pub(super) fn reorder_into(&mut self, elements: &Tensor, reordered: &Tensor) -> Result<()> {
        let mut operation = self.descriptor(DescriptorType::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &[elements])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &[reordered])?;
        self.add(operation)
    }

    /// Replaces the scores that a query does not attend to: rows after the segment, or later keys.
    pub(super) fn mask(&mut self, scores: &Tensor) -> Result<Tensor> {
        let (query, key) = (self.index(Axis::Query, scores)?, self.index(Axis::Key, scores)?);
        let (queries, keys) = self.lengths.clone();
        let is_query = self.compare(Mode::CUDNN_POINTWISE_CMP_LT, &query, &queries)?;
        let is_key = self.compare(Mode::CUDNN_POINTWISE_CMP_LT, &key, &keys)?;
        let is_pair = self.compare(Mode::CUDNN_POINTWISE_LOGICAL_AND, &is_query, &is_key)?;
        let masked = self.select(scores, &self.tensors.host_value(Id::Padding)?, &is_pair)?;
        if !self.tensors.key.is_causal {
            return Ok(masked);
        }
        let (query, key) = (self.index(Axis::Query, &masked)?, self.index(Axis::Key, &masked)?);
        let is_earlier = self.compare(Mode::CUDNN_POINTWISE_CMP_GE, &query, &key)?;
        self.select(&masked, &self.tensors.host_value(Id::Later)?, &is_earlier)
    }

    fn index(&mut self, axis: Axis, scores: &Tensor) -> Result<Tensor> {
        let index = self.tensors.scores(DataType::CUDNN_DATA_INT32)?.1;
        let mode = Mode::CUDNN_POINTWISE_GEN_INDEX;
        let function = self.function(mode, DataType::CUDNN_DATA_INT32, Some(axis))?;
        self.point(&function, scores, None, None, &index)?;
        Ok(index)
    }

    fn compare(&mut self, mode: Mode, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let compared = self.tensors.scores(DataType::CUDNN_DATA_BOOLEAN)?.1;
        let function = self.function(mode, DataType::CUDNN_DATA_BOOLEAN, None)?;
        self.point(&function, a, Some(b), None, &compared)?;
        Ok(compared)
    }

    fn select(&mut self, scores: &Tensor, otherwise: &Tensor, is_kept: &Tensor) -> Result<Tensor> {
        let selected = self.tensors.scores(DataType::CUDNN_DATA_FLOAT)?.1;
        let mode = Mode::CUDNN_POINTWISE_BINARY_SELECT;
        let function = self.function(mode, DataType::CUDNN_DATA_FLOAT, None)?;
        self.point(&function, scores, Some(otherwise), Some(is_kept), &selected)?;
        Ok(selected)
    }

    fn function(&self, mode: Mode, precision: DataType, axis: Option<Axis>) -> Result<Tensor> {
        let mut function = self.descriptor(DescriptorType::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        function.set(Attribute::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
        function.set(Attribute::CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
        if let Some(axis) = axis {
            function.set(Attribute::CUDNN_ATTR_POINTWISE_AXIS, &[axis as i64])?;
        }
        function.finalize()
    }

    fn point(
        &mut self,
        function: &Tensor,
        x: &Tensor,
        b: Option<&Tensor>,
        t: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<()> {
        let mut operation = self.descriptor(DescriptorType::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[function])?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &[x])?;
        if let Some(b) = b {
            operation.link(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &[b])?;
        }
        if let Some(t) = t {
            operation.link(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &[t])?;
        }
        operation.link(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &[y])?;
        self.add(operation)
    }

    fn descriptor(&self, kind: DescriptorType) -> Result<Descriptor> {
        Descriptor::new(self.tensors.library, kind)
    }

    fn add(&mut self, operation: Descriptor) -> Result<()> {
        self.done.push(operation.finalize()?);
        Ok(())
    }
}
