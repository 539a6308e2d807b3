//! The tensors of a stage, whole, whichever ranks hold their parts.

use super::Stage;
use crate::device::Device;
use crate::error::Result;
use crate::weights::Tensor;

/// Returns the parameters of a stage as checkpoints have them, whole; `None` on ranks of a tensor-parallel group but the
/// first.
///
/// All ranks of the group call it together. Parts are brought together tensor by tensor.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if the job is over, [`Error::Replicas`](crate::Error::Replicas) if two ranks hold
/// other bits of the same values.
pub fn assemble<D: Device>(stage: &Stage<D>) -> Result<Option<Vec<Tensor>>> {
    let mut tensors = Vec::new();
    for (spec, values) in stage.parameters().owned() {
        let values = stage.device().download(values)?;
        let whole = match stage.tensor_parallel() {
            Some(group) => group.assemble(spec, &values)?,
            None => Some(values),
        };
        let (name, shape) = (spec.name.clone(), spec.shape.clone());
        tensors.extend(whole.map(|values| Tensor { name, shape, values }));
    }
    let is_first = stage.tensor_parallel().is_none_or(|group| group.tp_rank().rank == 0);
    Ok(is_first.then_some(tensors))
}
