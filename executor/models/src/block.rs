//! Interface of blocks, and the state that their passes share.

use super::context::MicrobatchContext;
use super::parameters::Parameters;
use super::tensor_parallel::TensorPass;
use crate::error::Result;
use dflop_device::Device;

/// Inputs of a forward pass.
pub struct ForwardPass<'a, D: Device> {
    /// Device that computes.
    pub device: &'a D,
    /// Weights of the stage.
    pub parameters: &'a Parameters<D>,
    /// Properties of the microbatch.
    pub context: &'a MicrobatchContext<D>,
    /// Ranks that hold the other parts of the layers.
    pub tensor: Option<TensorPass<'a>>,
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
    pub tensor: Option<TensorPass<'a>>,
}

/// Output of a block.
pub enum BlockOutput<D: Device> {
    /// Rows for the next block.
    Rows(D::Floats),
    /// Unscaled sum of losses over the target tokens of the microbatch.
    Loss(f64),
}

/// Stack of buffers that a forward pass saves for its backward pass.
pub struct SavedActivations<D: Device> {
    buffers: Vec<D::Floats>,
}

impl<D: Device> Default for SavedActivations<D> {
    fn default() -> Self {
        Self { buffers: Vec::new() }
    }
}

impl<D: Device> SavedActivations<D> {
    /// Pushes a buffer.
    pub fn keep(&mut self, buffer: D::Floats) {
        self.buffers.push(buffer);
    }

    /// Pops the most recent buffer.
    ///
    /// # Panics
    /// If backward takes more than forward kept.
    pub fn take(&mut self) -> D::Floats {
        self.buffers.pop().expect("backward takes what forward kept")
    }

    /// Pushes the buffers of another stack.
    pub fn append(&mut self, mut other: Self) {
        self.buffers.append(&mut other.buffers);
    }

    /// Drops all buffers but the first, which is the input of the block.
    pub fn keep_input_only(&mut self) {
        self.buffers.truncate(1);
    }

    /// Number of saved elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.buffers.iter().map(dflop_device::Buffer::len).sum()
    }
}

/// Part of a module that a pipeline can place on any stage.
pub trait Block<D: Device>: Send + Sync {
    /// Computes the block on the rows of the previous block; the first block of an encoder gets none.
    fn forward(
        &self,
        pass: &ForwardPass<'_, D>,
        input: Option<D::Floats>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>>;

    /// Accumulates the gradients of the block's parameters and returns the gradient of its input, which may
    /// be left out if it is not needed. The gradient of a loss is not passed: it follows from the context.
    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<D::Floats>,
        saved: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<D::Floats>>;

    /// Returns whether activations can be recomputed from the first saved buffer.
    fn is_recomputable(&self) -> bool {
        false
    }

    /// Returns the logits of every row, for a block whose forward returns a loss.
    fn logits(&self, _pass: &ForwardPass<'_, D>, _input: &D::Floats) -> Result<Option<D::Floats>> {
        Ok(None)
    }
}

/// Returns the rows that a block requires, or an error if they are missing or have another size.
pub(crate) fn expect_rows<D: Device>(
    input: Option<D::Floats>,
    rows: usize,
    columns: usize,
) -> Result<D::Floats> {
    let found = input.as_ref().map(dflop_device::Buffer::len);
    match input {
        Some(input) if found == Some(rows * columns) => Ok(input),
        _ => Err(crate::Error::Input {
            input: "rows of the stage before",
            problem: format!("must have {rows} x {columns} elements, found {}", found.unwrap_or(0)),
        }),
    }
}
