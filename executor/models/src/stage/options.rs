//! Options for a block stage.

use crate::parameters::BUCKET_ELEMENTS;

/// Layer activations that a stage keeps between forward and backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// All activations that backward reads.
    #[default]
    Stored,
    /// Only the layer input; backward recomputes the rest (activation checkpointing).
    Recomputed,
}

/// Stage options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageOptions {
    /// Stage name for errors.
    pub name: String,
    /// Activations that are kept per layer.
    pub activations: Activations,
    /// Whether the input has a gradient, because an earlier stage or an encoder is trained.
    pub is_input_trained: bool,
    /// Gradient bucket size in elements.
    pub bucket_elements: usize,
}

impl StageOptions {
    /// Creates options for a stage that stores all activations and whose input has a gradient.
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
