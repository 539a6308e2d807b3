//! The causal mask, as a graph within the attention operation.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;
use cudarc::cudnn::sys::cudnnDataType_t as DataType;
use cudarc::cudnn::sys::cudnnPointwiseMode_t as Mode;

use super::super::descriptor::Descriptor;
use super::super::error::Result;
use super::tensor::{Id, Tensors};

/// Graph that replaces the scores above the diagonal by a host value.
pub(super) struct CausalMask {
    pub(super) graph: Arc<Descriptor>,
    pub(super) input: i64,
    pub(super) output: i64,
}

impl CausalMask {
    pub(super) fn new(tensors: &mut Tensors<'_>) -> Result<Self> {
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
