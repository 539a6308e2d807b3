//! Finds the images, audio and videos in a sample, their order, and their positions between texts.
//!
//! Samples in a dataset may differ: text only, one image, five images, an audio clip. Nothing is inferred
//! from the first samples; each sample is read independently. The sample's JSON document defines the order if
//! it names media (`images: ["0.jpg", "1.jpg"]`, `image: "a.jpg"`, message parts), else the fields do: by
//! number if all fields are numbered in the same way (`img_2.png` before `img_10.png`), else as stored in the
//! shard.
//!
//! A document names a field (`0.jpg`, `KEY.0.jpg`), or a file that packing converted to a field: then the
//! n-th name is the n-th field. Fields that such a document does not name, for example masks, are omitted. A
//! name without a field is a [`MediaFault`], never a gap; so is a number of placeholders that differs from
//! the number of media with that modality.
//!
//! [`crate::sample`] uses the same rules for counting at indexing, and a preparer converts the result to
//! tensors.

mod layout;
mod names;
mod parts;
mod source;

use serde_json::Value;

pub(super) use self::layout::Unread;
pub use self::layout::is_text_column;
pub(super) use self::names::names_media;
pub use self::names::{MEDIA_COLUMNS, named_path};
pub use self::parts::{ChatTurn, ContentPart};
pub(super) use self::source::{TextSource, TwoDocuments, measure_document, second_document, select_text};
pub use self::source::{has_text, has_turns, measure_json};

use self::layout::{Dialogue, Text};
use self::names::{column_media, resolve};
use self::parts::content_of_field;
use super::{Field, Sample};
use crate::error::{EXCERPT_CHARACTERS, Skipped, excerpt};
use crate::media::{Content, Media, Modality, extension_content, extension_modality};
use parts::UnplacedPart;

/// Mismatch between a sample's document and fields.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sample `{key}` of shard `{shard}`, offset {offset}: `{field}`: {reason}")]
pub struct MediaFault {
    /// URL of the shard.
    pub shard: String,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Sample key.
    pub key: String,
    /// Field that is missing or named too often.
    pub field: String,
    /// Description of the mismatch.
    pub reason: String,
}

impl MediaFault {
    fn new(sample: &Sample, field: &str, reason: impl Into<String>) -> Self {
        let (shard, key) = (sample.shard.to_string(), sample.key.clone());
        let field = excerpt(field, EXCERPT_CHARACTERS).into_owned();
        Self { shard, offset: sample.offset, key, field, reason: reason.into() }
    }

    /// Records the sample as skipped.
    #[must_use]
    pub fn skipped(self) -> Skipped {
        let Self { shard, offset, key, field, reason } = self;
        Skipped { shard, offset, key: Some(key), field: Some(field), reason }
    }
}

/// Media in a decoded sample, by modality and in order.
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
    /// Extension of the document field.
    json_name: &'a str,
    text: Result<SampleText<'a>, MediaFault>,
}

/// Sample text, and the extension of the source field.
#[derive(Debug, Clone)]
enum SampleText<'a> {
    Dialogue(&'a str, Dialogue<'a>),
    /// Document content, with media.
    Content(&'a str, Vec<UnplacedPart<'a>>),
    Caption(&'a str, Vec<UnplacedPart<'a>>),
    /// All text fields, if there are any; media come first.
    Fields(&'a str, Vec<UnplacedPart<'a>>),
}

impl<'a> SampleMedia<'a> {
    /// Orders the fields in a decoded sample.
    ///
    /// # Errors
    /// [`MediaFault`] if the document names a missing field.
    pub fn from_sample(sample: &'a Sample) -> Result<Self, MediaFault> {
        Self::for_modalities(sample, |_| true)
    }

    /// Orders the sample fields for a model that supports some modalities; other media are omitted.
    ///
    /// # Errors
    /// See [`from_sample`](Self::from_sample).
    pub fn for_modalities(sample: &'a Sample, takes: impl Fn(Modality) -> bool) -> Result<Self, MediaFault> {
        let documents: Vec<(&str, &Value)> = documents(sample).collect();
        let texts = in_order(sample, is_text);
        let source = select_text(documents.iter().map(|(_, json)| *json), !texts.is_empty());
        let (json_name, json) =
            describing(&documents, source).map_or(("", None), |(name, json)| (name, Some(json)));
        let text = read_text(sample, &documents, source);
        let media_of = |modality| {
            if takes(modality) {
                ordered_media(sample, json, text.as_ref().ok(), modality)
            } else {
                Ok(Vec::new())
            }
        };
        let [images, audio, videos] = Modality::ALL.map(media_of);
        let (images, audio, videos) = (images?, audio?, videos?);
        let text = text.and_then(|text| match text {
            SampleText::Fields(..) => text_of_fields(sample, &texts, [&images, &audio, &videos]),
            text => Ok(text),
        });
        Ok(Self { sample, images, audio, videos, texts, json, json_name, text })
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

    /// Returns the extension of the [`json`](Self::json) field; empty if there is none.
    #[must_use]
    pub fn json_name(&self) -> &'a str {
        self.json_name
    }

    /// Returns the decoded images, in order; undecoded fields are omitted.
    pub fn images(&self) -> impl Iterator<Item = &'a crate::media::RgbImage> {
        self.images.iter().filter_map(|field| match &field.media {
            Media::Image(image) => Some(image),
            _ => None,
        })
    }
}

