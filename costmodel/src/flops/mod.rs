//! Counts forward and backward FLOPs by module, as exact integers.
//!
//! One multiply-add is two FLOPs; matrix products and convolutions are counted, element-wise work, norms,
//! softmax, interpolation and look-ups are not. A specification is folded once into FLOPs per token and per
//! query-key pair, after which a sample costs a few multiplications. All sums saturate at the largest
//! integer.
//!
//! **Counted.** *Tower*: stem (patch embedding or convolutions), layers with the class token if there is one,
//! and a pooling head that runs although the output is unused. *Projector*: matrices over the tokens that
//! enter the LLM, after pixel shuffle, merging or pooling. *LLM*: layers and the LM head over all tokens.
//!
//! **Backward.** Twice the forward FLOPs, with a product for the input gradient and a product for the weight
//! gradient, but no gradient goes to pixels or spectrograms, into an unused pooling head or into layers after
//! the output layer. All parameters are trained, unless a part is frozen ([`Gradients`]).
//!
//! **Two figures.** *Model FLOPs* count attention in full ([`Attention::Full`]), as `PyTorch`'s
//! `FlopCounterMode` does; they agree with it to 0.02 % on every family (`costmodel/tests/flops.rs`).
//! *Executed FLOPs* are the FLOPs that run: causal attention over half the pairs in each packed sample, and
//! everything that a [`Recomputation`] repeats. Windows are exact in both: full attention counts twice the
//! causal pairs within the window, not the pairs outside that eager attention computes as well.

mod encoder;
mod llm;
mod slice;

use std::str::FromStr;

use crate::error::Error;

pub use encoder::{EncoderFlops, EncoderPass};
pub use llm::{LlmFlops, RingPass, SliceFlops};
pub use slice::ZigzagSlices;

/// Query-key pairs in a sequence that the LLM's attention computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attention {
    /// Each token attends to the tokens before it: half the pairs.
    Causal,
    /// Twice the pairs in causal attention: each token attends to all tokens in the window, as profilers such
    /// as `PyTorch`'s `FlopCounterMode` count without windows.
    Full,
}

/// Work that the backward pass repeats instead of saving the results (activation checkpointing).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Recomputation {
    /// Nothing.
    #[default]
    None,
    /// The attention scores, one of two attention products, as fused attention kernels do.
    ///
    /// # Source
    /// Dao, "FlashAttention-2", 2023, arXiv:2307.08691, section 3.1: five products backward for two forward.
    Scores,
    /// All transformer layers from the layer inputs, and the scores within: activation checkpointing for each
    /// layer with a fused kernel. Stem, projector and LM head activations are saved.
    ///
    /// # Source
    /// Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174.
    Layers,
}

impl Recomputation {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::None, Self::Scores, Self::Layers];

    /// Returns the name that [`FromStr`] reads: `none`, `scores` or `layers`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Scores => "scores",
            Self::Layers => "layers",
        }
    }
}

impl FromStr for Recomputation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| Error::UnknownPart {
            name: name.to_owned(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// Gradients that a part's backward pass computes; each gradient takes one product per forward product.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Gradients {
    /// Weight and input gradients: the part is trained, and so is something before it.
    #[default]
    All,
    /// Input gradients only: the part is frozen, something before it is trained. Attention has no weights:
    /// both factors are inputs.
    Inputs,
    /// Weight gradients, and input gradients between the part's own matrices: the part is trained, nothing
    /// before it is.
    Weights,
    /// No gradients: neither the part nor anything before it is trained.
    None,
}

impl Gradients {
    /// Returns a matrix's gradient FLOPs divided by the forward FLOPs.
    pub(crate) const fn over_forward(self) -> f64 {
        match self {
            Self::All => 2.0,
            Self::Inputs | Self::Weights => 1.0,
            Self::None => 0.0,
        }
    }
}

/// FLOPs for a training step over some samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TrainingFlops {
    /// Forward FLOPs.
    pub forward: u128,
    /// Backward FLOPs, without recomputation.
    pub backward: u128,
    /// FLOPs that the backward pass repeats; not part of the model FLOPs.
    pub recomputed: u128,
}

impl TrainingFlops {
    /// Returns the sum, saturating.
    #[must_use]
    pub const fn total(&self) -> u128 {
        self.forward.saturating_add(self.backward).saturating_add(self.recomputed)
    }
}

/// Converts multiply-adds to FLOPs, saturating.
fn flops(multiply_adds: u128) -> u64 {
    u64::try_from(multiply_adds.saturating_mul(2)).unwrap_or(u64::MAX)
}

fn product<const N: usize>(factors: [u32; N]) -> u128 {
    factors.into_iter().fold(1, |product, factor| product.saturating_mul(u128::from(factor)))
}

fn wide_product(factor: u64, count: u64) -> u128 {
    u128::from(factor) * u128::from(count)
}

fn sum<const N: usize>(terms: [u128; N]) -> u128 {
    terms.into_iter().fold(0, u128::saturating_add)
}
