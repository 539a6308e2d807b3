//! Attention over packed sequences with cuDNN.
//!
//! A *plan* holds the compiled kernels for one attention: heads, mask, and the maximum numbers of segments,
//! rows per segment and rows in all segments ([`PlanKey`]). cuDNN has no plan for all sizes on Hopper, so
//! sizes are rounded up and [`Plans`] builds each plan once, in a thread; a caller that gets
//! [`Lookup::Building`] or [`Lookup::Failed`] uses another kernel. An [`Executor`] queues a plan on a stream,
//! with device memory addresses.
//!
//! Queries, keys and values are columns in a single packed matrix, bf16
//! `[tokens, (heads + 2 * kv_heads) * head_dim]`. Every segment is an element in the cuDNN batch with a
//! *ragged offset* (the first element) and a length; both are in [`SegmentTables`]. Segments that a plan has
//! room for and a microbatch lacks are empty.
//!
//! Plans are built from [`DeviceProperties`], so no device is needed for that; the tests build plans for an
//! H200, an A100 and a B200.
//!
//! # Source
//! The backend API: `cudnn_graph.h` in cuDNN 9.28. The operations in [`Form::Composite`], [`Form::Direct`]
//! and [`Form::Padded`] follow NVIDIA's `cudnn-frontend` 1.32; the compared plans have the same machine code
//! and the same parameter layout.

mod arguments;
mod cache;
mod descriptor;
mod device_properties;
mod engine;
mod execute;
mod graph;
mod library;
mod plan;

pub use arguments::{Arguments, Gradients};
pub use cache::{Lookup, Plans};
pub use device_properties::DeviceProperties;
pub use execute::Executor;
pub use graph::Form;
pub use library::{Error, Heads, Library, PlanKey, Result, Version};
pub use plan::{Plan, SegmentTables};
