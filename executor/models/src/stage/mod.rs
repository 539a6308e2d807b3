//! Pipeline stage: a module part, run microbatch by microbatch.
//!
//! [`Stage`] is the contract that pipeline, optimizer and checkpoints need. [`BlockStage`] implements it for
//! consecutive blocks in a module; a crate that depends on this crate may implement any other stage, for
//! instance a stage that wraps a `BlockStage` or computes a custom loss.

mod block_passes;
mod block_stage;

use std::sync::Arc;

use crate::block::{BlockOutput, MicrobatchContext, TensorParallel};
use crate::error::Result;
use crate::parameters::Parameters;
pub use block_stage::{Activations, BlockStage, StageOptions, StageSettings, assemble};
use dflop_device::{Device, Tensor};

/// Callback for complete gradients, with the stage parameters and an index: the gradients of this parameter
/// and all later parameters are complete for the microbatch, except for parameters that are used twice
/// ([`Parameters::fold_shared_gradients`]).
pub type GradientsDone<'a, D> = dyn FnMut(&mut Parameters<D>, usize) -> Result<()> + Send + 'a;

/// Module part that one rank runs: microbatch forward and backward passes, and parameters.
///
/// For each microbatch, a pipeline calls [`forward`](Self::forward) once, then either
/// [`backward_with`](Self::backward_with), or [`backward_input`](Self::backward_input) and later
/// [`backward_weight`](Self::backward_weight). Without a backward ([`has_backward`](Self::has_backward)) it
/// calls only `forward`, and the stage saves nothing. In an evaluation it calls only
/// [`forward_only`](Self::forward_only).
///
/// **What a stage guarantees:**
///
/// - Any number of microbatches is in flight, in any order: data for later passes is saved by microbatch
///   number. Numbers repeat in the next step.
/// - Microbatch gradients are added to the gradients from earlier microbatches, in `f32`, in pass order; all
///   schedules then compute the same bits. A stage does not set gradients to zero. The last stage scales the
///   loss gradient by [`TextInputs::loss_scale`](crate::TextInputs::loss_scale); no earlier stage scales.
/// - Passes do not wait for the device ([`Runtime::read`](dflop_device::Runtime::read),
///   [`Runtime::download`](dflop_device::Runtime::download)), as this would delay the pipeline. The only
///   exception is a router, which reads the routing decision
///   ([`Runtime::download_in_pass`](dflop_device::Runtime::download_in_pass)).
/// - Rows have the sizes that the job derives from the model: `[rows, width]` from the context and the
///   module, in the weight type of the device. The pipeline checks the rows that a stage returns.
///
/// Parameters are trained and saved: an optimizer updates the trained parameters, checkpoints contain all
/// parameters. Names are unique in the job, except for copies of a tied parameter.
///
/// The required methods are the ones that every stage needs; the default methods suit a stage that is
/// trained, has complete layers, and computes weight gradients in any backward method.
/// `executor/examples/own_stage` has a complete stage.
pub trait Stage<D: Device>: Send {
    /// Returns the stage name for errors.
    fn name(&self) -> &str;

    /// Returns the stage device.
    fn device(&self) -> &D;

    /// Returns the stage parameters.
    fn parameters(&self) -> &Parameters<D>;

    /// Returns mutable parameters, for the optimizer.
    fn parameters_mut(&mut self) -> &mut Parameters<D>;

    /// Returns whether this stage, or anything before it, is trained, so that it exchanges gradients.
    /// Default: yes. The value must agree with the modules that the job trains and never change.
    fn has_backward(&self) -> bool {
        true
    }

