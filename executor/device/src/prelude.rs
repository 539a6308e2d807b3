//! Device and operation traits, for code that calls them on a concrete device.
//!
//! Code that is generic over [`Device`] needs only that trait.

pub use crate::comm::DeviceComm;
pub use crate::device::Device;
pub use crate::ops::activation::Activate;
pub use crate::ops::adamw::Update;
pub use crate::ops::attention::Attend;
pub use crate::ops::attention_sinks::AttentionSinks;
pub use crate::ops::bias::Biases;
pub use crate::ops::clamped_gate::ClampedGate;
pub use crate::ops::cross_entropy::CrossEntropy;
pub use crate::ops::elementwise::Elementwise;
pub use crate::ops::experts::Experts;
pub use crate::ops::gate::Gate;
pub use crate::ops::gather_scatter::GatherScatter;
pub use crate::ops::gemm::Gemm;
pub use crate::ops::head_norm::HeadNorm;
pub use crate::ops::latent_heads::LatentHeads;
pub use crate::ops::layer_norm::LayerNorm;
pub use crate::ops::layer_scale::LayerScale;
pub use crate::ops::rms_norm::RmsNorm;
pub use crate::ops::rope::Rotate;
pub use crate::ops::transpose::Transpose;
pub use crate::ops::vocab_parallel_cross_entropy::VocabParallelCrossEntropy;
pub use crate::runtime::Runtime;
