//! Tensor parallelism: each rank in a group holds a part of every layer.
//!
//! Attention and MLP each consist of a column-parallel layer, sharded by outputs, and a row-parallel layer,
//! sharded by inputs: forward sums over ranks after the second layer, backward after the first. Heads are not
//! divided. Embedding and LM head are sharded by vocabulary. Everything else is computed on every rank, from
//! the same bits.
//!
//! **Guarantees.** Rows between blocks, losses, and gradients of replicated parameters have the same bits on
//! all ranks: a sum has one order, and all ranks receive the result ([`Comm::all_reduce`]). Only the first
//! rank adds the bias in a row-parallel layer.
//!
//! # Source
//! Shoeybi et al.: "Megatron-LM", 2019, arXiv:1909.08053, section 3.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::parameters::weights::{ParameterSpec, TpRank};
use dflop_comm::{Comm, Payload, PayloadShape, StepContext};
use dflop_device::{Device, DeviceComm, Staged, Tensor};

/// Tag for the messages that send tensor parts to the first rank.
const ASSEMBLE: u64 = 0x7e_5053;

/// Tensor-parallel group, as seen by one rank.
///
/// All ranks in a group run the same passes on the same stages in the same order. Ranks that are threads in
/// one process may share a device, but must not call stages from inside
/// [`Runtime::run`](dflop_device::Runtime::run) on a shared device: a waiting rank would hold a thread that
/// the remaining ranks need.
pub struct TensorParallel<D: Device> {
    comm: Arc<dyn DeviceComm<D>>,
    step: AtomicU64,
}

impl<D: Device> fmt::Debug for TensorParallel<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorParallel({} of {})", self.comm().rank(), self.comm().size())
    }
}

impl<D: Device> TensorParallel<D> {
    /// Creates a group from all ranks in a communicator, which must be a separate [split](Comm::split) of the
    /// job communicator. Tensors on `device` are exchanged through the host.
    #[must_use]
    pub fn new(device: D, comm: Arc<dyn Comm>) -> Self {
        Self::over(Arc::new(Staged::new(device, comm)))
    }

    /// Creates a group from all ranks in a tensor communicator.
    #[must_use]
    pub fn over(comm: Arc<dyn DeviceComm<D>>) -> Self {
        Self { comm, step: AtomicU64::new(0) }
    }

    /// Returns the rank and size in the group.
    #[must_use]
    pub fn tp_rank(&self) -> TpRank {
        TpRank { rank: self.comm().rank(), size: self.comm().size() }
    }

    /// Returns the group communicator for the host.
    #[must_use]
    pub fn comm(&self) -> &dyn Comm {
        self.comm.host()
    }

    /// Returns the group communicator for tensors.
    #[must_use]
    pub fn tensors(&self) -> &dyn DeviceComm<D> {
        &*self.comm
    }

    /// Sets the step for the following passes: messages carry it, and ranks at different steps end the job.
    pub fn start_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Returns the context for sums in one pass.
    pub(crate) fn pass(&self, microbatch: Option<usize>, action: &str) -> TensorPass<'_, D> {
        let step = self.step.load(Ordering::Relaxed);
        let at = match microbatch {
            Some(microbatch) => StepContext::microbatch(step, microbatch as u32, action),
            None => StepContext::step(step, action),
        };
        TensorPass { group: self, at }
    }

    /// Sums over all ranks; all ranks receive the same bits.
    ///
    /// # Errors
    /// [`Error::Comm`] if the job has ended.
    pub fn all_reduce(&self, at: StepContext, tensor: &mut Tensor<D>) -> Result<()> {
        // all ranks have the same rows, so all ranks skip the sum
        if tensor.is_empty() {
            return Ok(());
        }
        Ok(self.comm.all_reduce(at, tensor)?)
    }

    /// Assembles a tensor from the parts of all ranks: weights, or any tensor with an element per weight.
    ///
    /// - `values`: part on this rank
    /// - returns the complete tensor, `spec.shape`, on the first rank; `None` on all other ranks
    ///
    /// All ranks call it for the same tensors in the same order. Replicas are compared with the original.
    ///
    /// # Errors
    /// [`Error::Comm`] if the job has ended, [`Error::Replicas`] if two ranks hold different bits for the
    /// same part.
    ///
    /// # Panics
    /// Never: received parts have the requested type.
    pub fn assemble(&self, spec: &ParameterSpec, values: &[f32]) -> Result<Option<Vec<f32>>> {
        let TpRank { rank: own, size } = self.tp_rank();
        let at = StepContext::step(self.step.load(Ordering::Relaxed), "assemble tensors");
        // only the first rank needs memory for complete tensors
        if own > 0 {
            let payload = Payload::f32(1, values.len(), values.to_vec())?;
            self.comm().send(0, ASSEMBLE, at, payload)?;
            return Ok(None);
        }
        let mut parts = vec![values.to_vec()];
        for rank in 1..size {
            let shape = PayloadShape::f32(1, spec.shard.rank_shape(rank, &spec.shape).iter().product());
            let part = self.comm().recv(rank, ASSEMBLE, at, shape)?.into_f32();
            parts.push(part.expect("received parts have the requested type"));
        }
        let mut whole = vec![0.0; spec.shape.iter().product()];
        for (rank, part) in parts.iter().enumerate() {
            let original = spec.shard.original(rank);
            // bits instead of values: NaN equals itself, and 0 differs from -0
            let same = part.iter().zip(&parts[original]).all(|(a, b)| a.to_bits() == b.to_bits());
            if !same {
                let (tensor, world) = (spec.name.clone(), |rank| self.comm().world_rank(rank));
                return Err(Error::Replicas { tensor, ranks: [world(original), world(rank)] });
            }
            let mut rest = &part[..];
            for span in spec.shard.rank_spans(rank, &spec.shape) {
                let (values, remainder) = rest.split_at(span.len());
                whole[span].copy_from_slice(values);
                rest = remainder;
            }
        }
        Ok(Some(whole))
    }
}

/// Tensor-parallel group during a pass over one microbatch.
pub struct TensorPass<'a, D: Device> {
    /// The group.
    pub group: &'a TensorParallel<D>,
    /// Context that messages carry.
    pub at: StepContext,
}

#[expect(clippy::expl_impl_clone_on_copy, reason = "a derived one needs a device that is `Copy`")]
impl<D: Device> Clone for TensorPass<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for TensorPass<'_, D> {}

/// Sums over the ranks in the group, if there is a group.
pub(crate) fn all_reduce<D: Device>(pass: Option<TensorPass<'_, D>>, tensor: &mut Tensor<D>) -> Result<()> {
    pass.map_or(Ok(()), |pass| pass.group.all_reduce(pass.at, tensor))
}
