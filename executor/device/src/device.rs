//! Device trait: memory and all operations.

use crate::ops::activation::Activate;
use crate::ops::adamw::Update;
use crate::ops::attention::Attend;
use crate::ops::attention_sinks::AttentionSinks;
use crate::ops::bias::Biases;
use crate::ops::clamped_gate::ClampedGate;
use crate::ops::cross_entropy::CrossEntropy;
use crate::ops::elementwise::Elementwise;
use crate::ops::experts::Experts;
use crate::ops::gate::Gate;
use crate::ops::gather_scatter::GatherScatter;
use crate::ops::gemm::Gemm;
use crate::ops::head_norm::HeadNorm;
use crate::ops::latent_heads::LatentHeads;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::layer_scale::LayerScale;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::rope::Rotate;
use crate::ops::transpose::Transpose;
use crate::ops::vocab_parallel_cross_entropy::VocabParallelCrossEntropy;
use crate::runtime::Runtime;

/// Device memory and operations.
///
/// Each operation is a separate trait, next to the functions that compute it on a CPU ([`crate::ops`]); a
/// device implements all operations. Tensor shapes are documented at the functions with the same name.
pub trait Device:
    Runtime
    + Activate
    + Attend
    + AttentionSinks
    + Biases
    + ClampedGate
    + CrossEntropy
    + Elementwise
    + Experts
    + Gate
    + GatherScatter
    + Gemm
    + HeadNorm
    + LatentHeads
    + LayerNorm
    + LayerScale
    + RmsNorm
    + Rotate
    + Transpose
    + Update
    + VocabParallelCrossEntropy
{
}

impl<D> Device for D where
    D: Runtime
        + Activate
        + Attend
        + AttentionSinks
        + Biases
        + ClampedGate
        + CrossEntropy
        + Elementwise
        + Experts
        + Gate
        + GatherScatter
        + Gemm
        + HeadNorm
        + LatentHeads
        + LayerNorm
        + LayerScale
        + RmsNorm
        + Rotate
        + Transpose
        + Update
        + VocabParallelCrossEntropy
{
}
