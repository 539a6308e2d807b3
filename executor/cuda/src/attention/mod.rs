//! Engines of attention: which may compute it, and cuDNN where it is the faster one.

mod cudnn_engine;
mod engine_choice;

pub use cudnn_engine::AttentionChoice;
pub(crate) use cudnn_engine::{Call, CudnnEngine};

/// Engines that compute attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttentionEngines {
    /// Kernels of this crate alone: the same bits in every run.
    #[default]
    Own,
    /// The faster one of these kernels and cuDNN on each shape, by measured time. The last digits of results
    /// depend on what is chosen, and on when.
    Fastest,
}
