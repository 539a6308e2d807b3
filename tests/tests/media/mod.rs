//! Tests decoding and augmentation.

mod augment;
mod video;
