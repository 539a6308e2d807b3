//! Tests the balanced loader, and common features of both loaders.

mod fields;
mod metrics;
mod rows;
mod skipped_samples;
mod stalls;
mod steps;
mod transforms;
