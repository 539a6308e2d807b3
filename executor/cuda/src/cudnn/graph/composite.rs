//! Composite graphs: products, sums and element functions, which an engine recognizes as attention.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnDataType_t as DataType, cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduction,
};

use super::super::descriptor::Descriptor;
use super::super::library::Result;
use super::form::{Form, Id};
use super::operations::{Operations, Product};

/// Graph tensor.
type Tensor = Arc<Descriptor>;

/// Creates the backward graph: gradients of packed queries, keys and values.
pub(super) fn backward(mut operations: Operations<'_>) -> Result<Tensor> {
    let graph = &mut operations;
    let key = graph.tensors.key;
    let rows = graph.tensors.offsets(Id::RowOffsets)?;
    let outputs = graph.tensors.offsets(Id::OutputOffsets)?;
    let numbers = graph.tensors.offsets(Id::LogSumOffsets)?;
    let queries = graph.tensors.row_columns(Id::Queries, key.heads, &rows)?;
    let keys = graph.tensors.transposed_of_row(Id::Keys, &rows)?;
    let values = graph.tensors.transposed_of_row(Id::Values, &rows)?;
    let output = graph.tensors.output_rows(Id::Output, &outputs)?;
    let d_output = graph.tensors.output_rows(Id::DOutput, &outputs)?;
    let log_sums = graph.tensors.log_sums(&numbers)?;
    let d_queries = graph.tensors.row_columns(Id::DQueries, key.heads, &rows)?;
    let gradients = graph.tensors.gradient_offsets(&rows)?;

    // Sum of the output times its gradient, for every row and head.
    let weighted = graph.tensors.output_numbers()?;
    graph.map_into(Mode::CUDNN_POINTWISE_MUL, &d_output, Some(&output), &weighted)?;
    let sums = graph.tensors.row_numbers()?;
    graph.reduce_into(Reduction::CUDNN_REDUCE_TENSOR_ADD, &weighted, &sums)?;
    let one = graph.tensors.host_value(Id::One)?;
    let row_sums = graph.tensors.row_sums(&numbers)?;
    graph.map_into(Mode::CUDNN_POINTWISE_MUL, &sums, Some(&one), &row_sums)?;

    // Probabilities, and value gradients.
    let scale = Arc::clone(&graph.scale);
    let scores = graph.scores(&queries, &keys)?;
    let scores = graph.map(Mode::CUDNN_POINTWISE_MUL, &scores, Some(&scale))?;
    let scores = graph.map(Mode::CUDNN_POINTWISE_SUB, &scores, Some(&log_sums))?;
    let scores = graph.mask(&scores)?;
    let probabilities = graph.map(Mode::CUDNN_POINTWISE_EXP, &scores, None)?;
    add_gradient(graph, &probabilities, &d_output, (Id::DValues, Id::DValuesOfHeads), &gradients)?;

    // Score gradients, and key gradients.
    let d_scores = graph.scores(&d_output, &values)?;
    let d_scores = graph.map(Mode::CUDNN_POINTWISE_SUB, &d_scores, Some(&row_sums))?;
    let d_scores = graph.map(Mode::CUDNN_POINTWISE_MUL, &d_scores, Some(&probabilities))?;
    let d_scores = graph.map(Mode::CUDNN_POINTWISE_MUL, &d_scores, Some(&scale))?;
    add_gradient(graph, &d_scores, &queries, (Id::DKeys, Id::DKeysOfHeads), &gradients)?;

    // Query gradients.
    let untransposed = graph.tensors.inner_of_row(&rows)?;
    graph.reorder_into(&keys, &untransposed)?;
    if graph.tensors.form == Form::Direct {
        graph.multiply(Product::QueriesOverKeys, &d_scores, &untransposed, &d_queries)?;
        return graph.graph();
    }
    let d_queries_sum = graph.tensors.query_sums(&rows)?;
    graph.multiply(Product::QueriesOverKeys, &d_scores, &untransposed, &d_queries_sum)?;
    graph.map_into(Mode::CUDNN_POINTWISE_IDENTITY, &d_queries_sum, None, &d_queries)?;
    graph.graph()
}

/// Multiplies transposed scores by query head rows: the key or value gradient, summed over the query heads
/// that share it.
fn add_gradient(
    graph: &mut Operations<'_>,
    scores: &Tensor,
    factors: &Tensor,
    (id, id_of_heads): (Id, Id),
    offsets: &Tensor,
) -> Result<()> {
    let key = graph.tensors.key;
    let transposed = graph.tensors.transposed_scores(DataType::CUDNN_DATA_BFLOAT16)?;
    graph.reorder_into(scores, &transposed)?;
    let gradient = graph.tensors.gradient(id, offsets)?;
    if key.heads == key.kv_heads {
        return graph.multiply(Product::KeysOverQueries, &transposed, factors, &gradient);
    }
    let of_heads = graph.tensors.query_head_gradient(id_of_heads, offsets)?;
    graph.multiply(Product::KeysOverQueries, &transposed, factors, &of_heads)?;
    graph.reduce_into(Reduction::CUDNN_REDUCE_TENSOR_ADD, &of_heads, &gradient)
}

/// Creates the forward graph: output and log-sum-exp for packed queries, keys and values.
pub(super) fn forward(mut operations: Operations<'_>) -> Result<Tensor> {
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
