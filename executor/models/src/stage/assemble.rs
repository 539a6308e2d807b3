//! Assembles complete stage tensors from tensor-parallel shards.

use super::Stage;
use crate::error::Result;
use crate::parameters::weights::Tensor;
use dflop_device::Device;

/// Returns complete stage parameters as in checkpoints, on the first tensor-parallel rank; `None` on all
/// other ranks.
///
/// All ranks in the group must call it together. Tensors are assembled one by one.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if the job has ended, [`Error::Replicas`](crate::Error::Replicas) if
/// two ranks hold different bits for the same values.
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
