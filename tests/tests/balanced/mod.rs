//! Tests the balanced loader, and what both loaders share.

mod fields;
mod metrics;
mod skipped_samples;
mod stalls;
mod steps;
mod transforms;
