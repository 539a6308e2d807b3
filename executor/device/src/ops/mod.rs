//! Operations on the CPU: forward and backward over plain slices, one operation per file.
//!
//! Matrices are row-major slices; a *row* is a token or a patch. Functions are generic over [`real::Real`],
//! so that finite differences check every backward in `f64`. Parameter and input gradients are *accumulated*
//! unless a function states otherwise, as residual connections and microbatches require.
//!
//! **Summation order.** Work is divided into chunks whose size depends only on shapes ([`parallel`]); sums
//! within a chunk run in a fixed order, and chunks are added in order. Results are bit-equal for any number
//! of threads. Slices with mismatched lengths are caller bugs and panic.
//!
//! **A new operation** is a file with a trait in `operation!`, the functions, the trait on
//! [`Cpu`](crate::Cpu) and `tests::cases`, and a line in `each_operation`, which adds it to
//! [`Device`], the prelude and the comparison of devices.

#![allow(
    clippy::inline_always,
    reason = "loops are compiled once for each kind of vector instructions, with all they call"
)]
#![expect(clippy::missing_panics_doc, reason = "shapes that do not agree panic, as said above")]

pub mod activation;
pub mod adamw;
pub(crate) mod argument;
pub mod attention;
pub mod attention_sinks;
#[cfg(test)]
mod bf16_tests;
pub mod bias;
pub mod clamped_gate;
pub mod cross_entropy;
pub mod elementwise;
#[cfg(test)]
pub(crate) mod every_operation;
pub mod experts;
#[cfg(test)]
pub(crate) mod finite_difference;
pub mod gate;
pub mod gather_scatter;
pub mod gemm;
pub mod head_norm;
pub mod latent_heads;
pub mod layer_norm;
pub mod layer_scale;
pub(crate) mod operation;
pub mod parallel;
pub mod real;
pub mod rms_norm;
pub mod rope;
pub mod sparse_rows;
pub mod transpose;
pub mod vocab_parallel_cross_entropy;

use crate::runtime::Runtime;

/// Calls a macro with the file and the trait of every operation.
macro_rules! each_operation {
    ($apply:ident) => {
        $apply! {
            activation::Activate,
            adamw::Update,
            attention::Attend,
            attention_sinks::AttentionSinks,
            bias::Biases,
            clamped_gate::ClampedGate,
            cross_entropy::CrossEntropy,
            elementwise::Elementwise,
            experts::Experts,
            gate::Gate,
            gather_scatter::GatherScatter,
            gemm::Gemm,
            head_norm::HeadNorm,
            latent_heads::LatentHeads,
            layer_norm::LayerNorm,
            layer_scale::LayerScale,
            rms_norm::RmsNorm,
            rope::Rotate,
            transpose::Transpose,
            vocab_parallel_cross_entropy::VocabParallelCrossEntropy,
        }
    };
}
pub(crate) use each_operation;

macro_rules! device {
    ($($file:ident::$Operation:ident),+ $(,)?) => {
        /// Device memory and operations.
        ///
        /// Each operation is a separate trait, next to the functions that compute it on a CPU; a device
        /// implements all operations. Tensor shapes are documented at the functions with the same name.
        pub trait Device: Runtime $(+ $file::$Operation)+ {}

        impl<D> Device for D where D: Runtime $(+ $file::$Operation)+ {}
    };
}
each_operation!(device);
