//! Decodes samples on a thread pool and collates them into batches.

mod batch;
mod collate;
mod fields;
mod mode;
mod outcome;
mod pool;
mod tensor;
mod transform;

pub use self::batch::{Batch, Pixels};
pub(crate) use self::collate::{Collator, PendingBatch, PendingSample};
pub use self::mode::Decode;
pub(crate) use self::mode::check_augment;
pub(crate) use self::pool::{DecodePool, KernelSettings, SIDE_WITHOUT_PIXELS, WORKERS_MAX};
pub use self::tensor::Tensor;
pub(crate) use self::transform::TransformStage;
pub use self::transform::{SampleAnswer, SampleInput, SampleTransform};
pub use self::transform::{Transform, TransformFault, TransformInput, Transforms};
