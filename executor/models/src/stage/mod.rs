//! Pipeline stage: consecutive blocks of one module, run microbatch by microbatch.
//!
//! `forward` takes the rows of the previous stage (or encoder tokens, or nothing) and saves the inputs of
//! backward by microbatch number. `backward` takes the gradient of the rows that forward returned,
//! accumulates the gradients of the parameters and returns the gradient of the input. Any number of
//! microbatches may be in flight, in any order.
//!
//! **Guarantees.** A stage computes the same bits as the same blocks inside a longer stage; gradients of
//! microbatches are added in the order of their backwards. Recomputed activations have the bits of stored
//! ones. Blocks before the first trained parameter save nothing and have no backward.

mod assemble;
mod build;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::context::MicrobatchContext;
use crate::error::{Error, Result};
use crate::parameters::{BUCKET_ELEMENTS, Parameters};
use crate::tensor_parallel::TensorParallel;
use crate::weight_gradients::{PendingWeights, WeightGradients};
use crate::weights::WeightSource;
use crate::{BackwardPass, Block, BlockOutput, ForwardPass, PassParameters, SavedActivations, StageBlocks};
pub use assemble::assemble;
pub use build::StageSettings;
use dflop_device::{Device, Tensor};

/// Activations that a stage keeps of a layer between forward and backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// Everything that backward reads.
    #[default]
    Stored,
    /// Only the input of the layer; backward recomputes the rest (activation checkpointing).
    Recomputed,
}

/// Options of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageOptions {
    /// Name for errors.
    pub name: String,
    /// Activations that are kept per layer.
    pub activations: Activations,
    /// Whether the input has a gradient, because an earlier stage or an encoder is trained.
    pub is_input_trained: bool,
    /// Elements of a bucket of gradients.
    pub bucket_elements: usize,
}

impl StageOptions {
    /// Makes options of a stage that stores all activations and whose input has a gradient.
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

/// Microbatch and action of a pass.
type PassName<'a> = (Option<usize>, &'a str);

/// Saved state of a microbatch.
struct InFlight<D: Device> {
    context: Arc<MicrobatchContext<D>>,
    saved: Vec<SavedActivations<D>>,
}

/// Consecutive blocks of a module, with their parameters and the saved activations of microbatches.
pub struct Stage<D: Device> {
    device: D,
    options: StageOptions,
    blocks: Vec<Box<dyn Block<D>>>,
    /// Whether a block, or anything before it, is trained.
    has_backward: Vec<bool>,
    /// Whether anything before a block is trained.
    needs_input: Vec<bool>,
    /// Index of the first parameter that was declared together with a block.
    first_parameters: Vec<usize>,
    parameters: Parameters<D>,
    in_flight: BTreeMap<usize, InFlight<D>>,
    /// Gradients of weights that are still to be computed, by microbatch, the last block first.
    pending: BTreeMap<usize, Vec<PendingWeights<D>>>,
    /// Ranks that have the other parts of the layers.
    tensor: Option<Arc<TensorParallel<D>>>,
}

impl<D: Device> Stage<D> {
    /// Loads the parameters of blocks.
    ///
    /// # Errors
    /// The errors of the source: a tensor that is missing or has another shape; [`Error::Device`].
    pub fn new(
        device: D,
        options: StageOptions,
        blocks: StageBlocks<D>,
        source: &dyn WeightSource,
    ) -> Result<Self> {
        let specs = blocks.declaration.into_specs();
        let parameters = Parameters::new(&device, specs, source, options.bucket_elements)?;
        let mut is_reached = options.is_input_trained;
        let mut has_backward = Vec::with_capacity(blocks.blocks.len());
        let mut needs_input = Vec::with_capacity(blocks.blocks.len());
        for is_trained in blocks.is_trained {
            needs_input.push(is_reached);
            is_reached |= is_trained;
            has_backward.push(is_reached);
        }
        Ok(Self {
            device,
            options,
            blocks: blocks.blocks,
            has_backward,
            needs_input,
            first_parameters: blocks.first_parameters,
            parameters,
            in_flight: BTreeMap::new(),
            pending: BTreeMap::new(),
            tensor: blocks.tensor,
        })
    }

