//! What every rank knows of a microbatch before it computes: lengths, positions, ids, who goes where.
//!
//! Made from the microbatch's description by the module's configuration, on every stage that runs it; no shape is ever
//! sent between stages.

use crate::device::Device;
use crate::device::DeviceSparseRows;
use crate::error::{Error, Result};
use crate::ops::sparse_rows::SparseRows;

/// A microbatch as the blocks of one module see it.
pub struct MicrobatchContext<D: Device> {
    /// What layers need.
    pub layers: LayerContext<D>,
    /// What first and last blocks need.
    pub inputs: ModuleInputs<D>,
}

/// A microbatch as transformer layers see it.
pub struct LayerContext<D: Device> {
    /// Rows of activations.
    pub rows: usize,
    /// First row of every sample, image or clip, then the number of rows.
    pub segments: Vec<u32>,
    /// The same of windows; empty where no layer has any.
    pub windows: Vec<u32>,
    /// Cosines and sines of every row, where layers rotate.
    pub rotation: Option<(D::Floats, D::Floats)>,
}

impl<D: Device> LayerContext<D> {
    /// Returns cosines and sines.
    ///
    /// # Errors
    /// [`Error::Input`] if the context is that of a module that does not rotate.
    pub fn angles(&self) -> Result<(&D::Floats, &D::Floats)> {
        match &self.rotation {
            Some((cos, sin)) => Ok((cos, sin)),
            None => Err(Error::Input { input: "context", problem: "is of another module".to_owned() }),
        }
    }
}

/// What first and last blocks need, by module.
pub enum ModuleInputs<D: Device> {
    /// The LLM.
    Text(TextInputs<D>),
    /// An encoder.
    Encoder(EncoderInputs<D>),
}

impl<D: Device> ModuleInputs<D> {
    /// Returns those of the LLM.
    ///
    /// # Errors
    /// [`Error::Input`] if the context is an encoder's.
    pub fn text(&self) -> Result<&TextInputs<D>> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Encoder(_) => Err(Error::Input { input: "context", problem: "is an encoder's".to_owned() }),
        }
    }

    /// Returns those of an encoder.
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

/// What the embedding and the LM head need.
pub struct TextInputs<D: Device> {
    /// From rows of the vocabulary to rows of the sequence.
    pub embedding: DeviceSparseRows<D>,
    /// The same on the host, for ranks that have a part of the vocabulary.
    pub words: SparseRows,
    /// From rows of the encoders' tokens to rows of the sequence, and how many there are; `None` without media.
    pub media: Option<(DeviceSparseRows<D>, usize)>,
    /// From rows of the sequence to those that predict a target.
    pub predictions: DeviceSparseRows<D>,
    /// What they should predict.
    pub targets: Vec<u32>,
    /// Factor on the sum of losses: 1 / target tokens of the step.
    pub loss_scale: f64,
}

/// What the first and the last block of an encoder need. All rows go through the same few sparse matrices, whatever
/// the family; what each is stands with the family.
pub struct EncoderInputs<D: Device> {
    /// Patches or frames, as rows.
    pub medium: D::Floats,
    /// Rows of the medium.
    pub medium_rows: usize,
    /// Into the first layer, or, for audio, the unfolding before each convolution, in order.
    pub stem: Vec<DeviceSparseRows<D>>,
    /// From rows of the position table to rows of the first layer.
    pub positions: Option<DeviceSparseRows<D>>,
    /// From a learned row that stands before every image to rows of the first layer.
    pub class: Option<DeviceSparseRows<D>>,
    /// From rows of the last layer to those that are projected.
    pub taken: Option<DeviceSparseRows<D>>,
    /// Rows that come out of the projector's matrices.
    pub projected_rows: usize,
    /// Rows that the LLM reads.
    pub tokens: usize,
    /// From projected rows to what the LLM reads.
    pub arranged: Option<DeviceSparseRows<D>>,
    /// From a learned row that ends every line of an image to what the LLM reads.
    pub newlines: Option<DeviceSparseRows<D>>,
}
