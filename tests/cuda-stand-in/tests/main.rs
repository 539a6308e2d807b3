//! Programs that use CUDA through cudarc, on the stand-ins.
#![expect(unsafe_code, reason = "launches of kernels, whose arguments only these tests know")]

mod kernels;
mod products;
mod support;
