//! Interface of blocks, and the state that their passes share.

use std::ops::Deref;

use super::context::MicrobatchContext;
use super::parameters::Parameters;
use super::tensor_parallel::TensorPass;
use super::weight_gradients::{PendingWeights, WeightGradients};
use crate::error::Result;
use dflop_device::{Device, Tensor};

/// Inputs of a forward pass.
pub struct ForwardPass<'a, D: Device> {
    /// Device that computes.
    pub device: &'a D,
    /// Weights of the stage.
    pub parameters: PassParameters<'a, D>,
    /// Properties of the microbatch.
    pub context: &'a MicrobatchContext<D>,
    /// Ranks that hold the other parts of the layers.
    pub tensor: Option<TensorPass<'a, D>>,
}

/// Weights of a stage in a forward pass.
pub enum PassParameters<'a, D: Device> {
    /// Of a pass without a backward: evaluation, recomputation.
    Read(&'a Parameters<D>),
    /// Of a pass with a backward, which may accumulate gradients that it knows already.
    Train(&'a mut Parameters<D>),
}

impl<D: Device> Deref for PassParameters<'_, D> {
    type Target = Parameters<D>;
    fn deref(&self) -> &Parameters<D> {
        match self {
            Self::Read(parameters) => parameters,
            Self::Train(parameters) => parameters,
        }
    }
}

/// Inputs of a backward pass, and the gradients that it accumulates.
pub struct BackwardPass<'a, D: Device> {
    /// Device that computes.
    pub device: &'a D,
    /// Weights of the stage and their gradients.
    pub parameters: &'a mut Parameters<D>,
    /// Properties of the microbatch.
    pub context: &'a MicrobatchContext<D>,
    /// Ranks that hold the other parts of the layers.
    pub tensor: Option<TensorPass<'a, D>>,
    /// When gradients of linear layers' weights are computed; all others are computed at once.
    pub weights: WeightGradients<'a, D>,
}

impl<D: Device> BackwardPass<'_, D> {
    /// Accumulates gradients of weights, now or later.
    pub(crate) fn add_weights(&mut self, work: PendingWeights<D>) -> Result<()> {
        match &mut self.weights {
            WeightGradients::Now => work.compute(self.device, self.parameters),
            WeightGradients::Later(pending) => {
                pending.push(work);
                Ok(())
            }
        }
    }
}

/// Output of a block.
pub enum BlockOutput<D: Device> {
    /// Rows for the next block.
    Rows(Tensor<D>),
    /// Unscaled sum of losses over the target tokens of the microbatch: one `f64` on the device.
    Loss(Tensor<D>),
}

/// Stack of buffers that a forward pass saves for its backward pass, and one of numbers that the host knows.
pub struct SavedActivations<D: Device> {
    buffers: Vec<Tensor<D>>,
    numbers: Vec<Vec<usize>>,
}

impl<D: Device> Default for SavedActivations<D> {
    fn default() -> Self {
        Self { buffers: Vec::new(), numbers: Vec::new() }
    }
}

impl<D: Device> SavedActivations<D> {
    /// Pushes a buffer.
    pub fn keep(&mut self, buffer: Tensor<D>) {
        self.buffers.push(buffer);
    }

    /// Pops the most recent buffer.
    ///
    /// # Panics
    /// If backward takes more than forward kept.
    pub fn take(&mut self) -> Tensor<D> {
        self.buffers.pop().expect("backward takes what forward kept")
    }

    /// Pushes numbers of the host.
    pub fn keep_numbers(&mut self, numbers: Vec<usize>) {
        self.numbers.push(numbers);
    }

    /// Pops the most recent numbers of the host.
    ///
    /// # Panics
    /// If backward takes more than forward kept.
    pub fn take_numbers(&mut self) -> Vec<usize> {
        self.numbers.pop().expect("backward takes what forward kept")
    }

    /// Pushes what another stack has.
    pub fn append(&mut self, mut other: Self) {
        self.buffers.append(&mut other.buffers);
        self.numbers.append(&mut other.numbers);
    }

    /// Drops all buffers but the first, which is the input of the block.
    pub fn keep_input_only(&mut self) {
        self.buffers.truncate(1);
        self.numbers.clear();
    }

    /// Number of saved elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.buffers.iter().map(Tensor::len).sum()
    }

    /// Size of the saved elements in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().map(Tensor::bytes).sum()
    }
}

/// Part of a module that a pipeline can place on any stage.
pub trait Block<D: Device>: Send + Sync {
    /// Computes the block on the rows of the previous block; the first block of an encoder gets none.
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>>;

    /// Accumulates the gradients of the block's parameters and returns the gradient of its input, which may
    /// be left out if it is not needed. The gradient of a loss is not passed: it follows from the context.
    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>>;

    /// Returns whether activations can be recomputed from the first saved buffer.
    fn is_recomputable(&self) -> bool {
        false
    }

    /// Returns the logits of every row, for a block whose forward returns a loss.
    fn logits(&self, _pass: &ForwardPass<'_, D>, _input: &Tensor<D>) -> Result<Option<Tensor<D>>> {
        Ok(None)
    }
}

/// Returns the rows that a block requires, or an error if they are missing or have another size.
pub(crate) fn expect_rows<D: Device>(
    input: Option<Tensor<D>>,
    rows: usize,
    columns: usize,
) -> Result<Tensor<D>> {
    let found = input.as_ref().map(Tensor::len);
    match input {
        Some(input) if found == Some(rows * columns) => Ok(input),
        _ => Err(crate::Error::Input {
            input: "rows of the stage before",
            problem: format!("must have {rows} x {columns} elements, found {}", found.unwrap_or(0)),
        }),
    }
}
