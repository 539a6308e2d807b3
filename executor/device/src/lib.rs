//! Devices that stages compute on: memory and operations.
//!
//! Models are written against [`Device`] alone. A buffer has a type and a length in elements; the caller
//! knows its shape. [`Device::Floats`] is the number type of the device (`f32` on the CPU), so that a device
//! that stores bf16 runs the same models. Operations are one method each, forward and backward; they may run
//! asynchronously, in order, and [`Device::download`] waits for its operands. Gradients of parameters and
//! inputs are *accumulated* unless a method states otherwise. Mismatched shapes are bugs of the model's code
//! and panic; external inputs are checked before they get here.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

mod bf16;
mod buffer_pool;
mod cpu;
mod device;
mod error;
pub mod ops;

pub use bf16::{Bf16Floats, CpuBf16};
pub use buffer_pool::CpuFloats;
pub use cpu::Cpu;
pub use device::{Buffer, Device, DeviceSparseRows, SparseBuffers};
pub use error::{Error, Result};
