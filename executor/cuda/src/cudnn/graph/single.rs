//! Graphs with a single operation, forward and backward, and their masks.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
    cudnnDataType_t as DataType, cudnnPointwiseMode_t as Mode,
};

use super::form::{Id, Tensors};
use crate::cudnn::descriptor::Descriptor;
use crate::cudnn::library::Result;

/// Creates the forward operation: output and log-sum-exp for packed queries, keys and values.
pub(super) fn forward(tensors: &mut Tensors<'_>) -> Result<Arc<Descriptor>> {
    let key = tensors.key;
    let rows = tensors.offsets(Id::RowOffsets)?;
    let parts = [
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, tensors.row_columns(Id::Queries, key.heads, &rows)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, tensors.row_columns(Id::Keys, key.kv_heads, &rows)?),
        (
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC,
            tensors.row_columns(Id::Values, key.kv_heads, &rows)?,
        ),
        (
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC,
            tensors.output_rows(Id::Output, &tensors.offsets(Id::OutputOffsets)?)?,
        ),
        (
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC,
            tensors.log_sums(&tensors.offsets(Id::LogSumOffsets)?)?,
        ),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, tensors.host_value(Id::Scale)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_QDESC, tensors.lengths(Id::QueryLengths)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_KVDESC, tensors.lengths(Id::KeyLengths)?),
    ];
    let kind = DescriptorType::CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR;
    let mut operation = Descriptor::new(tensors.library, kind)?;
    for (attribute, part) in &parts {
        operation.link(*attribute, &[part])?;
    }
    if key.is_causal {
        let mask = CausalMask::new(tensors)?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH, &[&mask.graph])?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, &[mask.input])?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, &[mask.output])?;
    }
    operation.finalize()
}

/// Creates the backward operation: gradients of packed queries, keys and values.
pub(super) fn backward(tensors: &mut Tensors<'_>) -> Result<Arc<Descriptor>> {
    let key = tensors.key;
    let rows = tensors.offsets(Id::RowOffsets)?;
    let outputs = tensors.offsets(Id::OutputOffsets)?;
    let gradients = tensors.gradient_offsets(&rows)?;
    let parts = [
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_QDESC, tensors.row_columns(Id::Queries, key.heads, &rows)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_KDESC, tensors.row_columns(Id::Keys, key.kv_heads, &rows)?),
        (
            Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_VDESC,
            tensors.row_columns(Id::Values, key.kv_heads, &rows)?,
        ),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_ODESC, tensors.output_rows(Id::Output, &outputs)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_DODDESC, tensors.output_rows(Id::DOutput, &outputs)?),
        (
            Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_STATSDESC,
            tensors.log_sums(&tensors.offsets(Id::LogSumOffsets)?)?,
        ),
        (
            Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_DQDESC,
            tensors.row_columns(Id::DQueries, key.heads, &rows)?,
        ),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_DKDESC, tensors.gradient(Id::DKeys, &gradients)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_DVDESC, tensors.gradient(Id::DValues, &gradients)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_SCALEDESC, tensors.host_value(Id::Scale)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_SEQ_LEN_QDESC, tensors.lengths(Id::QueryLengths)?),
        (Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_SEQ_LEN_KVDESC, tensors.lengths(Id::KeyLengths)?),
    ];
    let kind = DescriptorType::CUDNN_BACKEND_OPERATION_SDPA_BWD_DESCRIPTOR;
    let mut operation = Descriptor::new(tensors.library, kind)?;
    for (attribute, part) in &parts {
        operation.link(*attribute, &[part])?;
    }
    if tensors.form.is_bounded(key) {
        let tokens = [i64::from(key.tokens)];
        operation.set(Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_MAX_TOTAL_SEQ_LEN_Q, &tokens)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_MAX_TOTAL_SEQ_LEN_KV, &tokens)?;
    }
    if key.is_causal {
        let mask = CausalMask::new(tensors)?;
        operation.link(Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_SUBGRAPH, &[&mask.graph])?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_SUBGRAPH_INPUT_UID, &[mask.input])?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_SDPA_BWD_SUBGRAPH_OUTPUT_UID, &[mask.output])?;
    }
    operation.finalize()
}

/// Graph that replaces the scores above the diagonal by a host value.
struct CausalMask {
    graph: Arc<Descriptor>,
    input: i64,
    output: i64,
}

impl CausalMask {
    fn new(tensors: &mut Tensors<'_>) -> Result<Self> {
        let (input, scores) = tensors.scores(DataType::CUDNN_DATA_FLOAT)?;
        let (output, masked) = tensors.scores(DataType::CUDNN_DATA_FLOAT)?;
        let kind = DescriptorType::CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR;
        let mut mask = Descriptor::new(tensors.library, kind)?;
        let replaced = tensors.host_value(Id::Later)?;
        mask.link(Attribute::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC, &[&scores])?;
        mask.link(Attribute::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC, &[&replaced])?;
        mask.link(Attribute::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC, &[&masked])?;
        let is_kept = Mode::CUDNN_POINTWISE_CMP_GE;
        mask.set(Attribute::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE, &[is_kept])?;
        let mask = mask.finalize()?;
        Ok(Self { graph: super::from_operations(tensors.library, &[&mask])?, input, output })
    }
}
