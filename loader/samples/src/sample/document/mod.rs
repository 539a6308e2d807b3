//! Finds the images, audio and videos of a sample, their order, and their positions between its texts.
//!
//! Samples of one dataset may differ: text only, one image, five images, an audio clip. Nothing is inferred
//! from the first samples; each sample is read by itself. The order is given by the sample's JSON document if
//! it names media (`images: ["0.jpg", "1.jpg"]`, `image: "a.jpg"`, parts of messages), else by the fields: by
//! number where all are numbered in the same way (`img_2.png` before `img_10.png`), else as stored in the
//! shard.
//!
//! A document names a field (`0.jpg`, `KEY.0.jpg`), or a file that packing turned into a field:
//! then the n-th name is the n-th field. Fields that such a document does not name, for example masks, are
//! left out. A name without a field is a [`MediaFault`], never a gap; so is a number of placeholders that
//! differs from the number of media of that modality.
//!
//! [`crate::sample`] counts by the same rules at indexing, and a preparer turns the result into
//! tensors.

mod content;
mod names;
mod parts;

use serde_json::Value;

pub use self::names::{MEDIA_COLUMNS, named_path};
pub use self::parts::{ChatTurn, ContentPart};

use self::names::{named_media, resolve};
use super::decoded::{Field, Sample};
use super::text::has_content;
use crate::error::Skipped;
use crate::media::{Content, Media, Modality, content_of, modality_of as modality_of_extension};

/// Mismatch between the document of a sample and its fields.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sample `{key}` of shard `{shard}`, offset {offset}: `{field}`: {reason}")]
pub struct MediaFault {
    /// URL of the shard.
    pub shard: String,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Key of the sample.
    pub key: String,
    /// Field that is missing or named too often.
    pub field: String,
    /// Description of the mismatch.
    pub reason: String,
}

impl MediaFault {
    fn new(sample: &Sample, field: &str, reason: impl Into<String>) -> Self {
        let (shard, key) = (sample.shard.to_string(), sample.key.clone());
        Self { shard, offset: sample.offset, key, field: field.to_owned(), reason: reason.into() }
    }

    /// Records the sample as skipped.
    #[must_use]
    pub fn skipped(self) -> Skipped {
        let Self { shard, offset, key, field, reason } = self;
        Skipped { shard, offset, key: Some(key), field: Some(field), reason }
    }
}

/// Media of a decoded sample, by modality and in order.
///
/// # Examples
/// ```
/// use dflop_samples::sample::{Field, Sample};
/// use dflop_samples::media::{Media, Modality, RgbImage};
/// use dflop_samples::sample::document::ContentPart;
/// use dflop_samples::sample::document::SampleMedia;
///
/// let image = |name: &str| Field { extension: name.into(), media: Media::Image(RgbImage::default()) };
/// let document = serde_json::json!({"images": ["1.jpg", "0.jpg"],
///     "conversations": [{"from": "human", "value": "<image>then <image>"}]});
/// let fields = vec![
///     image("0.jpg"),
///     image("1.jpg"),
///     Field { extension: "json".into(), media: Media::Json(document) },
/// ];
/// let sample = Sample::new("k", fields);
/// let media = SampleMedia::from_sample(&sample)?;
/// assert_eq!(&*media.images[0].extension, "1.jpg");
/// let turns = media.turns()?.unwrap();
/// let placed = |at| ContentPart::Medium(Modality::Image, at);
/// assert_eq!(turns[0].parts, [placed(0), ContentPart::Text("then "), placed(1)]);
/// # Ok::<(), dflop_samples::sample::document::MediaFault>(())
/// ```
#[derive(Debug, Clone)]
pub struct SampleMedia<'a> {
    sample: &'a Sample,
    /// Image fields.
    pub images: Vec<&'a Field>,
    /// Audio fields.
    pub audio: Vec<&'a Field>,
    /// Video fields.
    pub videos: Vec<&'a Field>,
    /// Text fields.
    pub texts: Vec<&'a Field>,
    /// Document that describes the sample: the first JSON field with turns or ordered content, else the first
    /// that names media, else the first.
    pub json: Option<&'a Value>,
    /// Extension of the document's field.
    json_name: &'a str,
}

impl<'a> SampleMedia<'a> {
    /// Orders the fields of a decoded sample.
    ///
    /// # Errors
    /// [`MediaFault`] if the document names a field that is not there.
    pub fn from_sample(sample: &'a Sample) -> Result<Self, MediaFault> {
        Self::for_modalities(sample, |_| true)
    }

