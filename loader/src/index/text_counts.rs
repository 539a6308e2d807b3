//! Counts text tokens with a model's tokenizer, in addition to the estimates.
//!
//! Each counter has a separate column in the index, named after the counter digest; an index can hold several
//! columns. A column is created when the index is first opened with that counter, which reads the texts in
//! all shards again.

use std::fmt::Debug;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::UInt32Type;
use arrow_array::{PrimitiveArray, RecordBatch};
use dflop_samples::inputs::TextCounter;
use dflop_samples::media::{
    Content, DecodeLimits, Media, MediaShape, Modality, RgbImage, TextLength, Video, extension_codec,
};
use dflop_samples::sample::{Field, Sample};

use super::schema::{TEXT_TOKENS_PREFIX, counter_digests};
use crate::shard::{RawField, RawSample};

/// Source of the token counts that an index returns.
#[derive(Debug, Clone, Default)]
pub enum TokenCounts {
    /// Estimates from the text alone.
    #[default]
    Estimated,
    /// Counts from this counter; a missing column is created.
    Of(Arc<dyn TextCounter>),
    /// Counts from this counter if the index has the column, else estimates.
    IfPresent(Arc<dyn TextCounter>),
}

impl TokenCounts {
    /// Returns the counter whose column is required.
    pub(super) fn required(&self) -> Option<&Arc<dyn TextCounter>> {
        match self {
            Self::Of(counter) => Some(counter),
            Self::Estimated | Self::IfPresent(_) => None,
        }
    }

    /// Returns the digest of the counter whose column is read.
    pub(super) fn wanted(&self) -> Option<String> {
        match self {
            Self::Estimated => None,
            Self::Of(counter) | Self::IfPresent(counter) => Some(counter.digest()),
        }
    }
}

/// Token count column: tokens and target tokens for each sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CountedTexts {
    pub(super) digest: String,
    pub(super) lengths: Vec<u32>,
}

/// Counts a shard's samples in order.
#[derive(Debug)]
pub(super) struct ShardCounter {
    counter: Arc<dyn TextCounter>,
    counted: CountedTexts,
    /// Number of samples that could not be counted, and the first error.
    refused: Option<(u64, String)>,
    limits: DecodeLimits,
}

impl ShardCounter {
    /// Creates a counter without samples; `limits` include the video sampling.
    pub(super) fn new(counter: Arc<dyn TextCounter>, limits: DecodeLimits) -> Self {
        let counted = CountedTexts { digest: counter.digest(), lengths: Vec::new() };
        Self { counter, counted, refused: None, limits }
    }

    /// Counts a sample with these field shapes; a sample that cannot be counted keeps the estimate.
    pub(super) fn push(&mut self, sample: &RawSample, shapes: &[MediaShape], estimate: TextLength) {
        let length = match self.counter.count(&self.text_sample(sample, shapes)) {
            Ok(length) => length,
            Err(error) => {
                let key = &sample.key;
                let first = || (0, format!("`{key}`, {error}"));
                self.refused.get_or_insert_with(first).0 += 1;
                estimate
            }
        };
        self.counted.lengths.extend([length.tokens, length.target_tokens.min(length.tokens)]);
    }

    /// Returns the sample with texts and documents. Videos are included without pixels if the counter reads
    /// frame times, images without pixels if it reads image sizes; other fields only have names.
    fn text_sample(&self, sample: &RawSample, shapes: &[MediaShape]) -> Sample {
        let field = |(field, shape): (&RawField, &MediaShape)| {
            let media = match shape {
                MediaShape::Image(size) if self.counter.reads_image_sizes() => Some(Media::Image(RgbImage {
                    width: size.width,
                    height: size.height,
                    ..RgbImage::default()
                })),
                _ => self.field_text(field),
            };
            let media = media.unwrap_or_else(|| Media::Opaque(bytes::Bytes::new()));
            Field { extension: field.extension.clone(), media }
        };
        let mut texts =
            Sample::new(sample.key.clone(), sample.fields.iter().zip(shapes).map(field).collect());
        texts.shard = sample.shard.clone();
        texts.offset = sample.offset;
        texts
    }

    fn field_text(&self, field: &RawField) -> Option<Media> {
        let codec = extension_codec(&field.extension)?;
        let payload = field.payload.clone().unwrap_or_default();
        match codec.content() {
            Content::Text | Content::Document => codec.decode(payload, &self.limits).ok(),
            Content::Medium(Modality::Video) if self.counter.reads_video_times() => {
                let video = Video::without_pixels(&payload, &self.limits.video.sampling)?;
                video.ok().map(Media::Video)
            }
            _ => None,
        }
    }

    /// Returns the column, and a warning if some samples keep estimates.
    pub(super) fn finish(self, shard: &str) -> (CountedTexts, Option<String>) {
        let warning = self.refused.map(|(samples, first)| {
            format!(
                "tokens of {samples} samples of shard `{shard}` could not be counted and are estimates; the first: {first}"
            )
        });
        (self.counted, warning)
    }
}

/// Returns the token count columns in a record batch.
pub(super) fn count_columns(batch: &RecordBatch) -> Option<Vec<(String, PrimitiveArray<UInt32Type>)>> {
    let schema = batch.schema();
    counter_digests(&schema)
        .map(|digest| {
            let column = batch.column_by_name(&format!("{TEXT_TOKENS_PREFIX}{digest}"))?;
            let lengths = column.as_fixed_size_list_opt()?.values();
            Some((digest.to_owned(), lengths.as_primitive_opt()?.clone()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::ImageSize;
    use dflop_samples::BoxError;

    use super::*;

    /// Counts the pixels that images would have, if it reads sizes.
    #[derive(Debug)]
    struct Pixels {
        has_sizes: bool,
    }

    impl TextCounter for Pixels {
        fn digest(&self) -> String {
            "0123456789abcdef".to_owned()
        }

        fn reads_image_sizes(&self) -> bool {
            self.has_sizes
        }

        fn count(&self, sample: &Sample) -> Result<TextLength, BoxError> {
            let pixels = |field: &Field| match &field.media {
                Media::Image(image) => image.width * image.height + image.pixels.len() as u32,
                _ => 0,
            };
            let tokens = sample.fields.iter().map(pixels).sum();
            Ok(TextLength { tokens, target_tokens: 0 })
        }
    }

    #[test]
    fn a_counter_gets_the_sizes_of_images_on_request() {
        let field = |extension: &str| RawField {
            extension: extension.into(),
            offset: 0,
            bytes: 2,
            payload: Some(bytes::Bytes::from_static(b"ab")),
            size: None,
        };
        let fields = vec![field("png"), field("txt"), field("jpg")];
        let sample = RawSample { key: "k".into(), shard: "s".into(), offset: 0, epoch: 0, fields };
        let image = |width, height| MediaShape::Image(ImageSize { width, height });
        let shapes = [image(300, 20), MediaShape::Opaque, image(7, 10)];
        for (has_sizes, tokens) in [(true, 6070), (false, 0)] {
            let mut counter = ShardCounter::new(Arc::new(Pixels { has_sizes }), DecodeLimits::default());
            counter.push(&sample, &shapes, TextLength::default());
            let (counted, warning) = counter.finish("s");
            assert_eq!((counted.lengths, warning), (vec![tokens, 0], None));
        }
    }
}
