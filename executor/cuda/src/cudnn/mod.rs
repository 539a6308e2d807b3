//! Attention over packed sequences by cuDNN.

mod arguments;
mod background;
mod cache;
mod descriptor;
mod device_properties;
mod engine;
mod error;
mod execute;
mod graph;
mod library;
mod plan;
mod plan_key;
mod store;
mod tables;

pub use arguments::{Arguments, Gradients};
pub use background::Lookup;
pub use cache::Plans;
pub use device_properties::DeviceProperties;
pub use error::{Error, Result};
pub use execute::Executor;
pub use graph::Form;
pub use library::{Library, Version};
pub use plan::Plan;
pub use plan_key::{Heads, PlanKey};
pub use tables::SegmentTables;
