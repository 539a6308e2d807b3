//! Block interface, the state and the context that block passes share, and tensor parallelism.
//!
//! Stage blocks, before parameters have values.
//!
//! Microbatch properties that every rank knows before computing are lengths, positions, ids and row
//! selections. Each stage derives them from the microbatch description and the module configuration; shapes
//! are never sent between stages.

pub(crate) mod tensor_parallel;

use crate::error::{Error, Result};
use crate::parameters::weights::TpRank;
use crate::parameters::{Declaration, Parameters, PendingWeights, WeightGradients};
use dflop_device::ops::bias::Columns;
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::{Device, DeviceSparseRows, Segments, Tensor};
use std::collections::BTreeSet;
use std::ops::{Deref, Range};
use std::sync::Arc;

pub use tensor_parallel::{TensorParallel, TensorPass};

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

/// Blocks with declared parameters that have no values yet.
pub struct StageBlocks<D: Device> {
    pub(crate) blocks: Vec<Box<dyn Block<D>>>,
    /// Whether a block has trained parameters.
    pub(crate) is_trained: Vec<bool>,
    /// Index of the first parameter that was declared together with a block.
    pub(crate) first_parameters: Vec<usize>,
    pub(crate) declaration: Declaration,
    pub(crate) tensor: Option<Arc<TensorParallel<D>>>,
}

impl<D: Device> Default for StageBlocks<D> {
    fn default() -> Self {
        Self::new(None)
    }
}

impl<D: Device> StageBlocks<D> {
    /// Starts without blocks; a tensor-parallel rank declares its part of the parameters.
    #[must_use]
    pub fn new(tensor: Option<Arc<TensorParallel<D>>>) -> Self {
        // a group with a single rank needs no sums
        let tensor = tensor.filter(|tensor| tensor.tp_rank().size > 1);
        let tp_rank = tensor.as_ref().map_or(TpRank::ALONE, |tensor| tensor.tp_rank());
        let declaration = Declaration::for_rank(tp_rank);
        Self { blocks: Vec::new(), is_trained: Vec::new(), first_parameters: Vec::new(), declaration, tensor }
    }

    /// Freezes the parameters with these names, also in blocks that are trained.
    #[must_use]
    pub fn freeze(mut self, names: Arc<BTreeSet<String>>) -> Self {
        self.declaration.freeze_names(names);
        self
    }

    /// Returns the rank whose part of the blocks is declared.
    #[must_use]
    pub fn tp_rank(&self) -> TpRank {
        self.declaration.tp_rank()
    }

    /// Adds blocks, with trained or frozen parameters.
    pub fn add(
        &mut self,
        is_frozen: bool,
        declare: impl FnOnce(&mut Declaration) -> Result<Vec<Box<dyn Block<D>>>>,
    ) -> Result<()> {
        self.declaration.freeze(is_frozen);
        // first parameter of this call: backward reports gradients as complete from here on
        let start = self.declaration.len();
        let blocks = declare(&mut self.declaration)?;
        let is_trained = self.declaration.has_trained_since(start);
        // blocks from the same call are trained or frozen together
        self.is_trained.extend(std::iter::repeat_n(is_trained, blocks.len()));
        self.first_parameters.extend(std::iter::repeat_n(start, blocks.len()));
        self.blocks.extend(blocks);
        Ok(())
    }

    /// Returns whether a block has trained parameters.
    #[must_use]
    pub fn is_trained(&self) -> bool {
        self.is_trained.contains(&true)
    }

    /// Returns the declaration with all parameters.
    #[must_use]
    pub fn into_declaration(self) -> Declaration {
        self.declaration
    }
}

/// Splits a range into single layers, each of which is declared and completes gradients separately. An empty
/// range is returned unchanged.
pub(crate) fn single_layers(layers: &Range<usize>) -> Vec<Range<usize>> {
    if layers.len() < 2 {
        return vec![layers.clone()];
    }
    layers.clone().map(|layer| layer..layer + 1).collect()
}

/// Microbatch as seen by the blocks in one module.
pub struct MicrobatchContext<D: Device> {
    /// Transformer layer inputs.
    pub layers: LayerContext<D>,
    /// First and last block inputs.
    pub inputs: ModuleInputs<D>,
}

