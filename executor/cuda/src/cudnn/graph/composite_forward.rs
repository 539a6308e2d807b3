//! The forward graph as products, softmax and mask.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnDataType_t as DataType;
use cudarc::cudnn::sys::cudnnPointwiseMode_t as Mode;
use cudarc::cudnn::sys::cudnnReduceTensorOp_t as Reduction;

use super::super::descriptor::Descriptor;
use super::super::error::Result;
use super::operations::{Operations, Product};
use super::tensor::Id;

/// Creates the graph: output and log-sum-exp for packed queries, keys and values.
pub(super) fn graph(mut operations: Operations<'_>) -> Result<Arc<Descriptor>> {
    let graph = &mut operations;
    let key = graph.tensors.key;
    let rows = graph.tensors.offsets(Id::RowOffsets)?;
    let queries = graph.tensors.row_columns(Id::Queries, key.heads, &rows)?;
    let keys = graph.tensors.transposed_of_row(Id::Keys, &rows)?;
    let values = graph.tensors.row_columns(Id::Values, key.kv_heads, &rows)?;
    let output = graph.tensors.output_rows(Id::Output, &graph.tensors.offsets(Id::OutputOffsets)?)?;
    let log_sums = graph.tensors.log_sums(&graph.tensors.offsets(Id::LogSumOffsets)?)?;

    let scale = Arc::clone(&graph.scale);
    let scores = graph.scores(&queries, &keys)?;
    let scores = graph.map(Mode::CUDNN_POINTWISE_MUL, &scores, Some(&scale))?;
    let scores = graph.mask(&scores)?;

    let greatest = graph.tensors.row_numbers()?;
    graph.reduce_into(Reduction::CUDNN_REDUCE_TENSOR_MAX, &scores, &greatest)?;
    let scores = graph.map(Mode::CUDNN_POINTWISE_SUB, &scores, Some(&greatest))?;
    let powers = graph.map(Mode::CUDNN_POINTWISE_EXP, &scores, None)?;
    let sums = graph.tensors.row_numbers()?;
    graph.reduce_into(Reduction::CUDNN_REDUCE_TENSOR_ADD, &powers, &sums)?;
    let logarithms = graph.tensors.row_numbers()?;
    graph.map_into(Mode::CUDNN_POINTWISE_LOG, &sums, None, &logarithms)?;
    graph.map_into(Mode::CUDNN_POINTWISE_ADD, &greatest, Some(&logarithms), &log_sums)?;
    let probabilities = graph.tensors.scores(DataType::CUDNN_DATA_BFLOAT16)?.1;
    graph.map_into(Mode::CUDNN_POINTWISE_DIV, &powers, Some(&sums), &probabilities)?;

    graph.multiply(Product::QueriesOverKeys, &probabilities, &values, &output)?;
    graph.graph()
}
