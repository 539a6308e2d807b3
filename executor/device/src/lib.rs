//! Devices for stages: memory, lanes, operations, communication.
//!
//! Models depend only on [`Device`]. A [`Tensor`] is a range in an allocation, with a type and a length; the
//! caller knows the shape. [`Runtime::storage`] is the type for weights and activations (`f32` or bf16), so
//! that a device that stores bf16 runs the same models. Each operation is a trait, with forward and backward.
//! Operations may run asynchronously: in lane order, and in event order between lanes. Scalars such as losses
//! and norms stay on the device; [`Runtime::read`] waits for them, once a step. Parameter and input gradients
//! are *accumulated* unless a method states otherwise. Mismatched shapes are bugs in model code and panic;
//! external inputs are checked before they get here.

#![cfg_attr(test, allow(clippy::float_cmp, reason = "tests compare bits on purpose"))]

pub mod comm;
pub mod conformance;
mod cpu;
pub mod deferred;
mod error;
pub mod ops;
mod runtime;
mod segments;

pub use comm::{DeviceComm, MessageLane, RowShape, Staged, reserve_lanes};
pub use cpu::{Cpu, CpuEvent, CpuMemory};
pub use error::{Error, Result};
pub use ops::Device;
pub use ops::gemm::Epilogue;
pub use ops::sparse_rows::{DeviceSparseRows, SparseBuffers};
pub use runtime::{
    Bucket, Dtype, HostTask, KernelLoads, Lane, LateRead, Memory, Runtime, Span, Tensor, Transfer,
};
pub use segments::{HostSegments, KeyRanges, PlanKey, Segments, Tile};

/// Device and operation traits, for code that calls them on a concrete device.
///
/// Code that is generic over [`Device`] needs only that trait.
pub mod prelude {
    pub use crate::comm::DeviceComm;
    pub use crate::ops::Device;
    pub use crate::runtime::Runtime;

    macro_rules! traits {
        ($($file:ident::$Operation:ident),+ $(,)?) => {
            $(pub use crate::ops::$file::$Operation;)+
        };
    }
    crate::ops::each_operation!(traits);
}
