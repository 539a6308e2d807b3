//! Describes the dataset and the samples on a page, from the index alone.

use dflop_costmodel::{CostModel, SampleShape};
use dflop_loader::Dataset;
use dflop_loader::error::Skipped;
use dflop_loader::index::FieldRow;
use dflop_loader::media::{Content, MediaShape, Modality, extension_content};
use dflop_loader::store::redact;
use serde::Serialize;
use serde_json::{Value, json};

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

/// Returns the base name of a shard, without credentials.
fn shard_name(url: &str) -> String {
    redact(url).rsplit('/').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
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
    fn kinds_follow_the_codec() {
        let kinds = ["jpg", "wav", "mp4", "txt", "json", "npy", "bin", "html", "svg"].map(content_kind);
        let expected = ["image", "audio", "video", "text", "document", "value", "other", "other", "image"];
        assert_eq!(kinds, expected);
    }
}