    /// Orders the fields of a sample for a model that takes some modalities; media of the others are left
    /// out.
    ///
    /// # Errors
    /// See [`from_sample`](Self::from_sample).
    pub fn for_modalities(sample: &'a Sample, takes: impl Fn(Modality) -> bool) -> Result<Self, MediaFault> {
        let (json_name, json) = document(sample).map_or(("", None), |(name, json)| (name, Some(json)));
        let media_of =
            |modality| if takes(modality) { ordered_media(sample, json, modality) } else { Ok(Vec::new()) };
        let [images, audio, videos] = Modality::ALL.map(media_of);
        let texts = in_order(sample, is_text);
        Ok(Self { sample, images: images?, audio: audio?, videos: videos?, texts, json, json_name })
    }

    /// Returns the media of a modality, in order.
    #[must_use]
    pub fn by_modality(&self, modality: Modality) -> &[&'a Field] {
        match modality {
            Modality::Image => &self.images,
            Modality::Audio => &self.audio,
            Modality::Video => &self.videos,
        }
    }

    /// Returns the extension of the field of [`json`](Self::json); empty if there is none.
    #[must_use]
    pub fn json_name(&self) -> &'a str {
        self.json_name
    }

    /// Returns the decoded images, in order; undecoded fields are left out.
    pub fn images(&self) -> impl Iterator<Item = &'a crate::media::RgbImage> {
        self.images.iter().filter_map(|field| match &field.media {
            Media::Image(image) => Some(image),
            _ => None,
        })
    }
}

/// Returns the modality of a field: by its decoded value, or, if undecoded, by its extension.
fn modality_of(field: &Field) -> Option<Modality> {
    match &field.media {
        Media::Image(_) => Some(Modality::Image),
        Media::Audio(_) => Some(Modality::Audio),
        Media::Video(_) => Some(Modality::Video),
        Media::Opaque(_) => modality_of_extension(&field.extension),
        Media::Text(_) | Media::Json(_) | Media::Npy(_) | Media::Custom(_) => None,
    }
}

fn is_text(field: &Field) -> bool {
    match &field.media {
        Media::Text(_) => true,
        Media::Opaque(_) => content_of(&field.extension) == Some(Content::Text),
        _ => false,
    }
}

/// Returns the JSON fields of a sample with their extensions.
fn documents(sample: &Sample) -> impl Iterator<Item = (&str, &Value)> + Clone {
    sample.fields.iter().filter_map(|field| match &field.media {
        Media::Json(json) => Some((&*field.extension, json)),
        _ => None,
    })
}

fn document(sample: &Sample) -> Option<(&str, &Value)> {
    let mut documents = documents(sample);
    let names_media =
        |json: &Value| Modality::ALL.iter().any(|&modality| named_media(json, modality).is_some());
    // A document with content outranks one that only names media, in any order of the fields.
    let content = documents.clone().find(|(_, json)| has_content(json));
    content.or_else(|| documents.clone().find(|(_, json)| names_media(json))).or_else(|| documents.next())
}

fn ordered_media<'a>(
    sample: &'a Sample,
    json: Option<&Value>,
    modality: Modality,
) -> Result<Vec<&'a Field>, MediaFault> {
    let stored = in_order(sample, |field| modality_of(field) == Some(modality));
    match json.and_then(|json| named_media(json, modality)) {
        None => Ok(stored),
        Some(names) => resolve(&sample.key, &stored, &names)
            .map_err(|(name, reason)| MediaFault::new(sample, name, reason)),
    }
}

/// Returns matching fields: by number where all are numbered in the same way, else in shard order.
fn in_order(sample: &Sample, is_wanted: impl Fn(&Field) -> bool) -> Vec<&Field> {
    let mut fields: Vec<&Field> = sample.fields.iter().filter(|field| is_wanted(field)).collect();
    if are_numbered(&fields) {
        fields.sort_by_key(|field| split_number(&field.extension).map(|(_, number)| number));
    }
    fields
}

/// Returns whether all fields are numbered in the same way.
fn are_numbered(fields: &[&Field]) -> bool {
    let mut prefixes = fields.iter().map(|field| split_number(&field.extension).map(|(prefix, _)| prefix));
    let first = prefixes.next().flatten();
    first.is_some() && prefixes.all(|prefix| prefix == first)
}

/// Splits `img_12.png` into `img_` and 12, and `12.left.png` into an empty prefix and 12; the file type is
/// ignored.
fn split_number(extension: &str) -> Option<(&str, u64)> {
    let (stem, _) = extension.rsplit_once('.')?;
    if let Some(number) = stem.split('.').next().and_then(|first| first.parse().ok()) {
        return Some(("", number));
    }
    let prefix = stem.trim_end_matches(|letter: char| letter.is_ascii_digit());
    Some((prefix, stem[prefix.len()..].parse().ok()?))
}

#[cfg(test)]
mod tests;
