//! Attention engines: allowed engines, and cuDNN where it is faster.

mod cudnn_engine;
mod engine_choice;

pub use cudnn_engine::AttentionChoice;
pub(crate) use cudnn_engine::{Call, CudnnEngine};

/// Engines that compute attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttentionEngines {
    /// Only the kernels in this crate: the same bits in every run.
    #[default]
    Own,
    /// The faster engine on each shape (these kernels or cuDNN), by measured time. The last digits in results
    /// depend on the choice and on the time of the choice.
    Fastest,
}
