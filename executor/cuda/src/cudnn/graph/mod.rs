//! Graphs of attention over packed rows.

mod backward;
mod forward;
mod mask;
mod tensor;

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;

use super::descriptor::Descriptor;
use super::error::Result;
use super::library::Library;
use super::plan_key::PlanKey;
pub(super) use tensor::Id;
use tensor::Tensors;

/// Makes the graph of a key.
pub(super) fn of_key(library: &Arc<Library>, key: &PlanKey) -> Result<Arc<Descriptor>> {
    let mut tensors = Tensors::new(library, key);
    let operation = match key.is_backward {
        true => backward::operation(&mut tensors)?,
        false => forward::operation(&mut tensors)?,
    };
    of_operations(library, &[&operation])
}

/// Makes a graph of operations.
fn of_operations(library: &Arc<Library>, operations: &[&Arc<Descriptor>]) -> Result<Arc<Descriptor>> {
    let mut graph = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
    graph.link(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, operations)?;
    graph.finalize()
}