/// Returns a field's modality: by the decoded value, or, if undecoded, by the extension.
fn field_modality(field: &Field) -> Option<Modality> {
    match &field.media {
        Media::Image(_) => Some(Modality::Image),
        Media::Audio(_) => Some(Modality::Audio),
        Media::Video(_) => Some(Modality::Video),
        Media::Opaque(_) => extension_modality(&field.extension),
        Media::Text(_) | Media::Json(_) | Media::Npy(_) | Media::Custom(_) => None,
    }
}

fn is_text(field: &Field) -> bool {
    match &field.media {
        Media::Text(_) => true,
        Media::Opaque(_) => extension_content(&field.extension) == Some(Content::Text),
        _ => false,
    }
}

/// Returns the JSON fields in a sample with extensions.
fn documents(sample: &Sample) -> impl Iterator<Item = (&str, &Value)> + Clone {
    sample.fields.iter().filter_map(|field| match &field.media {
        Media::Json(json) => Some((&*field.extension, json)),
        _ => None,
    })
}

/// Returns the document that names the media: the document with the conversation or content, else the first
/// that names any, else the first.
fn describing<'a>(
    documents: &[(&'a str, &'a Value)],
    source: Result<TextSource<'a>, TwoDocuments>,
) -> Option<(&'a str, &'a Value)> {
    let number = match source {
        Ok(TextSource::Document(number, layout)) if layout.is_whole() => Some(number),
        Err(TwoDocuments(first, _)) => Some(first),
        Ok(_) => documents.iter().position(|(_, json)| names_media(json)),
    };
    documents.get(number.unwrap_or_default()).copied()
}

/// Reads the text from the selected source.
fn read_text<'a>(
    sample: &'a Sample,
    documents: &[(&'a str, &'a Value)],
    source: Result<TextSource<'a>, TwoDocuments>,
) -> Result<SampleText<'a>, MediaFault> {
    match source {
        Err(TwoDocuments(first, second)) => {
            Err(MediaFault::new(sample, documents[second].0, second_document(documents[first].0)))
        }
        Ok(TextSource::Fields | TextSource::Nothing) => Ok(SampleText::Fields("", Vec::new())),
        Ok(TextSource::Document(number, layout)) => {
            let (name, json) = documents[number];
            match layout.read(json, &mut Unread::default()) {
                Ok(Text::Dialogue(dialogue)) => Ok(SampleText::Dialogue(name, dialogue)),
                Ok(Text::Content(parts)) => Ok(SampleText::Content(name, parts)),
                Ok(Text::Caption(parts)) => Ok(SampleText::Caption(name, parts)),
                Err(reason) => Err(MediaFault::new(sample, name, reason)),
            }
        }
    }
}

/// Reads the text fields, with media between them if all fields are numbered in the same way.
///
/// - `media`: media fields in the sample, by modality
fn text_of_fields<'a>(
    sample: &'a Sample,
    texts: &[&'a Field],
    media: [&[&'a Field]; 3],
) -> Result<SampleText<'a>, MediaFault> {
    let is_medium = |field: &Field| media.iter().copied().flatten().any(|known| std::ptr::eq(*known, field));
    let numbered = in_order(sample, |field| is_text(field) || is_medium(field));
    let is_interleaved = are_numbered(&numbered) && !texts.is_empty();
    let listed = if is_interleaved { &numbered[..] } else { texts };
    let mut parts = Vec::with_capacity(listed.len());
    for field in listed {
        let content = content_of_field(field);
        parts.extend(content.map_err(|reason| MediaFault::new(sample, &field.extension, reason))?);
    }
    let first = listed.first().map_or("", |field| &*field.extension);
    Ok(if is_interleaved { SampleText::Content(first, parts) } else { SampleText::Fields(first, parts) })
}

/// Returns the fields with a modality in the order named by the document's column, else by named content
/// parts, else as stored.
fn ordered_media<'a>(
    sample: &'a Sample,
    json: Option<&Value>,
    text: Option<&SampleText<'_>>,
    modality: Modality,
) -> Result<Vec<&'a Field>, MediaFault> {
    let stored = in_order(sample, |field| field_modality(field) == Some(modality));
    let named = json.and_then(|json| column_media(json, modality));
    match named.or_else(|| part_names(text?, modality)) {
        None => Ok(stored),
        Some(names) => resolve(&sample.key, &stored, &names)
            .map_err(|(name, reason)| MediaFault::new(sample, name, reason)),
    }
}

/// Returns the part names for a modality, if there are any parts and all have a name.
fn part_names<'t>(text: &'t SampleText<'_>, modality: Modality) -> Option<Vec<&'t str>> {
    let contents: Vec<&[UnplacedPart<'_>]> = match text {
        SampleText::Dialogue(_, dialogue) => dialogue.turns.iter().map(|turn| &turn.content[..]).collect(),
        SampleText::Content(_, parts) => vec![parts],
        SampleText::Caption(..) | SampleText::Fields(..) => return None,
    };
    let name = |part: &'t UnplacedPart<'_>| match part {
        UnplacedPart::Media(of, name) if *of == modality => Some(name.as_deref()),
        _ => None,
    };
    let names: Option<Vec<&str>> = contents.into_iter().flatten().filter_map(name).collect();
    names.filter(|names| !names.is_empty())
}

/// Returns matching fields: by number if all are numbered in the same way, else in shard order.
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
