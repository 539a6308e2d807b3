//! Pipeline stage: a part of a module, run microbatch by microbatch.
//!
//! [`Stage`] is the contract that pipeline, optimizer and checkpoints need. [`BlockStage`] fulfills it for
//! consecutive blocks of one module; a crate that depends on this one may bring any other, for instance one
//! that wraps a `BlockStage` or computes a loss of its own.

mod assemble;
mod block_list;
mod block_passes;
mod block_stage;
mod build;
mod options;

use std::sync::Arc;

use crate::BlockOutput;
use crate::context::MicrobatchContext;
use crate::error::Result;
use crate::parameters::Parameters;
use crate::tensor_parallel::TensorParallel;
pub use assemble::assemble;
pub use block_stage::BlockStage;
pub use build::StageSettings;
use dflop_device::{Device, Tensor};
pub use options::{Activations, StageOptions};

/// Callback for complete gradients, with the parameters of the stage and an index: the gradients of this
/// parameter and all later ones are complete for the microbatch, except for parameters that are used twice
/// ([`Parameters::fold_shared_gradients`]).
pub type GradientsDone<'a, D> = dyn FnMut(&mut Parameters<D>, usize) -> Result<()> + Send + 'a;

/// Part of a module that one rank runs: forward and backward passes of microbatches, and their parameters.
///
/// A pipeline calls [`forward`](Self::forward) of a microbatch once, then either
/// [`backward_with`](Self::backward_with), or [`backward_input`](Self::backward_input) and later
/// [`backward_weight`](Self::backward_weight). Without a backward ([`has_backward`](Self::has_backward)) it
/// calls `forward` alone, and the stage saves nothing.
///
/// **What a stage guarantees:**
///
/// - Any number of microbatches is in flight, in any order: what a pass needs of an earlier one is saved by
///   microbatch number. Numbers come again in the next step.
/// - Gradients of a microbatch are added to those of the microbatches before, in `f32`, in the order of the
///   passes; all schedules then give the same bits. A stage does not set them to zero. The last stage scales
///   the gradient of its loss by [`TextInputs::loss_scale`](crate::TextInputs::loss_scale), no other scales.
/// - Passes do not wait for the device ([`Runtime::read`](dflop_device::Runtime::read),
///   [`Runtime::download`](dflop_device::Runtime::download)), or the pipeline is late. A router alone does:
///   it reads its decision ([`Runtime::download_in_pass`](dflop_device::Runtime::download_in_pass)).
/// - Rows have the sizes that the job derives from the model: `[rows, width]` of the context and of the
///   module, in the type of the device's weights. The pipeline checks what a stage returns.
///
/// Parameters are what is trained and saved: an optimizer updates the trained ones, checkpoints contain all
/// of them. Names are unique in the job, except for copies of a tied parameter.
///
/// Required are the methods that no stage can do without; the others suit a stage that is trained, has all of
/// its layers, and computes gradients of weights wherever it likes. `executor/examples/own_stage` has a whole
/// one.
pub trait Stage<D: Device>: Send {
    /// Name for errors.
    fn name(&self) -> &str;

    /// Device of the stage.
    fn device(&self) -> &D;

    /// Parameters of the stage.
    fn parameters(&self) -> &Parameters<D>;

    /// Mutable parameters, for the optimizer.
    fn parameters_mut(&mut self) -> &mut Parameters<D>;

    /// Returns whether this stage, or anything before it, is trained, so that it exchanges gradients.
    /// Default: yes. It agrees with the modules that the job trains and is the same at all times.
    fn has_backward(&self) -> bool {
        true
    }

    /// Runs forward on a microbatch and saves what its backward needs.
    ///
    /// - `context`: lengths, positions and ids of the microbatch
    /// - `input`: `[rows, width]` of the previous stage; encoder tokens, if any, for the first stage of the
    ///   LLM; nothing for the first stage of an encoder
    /// - returns rows for the next stage, `[rows, width]`; the last stage of an encoder returns a row per
    ///   token, the last stage of the LLM the unscaled sum of losses, one `f64`
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if the input does not fit the context,
    /// [`Error::Order`](crate::Error::Order) if the microbatch is in flight,
    /// [`Error::Comm`](crate::Error::Comm) if another rank of a tensor-parallel group failed. Any error ends
    /// the job.
    fn forward(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>>;

    /// Runs backward on a microbatch: accumulates the gradients of all parameters, returns the gradient of
    /// the input, and reports complete gradients on the way. Default:
    /// [`backward_input`](Self::backward_input), [`backward_weight`](Self::backward_weight), then one report
    /// of everything.
    ///
    /// - `gradient`, returned gradient: as for [`backward_input`](Self::backward_input)
    /// - `done`: called with indices of parameters that never grow. A pipeline sums reported gradients over
    ///   replicas while the pass goes on, so the pass does not touch them again. A stage that reports
    ///   nothing is correct, but later.
    ///
    /// # Errors
    /// The errors of [`backward_input`](Self::backward_input), [`backward_weight`](Self::backward_weight) and
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

    /// Runs the part of backward that the stage before waits for. Gradients of parameters may be accumulated
    /// here or in [`backward_weight`](Self::backward_weight).
    ///
    /// - `gradient`: of the rows that forward returned; none if it returned a loss
    /// - returns the gradient of forward's input, of the same size; it may be left out if there was no
    ///   input, or nothing before it is trained
    ///
    /// # Errors
    /// [`Error::Order`](crate::Error::Order) if the microbatch is not in flight,
    /// [`Error::Input`](crate::Error::Input) if the gradient does not fit.
    fn backward_input(&mut self, microbatch: usize, gradient: Option<Tensor<D>>)
    -> Result<Option<Tensor<D>>>;

    /// Accumulates the gradients of parameters that [`backward_input`](Self::backward_input) of the same
    /// microbatch left; afterwards the microbatch is no longer in flight. Default: nothing is left.
    ///
    /// # Errors
    /// [`Error::Order`](crate::Error::Order) if the microbatch had no backward pass of its input.
    fn backward_weight(&mut self, microbatch: usize) -> Result<()> {
        let _ = microbatch;
        Ok(())
    }

    /// Sets the number of the step whose passes follow, as tensor-parallel messages carry it. Default: does
    /// nothing.
    fn start_step(&mut self, step: u64) {
        let _ = step;
    }

    /// Drops what is saved of all microbatches in flight: a step that failed leaves them.
    fn forget(&mut self);

    /// Ranks that have the other parts of the layers; `None`, the default, if this rank has all of them.
    fn tensor_parallel(&self) -> Option<&TensorParallel<D>> {
        None
    }

    /// Boxes the stage, as a pipeline takes it.
    #[must_use]
    fn boxed(self) -> Box<dyn Stage<D>>
    where
        Self: Sized + 'static,
    {
        Box::new(self)
    }
}
