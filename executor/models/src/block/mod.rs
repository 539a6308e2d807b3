//! Block interface, the state and the context that block passes share, and tensor parallelism.

mod context;
mod stage_blocks;
pub(crate) mod tensor_parallel;

pub use context::{EncoderInputs, LayerContext, MicrobatchContext, ModuleInputs, TextInputs};
pub use stage_blocks::StageBlocks;
pub(crate) use stage_blocks::single_layers;
pub use tensor_parallel::{TensorParallel, TensorPass};

use std::ops::Deref;

use crate::error::{Error, Result};
use crate::parameters::{Parameters, PendingWeights, WeightGradients};
use dflop_device::ops::bias::Columns;
use dflop_device::{Device, Tensor};

/// Forward pass inputs.
pub struct ForwardPass<'a, D: Device> {
    /// Device that computes.
    pub device: &'a D,
    /// Stage weights.
    pub parameters: PassParameters<'a, D>,
    /// Microbatch properties.
    pub context: &'a MicrobatchContext<D>,
    /// Tensor-parallel ranks that hold the remaining parts of each layer.
    pub tensor: Option<TensorPass<'a, D>>,
    /// Rows that blocks keep for later blocks in the stage.
    pub kept: KeptRows<D>,
}

/// Stage weights in a forward pass.
pub enum PassParameters<'a, D: Device> {
    /// Weights for a pass without a backward: evaluation, recomputation.
    Read(&'a Parameters<D>),
    /// Weights for a pass with a backward, which may accumulate gradients that the forward already knows.
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

/// Backward pass inputs, and the gradients that the pass accumulates.
pub struct BackwardPass<'a, D: Device> {
    /// Device that computes.
    pub device: &'a D,
    /// Stage weights and gradients.
    pub parameters: &'a mut Parameters<D>,
    /// Microbatch properties.
    pub context: &'a MicrobatchContext<D>,
    /// Tensor-parallel ranks that hold the remaining parts of each layer.
    pub tensor: Option<TensorPass<'a, D>>,
    /// Time at which gradients of linear layer weights are computed; all other gradients are computed at
    /// once.
    pub weights: WeightGradients<'a, D>,
    /// Gradients that blocks keep for earlier blocks in the stage.
    pub kept: KeptRows<D>,
}

/// Rows that a block keeps for a block in the same stage and pass that does not follow directly: encoder
/// layer rows for projectors, projector rows for the first LLM layers. A stack.
pub struct KeptRows<D: Device> {
    rows: Vec<Tensor<D>>,
}

impl<D: Device> Default for KeptRows<D> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

impl<D: Device> KeptRows<D> {
    /// Keeps rows.
    pub fn push(&mut self, rows: Tensor<D>) {
        self.rows.push(rows);
    }

    /// Returns the rows that were kept last.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if there are none: the blocks that keep and use the rows are in
    /// different stages.
    pub fn pop(&mut self) -> Result<Tensor<D>> {
        self.rows.pop().ok_or_else(missing_rows)
    }

    /// Returns the rows that were kept in the last `count` calls, in call order.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if there are fewer.
    pub fn take(&mut self, count: usize) -> Result<Vec<Tensor<D>>> {
        let first = self.rows.len().checked_sub(count).ok_or_else(missing_rows)?;
        Ok(self.rows.split_off(first))
    }
}

fn missing_rows() -> Error {
    let problem = "are missing, the layers that keep and take them must be in one stage".to_owned();
    Error::Input { input: "rows of earlier layers", problem }
}

/// Joins matrices with `width` columns side by side.
pub(crate) fn join_columns<D: Device>(
    device: &D,
    parts: &[Tensor<D>],
    rows: usize,
    width: usize,
) -> Result<Tensor<D>> {
    let stride = width * parts.len();
    let mut joined = device.alloc(rows * stride)?;
    for (part, first) in parts.iter().zip((0..).step_by(width)) {
        device.copy_columns(part, Columns::all(width), width, &mut joined, Columns { first, stride })?;
    }
    Ok(joined)
}

/// Splits a matrix into `parts` matrices with equal width.
pub(crate) fn split_columns<D: Device>(
    device: &D,
    joined: &Tensor<D>,
    rows: usize,
    parts: usize,
) -> Result<Vec<Tensor<D>>> {
    let stride = joined.len() / rows.max(1);
    let width = stride / parts;
    let part = |index| {
        let first = index * width;
        let mut part = device.alloc(rows * width)?;
        device.copy_columns(joined, Columns { first, stride }, width, &mut part, Columns::all(width))?;
        Ok(part)
    };
    (0..parts).map(part).collect()
}

impl<D: Device> BackwardPass<'_, D> {
    /// Accumulates weight gradients, now or later.
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

/// Block output.
pub enum BlockOutput<D: Device> {
    /// Rows for the next block.
    Rows(Tensor<D>),
    /// Unscaled loss sum over the target tokens in the microbatch: one `f64` on the device.
    Loss(Tensor<D>),
}

/// Stack of buffers that a forward pass saves for its backward pass, and a stack of host numbers.
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
    /// If backward pops more than forward pushed.
    pub fn take(&mut self) -> Tensor<D> {
        self.buffers.pop().expect("backward takes what forward kept")
    }

    /// Pushes host numbers.
    pub fn keep_numbers(&mut self, numbers: Vec<usize>) {
        self.numbers.push(numbers);
    }

    /// Pops the most recent host numbers.
    ///
    /// # Panics
    /// If backward pops more than forward pushed.
    pub fn take_numbers(&mut self) -> Vec<usize> {
        self.numbers.pop().expect("backward takes what forward kept")
    }

    /// Pushes the contents of another stack.
    pub fn append(&mut self, mut other: Self) {
        self.buffers.append(&mut other.buffers);
        self.numbers.append(&mut other.numbers);
    }

    /// Drops all buffers but the first, which is the block input.
    pub fn keep_input_only(&mut self) {
        self.buffers.truncate(1);
        self.numbers.clear();
    }

    /// Returns the number of saved elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.buffers.iter().map(Tensor::len).sum()
    }

    /// Returns the saved size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().map(Tensor::bytes).sum()
    }
}

/// Module part that a pipeline can place on any stage.
pub trait Block<D: Device>: Send + Sync {
    /// Computes the block from the rows of the previous block; the first encoder block has no input rows.
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>>;

    /// Accumulates parameter gradients and returns the input gradient, which a block may omit if it is not
    /// needed. The loss gradient is not passed: it follows from the context.
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

    /// Returns logits for every row, if the forward returns a loss.
    fn logits(&self, _pass: &ForwardPass<'_, D>, _input: &Tensor<D>) -> Result<Option<Tensor<D>>> {
        Ok(None)
    }
}

/// Returns the rows that a block requires, or an error if the rows are missing or have another size.
pub(crate) fn expect_rows<D: Device>(
    input: Option<Tensor<D>>,
    rows: usize,
    columns: usize,
) -> Result<Tensor<D>> {
    let found = input.as_ref().map(Tensor::len);
    match input {
        Some(input) if found == Some(rows * columns) => Ok(input),
        _ => Err(Error::Input {
            input: "rows of the stage before",
            problem: format!("must have {rows} x {columns} elements, found {}", found.unwrap_or(0)),
        }),
    }
}
