//! Tests of decoding and augmentation.

mod augment;
mod video;
