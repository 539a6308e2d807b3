//! Devices that stages compute on: memory, lanes, operations, communication.
//!
//! Models are written against [`Device`] alone. A [`Tensor`] is a range of an allocation, with a type and a
//! length; the caller knows its shape. [`Runtime::storage`] is the type of weights and activations (`f32` or
//! bf16), so that a device that stores bf16 runs the same models. Operations are one trait each, forward and
//! backward. They may run asynchronously: in the order of their lane, and in the order of events between
//! lanes. Scalars such as losses and norms stay on the device; [`Runtime::read`] waits for them, once a step.
//! Gradients of parameters and inputs are *accumulated* unless a method states otherwise. Mismatched shapes
//! are bugs of the model's code and panic; external inputs are checked before they get here.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

pub mod comm;
pub mod conformance;
mod cpu;
pub mod deferred;
mod device;
mod dtype;
mod error;
mod key_ranges;
pub mod ops;
pub mod prelude;
mod runtime;
mod segments;

pub use comm::{DeviceComm, MessageLane, RowShape, Staged, reserve_lanes};
pub use cpu::{Cpu, CpuEvent, CpuMemory};
pub use device::Device;
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use key_ranges::KeyRanges;
pub use ops::gemm::Epilogue;
pub use ops::sparse_rows::{DeviceSparseRows, SparseBuffers};
pub use runtime::{Bucket, HostTask, Lane, LateRead, Memory, Runtime, Span, Tensor, Transfer};
pub use segments::{HostSegments, PlanKey, Segments, Tile};
