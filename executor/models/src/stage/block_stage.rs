//! A stage of blocks: built from the model configuration, run over microbatches, assembled from shards.
//!
//! **Guarantees.** A stage computes the same bits as the same blocks inside a longer stage; microbatch
//! gradients are added in backward order. Recomputed activations have the same bits as stored activations.
//! Blocks before the first trained parameter save nothing and have no backward.

use super::Stage;
use crate::block::{
    BackwardPass, Block, BlockOutput, ForwardPass, KeptRows, MicrobatchContext, PassParameters,
    SavedActivations, StageBlocks, TensorParallel,
};
use crate::error::{Error, Result};
use crate::families::{FrozenModules, ModelConfig, StageRange};
use crate::parameters::weights::{self, WeightSource};
use crate::parameters::{BUCKET_ELEMENTS, Parameters, PendingWeights};
use dflop_device::{Device, Tensor};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

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
            Ok(self.blocks.forward(&mut pass, input, false)?.0)
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

/// Stage options that do not depend on the model.
#[derive(Debug, Clone)]
pub struct StageSettings<D: Device> {
    /// Activations that are kept per layer.
    pub activations: Activations,
    /// Ranks that share the stage layers; `None` if this rank has complete layers.
    pub tensor_parallel: Option<Arc<TensorParallel<D>>>,
    /// Gradient bucket size in elements; buckets are summed over replicas in one collective, and a larger
    /// parameter has a separate bucket. Must be the same on all ranks.
    pub bucket_elements: usize,
}

impl<D: Device> Default for StageSettings<D> {
    /// Stores all activations, has complete layers on this rank, and uses [`BUCKET_ELEMENTS`].
    fn default() -> Self {
        let activations = Activations::default();
        Self { activations, tensor_parallel: None, bucket_elements: BUCKET_ELEMENTS }
    }
}

impl ModelConfig {
    /// Builds a stage.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) if the model has no such layers, and errors from the
    /// source.
    pub fn stage<D: Device>(
        &self,
        device: &D,
        range: &StageRange,
        frozen: FrozenModules,
        activations: Activations,
        source: &dyn WeightSource,
    ) -> Result<BlockStage<D>> {
        let settings = StageSettings { activations, ..StageSettings::default() };
        self.stage_with(device, range, frozen, settings, source)
    }

    /// Builds a stage, or the part of a stage on this rank.
    ///
    /// # Errors
    /// The errors in [`ModelConfig::stage`]; [`Error::ModelConfig`](crate::Error::ModelConfig) if the ranks
    /// cannot share the stage.
    pub fn stage_with<D: Device>(
        &self,
        device: &D,
        range: &StageRange,
        frozen: FrozenModules,
        settings: StageSettings<D>,
        source: &dyn WeightSource,
    ) -> Result<BlockStage<D>> {
        let StageSettings { activations, tensor_parallel, bucket_elements } = settings;
        let StageRange { module, layers } = range;
        let options = StageOptions {
            name: format!("{module:?} {}..{}", layers.start, layers.end),
            activations,
            is_input_trained: self.is_input_trained(range, frozen),
            bucket_elements,
        };
        let blocks = self.stage_blocks(range, frozen, tensor_parallel)?;
        BlockStage::new(device.clone(), options, blocks, source)
    }
}

/// Layer activations that a stage keeps between forward and backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// All activations that backward reads.
    #[default]
    Stored,
    /// Only the layer input; backward recomputes the rest (activation checkpointing).
    Recomputed,
    /// The same for one layer in this number, from the first layer in the stage on; all activations of other
    /// layers.
    RecomputedEvery(NonZeroUsize),
}

/// Stage options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageOptions {
    /// Stage name for errors.
    pub name: String,
    /// Activations that are kept per layer.
    pub activations: Activations,
    /// Whether the input has a gradient, because an earlier stage or an encoder is trained.
    pub is_input_trained: bool,
    /// Gradient bucket size in elements.
    pub bucket_elements: usize,
}

impl StageOptions {
    /// Creates options for a stage that stores all activations and whose input has a gradient.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            activations: Activations::Stored,
            is_input_trained: true,
            bucket_elements: BUCKET_ELEMENTS,
        }
    }
}

/// Returns complete stage parameters as in checkpoints, on the first tensor-parallel rank; `None` on all
/// other ranks.
///
/// All ranks in the group must call it together. Tensors are assembled one by one.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if the job has ended, [`Error::Replicas`](crate::Error::Replicas) if
/// two ranks hold different bits for the same values.
pub fn assemble<D: Device>(stage: &(impl Stage<D> + ?Sized)) -> Result<Option<Vec<weights::Tensor>>> {
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
        tensors.extend(whole.map(|values| weights::Tensor { name, shape, values }));
    }
    let is_first = stage.tensor_parallel().is_none_or(|group| group.tp_rank().rank == 0);
    Ok(is_first.then_some(tensors))
}

/// Blocks in a stage, and the buffers that passes save and skip.
pub(super) struct BlockList<D: Device> {
    blocks: Vec<Box<dyn Block<D>>>,
    /// Whether a block, or anything before it, is trained.
    has_backward: Vec<bool>,
    /// Whether anything before a block is trained.
    needs_input: Vec<bool>,
    /// Index of the first parameter that was declared together with a block.
    first_parameters: Vec<usize>,
    is_input_trained: bool,
    activations: Activations,
}

