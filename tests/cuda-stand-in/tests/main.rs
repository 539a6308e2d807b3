//! Programs that use CUDA through cudarc, on the stand-ins.
#![expect(unsafe_code, reason = "launches of kernels, whose arguments only these tests know")]

mod costs;
mod kernels;
mod memory;
mod products;
mod streams;
mod support;