/// Microbatch as seen by transformer layers.
pub struct LayerContext<D: Device> {
    /// Number of activation rows.
    pub rows: usize,
    /// Samples, images or audio clips.
    pub segments: Segments<D>,
    /// Windows; `None` if no layer uses windows, or if no window is shorter than a segment.
    pub windows: Option<Segments<D>>,
    /// Cosines and sines for every row, if layers rotate.
    pub rotation: Option<(Tensor<D>, Tensor<D>)>,
    /// Cosines and sines for decoder layers with windows, if these rotate differently.
    pub window_rotation: Option<(Tensor<D>, Tensor<D>)>,
    /// Query factor for every row, and as many zeros, for layers that scale queries by position; `None` if
    /// all factors are 1.
    pub query_scales: Option<(Tensor<D>, Tensor<D>)>,
}

impl<D: Device> LayerContext<D> {
    /// Returns cosines and sines.
    ///
    /// - `has_window`: whether the layer is a decoder layer with windows
    ///
    /// # Errors
    /// [`Error::Input`] if the module has no rotation.
    pub fn angles(&self, has_window: bool) -> Result<(&Tensor<D>, &Tensor<D>)> {
        let of_windows = self.window_rotation.as_ref().filter(|_| has_window);
        match of_windows.or(self.rotation.as_ref()) {
            Some((cos, sin)) => Ok((cos, sin)),
            None => Err(Error::Input { input: "context", problem: "is of another module".to_owned() }),
        }
    }
}

/// First and last block inputs, by module.
#[expect(clippy::large_enum_variant, reason = "there is one per microbatch")]
pub enum ModuleInputs<D: Device> {
    /// LLM inputs.
    Text(TextInputs<D>),
    /// Encoder inputs.
    Encoder(EncoderInputs<D>),
}

impl<D: Device> ModuleInputs<D> {
    /// Returns LLM inputs.
    ///
    /// # Errors
    /// [`Error::Input`] if the context belongs to an encoder.
    pub fn text(&self) -> Result<&TextInputs<D>> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Encoder(_) => Err(Error::Input { input: "context", problem: "is an encoder's".to_owned() }),
        }
    }

    /// Returns encoder inputs.
    ///
    /// # Errors
    /// [`Error::Input`] if the context belongs to the LLM.
    pub fn encoder(&self) -> Result<&EncoderInputs<D>> {
        match self {
            Self::Encoder(encoder) => Ok(encoder),
            Self::Text(_) => Err(Error::Input { input: "context", problem: "is the LLM's".to_owned() }),
        }
    }
}

/// Inputs for the embedding and the LM head.
pub struct TextInputs<D: Device> {
    /// Maps vocabulary rows to sequence rows.
    pub embedding: DeviceSparseRows<D>,
    /// Host copy of `embedding`, for ranks with a vocabulary shard.
    pub words: SparseRows,
    /// Maps encoder tokens to sequence rows, with the token count; `None` without media.
    pub media: Option<(DeviceSparseRows<D>, usize)>,
    /// Maps sequence rows to rows that predict a target.
    pub predictions: DeviceSparseRows<D>,
    /// Predicted token ids, as indices.
    pub targets: Tensor<D>,
    /// Factor for the loss sum: 1 / target tokens of the step.
    pub loss_scale: f64,
}

/// Inputs for the first and last encoder block. The same few sparse matrices serve all families; each family
/// documents how it fills them.
pub struct EncoderInputs<D: Device> {
    /// Patches or frames, as rows.
    pub medium: Tensor<D>,
    /// Number of medium rows.
    pub medium_rows: usize,
    /// Maps medium rows to first-layer rows; for audio, unfolds rows before each convolution, in order.
    pub stem: Vec<DeviceSparseRows<D>>,
    /// Maps position table rows to first-layer rows.
    pub positions: Option<DeviceSparseRows<D>>,
    /// Computed position table, which is not a parameter.
    pub position_table: Option<Tensor<D>>,
    /// Maps the learned class row before every image to first-layer rows.
    pub class: Option<DeviceSparseRows<D>>,
    /// Maps last-layer rows to projected rows.
    pub taken: Option<DeviceSparseRows<D>>,
    /// Number of rows in the projector output.
    pub projected_rows: usize,
    /// Number of LLM tokens.
    pub tokens: usize,
    /// Maps projected rows to tokens.
    pub arranged: Option<DeviceSparseRows<D>>,
    /// Maps the learned newline row to the tokens that end image lines.
    pub newlines: Option<DeviceSparseRows<D>>,
}
