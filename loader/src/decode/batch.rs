//! Samples that are delivered together, and the tensor with the samples' images.

use std::ops::Range;

use dflop_samples::media::PixelLayout;
use dflop_samples::sample::Sample;

use super::tensor::Tensor;

/// Samples that are delivered together.
#[derive(Debug)]
pub struct Batch {
    /// Samples, in order.
    pub samples: Vec<Sample>,
    /// All images in the samples, if pixels were requested.
    pub pixels: Option<Pixels>,
}

/// Batch images as a single tensor.
#[derive(Debug)]
pub struct Pixels {
    /// `[images, 3, side, side]`, or `[images, side, side, 3]` by `layout`: resized and cropped; normalized,
    /// unless the values are bytes.
    pub tensor: Tensor,
    /// Axis order within an image.
    pub layout: PixelLayout,
    /// Height and width of every image, in pixels.
    pub side: u32,
    /// Image rows in the tensor for every sample; empty for a sample without an image.
    pub rows: Vec<Range<usize>>,
}
