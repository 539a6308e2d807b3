//! The interface of a block, and the state that its passes share.

use super::context::MicrobatchContext;
use super::parameters::Parameters;
use super::tensor_parallel::TensorPass;
use crate::device::Device;
use crate::error::Result;

/// What a forward reads.
pub struct ForwardPass<'a, D: Device> {
    /// Where it computes.
    pub device: &'a D,
    /// Weights of the stage.
    pub parameters: &'a Parameters<D>,
    /// What every rank knows of the microbatch.
    pub context: &'a MicrobatchContext<D>,
    /// The ranks that hold the other parts of the layers.
    pub tensor: Option<TensorPass<'a>>,
}

/// What a backward reads, and the gradients that it adds to.
pub struct BackwardPass<'a, D: Device> {
    /// Where it computes.
    pub device: &'a D,
    /// Weights of the stage and their gradients.
    pub parameters: &'a mut Parameters<D>,
    /// What every rank knows of the microbatch.
    pub context: &'a MicrobatchContext<D>,
    /// The ranks that hold the other parts of the layers.
    pub tensor: Option<TensorPass<'a>>,
}

/// What a block hands on.
pub enum BlockOutput<D: Device> {
    /// Rows for the next block.
    Rows(D::Floats),
    /// The sum of losses over the target tokens of the microbatch, unscaled.
    Loss(f64),
}

/// What a forward keeps for its backward, last in, first out.
pub struct SavedActivations<D: Device> {
    buffers: Vec<D::Floats>,
}

impl<D: Device> Default for SavedActivations<D> {
    fn default() -> Self {
        Self { buffers: Vec::new() }
    }
}

impl<D: Device> SavedActivations<D> {
    /// Keeps a buffer.
    pub fn keep(&mut self, buffer: D::Floats) {
        self.buffers.push(buffer);
    }

    /// Takes the buffer that was kept last.
    ///
    /// # Panics
    /// If backward takes more than forward kept.
    pub fn take(&mut self) -> D::Floats {
        self.buffers.pop().expect("backward takes what forward kept")
    }

    /// Keeps what another has kept.
    pub fn append(&mut self, mut other: Self) {
        self.buffers.append(&mut other.buffers);
    }

    /// Drops all but what was kept first: a block's input.
    pub fn keep_input_only(&mut self) {
        self.buffers.truncate(1);
    }

    /// Returns the elements that are kept.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.buffers.iter().map(crate::device::Buffer::len).sum()
    }
}

/// A piece of a module that a pipeline can put on any stage.
pub trait Block<D: Device>: Send + Sync {
    /// Computes the block on the rows of the one before it; the first block of an encoder gets none.
    fn forward(
        &self,
        pass: &ForwardPass<'_, D>,
        input: Option<D::Floats>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>>;

    /// Adds the gradients of the block's parameters and returns that of its input, which may be left out if it is not
    /// needed. The gradient of a loss is not given: it is what the context says.
    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<D::Floats>,
        saved: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<D::Floats>>;

    /// Whether activations can be computed anew from what was kept first.
    fn is_recomputable(&self) -> bool {
        false
    }

    /// Returns what the block would say of every row where forward gives a loss: logits.
    fn logits(&self, _pass: &ForwardPass<'_, D>, _input: &D::Floats) -> Result<Option<D::Floats>> {
        Ok(None)
    }
}

/// The rows that a block must be given.
pub(crate) fn expect_rows<D: Device>(
    input: Option<D::Floats>,
    rows: usize,
    columns: usize,
) -> Result<D::Floats> {
    let found = input.as_ref().map(crate::device::Buffer::len);
    match input {
        Some(input) if found == Some(rows * columns) => Ok(input),
        _ => Err(crate::Error::Input {
            input: "rows of the stage before",
            problem: format!("must have {rows} x {columns} elements, found {}", found.unwrap_or(0)),
        }),
    }
}
