//! Device features apart from operations: memory tensors, lanes and events, host tasks.

mod device_runtime;
mod host_task;
mod tensor;
mod transfer;

pub use device_runtime::{KernelLoads, Lane, LateRead, Memory, Runtime};
pub use host_task::HostTask;
pub use tensor::{Bucket, Tensor};
pub use transfer::{Span, Transfer};
