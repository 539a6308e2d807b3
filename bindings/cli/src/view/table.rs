//! Holds the sort and filter values: a number per sample and column.
//!
//! Describes the dataset and the samples on a page, from the index alone.

use crate::failure::Failure;
use dflop_costmodel::{CostModel, SampleShape};
use dflop_loader::Dataset;
use dflop_loader::error::Skipped;
use dflop_loader::flow::in_parallel;
use dflop_loader::index::FieldRow;
use dflop_loader::media::{Content, MediaShape, Modality, extension_content};
use dflop_loader::store::redact;
use serde::Serialize;
use serde_json::{Value, json};

/// Number that samples are sorted and filtered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    /// Place in the dataset, from 0.
    Place,
    /// Predicted time over all modules, in ns.
    CostNs,
    /// LLM positions.
    Tokens,
    /// Payload bytes in all fields.
    Bytes,
    /// Number of pixels in all images and frames.
    Pixels,
    /// Length of all audio clips, in ms.
    AudioMs,
}

impl Column {
    pub(super) const ALL: [Self; 6] =
        [Self::Place, Self::CostNs, Self::Tokens, Self::Bytes, Self::Pixels, Self::AudioMs];

    /// Name in queries and answers.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Place => "place",
            Self::CostNs => "cost_ns",
            Self::Tokens => "tokens",
            Self::Bytes => "bytes",
            Self::Pixels => "pixels",
            Self::AudioMs => "audio_ms",
        }
    }
}

/// Dataset sample numbers, by place.
#[derive(Debug, Default)]
pub(super) struct SampleTable {
    cost_ns: Vec<u64>,
    tokens: Vec<u32>,
    bytes: Vec<u64>,
    pixels: Vec<u64>,
    audio_ms: Vec<u32>,
    /// Whether the model does not support the sample, which then has no cost and no tokens.
    is_refused: Vec<bool>,
}

impl SampleTable {
    /// Reads all sample shapes from the index and predicts the costs, on all cores.
    ///
    /// # Errors
    /// [`Failure::Misuse`] if the dataset has more than 2^32 samples.
    pub(super) fn new(dataset: &Dataset, model: &CostModel) -> Result<Self, Failure> {
        let Ok(samples) = u32::try_from(dataset.len()) else {
            let reason = "has more than 2^32 samples, which one page does not show; name some of its shards";
            return Err(Failure::Misuse(format!("the dataset {reason}")));
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from) as u32;
        let part = samples.div_ceil(threads).max(1);
        let starts: Vec<u32> = (0..samples).step_by(part as usize).collect();
        let parts = in_parallel(threads as usize, &starts, |&start| {
            Self::part(dataset, model, start..samples.min(start.saturating_add(part)))
        });
        let mut table = Self::default();
        for part in parts {
            table.append(part);
        }
        Ok(table)
    }

    fn part(dataset: &Dataset, model: &CostModel, places: std::ops::Range<u32>) -> Self {
        let (mut table, mut shape) = (Self::default(), SampleShape::default());
        for place in places {
            let row = dataset.index().sample(dataset.sample_number(place.into()));
            row.read_shape(&mut shape);
            let cost = model.predict(&shape);
            let total = |ns: &[u64]| ns.iter().fold(0_u64, |sum, ns| sum.saturating_add(*ns));
            table.is_refused.push(cost.is_err());
            table.cost_ns.push(cost.as_ref().map_or(0, |cost| total(cost.module_ns.as_slice())));
            table.tokens.push(cost.map_or(0, |cost| cost.tokens));
            table.bytes.push(row.bytes());
            table.pixels.push(pixels(&shape));
            table.audio_ms.push(audio_ms(&shape));
        }
        table
    }

    fn append(&mut self, part: Self) {
        self.cost_ns.extend(part.cost_ns);
        self.tokens.extend(part.tokens);
        self.bytes.extend(part.bytes);
        self.pixels.extend(part.pixels);
        self.audio_ms.extend(part.audio_ms);
        self.is_refused.extend(part.is_refused);
    }

    /// Number of samples.
    pub(super) fn len(&self) -> u32 {
        self.cost_ns.len() as u32
    }

