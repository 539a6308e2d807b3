//! Tests the public claims of the planner: one module per kind.

mod native_resolution;
mod planner;