    /// Runs the blocks on a microbatch and saves the inputs of its backward.
    ///
    /// - `input`: `[rows, width]` of the previous stage; encoder tokens, if any, for the first stage of the
    ///   LLM; nothing for the first stage of an encoder
    /// - returns rows for the next stage, or the sum of losses
    ///
    /// # Errors
    /// [`Error::Input`] if the input does not fit the context, [`Error::Order`] if the microbatch is in
    /// flight, [`Error::Comm`] if another rank of a tensor-parallel group failed. If a pass fails on a rank
    /// of such a group, the rank ends the job, because the others wait for it.
    pub fn forward(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        if self.in_flight.contains_key(&microbatch) {
            return Err(self.order(microbatch, "is in flight already"));
        }
        let at = (Some(microbatch), "tensor-parallel forward");
        let device = self.device.clone();
        let result = if self.tensor.is_some() {
            self.train_blocks(&context, at, input)
        } else {
            device.run(|| self.train_blocks(&context, at, input))
        };
        let result = result.map_err(|error| error.while_allocating(|| self.forward_of(microbatch)));
        let (output, saved) = self.or_end_job(at, result)?;
        // without a backward, nothing would remove the microbatch again
        if self.has_backward() {
            self.in_flight.insert(microbatch, InFlight { context, saved });
        }
        Ok(output)
    }

    /// Runs the blocks on a microbatch and saves nothing.
    pub fn evaluate(
        &self,
        context: &MicrobatchContext<D>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        self.on_device(|| {
            let mut pass = self.pass(context, (None, "tensor-parallel evaluate"));
            Ok(self.blocks().run(&mut pass, input)?.0)
        })
    }

    /// Computes the logits of all rows, `[rows, vocabulary]`; `None` for a stage without the LM head.
    pub fn logits(
        &self,
        context: &MicrobatchContext<D>,
        input: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        self.on_device(|| {
            let Some((last, before)) = self.blocks.split_last() else { return Ok(None) };
            let mut pass = self.pass(context, (None, "tensor-parallel logits"));
            let mut rows = input;
            for block in before {
                if let BlockOutput::Rows(output) =
                    block.forward(&mut pass, rows.take(), &mut SavedActivations::default())?
                {
                    rows = Some(output);
                }
            }
            rows.map_or(Ok(None), |rows| last.logits(&pass, &rows))
        })
    }

