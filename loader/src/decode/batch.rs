//! Samples that are delivered together, and the tensor of their images.

use std::ops::Range;

use dflop_samples::media::PixelLayout;
use dflop_samples::sample::Sample;

use super::tensor::Tensor;

/// Samples that are delivered together.
#[derive(Debug)]
pub struct Batch {
    /// The samples, in order.
    pub samples: Vec<Sample>,
    /// All images of the samples, if they were asked for as pixels.
    pub pixels: Option<Pixels>,
}

/// The images of a batch as one tensor.
#[derive(Debug)]
pub struct Pixels {
    /// `[images, 3, side, side]`, or `[images, side, side, 3]` by `layout`: resized and cropped; normalized,
    /// unless they are bytes.
    pub tensor: Tensor,
    /// Order of the axes of an image.
    pub layout: PixelLayout,
    /// Height and width of every image.
    pub side: u32,
    /// For every sample the rows of its images; empty for a sample without an image.
    pub rows: Vec<Range<usize>>,
}
