//! Operations on the CPU: forward and backward over plain slices, one operation a file.
//!
//! Matrices are row-major slices; a *row* is a token or a patch. Functions are generic over [`real::Real`], so that finite
//! differences check every backward in `f64`. Gradients of parameters and of inputs are *added* to what is there, unless
//! a function says otherwise: that is how residual connections and microbatches add up.
//!
//! **Order of sums.** Work is cut into chunks whose size depends on shapes alone ([`parallel`]), sums within a chunk run in
//! a fixed order and chunks are added in order. Results are bit-equal for any number of threads. Slices whose lengths do
//! not agree are an error of the caller's code, and panic.

#![allow(
    clippy::inline_always,
    reason = "loops are compiled once for each kind of vector instructions, with all they call"
)]
#![expect(clippy::missing_panics_doc, reason = "shapes that do not agree panic, as said above")]

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod bias;
pub mod cross_entropy;
pub mod elementwise;
#[cfg(test)]
pub(crate) mod finite_difference;
pub mod gather_scatter;
pub mod gemm;
pub mod layer_norm;
pub mod layer_scale;
pub mod parallel;
pub mod real;
pub mod rms_norm;
pub mod rope;
pub mod silu_gate;
pub mod sparse_rows;
pub mod transpose;
pub mod vocab_parallel_cross_entropy;