    /// Returns the number of a sample in a column.
    pub(super) fn value(&self, column: Column, place: u32) -> u64 {
        let at = place as usize;
        match column {
            Column::Place => place.into(),
            Column::CostNs => self.cost_ns[at],
            Column::Tokens => self.tokens[at].into(),
            Column::Bytes => self.bytes[at],
            Column::Pixels => self.pixels[at],
            Column::AudioMs => self.audio_ms[at].into(),
        }
    }

    /// Returns whether the model does not support a sample.
    pub(super) fn is_refused(&self, place: u32) -> bool {
        self.is_refused[place as usize]
    }

    /// Number of samples that the model does not support.
    pub(super) fn refused(&self) -> usize {
        self.is_refused.iter().filter(|is_refused| **is_refused).count()
    }
}

fn pixels(shape: &SampleShape) -> u64 {
    let area = |width: u32, height: u32| u64::from(width) * u64::from(height);
    let images = shape.images.iter().map(|image| area(image.width, image.height));
    let frames =
        shape.videos.iter().map(|video| area(video.width, video.height).saturating_mul(video.frames.into()));
    images.chain(frames).fold(0, u64::saturating_add)
}

fn audio_ms(shape: &SampleShape) -> u32 {
    let clip = |clip: &dflop_costmodel::AudioLength| {
        u128::from(clip.frames) * 1_000 / u128::from(clip.sample_rate_hz.max(1))
    };
    u32::try_from(shape.audio.iter().map(clip).sum::<u128>()).unwrap_or(u32::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use dflop_costmodel::{AudioLength, ImageSize, VideoShape};

    /// A table with these costs; tokens are a tenth of the cost, and samples without cost are rejected.
    pub(in super::super) fn with_costs(costs: &[u64]) -> SampleTable {
        SampleTable {
            cost_ns: costs.to_vec(),
            tokens: costs.iter().map(|cost| (cost / 10) as u32).collect(),
            bytes: vec![1; costs.len()],
            pixels: vec![0; costs.len()],
            audio_ms: vec![0; costs.len()],
            is_refused: costs.iter().map(|cost| *cost == 0).collect(),
        }
    }

    #[test]
    fn media_of_a_sample_are_summed() {
        let shape = SampleShape {
            images: vec![ImageSize { width: 10, height: 20 }, ImageSize { width: u32::MAX, height: 1 }],
            videos: vec![VideoShape { frames: 3, width: 2, height: 2 }],
            audio: vec![AudioLength { frames: 24_000, sample_rate_hz: 16_000 }; 2],
            ..SampleShape::default()
        };
        assert_eq!(pixels(&shape), 212 + u64::from(u32::MAX));
        assert_eq!(audio_ms(&shape), 3_000);
        let long = AudioLength { frames: u64::MAX, sample_rate_hz: 0 };
        assert_eq!(audio_ms(&SampleShape { audio: vec![long; 2], ..SampleShape::default() }), u32::MAX);
    }
}

/// Sample table row.
#[derive(Debug, Serialize)]
pub(super) struct DescribedSample {
    /// Place in the dataset, from 0; names the sample in requests.
    pub(super) place: u32,
    pub(super) key: String,
    pub(super) shard: String,
    /// Offset of the first header in the shard, after decompression.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) tokens: u32,
    pub(super) target_tokens: u32,
    /// Predicted time by module, in summary order; empty if the model does not support the sample.
    pub(super) module_ns: Vec<u64>,
    /// Reason why the model does not support the sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) refusal: Option<String>,
    pub(super) fields: Vec<DescribedField>,
}

/// Sample field.
#[derive(Debug, Serialize)]
pub(super) struct DescribedField {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// `image`, `audio`, `video`, `text`, `document`, `value`, or `other` without a codec.
    pub(super) kind: &'static str,
    pub(super) shape: Value,
}

/// Describes a sample.
pub(super) fn describe(dataset: &Dataset, model: &CostModel, place: u32) -> DescribedSample {
    let row = dataset.index().sample(dataset.sample_number(place.into()));
    let mut shape = SampleShape::default();
    row.read_shape(&mut shape);
    let cost = model.predict(&shape);
    let refusal = cost.as_ref().err().map(ToString::to_string);
    let cost = cost.ok();
    DescribedSample {
        place,
        key: row.key().to_owned(),
        shard: shard_name(&dataset.index().shards()[row.shard].url),
        offset: row.offset(),
        bytes: row.bytes(),
        tokens: cost.as_ref().map_or(shape.text_tokens, |cost| cost.tokens),
        target_tokens: shape.target_tokens,
        module_ns: cost.as_ref().map(|cost| cost.module_ns.as_slice().to_vec()).unwrap_or_default(),
        refusal,
        fields: row.fields().map(field).collect(),
    }
}

fn field(field: FieldRow<'_>) -> DescribedField {
    let kind = content_kind(field.extension);
    let shape = match field.shape {
        MediaShape::Opaque => Value::Null,
        MediaShape::Image(size) => json!({"width": size.width, "height": size.height}),
        MediaShape::Audio(length) => {
            let seconds = length.frames as f64 / f64::from(length.sample_rate_hz.max(1));
            json!({"seconds": seconds, "sample_rate_hz": length.sample_rate_hz})
        }
        MediaShape::Video(video) => {
            json!({"frames": video.frames, "width": video.width, "height": video.height})
        }
        MediaShape::Text(length) => json!({"tokens": length.tokens, "target_tokens": length.target_tokens}),
    };
    DescribedField { name: field.extension.to_owned(), bytes: field.bytes, kind, shape }
}

/// Names the content kind for a field.
pub(super) fn content_kind(extension: &str) -> &'static str {
    match extension_content(extension) {
        Some(Content::Medium(Modality::Image)) => "image",
        Some(Content::Medium(Modality::Audio)) => "audio",
        Some(Content::Medium(Modality::Video)) => "video",
        Some(Content::Text) => "text",
        Some(Content::Document) => "document",
        Some(Content::Value) => "value",
        None => "other",
    }
}

