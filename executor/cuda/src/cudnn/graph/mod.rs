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
use super::library::Version;
use super::plan_key::PlanKey;
use serde::{Deserialize, Serialize};
pub(super) use tensor::Id;
use tensor::Tensors;

/// Bytes that places in the workspace are multiples of.
pub(super) const SCRATCH_ALIGNMENT_BYTES: u64 = 256;
/// First version with the causal mask as an operation.
const MASK_OPERATION: Version = Version(92_100);
/// First version with engines for the backward pass as one operation.
const BACKWARD_OPERATION: Version = Version(92_800);

/// Form of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    /// One operation.
    Single,
    /// Products, sums and functions of elements, which an engine recognises as attention.
    Composite,
}

/// Forms that a version may have engines for, best first.
pub(super) fn forms(version: Version, key: &PlanKey) -> &'static [Form] {
    let first = if key.is_backward { BACKWARD_OPERATION } else { MASK_OPERATION };
    let is_single = version >= first || (!key.is_backward && !key.is_causal);
    if is_single { &[Form::Single, Form::Composite] } else { &[Form::Composite] }
}

/// Tensors of a graph that lie in the workspace, and their bytes.
pub(super) fn scratch(key: &PlanKey, form: Form) -> Vec<(Id, u64)> {
    let _ = (key, form);
    Vec::new()
}

/// Makes the graph of a key.
pub(super) fn of_key(library: &Arc<Library>, key: &PlanKey, form: Form) -> Result<Arc<Descriptor>> {
    let _ = form;
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
