//! Microbatch properties that every rank knows before computing: lengths, positions, ids, row selections.
//!
//! Each stage derives them from the microbatch description and the module configuration; shapes are never
//! sent between stages.

use crate::error::{Error, Result};
use dflop_device::DeviceSparseRows;
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::{Device, Segments, Tensor};

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
