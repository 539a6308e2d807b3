//! Stage with consecutive blocks from one module.
//!
//! **Guarantees.** A stage computes the same bits as the same blocks inside a longer stage; microbatch
//! gradients are added in backward order. Recomputed activations have the same bits as stored activations.
//! Blocks before the first trained parameter save nothing and have no backward.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::block_list::BlockList;
use super::{Stage, StageOptions};
use crate::block::{
    BlockOutput, ForwardPass, KeptRows, MicrobatchContext, PassParameters, SavedActivations, StageBlocks,
    TensorParallel,
};
use crate::error::{Error, Result};
use crate::parameters::weights::WeightSource;
use crate::parameters::{Parameters, PendingWeights};
use dflop_device::{Device, Tensor};

/// Microbatch and action for a pass.
pub(super) type PassName<'a> = (Option<usize>, &'a str);

/// Saved microbatch state.
pub(super) struct InFlight<D: Device> {
    pub(super) context: Arc<MicrobatchContext<D>>,
    pub(super) saved: Vec<SavedActivations<D>>,
}

/// Consecutive module blocks, with parameters and saved microbatch activations.
pub struct BlockStage<D: Device> {
    pub(super) device: D,
    pub(super) name: String,
    pub(super) blocks: BlockList<D>,
    pub(super) parameters: Parameters<D>,
    pub(super) in_flight: BTreeMap<usize, InFlight<D>>,
    /// Weight gradients that are still to be computed, by microbatch, the last block first.
    pub(super) pending: BTreeMap<usize, Vec<PendingWeights<D>>>,
    /// Tensor-parallel ranks that have the remaining parts of the layers.
    pub(super) tensor: Option<Arc<TensorParallel<D>>>,
}

impl<D: Device> BlockStage<D> {
    /// Loads block parameters.
    ///
    /// # Errors
    /// Errors from the source: a tensor that is missing or has another shape; [`Error::Device`].
    pub fn new(
        device: D,
        options: StageOptions,
        blocks: StageBlocks<D>,
        source: &dyn WeightSource,
    ) -> Result<Self> {
        let StageOptions { name, activations, is_input_trained, bucket_elements } = options;
        let StageBlocks { blocks, is_trained, first_parameters, declaration, tensor } = blocks;
        let parameters = Parameters::new(&device, declaration.into_specs(), source, bucket_elements)?;
        let blocks = BlockList::new(blocks, first_parameters, &is_trained, is_input_trained, activations);
        let (in_flight, pending) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { device, name, blocks, parameters, in_flight, pending, tensor })
    }

    /// Runs the blocks on a microbatch and saves nothing.
    pub fn evaluate(
        &self,
        context: &MicrobatchContext<D>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        self.parameters.wait_all_values()?;
        self.on_device(|| {
            let mut pass = self.read_pass(context, "tensor-parallel evaluate");
            Ok(self.blocks.forward(&mut pass, input)?.0)
        })
    }

    /// Computes logits for all rows, `[rows, vocabulary]`; `None` for a stage without the LM head.
    pub fn logits(
        &self,
        context: &MicrobatchContext<D>,
        input: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        self.parameters.wait_all_values()?;
        self.on_device(|| self.blocks.logits(&mut self.read_pass(context, "tensor-parallel logits"), input))
    }

    /// Reads a microbatch loss, which waits for the device.
    ///
    /// # Errors
    /// [`Error::Loss`] if it is not finite.
    pub fn read_loss(&self, microbatch: usize, loss: &Tensor<D>) -> Result<f64> {
        let loss = self.device.read(loss)?.iter().sum::<f64>();
        if loss.is_finite() {
            return Ok(loss);
        }
        Err(Error::Loss { stage: self.name.clone(), microbatch, loss })
    }

    /// Runs [`backward_with`](Stage::backward_with) without reports.
    ///
    /// # Errors
    /// [`Error::Order`] if the microbatch is not in flight, [`Error::Input`] if the gradient has the wrong
    /// size.
    pub fn backward(&mut self, microbatch: usize, gradient: Option<Tensor<D>>) -> Result<Option<Tensor<D>>> {
        self.backward_with(microbatch, gradient, &mut |_, _| Ok(()))
    }

    /// Returns the number of microbatches in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the size of the saved activations in bytes.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        let saved = self.in_flight.values().flat_map(|microbatch| &microbatch.saved);
        let pending = self.pending.values().flatten().map(PendingWeights::bytes);
        saved.map(SavedActivations::bytes).chain(pending).sum()
    }

    /// Runs on the device threads, unless the rank also waits for other ranks: it would hold a thread that
    /// ranks on the same device need.
    fn on_device<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        if self.tensor.is_some() { body() } else { self.device.run(body) }
    }

    /// Runs a pass that changes the stage, as [`on_device`](Self::on_device) does. A pass that waits for
    /// weights also waits for other ranks.
    pub(super) fn run_mut<R: Send>(&mut self, body: impl FnOnce(&mut Self) -> R + Send) -> R {
        if self.tensor.is_some() || self.parameters.is_gathering() {
            return body(self);
        }
        // the closure borrows the stage mutably, so it cannot borrow the device from it
        let device = self.device.clone();
        device.run(|| body(self))
    }

    /// Names the pass in an error about memory, and ends the job if only this rank knows that the pass
    /// failed, because the remaining ranks in the group wait for it.
    pub(super) fn or_end_job<T>(
        &self,
        (microbatch, action): PassName<'_>,
        pass: &str,
        result: Result<T>,
    ) -> Result<T> {
        let what = || format!("stage {}, {pass} of microbatch {}", self.name, microbatch.unwrap_or(0));
        let result = result.map_err(|error| error.while_allocating(what));
        if let (Err(error), Some(tensor)) = (&result, &self.tensor)
            && !matches!(error, Error::Comm(_))
        {
            let reason = format!("stage {}: {error}", self.name);
            tensor.comm().abort(tensor.pass(microbatch, action).at, &reason);
        }
        result
    }

    fn read_pass<'a>(&'a self, context: &'a MicrobatchContext<D>, action: &str) -> ForwardPass<'a, D> {
        let tensor = self.tensor.as_ref().map(|tensor| tensor.pass(None, action));
        let parameters = PassParameters::Read(&self.parameters);
        ForwardPass { device: &self.device, parameters, context, tensor, kept: KeptRows::default() }
    }

    pub(super) fn order(&self, microbatch: usize, problem: &'static str) -> Error {
        Error::Order { stage: self.name.clone(), microbatch, problem }
    }
}