impl<D: Device> BlockList<D> {
    /// Creates a block list.
    ///
    /// - `first_parameters`, `is_trained`: one per block
    pub(super) fn new(
        blocks: Vec<Box<dyn Block<D>>>,
        first_parameters: Vec<usize>,
        is_trained: &[bool],
        is_input_trained: bool,
        activations: Activations,
    ) -> Self {
        let mut is_reached = is_input_trained;
        let mut has_backward = Vec::with_capacity(blocks.len());
        let mut needs_input = Vec::with_capacity(blocks.len());
        for is_trained in is_trained {
            needs_input.push(is_reached);
            is_reached |= is_trained;
            has_backward.push(is_reached);
        }
        Self { blocks, has_backward, needs_input, first_parameters, is_input_trained, activations }
    }

    /// Returns whether a block, or anything before the blocks, is trained.
    pub(super) fn has_backward(&self) -> bool {
        self.has_backward.last().copied().unwrap_or(self.is_input_trained)
    }

    /// Returns whether a forward pass of the blocks has a backward pass to follow.
    pub(super) fn is_trained(&self) -> bool {
        self.has_backward.last().copied().unwrap_or(false)
    }

    /// Runs all blocks; returns the buffers that each block saves for the backward pass.
    ///
    /// - `has_backward`: whether a backward pass follows; without one nothing is saved
    pub(super) fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        mut input: Option<Tensor<D>>,
        has_backward: bool,
    ) -> Result<(BlockOutput<D>, Vec<SavedActivations<D>>)> {
        let mut all = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let mut saved = SavedActivations::default();
            // Only now, so that gathers for later blocks overlap with this block.
            pass.parameters.wait_values(self.block_parameters(index, pass.parameters.specs().len()))?;
            let output = block.forward(pass, input.take(), &mut saved)?;
            if !(has_backward && self.has_backward[index]) {
                saved = SavedActivations::default();
            } else if self.is_recomputed(index) {
                saved.keep_input_only();
            }
            all.push(saved);
            match output {
                BlockOutput::Rows(rows) => input = Some(rows),
                // only the last block in a model returns a loss
                loss @ BlockOutput::Loss(_) => return Ok((loss, all)),
            }
        }
        let problem = "missing: an empty stage needs the previous stage's rows".to_owned();
        let rows = input.ok_or(Error::Input { input: "rows of the stage before", problem })?;
        Ok((BlockOutput::Rows(rows), all))
    }

    /// Runs all blocks in reverse, down to the first trained block, and reports complete gradients.
    ///
    /// - returns the input gradient; `None` if nothing before the blocks is trained
    pub(super) fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        saved: Vec<SavedActivations<D>>,
        mut gradient: Option<Tensor<D>>,
        mut done: impl FnMut(&mut Parameters<D>, usize) -> Result<()>,
    ) -> Result<Option<Tensor<D>>> {
        for (index, mut saved) in saved.into_iter().enumerate().rev() {
            if !self.has_backward[index] {
                return Ok(None);
            }
            let block = &self.blocks[index];
            if self.is_recomputed(index) {
                let input = saved.take();
                let BackwardPass { device, context, tensor, .. } = *pass;
                let parameters = PassParameters::Read(pass.parameters);
                let mut again =
                    ForwardPass { device, parameters, context, tensor, kept: KeptRows::default() };
                block.forward(&mut again, Some(input), &mut saved)?;
            }
            gradient = block.backward(pass, gradient, &mut saved, self.needs_input[index])?;
            let first = self.first_parameters[index];
            // blocks that were declared together complete together
            if index == 0 || self.first_parameters[index - 1] != first {
                done(pass.parameters, first)?;
            }
        }
        Ok(if self.is_input_trained { gradient } else { None })
    }

    /// Computes logits for all rows; `None` if the last block has none.
    pub(super) fn logits(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        let Some((last, before)) = self.blocks.split_last() else { return Ok(None) };
        let mut rows = input;
        for block in before {
            if let BlockOutput::Rows(output) =
                block.forward(pass, rows.take(), &mut SavedActivations::default())?
            {
                rows = Some(output);
            }
        }
        rows.map_or(Ok(None), |rows| last.logits(pass, &rows))
    }

    /// Returns the indices of the parameters that were declared together with a block.
    ///
    /// - `all`: number of parameters in the stage
    fn block_parameters(&self, block: usize, all: usize) -> Range<usize> {
        let first = self.first_parameters[block];
        let next = self.first_parameters[block..].iter().find(|&&other| other > first);
        first..next.copied().unwrap_or(all)
    }

    fn is_recomputed(&self, block: usize) -> bool {
        let every = match self.activations {
            Activations::Stored => return false,
            Activations::Recomputed => 1,
            Activations::RecomputedEvery(every) => every.get(),
        };
        let layers_before = || self.blocks[..block].iter().filter(|block| block.is_recomputable()).count();
        self.blocks[block].is_recomputable() && layers_before().is_multiple_of(every)
    }
}