    /// Runs on the threads of the device, unless the rank waits for other ranks meanwhile: it would hold a
    /// thread that ranks on the same device need.
    fn on_device<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        if self.tensor.is_some() { body() } else { self.device.run(body) }
    }

    /// Ends the job if only this rank knows that the pass failed, because the other ranks of the group wait
    /// for it.
    fn or_end_job<T>(&self, (microbatch, action): PassName<'_>, result: Result<T>) -> Result<T> {
        if let (Err(error), Some(tensor)) = (&result, &self.tensor)
            && !matches!(error, Error::Comm(_))
        {
            let reason = format!("stage {}: {error}", self.options.name);
            tensor.comm().abort(tensor.pass(microbatch, action).at, &reason);
        }
        result
    }

    fn pass<'a>(
        &'a self,
        context: &'a MicrobatchContext<D>,
        (microbatch, action): PassName<'_>,
    ) -> ForwardPass<'a, D> {
        let tensor = self.tensor.as_ref().map(|tensor| tensor.pass(microbatch, action));
        let parameters = PassParameters::Read(&self.parameters);
        ForwardPass { device: &self.device, parameters, context, tensor }
    }

    fn blocks(&self) -> BlockList<'_, D> {
        BlockList {
            blocks: &self.blocks,
            has_backward: &self.has_backward,
            activations: self.options.activations,
        }
    }

    /// Runs the blocks, with a backward to follow if anything in the stage or before it is trained.
    fn train_blocks(
        &mut self,
        context: &MicrobatchContext<D>,
        (microbatch, action): PassName<'_>,
        input: Option<Tensor<D>>,
    ) -> Result<(BlockOutput<D>, Vec<SavedActivations<D>>)> {
        let Self { device, parameters, tensor, blocks, has_backward, options, .. } = self;
        let tensor = tensor.as_ref().map(|tensor| tensor.pass(microbatch, action));
        let is_trained = has_backward.last().copied().unwrap_or(false);
        let parameters =
            if is_trained { PassParameters::Train(parameters) } else { PassParameters::Read(parameters) };
        let mut pass = ForwardPass { device, parameters, context, tensor };
        BlockList { blocks, has_backward, activations: options.activations }.run(&mut pass, input)
    }

    /// Reads the loss of a microbatch, which waits for the device.
    ///
    /// # Errors
    /// [`Error::Loss`] if it is not finite.
    pub fn read_loss(&self, microbatch: usize, loss: &Tensor<D>) -> Result<f64> {
        let loss = self.device.read(loss)?.iter().sum::<f64>();
        if loss.is_finite() {
            return Ok(loss);
        }
        Err(Error::Loss { stage: self.options.name.clone(), microbatch, loss })
    }

    /// Runs backward on a microbatch: accumulates the gradients of parameters and returns the gradient of the
    /// input.
    ///
    /// - `gradient`: of the rows that forward returned; none if it returned a loss
    /// - returns the gradient of forward's input; `None` if there was no input, or nothing before it is
    ///   trained
    ///
    /// # Errors
    /// [`Error::Order`] if the microbatch is not in flight, [`Error::Input`] if the gradient does not fit.
    pub fn backward(&mut self, microbatch: usize, gradient: Option<Tensor<D>>) -> Result<Option<Tensor<D>>> {
        self.backward_with(microbatch, gradient, |_, _| Ok(()))
    }

    /// Runs [`backward`](Self::backward) and reports complete gradients on the way.
    ///
    /// - `done`: called after each group of layers, the last one first, with the index of a parameter: the
    ///   gradients of this parameter and all later ones are complete for this microbatch, except for
    ///   parameters that are used in two blocks ([`Parameters::fold_shared_gradients`])
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward) and of `done`.
    pub fn backward_with(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
        done: impl FnMut(&mut Parameters<D>, usize) -> Result<()> + Send,
    ) -> Result<Option<Tensor<D>>> {
        self.backward_of(microbatch, gradient, WeightGradients::Now, done)
    }

    /// Runs the part of [`backward`](Self::backward) that the stage before waits for; the gradients of linear
    /// layers' weights are left to [`backward_weight`](Self::backward_weight).
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward).
    pub fn backward_input(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        let mut pending = Vec::new();
        let weights = WeightGradients::Later(&mut pending);
        let input = self.backward_of(microbatch, gradient, weights, |_, _| Ok(()))?;
        self.pending.insert(microbatch, pending);
        Ok(input)
    }

    /// Accumulates the gradients of weights that [`backward_input`](Self::backward_input) left.
    ///
    /// # Errors
    /// [`Error::Order`] if none are left, [`Error::Device`].
    pub fn backward_weight(&mut self, microbatch: usize) -> Result<()> {
        if !self.has_backward() {
            return Ok(());
        }
        let Some(pending) = self.pending.remove(&microbatch) else {
            return Err(self.order(microbatch, "has no backward pass of its input"));
        };
        let (device, parameters) = (self.device.clone(), &mut self.parameters);
        device.run(|| pending.iter().try_for_each(|work| work.compute(&device, parameters)))
    }

    fn backward_of(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
        weights: WeightGradients<'_, D>,
        done: impl FnMut(&mut Parameters<D>, usize) -> Result<()> + Send,
    ) -> Result<Option<Tensor<D>>> {
        if !self.has_backward() {
            return Ok(None);
        }
        let Some(in_flight) = self.in_flight.remove(&microbatch) else {
            return Err(self.order(microbatch, "is not in flight"));
        };
        let at = (Some(microbatch), "tensor-parallel backward");
        let what = format!("stage {}, backward of microbatch {microbatch}", self.options.name);
        if self.tensor.is_some() {
            let result = self.run_backward(at, in_flight, gradient, weights, done);
            return self.or_end_job(at, result.map_err(|error| error.while_allocating(|| what)));
        }
        // the closure borrows the stage mutably, so it cannot borrow the device from it
        let device = self.device.clone();
        let result = device.run(|| self.run_backward(at, in_flight, gradient, weights, done));
        result.map_err(|error| error.while_allocating(|| what))
    }

    fn forward_of(&self, microbatch: usize) -> String {
        format!("stage {}, forward of microbatch {microbatch}", self.options.name)
    }

    fn run_backward(
        &mut self,
        at: PassName<'_>,
        in_flight: InFlight<D>,
        mut gradient: Option<Tensor<D>>,
        mut weights: WeightGradients<'_, D>,
        mut done: impl FnMut(&mut Parameters<D>, usize) -> Result<()>,
    ) -> Result<Option<Tensor<D>>> {
        let InFlight { context, saved } = in_flight;
        let group = self.tensor.clone();
        let tensor = group.as_ref().map(|group| group.pass(at.0, at.1));
        for (index, mut saved) in saved.into_iter().enumerate().rev() {
            if !self.has_backward[index] {
                return Ok(None);
            }
            let block = &self.blocks[index];
            if self.blocks().is_recomputed(index) {
                let input = saved.take();
                block.forward(&mut self.pass(&context, at), Some(input), &mut saved)?;
            }
            let parameters = &mut self.parameters;
            let weights = match &mut weights {
                WeightGradients::Now => WeightGradients::Now,
                WeightGradients::Later(pending) => WeightGradients::Later(pending),
            };
            let (device, context) = (&self.device, &*context);
            let mut pass = BackwardPass { device, parameters, context, tensor, weights };
            gradient = block.backward(&mut pass, gradient, &mut saved, self.needs_input[index])?;
            let first = self.first_parameters[index];
            // blocks that were declared together complete together
            if index == 0 || self.first_parameters[index - 1] != first {
                done(&mut self.parameters, first)?;
            }
        }
        Ok(if self.options.is_input_trained { gradient } else { None })
    }

    fn order(&self, microbatch: usize, problem: &'static str) -> Error {
        Error::Order { stage: self.options.name.clone(), microbatch, problem }
    }

    /// Returns whether this stage, or anything before it, is trained, so that it exchanges gradients.
    #[must_use]
    pub fn has_backward(&self) -> bool {
        self.has_backward.last().copied().unwrap_or(self.options.is_input_trained)
    }

    /// Sets the step of the following passes, which messages to other tensor-parallel ranks carry.
    pub fn start_step(&self, step: u64) {
        if let Some(tensor) = &self.tensor {
            tensor.start_step(step);
        }
    }

    /// Ranks that have the other parts of the layers; `None` if this rank has all of them.
    #[must_use]
    pub fn tensor_parallel(&self) -> Option<&TensorParallel<D>> {
        self.tensor.as_deref()
    }

    /// Name for errors.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Device of the stage.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Parameters of the stage.
    #[must_use]
    pub fn parameters(&self) -> &Parameters<D> {
        &self.parameters
    }

    /// Mutable parameters, for the optimizer.
    pub fn parameters_mut(&mut self) -> &mut Parameters<D> {
        &mut self.parameters
    }

    /// Number of microbatches in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Size of the saved activations in bytes.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        let saved = self.in_flight.values().flat_map(|microbatch| &microbatch.saved);
        let pending = self.pending.values().flatten().map(PendingWeights::bytes);
        saved.map(SavedActivations::bytes).chain(pending).sum()
    }

    /// Drops the saved activations of all microbatches in flight.
    pub fn forget(&mut self) {
        self.in_flight.clear();
        self.pending.clear();
    }
}

