//! Options of a stage of blocks.

use crate::parameters::BUCKET_ELEMENTS;

/// Activations that a stage keeps of a layer between forward and backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// Everything that backward reads.
    #[default]
    Stored,
    /// Only the input of the layer; backward recomputes the rest (activation checkpointing).
    Recomputed,
}

/// Options of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageOptions {
    /// Name for errors.
    pub name: String,
    /// Activations that are kept per layer.
    pub activations: Activations,
    /// Whether the input has a gradient, because an earlier stage or an encoder is trained.
    pub is_input_trained: bool,
    /// Elements of a bucket of gradients.
    pub bucket_elements: usize,
}

impl StageOptions {
    /// Makes options of a stage that stores all activations and whose input has a gradient.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            activations: Activations::Stored,
            is_input_trained: true,
            bucket_elements: BUCKET_ELEMENTS,
        }
    }
}
