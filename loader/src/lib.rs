//! Streams WebDataset shards as decoded, cost-annotated and balanced microbatches.
//!
//! [`probe`] reads the shape of a medium from its header; [`decode`] turns the bytes of one field into
//! typed media. Both are pure functions over byte slices: no files, no threads, no clocks.

pub mod decode;
pub mod probe;