/// Blocks of a stage, and what a forward pass saves of them.
struct BlockList<'a, D: Device> {
    blocks: &'a [Box<dyn Block<D>>],
    has_backward: &'a [bool],
    activations: Activations,
}

impl<D: Device> BlockList<'_, D> {
    fn run(
        &self,
        pass: &mut ForwardPass<'_, D>,
        mut input: Option<Tensor<D>>,
    ) -> Result<(BlockOutput<D>, Vec<SavedActivations<D>>)> {
        let mut all = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let mut saved = SavedActivations::default();
            let output = block.forward(pass, input.take(), &mut saved)?;
            if !self.has_backward[index] {
                saved = SavedActivations::default();
            } else if self.is_recomputed(index) {
                saved.keep_input_only();
            }
            all.push(saved);
            match output {
                BlockOutput::Rows(rows) => input = Some(rows),
                // only the last block of a model returns a loss
                loss @ BlockOutput::Loss(_) => return Ok((loss, all)),
            }
        }
        let problem = "is missing, a stage without blocks needs it".to_owned();
        let rows = input.ok_or(Error::Input { input: "rows of the stage before", problem })?;
        Ok((BlockOutput::Rows(rows), all))
    }

    fn is_recomputed(&self, block: usize) -> bool {
        self.activations == Activations::Recomputed && self.blocks[block].is_recomputable()
    }
}