/// Describes the entries missing from the index, without credentials.
pub(super) fn skipped(skipped: &Skipped) -> Value {
    json!({
        "shard": redact(&skipped.shard),
        "offset": skipped.offset,
        "key": skipped.key,
        "field": skipped.field,
        "reason": redact(&skipped.reason),
    })
}

/// Returns a reason without numbers and quoted names, so that equal faults have one group.
pub(super) fn reason_group(reason: &str) -> String {
    let reason = redact(reason);
    let unquoted = reason.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "…" });
    let mut group = String::new();
    for character in unquoted.collect::<Vec<_>>().join("`").chars() {
        match character {
            '0'..='9' if group.ends_with('N') => {}
            '0'..='9' => group.push('N'),
            _ => group.push(character),
        }
    }
    group
}

/// Returns the base name of a shard, without credentials.
fn shard_name(url: &str) -> String {
    redact(url).rsplit('/').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod detail_tests {
    use super::*;

    #[test]
    fn shards_are_named_without_credentials() {
        assert_eq!(shard_name("s3://bucket/a/b.tar"), "b.tar");
        let skipped = skipped(&Skipped {
            shard: "https://user:secret@host/a.tar".into(),
            offset: 7,
            key: None,
            field: None,
            reason: "bad".into(),
        });
        assert!(!skipped.to_string().contains("secret"), "{skipped}");
    }

    #[test]
    fn reasons_are_grouped_without_numbers_and_names() {
        let groups = ["cut at byte 12", "cut at byte 360924", "no `a.jpg`, 2 of 3", "no `b.jpg`, 40 of 5"];
        let expected = ["cut at byte N", "cut at byte N", "no `…`, N of N", "no `…`, N of N"];
        assert_eq!(groups.map(reason_group), expected);
    }

    #[test]
    fn kinds_follow_the_codec() {
        let kinds = ["jpg", "wav", "mp4", "txt", "json", "npy", "bin", "html", "svg"].map(content_kind);
        let expected = ["image", "audio", "video", "text", "document", "value", "other", "other", "image"];
        assert_eq!(kinds, expected);
    }
}
