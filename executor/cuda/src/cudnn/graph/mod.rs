//! Graphs of attention over packed rows.

mod backward;
mod composite_backward;
mod composite_forward;
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
use super::library::Version;
use super::plan_key::PlanKey;
use operations::Operations;
use serde::{Deserialize, Serialize};
pub(super) use tensor::Id;
use tensor::Tensors;

/// Bytes that places in the workspace are multiples of.
pub(super) const SCRATCH_ALIGNMENT_BYTES: u64 = 256;
/// Bytes of elements.
const F32_BYTES: u64 = 4;
const BF16_BYTES: u64 = 2;
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
    if std::env::var("COMPOSITE").is_ok() {
        return &[Form::Composite];
    }
    let is_single = version >= first || (!key.is_backward && !key.is_causal);
    if is_single { &[Form::Single, Form::Composite] } else { &[Form::Composite] }
}

/// Tensors of a graph that lie in the workspace, and their bytes.
pub(super) fn scratch(key: &PlanKey, form: Form) -> Vec<(Id, u64)> {
    if form == Form::Single || !key.is_backward {
        return Vec::new();
    }
    let [heads, head_dim, row] = [key.heads, key.head_dim, key.row()].map(u64::from);
    let padded = u64::from(key.segments) * u64::from(key.longest);
    let tokens = u64::from(key.tokens);
    let (rows, queries) =
        if key.is_bounded() { (tokens, tokens * row) } else { (padded, padded * heads * head_dim) };
    let mut scratch = vec![(Id::RowSums, rows * heads * F32_BYTES), (Id::DQuerySums, queries * F32_BYTES)];
    if key.is_bounded() && key.heads != key.kv_heads {
        let bytes = tokens * row * u64::from(key.heads / key.kv_heads) * BF16_BYTES;
        scratch.extend([(Id::DKeysOfHeads, bytes), (Id::DValuesOfHeads, bytes)]);
    }
    for (_, bytes) in &mut scratch {
        *bytes = bytes.next_multiple_of(SCRATCH_ALIGNMENT_BYTES);
    }
    scratch
}

/// Makes the graph of a key.
pub(super) fn of_key(library: &Arc<Library>, key: &PlanKey, form: Form) -> Result<Arc<Descriptor>> {
    let mut tensors = Tensors::new(library, key);
    match (form, key.is_backward) {
        (Form::Single, false) => of_operations(library, &[&forward::operation(&mut tensors)?]),
        (Form::Single, true) => of_operations(library, &[&backward::operation(&mut tensors)?]),
        (Form::Composite, false) => composite_forward::graph(Operations::new(tensors)?),
        (Form::Composite, true) => composite_backward::graph(Operations::new(tensors)?),
    }
}

/// Makes a graph of operations.
fn of_operations(library: &Arc<Library>, operations: &[&Arc<Descriptor>]) -> Result<Arc<Descriptor>> {
    let mut graph = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
    graph.link(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, operations)?;
    graph.finalize()
}
