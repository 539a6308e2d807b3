//! FLOPs of a forward and a backward pass, by module, as exact integers.
//!
//! One multiply-add is two FLOPs; matrix products and convolutions are counted, element-wise work, norms,
//! softmax, interpolation and look-ups are not. A specification is folded once into FLOPs per token and per
//! query-key pair, after which a sample costs a few multiplications. All sums saturate at the largest integer.
//!
//! **What counts.** *Tower*: stem (patch embedding or convolutions), layers with the class token where there
//! is one, and a pooling head that runs though no one uses it. *Projector*: its matrices over the tokens that
//! enter the LLM, after pixel shuffle, merging or pooling. *LLM*: layers and the LM head over all tokens.
//!
//! **Backward.** Twice the forward, one product for the gradient of the input and one for that of the
//! weights, but no gradient goes to pixels or spectrograms, into an unused pooling head or into layers behind
//! the one whose output is taken. All parameters are trained, unless a part is frozen ([`Gradients`]).
//!
//! **Two figures.** *Model FLOPs* count attention in full ([`Attention::Full`]), as `PyTorch`'s
//! `FlopCounterMode` does, with which they agree to 0.02 % on every family
//! (`costmodel/tests/flops.rs`). *Executed FLOPs* are what runs: causal attention over half of the pairs of each
//! sample of a pack, and whatever a [`Recomputation`] does again. Windows are exact in both.

mod encoder;
mod llm;

use std::str::FromStr;

use crate::error::Error;

pub use encoder::{EncoderFlops, EncoderPass};
pub use llm::LlmFlops;

/// Which query-key pairs of a sequence the LLM's attention computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attention {
    /// Each token sees those before it: half of all pairs.
    Causal,
    /// Each token sees all; what profilers such as `PyTorch`'s `FlopCounterMode` count.
    Full,
}

/// What the backward pass computes a second time instead of keeping it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Recomputation {
    /// Nothing.
    #[default]
    None,
    /// The attention scores, one of attention's two products: what fused attention kernels do.
    ///
    /// # Source
    /// Dao, "FlashAttention-2", 2023, arXiv:2307.08691, section 3.1: five products backward for two forward.
    Scores,
    /// All transformer layers from their inputs, and the scores within: activation checkpointing of each
    /// layer over a fused kernel. Stem, projector and LM head are kept.
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

/// Which gradients the backward pass of a part computes; each of them takes one product for each of the forward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Gradients {
    /// Of weights and of inputs: the part is trained, and so is something before it.
    #[default]
    All,
    /// Of inputs alone: the part is frozen, something before it is trained. Attention has no weights: both of its
    /// factors are inputs.
    Inputs,
    /// Of weights alone, and of inputs between its own matrices: the part is trained, nothing before it is.
    Weights,
    /// None: nothing up to here is trained.
    None,
}

/// FLOPs of one training pass over some samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TrainingFlops {
    /// Of the forward pass.
    pub forward: u128,
    /// Of the backward pass, without what it recomputes.
    pub backward: u128,
    /// Done a second time in the backward pass; not part of the model's FLOPs.
    pub recomputed: u128,
}

impl TrainingFlops {
    /// Returns all of it, saturating.
    #[must_use]
    pub const fn total(&self) -> u128 {
        self.forward.saturating_add(self.backward).saturating_add(self.recomputed)
    }
}

/// FLOPs from multiply-adds, saturating.
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