    /// Runs forward on a microbatch and saves the data that the backward needs.
    ///
    /// - `context`: microbatch lengths, positions and ids
    /// - `input`: `[rows, width]` from the previous stage; encoder tokens, if any, for the first LLM stage;
    ///   nothing for the first encoder stage
    /// - returns rows for the next stage, `[rows, width]`; the last encoder stage returns a row per token,
    ///   the last LLM stage the unscaled loss sum, one `f64`
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if the input does not match the context,
    /// [`Error::Order`](crate::Error::Order) if the microbatch is in flight,
    /// [`Error::Comm`](crate::Error::Comm) if another tensor-parallel rank failed. Any error ends the job.
    fn forward(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>>;

    /// Runs forward on a microbatch that has no backward, as in an evaluation, and saves nothing. No other
    /// microbatch is in flight. Default: [`forward`](Self::forward), then [`forget`](Self::forget); gradients
    /// may change, since every training step starts with zero gradients.
    ///
    /// - `context`, `input`, returned rows or loss: as for [`forward`](Self::forward), with the same bits
    ///
    /// # Errors
    /// Errors from [`forward`](Self::forward).
    fn forward_only(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        let output = self.forward(microbatch, context, input)?;
        self.forget();
        Ok(output)
    }

    /// Runs backward on a microbatch: accumulates all parameter gradients, returns the input gradient, and
    /// reports complete gradients on the way. Default: [`backward_input`](Self::backward_input),
    /// [`backward_weight`](Self::backward_weight), then one report for all parameters.
    ///
    /// - `gradient`, returned gradient: as for [`backward_input`](Self::backward_input)
    /// - `done`: called with parameter indices that never grow. A pipeline sums reported gradients over
    ///   replicas while the pass continues, so the pass must not touch them again. A stage that reports
    ///   nothing is correct, but its gradients are summed later.
    ///
    /// # Errors
    /// Errors from [`backward_input`](Self::backward_input), [`backward_weight`](Self::backward_weight) and
    /// `done`.
    fn backward_with(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
        done: &mut GradientsDone<'_, D>,
    ) -> Result<Option<Tensor<D>>> {
        let input = self.backward_input(microbatch, gradient)?;
        self.backward_weight(microbatch)?;
        done(self.parameters_mut(), 0)?;
        Ok(input)
    }

    /// Runs the part of backward that the previous stage waits for. Parameter gradients may be accumulated
    /// here or in [`backward_weight`](Self::backward_weight).
    ///
    /// - `gradient`: gradient of the rows that forward returned; none if forward returned a loss
    /// - returns the gradient of the forward input, with the same size; may be omitted if there was no input,
    ///   or if nothing before it is trained
    ///
    /// # Errors
    /// [`Error::Order`](crate::Error::Order) if the microbatch is not in flight,
    /// [`Error::Input`](crate::Error::Input) if the gradient has the wrong size.
    fn backward_input(&mut self, microbatch: usize, gradient: Option<Tensor<D>>)
    -> Result<Option<Tensor<D>>>;

    /// Accumulates the parameter gradients that [`backward_input`](Self::backward_input) left for the same
    /// microbatch; afterwards the microbatch is no longer in flight. Default: nothing is left.
    ///
    /// # Errors
    /// [`Error::Order`](crate::Error::Order) if [`backward_input`](Self::backward_input) did not run for the
    /// microbatch.
    fn backward_weight(&mut self, microbatch: usize) -> Result<()> {
        let _ = microbatch;
        Ok(())
    }

    /// Sets the step number for the following passes, which tensor-parallel messages carry. Default: does
    /// nothing.
    fn start_step(&mut self, step: u64) {
        let _ = step;
    }

    /// Drops saved data for all microbatches in flight, as left by a failed step.
    fn forget(&mut self);

    /// Returns the ranks that have the remaining parts of the layers; `None`, the default, if this rank has
    /// complete layers.
    fn tensor_parallel(&self) -> Option<&TensorParallel<D>> {
        None
    }

    /// Boxes the stage, as a pipeline requires.
    #[must_use]
    fn boxed(self) -> Box<dyn Stage<D>>
    where
        Self: Sized + 'static,
    {
        Box::new(self)
    }
}
