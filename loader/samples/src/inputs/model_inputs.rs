//! Defines microbatch tensors.

use super::tensors::NamedTensor;

/// Microbatch tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelInputs {
    /// Keyword arguments for the model: `input_ids`, `labels`, `position_ids` or `attention_mask`, and media.
    pub tensors: Vec<NamedTensor>,
    /// First token of every sample in packed order, then the number of tokens: `[samples + 1]`. Padded
    /// tensors have the same cumulative lengths. Blank media, and padding to a fixed row length, are
    /// additional sequences after the samples.
    pub cu_seqlens: Vec<i32>,
    /// Number of tokens in the longest sequence in `cu_seqlens`.
    pub max_seqlen: u32,
    /// Number of tokens in all samples, without padding.
    pub tokens: u64,
    /// Number of tokens in the loss: labels that are not -100.
    pub target_tokens: u64,
}

impl ModelInputs {
    /// Returns a tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&NamedTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}
