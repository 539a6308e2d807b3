//! Attention graphs over packed rows.

mod backward;
mod composite_backward;
mod composite_forward;
mod form;
mod forward;
mod mask;
mod operations;
mod tensor;

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;

use super::descriptor::Descriptor;
use super::error::Result;
use super::library::Library;
use super::plan_key::PlanKey;
pub use form::Form;
pub(super) use form::SCRATCH_ALIGNMENT_BYTES;
use operations::Operations;
pub(super) use tensor::Id;
use tensor::Tensors;

/// Creates the graph for a key.
pub(super) fn for_key(library: &Arc<Library>, key: &PlanKey, form: Form) -> Result<Arc<Descriptor>> {
    let mut tensors = Tensors::new(library, key, form);
    match (form, key.is_backward) {
        (Form::Single, false) => from_operations(library, &[&forward::operation(&mut tensors)?]),
        (Form::Single, true) => from_operations(library, &[&backward::operation(&mut tensors)?]),
        (_, false) => composite_forward::graph(Operations::new(tensors)?),
        (_, true) => composite_backward::graph(Operations::new(tensors)?),
    }
}

/// Creates a graph from operations.
fn from_operations(library: &Arc<Library>, operations: &[&Arc<Descriptor>]) -> Result<Arc<Descriptor>> {
    let mut graph = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
    graph.link(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, operations)?;
    graph.finalize()
}
