//! Attention over packed sequences by cuDNN.

mod descriptor;
mod device_properties;
mod error;
mod graph;
mod library;
mod plan;
mod plan_key;

pub use device_properties::DeviceProperties;
pub use error::{Error, Result};
pub use library::{Library, Version};
pub use plan::Plan;
pub use plan_key::{Heads, PlanKey};
