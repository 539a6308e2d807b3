//! Attention graphs over packed rows.

mod composite;
mod form;
mod operations;
mod single;

pub use form::Form;
pub(super) use form::{Id, SCRATCH_ALIGNMENT_BYTES};

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
};
use form::Tensors;
use operations::Operations;

use super::descriptor::Descriptor;
use super::library::{Library, PlanKey, Result};

/// Creates the graph for a key.
pub(super) fn for_key(library: &Arc<Library>, key: &PlanKey, form: Form) -> Result<Arc<Descriptor>> {
    let mut tensors = Tensors::new(library, key, form);
    match (form, key.is_backward) {
        (Form::Single, false) => from_operations(library, &[&single::forward(&mut tensors)?]),
        (Form::Single, true) => from_operations(library, &[&single::backward(&mut tensors)?]),
        (_, false) => composite::forward(Operations::new(tensors)?),
        (_, true) => composite::backward(Operations::new(tensors)?),
    }
}

/// Creates a graph from operations.
fn from_operations(library: &Arc<Library>, operations: &[&Arc<Descriptor>]) -> Result<Arc<Descriptor>> {
    let mut graph = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
    graph.link(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, operations)?;
    graph.finalize()
}
