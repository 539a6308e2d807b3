//! Defines the tensors of a microbatch.

use super::tensors::NamedTensor;

/// Tensors of a microbatch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelInputs {
    /// Keyword arguments of the model: `input_ids`, `labels`, `position_ids` or `attention_mask`, and media.
    pub tensors: Vec<NamedTensor>,
    /// First token of every sample in packed order, then the number of tokens: `[samples + 1]`. For padded
    /// tensors the same cumulative lengths. Blank media, and padding of a packed row to a fixed length, are
    /// additional sequences after the samples.
    pub cu_seqlens: Vec<i32>,
    /// Tokens of the longest sequence in `cu_seqlens`.
    pub max_seqlen: u32,
    /// Tokens of all samples, without padding.
    pub tokens: u64,
    /// Tokens that the loss is computed on: labels that are not -100.
    pub target_tokens: u64,
}

impl ModelInputs {
    /// Returns a tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&NamedTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}
