//! Tests decoding and augmentation.

mod augment;
mod own_codec;
mod video;
