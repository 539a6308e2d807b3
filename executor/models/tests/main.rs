//! Stages, weights and configurations on the CPU device; suites for any device are in `executor/testing`.

mod parameters;
mod stages;
mod unsupported;
mod weights;
