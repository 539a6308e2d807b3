//! CUDA device for the executor.
//!
//! [`Cuda`] implements [`dflop_device::Device`], so that models and pipelines run on it unchanged. Nothing
//! from CUDA is needed to build: the driver, NVRTC and cuBLASLt are found at run time ([`SearchPath`]).
//! Kernels are CUDA C++, a file per operation in `kernels/`, and compiled for the available device; the
//! machine code is kept on disk.

mod address;
mod attention;
mod blas;
mod compiler;
pub mod cudnn;
mod device;
mod driver;
mod error;
mod event;
mod function_tables;
mod kernel_times;
mod kernels;
mod lanes;
mod libraries;
mod loads;
mod memory;
mod nccl;
mod ops;
mod runtime;
mod staging;

pub use attention::{AttentionChoice, AttentionEngines};
pub use device::{Cuda, CudaBuilder, Properties};
pub use error::{Error, Result};
pub use event::CudaEvent;
pub use kernel_times::KernelTime;
pub use libraries::{LIBRARY_PATH, Libraries, SearchPath};
#[doc(hidden)]
pub use loads::LateLoads;
pub use memory::CudaMemory;
pub use nccl::{NCCL_VARIABLES, Nccl, NcclComm, NcclVersion, check_alone as check_nccl_alone};
