//! Assembles the whole tensors of a stage from the parts of tensor-parallel ranks.

use super::Stage;
use crate::error::Result;
use crate::weights::Tensor;
use dflop_device::Device;

/// Returns the whole parameters of a stage as in checkpoints, on the first rank of a tensor-parallel group;
/// `None` on the others.
///
/// All ranks of the group must call it together. Tensors are assembled one by one.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if the job has ended, [`Error::Replicas`](crate::Error::Replicas) if
/// two ranks hold different bits of the same values.
pub fn assemble<D: Device>(stage: &(impl Stage<D> + ?Sized)) -> Result<Option<Vec<Tensor>>> {
    stage.parameters().wait_all_values()?;
    let mut tensors = Vec::new();
    for (spec, values) in stage.parameters().owned() {
        let values = stage.device().download(values)?;
        let whole = match stage.tensor_parallel() {
            // collective: ranks other than the first send their part and get `None`
            Some(group) => group.assemble(spec, &values)?,
            None => Some(values),
        };
        let (name, shape) = (spec.name.clone(), spec.shape.clone());
        tensors.extend(whole.map(|values| Tensor { name, shape, values }));
    }
    let is_first = stage.tensor_parallel().is_none_or(|group| group.tp_rank().rank == 0);
    Ok(is_first.then_some(tensors))
}
