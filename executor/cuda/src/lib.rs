//! CUDA device for the executor.
//!
//! [`Cuda`] implements [`dflop_device::Device`], so that models and pipelines run on it unchanged. Nothing
//! from CUDA is needed to build: the driver, NVRTC and cuBLASLt are found at run time ([`SearchPath`]).
//! Kernels are CUDA C++, a file per operation in `kernels/`, and compiled for the available device; the
//! machine code is kept on disk.

mod attention;
mod blas;
mod compiler;
pub mod cudnn;
mod device;
mod driver;
mod error;
mod libraries;
mod nccl;
mod ops;

pub use attention::{AttentionChoice, AttentionEngines};
pub use device::{Cuda, CudaBuilder, KernelTime, Properties};
#[doc(hidden)]
pub use driver::{CudaEvent, CudaMemory, LateLoads};
pub use error::{Error, Result};
pub use libraries::{LIBRARY_PATH, Libraries, SearchPath};
pub use nccl::{NCCL_VARIABLES, Nccl, NcclComm, NcclVersion, check_alone as check_nccl_alone};
