//! CUDA devices on the stand-ins, for tests: through the host and over NCCL.
//!
//! Both need a C++ compiler. Where there is none, the test process ends and counts as passed.

pub mod cuda;
mod nccl;

pub use cuda::OnCuda;
pub use nccl::{OnNccl, OnQueues};
