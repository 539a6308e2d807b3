//! Passes through a block stage: one microbatch through all blocks, forward or backward.

use std::sync::Arc;

use super::block_stage::{BlockStage, InFlight, PassName};
use super::{GradientsDone, Stage};
use crate::block::{
    BackwardPass, BlockOutput, ForwardPass, KeptRows, MicrobatchContext, PassParameters, SavedActivations,
    TensorParallel,
};
use crate::error::Result;
use crate::parameters::{Parameters, WeightGradients};
use dflop_device::{Device, Tensor};

impl<D: Device> Stage<D> for BlockStage<D> {
    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> &D {
        &self.device
    }

    fn parameters(&self) -> &Parameters<D> {
        &self.parameters
    }

    fn parameters_mut(&mut self) -> &mut Parameters<D> {
        &mut self.parameters
    }

    fn has_backward(&self) -> bool {
        self.blocks.has_backward()
    }

    /// Runs the blocks. If a pass fails on a tensor-parallel rank, the rank ends the job, because the
    /// remaining ranks wait for it.
    fn forward(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        if self.in_flight.contains_key(&microbatch) {
            return Err(self.order(microbatch, "is in flight already"));
        }
        let at = (Some(microbatch), "tensor-parallel forward");
        let result = self.run_mut(|stage| stage.train_blocks(&context, at, input));
        let (output, saved) = self.or_end_job(at, "forward", result)?;
        // without a backward, nothing would remove the microbatch again
        if self.has_backward() {
            self.in_flight.insert(microbatch, InFlight { context, saved });
        }
        Ok(output)
    }

    /// Runs the blocks and reads parameters only; each block's buffers are released with the block.
    fn forward_only(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        let at = (Some(microbatch), "tensor-parallel evaluation");
        let result = self.run_mut(|stage| {
            let Self { device, parameters, tensor, blocks, .. } = stage;
            let tensor = tensor.as_ref().map(|tensor| tensor.pass(at.0, at.1));
            let (parameters, kept) = (PassParameters::Read(parameters), KeptRows::default());
            let mut pass = ForwardPass { device, parameters, context: &context, tensor, kept };
            Ok(blocks.forward(&mut pass, input, false)?.0)
        });
        self.or_end_job(at, "evaluation", result)
    }

    /// Runs the blocks in reverse; reports after each group of blocks that were declared together.
    fn backward_with(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
        done: &mut GradientsDone<'_, D>,
    ) -> Result<Option<Tensor<D>>> {
        self.run_backward(microbatch, gradient, WeightGradients::Now, done)
    }

    /// Runs the blocks in reverse, without weight gradients for linear layers.
    fn backward_input(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        let mut pending = Vec::new();
        let weights = WeightGradients::Later(&mut pending);
        let input = self.run_backward(microbatch, gradient, weights, &mut |_, _| Ok(()))?;
        self.pending.insert(microbatch, pending);
        Ok(input)
    }

    fn backward_weight(&mut self, microbatch: usize) -> Result<()> {
        if !self.has_backward() {
            return Ok(());
        }
        let Some(pending) = self.pending.remove(&microbatch) else {
            return Err(self.order(microbatch, "has no backward pass of its input"));
        };
        let (device, parameters) = (self.device.clone(), &mut self.parameters);
        device.run(|| pending.iter().try_for_each(|work| work.compute(&device, parameters)))
    }

    fn start_step(&mut self, step: u64) {
        if let Some(tensor) = &self.tensor {
            tensor.start_step(step);
        }
    }

    fn forget(&mut self) {
        self.in_flight.clear();
        self.pending.clear();
    }

    fn tensor_parallel(&self) -> Option<&TensorParallel<D>> {
        self.tensor.as_deref()
    }
}

impl<D: Device> BlockStage<D> {
    /// Runs the blocks, with a backward to follow if anything in the stage or before it is trained.
    fn train_blocks(
        &mut self,
        context: &MicrobatchContext<D>,
        (microbatch, action): PassName<'_>,
        input: Option<Tensor<D>>,
    ) -> Result<(BlockOutput<D>, Vec<SavedActivations<D>>)> {
        let Self { device, parameters, tensor, blocks, .. } = self;
        let tensor = tensor.as_ref().map(|tensor| tensor.pass(microbatch, action));
        let parameters = if blocks.is_trained() {
            PassParameters::Train(parameters)
        } else {
            PassParameters::Read(parameters)
        };
        let kept = KeptRows::default();
        blocks.forward(&mut ForwardPass { device, parameters, context, tensor, kept }, input, true)
    }

    fn run_backward(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
        weights: WeightGradients<'_, D>,
        done: &mut GradientsDone<'_, D>,
    ) -> Result<Option<Tensor<D>>> {
        if !self.has_backward() {
            return Ok(None);
        }
        let Some(InFlight { context, saved }) = self.in_flight.remove(&microbatch) else {
            return Err(self.order(microbatch, "is not in flight"));
        };
        let at = (Some(microbatch), "tensor-parallel backward");
        let result = self.run_mut(|stage| {
            let Self { device, parameters, tensor, blocks, .. } = stage;
            let tensor = tensor.as_ref().map(|tensor| tensor.pass(at.0, at.1));
            let kept = KeptRows::default();
            let mut pass = BackwardPass { device, parameters, context: &context, tensor, weights, kept };
            blocks.backward(&mut pass, saved, gradient, done)
        });
        self.or_end_job(at, "backward", result)
    }
}
