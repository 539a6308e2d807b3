//! Decoded media to the tensors of a model: what its processor does.

pub mod audio;
pub mod image;
