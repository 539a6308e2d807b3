//! Forward graph with a single operation.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;

use super::super::descriptor::Descriptor;
use super::super::error::Result;
use super::mask::CausalMask;
use super::tensor::{Id, Tensors};

/// Creates the operation: output and log-sum-exp for packed queries, keys and values.
pub(super) fn operation(tensors: &mut Tensors<'_>) -> Result<Arc<Descriptor>> {
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
