//! Samples, decoded or not, as a loader delivers them.

use std::ops::Range;
use std::sync::Arc;

use crate::media::Media;
use crate::prepare::PreparedSample;
use crate::decode::Tensor;

/// A field of a delivered sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Field {
    /// What follows the key's dot in the entry name, lower-cased.
    pub extension: Arc<str>,
    /// The content; [`Media::Opaque`] if it was not decoded.
    pub media: Media,
}

/// A delivered sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Entry path up to the first dot of its file name.
    pub key: String,
    /// URL of the shard.
    pub shard: Arc<str>,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Epoch that the sample is drawn from, from 0.
    pub epoch: u64,
    /// Payload bytes that were read for it, encoded.
    pub bytes: u64,
    /// The fields, in shard order; without images where those went into a tensor, without images and clips where
    /// the sample was prepared for a model.
    pub fields: Vec<Field>,
    /// The sample as a model takes it, until it is packed into the tensors of its microbatch.
    pub(crate) prepared: Option<Box<PreparedSample>>,
}

impl Sample {
    /// Makes a sample of decoded fields, as a loader delivers it.
    #[must_use]
    pub fn new(key: impl Into<String>, fields: Vec<Field>) -> Self {
        Self { key: key.into(), shard: "".into(), offset: 0, epoch: 0, bytes: 0, fields, prepared: None }
    }

    /// Takes the sample as a model takes it, where a preparer made it and it is not packed.
    #[must_use]
    pub fn take_prepared(&mut self) -> Option<PreparedSample> {
        self.prepared.take().map(|prepared| *prepared)
    }

    /// Returns the content of the field with this extension.
    #[must_use]
    pub fn field(&self, extension: &str) -> Option<&Media> {
        self.fields.iter().find(|field| &*field.extension == extension).map(|field| &field.media)
    }
}

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
    /// `[images, 3, side, side]` f32: resized, cropped, normalized by the `ImageNet` mean and deviation.
    pub tensor: Tensor,
    /// Height and width of every image.
    pub side: u32,
    /// For every sample the rows of its images; empty for a sample without an image.
    pub rows: Vec<Range<usize>>,
}
