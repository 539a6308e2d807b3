//! Programs that use CUDA through cudarc, on the stand-ins.

mod costs;
mod environment;
mod kernels;
mod memory;
mod nccl;
mod products;
mod streams;
mod support;
mod threads;
mod traffic;
