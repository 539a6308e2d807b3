//! Properties of a microbatch that every rank knows before it computes: lengths, positions, ids, row
//! selections.
//!
//! Each stage derives them from the description of the microbatch and the configuration of the module; shapes
//! are never sent between stages.

use crate::error::{Error, Result};
use dflop_device::DeviceSparseRows;
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::{Device, Segments, Tensor};

/// Microbatch as the blocks of one module see it.
pub struct MicrobatchContext<D: Device> {
    /// Inputs of transformer layers.
    pub layers: LayerContext<D>,
    /// Inputs of first and last blocks.
    pub inputs: ModuleInputs<D>,
}

/// Microbatch as transformer layers see it.
pub struct LayerContext<D: Device> {
    /// Number of activation rows.
    pub rows: usize,
    /// Samples, images or audio clips.
    pub segments: Segments<D>,
    /// Windows; `None` if no layer has windows, or none is shorter than a segment.
    pub windows: Option<Segments<D>>,
    /// Cosines and sines of every row, for layers that rotate.
    pub rotation: Option<(Tensor<D>, Tensor<D>)>,
    /// The same for layers of a decoder with windows, if they rotate in another way.
    pub window_rotation: Option<(Tensor<D>, Tensor<D>)>,
    /// Factor on the queries of every row, and as many zeros, for layers that scale queries by position;
    /// `None` if all factors are 1.
    pub query_scales: Option<(Tensor<D>, Tensor<D>)>,
}

impl<D: Device> LayerContext<D> {
    /// Returns cosines and sines.
    ///
    /// - `has_window`: whether it is a layer of a decoder with windows
    ///
    /// # Errors
    /// [`Error::Input`] if the context belongs to a module without rotation.
    pub fn angles(&self, has_window: bool) -> Result<(&Tensor<D>, &Tensor<D>)> {
        let of_windows = self.window_rotation.as_ref().filter(|_| has_window);
        match of_windows.or(self.rotation.as_ref()) {
            Some((cos, sin)) => Ok((cos, sin)),
            None => Err(Error::Input { input: "context", problem: "is of another module".to_owned() }),
        }
    }
}

/// Inputs of first and last blocks, by module.
#[expect(clippy::large_enum_variant, reason = "there is one per microbatch")]
pub enum ModuleInputs<D: Device> {
    /// The LLM.
    Text(TextInputs<D>),
    /// An encoder.
    Encoder(EncoderInputs<D>),
}

impl<D: Device> ModuleInputs<D> {
    /// Returns the inputs of the LLM.
    ///
    /// # Errors
    /// [`Error::Input`] if the context is an encoder's.
    pub fn text(&self) -> Result<&TextInputs<D>> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Encoder(_) => Err(Error::Input { input: "context", problem: "is an encoder's".to_owned() }),
        }
    }

    /// Returns the inputs of an encoder.
    ///
    /// # Errors
    /// [`Error::Input`] if the context is the LLM's.
    pub fn encoder(&self) -> Result<&EncoderInputs<D>> {
        match self {
            Self::Encoder(encoder) => Ok(encoder),
            Self::Text(_) => Err(Error::Input { input: "context", problem: "is the LLM's".to_owned() }),
        }
    }
}

/// Inputs of the embedding and the LM head.
pub struct TextInputs<D: Device> {
    /// Maps rows of the vocabulary to rows of the sequence.
    pub embedding: DeviceSparseRows<D>,
    /// Host copy of `embedding`, for ranks that have a part of the vocabulary.
    pub words: SparseRows,
    /// Maps encoder tokens to rows of the sequence, with the number of tokens; `None` without media.
    pub media: Option<(DeviceSparseRows<D>, usize)>,
    /// Maps rows of the sequence to the rows that predict a target.
    pub predictions: DeviceSparseRows<D>,
    /// Predicted token ids, as indices.
    pub targets: Tensor<D>,
    /// Factor on the sum of losses: 1 / target tokens of the step.
    pub loss_scale: f64,
}

/// Inputs of the first and last block of an encoder. The same few sparse matrices serve all families; each
/// family documents how it fills them.
pub struct EncoderInputs<D: Device> {
    /// Patches or frames, as rows.
    pub medium: Tensor<D>,
    /// Number of rows of the medium.
    pub medium_rows: usize,
    /// Maps rows of the medium into the first layer; for audio, unfolds the rows before each convolution, in
    /// order.
    pub stem: Vec<DeviceSparseRows<D>>,
    /// Maps rows of the position table to rows of the first layer.
    pub positions: Option<DeviceSparseRows<D>>,
    /// Position table that is computed, not a parameter.
    pub position_table: Option<Tensor<D>>,
    /// Maps the learned class row in front of every image to rows of the first layer.
    pub class: Option<DeviceSparseRows<D>>,
    /// Maps rows of the last layer to the projected rows.
    pub taken: Option<DeviceSparseRows<D>>,
    /// Number of rows that leave the projector's matrices.
    pub projected_rows: usize,
    /// Number of tokens for the LLM.
    pub tokens: usize,
    /// Maps projected rows to tokens.
    pub arranged: Option<DeviceSparseRows<D>>,
    /// Maps the learned newline row to the tokens that end lines of an image.
    pub newlines: Option<DeviceSparseRows<D>>,
}
