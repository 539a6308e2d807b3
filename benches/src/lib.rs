//! Synthetic inputs for the benchmarks.
