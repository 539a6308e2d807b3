//! TODO decode.

mod batch;
mod collate;
mod fields;
mod pool;
mod tensor;
mod transform;
pub use self::batch::{Batch, Pixels};
pub use self::collate::Decode;
pub(crate) use self::collate::{Collator, PendingBatch, PendingSample, check_augment};
pub(crate) use self::pool::{DecodePool, KernelSettings, SIDE_WITHOUT_PIXELS, WORKERS_MAX};
pub use self::tensor::Tensor;
pub use self::transform::{Transform, TransformFault, TransformInput, Transforms};
pub(crate) use self::transform::TransformStage;
