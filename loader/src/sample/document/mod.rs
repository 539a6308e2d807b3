//! Which images, clips and videos a sample has, in which order, and how they stand between its texts.
//!
//! Samples of one dataset may differ: text only, one image, five images, a clip. Nothing is guessed from the
//! first samples; each says for itself what it has. The order is that of the sample's JSON document where it names
//! media (`images: ["0.jpg", "1.jpg"]`, `image: "a.jpg"`, parts of messages), else that of the fields: by number
//! where they are numbered alike (`img_2.png` before `img_10.png`), else as stored in the shard.
//!
//! A document names a field (`0.jpg`, `KEY.0.jpg`), or a file that [`crate::import`] made a field of: then the n-th
//! name is the n-th field. Fields that a naming document leaves out, such as masks, are left out. A name without a
//! field is a [`MediaFault`], never a gap, and so are more or fewer placeholders of a kind than media.
//!
//! The same rules say what [`crate::sample`] counts at indexing and what [`crate::prepare`] turns into tensors.

mod content;
mod names;
mod parts;

use serde_json::Value;

pub(crate) use self::names::{MEDIA_COLUMNS, named_path};
pub use self::parts::{Part, Turn};

use self::names::{named_in, resolve};
use super::decoded::{Field, Sample};
use super::text::{MediumSlot, has_content};
use crate::error::Skipped;
use crate::media::{Media, MediumKind, is_video_extension, kind_of_extension};

/// A sample whose document does not fit its fields.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sample `{key}` of shard `{shard}`, offset {offset}: `{field}`: {reason}")]
pub struct MediaFault {
    /// URL of the shard.
    pub shard: String,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Key of the sample.
    pub key: String,
    /// The field that is missing or asked for too often.
    pub field: String,
    /// What is wrong.
    pub reason: String,
}

impl MediaFault {
    fn new(sample: &Sample, field: &str, reason: impl Into<String>) -> Self {
        let (shard, key) = (sample.shard.to_string(), sample.key.clone());
        Self { shard, offset: sample.offset, key, field: field.to_owned(), reason: reason.into() }
    }

    /// Accounts for the sample.
    #[must_use]
    pub fn skipped(self) -> Skipped {
        let Self { shard, offset, key, field, reason } = self;
        Skipped { shard, offset, key: Some(key), field: Some(field), reason }
    }
}

/// The media of a decoded sample, by kind and in order.
///
/// # Examples
/// ```
/// use dflop_loader::sample::{Field, Sample};
/// use dflop_loader::media::{Media, RgbImage};
/// use dflop_loader::sample::document::Part;
/// use dflop_loader::sample_media::SampleMedia;
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
/// let media = SampleMedia::of(&sample)?;
/// assert_eq!(&*media.images[0].extension, "1.jpg");
/// let turns = media.turns()?.unwrap();
/// assert_eq!(turns[0].parts, [Part::Image(0), Part::Text("then "), Part::Image(1)]);
/// # Ok::<(), dflop_loader::sample_media::MediaFault>(())
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
    /// The document that describes the sample: the first JSON field that has turns or content in order, else the first
    /// that names media, else the first.
    pub json: Option<&'a Value>,
    /// Extension of the document's field.
    json_name: &'a str,
}

impl<'a> SampleMedia<'a> {
    /// Orders the fields of a sample that was decoded as [`Decode::Media`](crate::decode::Decode::Media).
    ///
    /// # Errors
    /// [`MediaFault`] if the document names a field that is not there.
    pub fn of(sample: &'a Sample) -> Result<Self, MediaFault> {
        Self::of_kinds(sample, |_| true)
    }

    /// Orders the fields of a sample for a model that takes some kinds of media; it has none of the others.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_kinds(sample: &'a Sample, takes: impl Fn(MediumSlot) -> bool) -> Result<Self, MediaFault> {
        let (json_name, json) = document(sample).map_or(("", None), |(name, json)| (name, Some(json)));
        let of_kind = |slot| if takes(slot) { media_of(sample, json, slot) } else { Ok(Vec::new()) };
        let [images, audio, videos] = MediumSlot::ALL.map(of_kind);
        let texts = in_order(sample, is_text);
        Ok(Self { sample, images: images?, audio: audio?, videos: videos?, texts, json, json_name })
    }

    /// The media of a kind, in order.
    #[must_use]
    pub fn of_slot(&self, slot: MediumSlot) -> &[&'a Field] {
        match slot {
            MediumSlot::Image => &self.images,
            MediumSlot::Audio => &self.audio,
            MediumSlot::Video => &self.videos,
        }
    }

    /// Extension of the field of [`json`](Self::json); empty if there is none.
    #[must_use]
    pub fn json_name(&self) -> &'a str {
        self.json_name
    }

    /// The decoded images, in order; a field that was not decoded is left out.
    pub fn images(&self) -> impl Iterator<Item = &'a crate::media::RgbImage> {
        self.images.iter().filter_map(|field| match &field.media {
            Media::Image(image) => Some(image),
            _ => None,
        })
    }
}

/// The kind of a field's medium: what it was decoded to, or, undecoded, what its extension says.
fn slot_of(field: &Field) -> Option<MediumSlot> {
    match &field.media {
        Media::Image(_) => Some(MediumSlot::Image),
        Media::Audio(_) => Some(MediumSlot::Audio),
        Media::Video(_) => Some(MediumSlot::Video),
        Media::Opaque(_) => slot_of_extension(&field.extension),
        Media::Text(_) | Media::Json(_) | Media::Npy(_) | Media::Custom(_) => None,
    }
}

/// The kind of a medium's field; video has a decoder of its own or none.
fn slot_of_extension(extension: &str) -> Option<MediumSlot> {
    let last = extension.rsplit('.').next().unwrap_or_default();
    match kind_of_extension(extension) {
        MediumKind::Image => Some(MediumSlot::Image),
        MediumKind::Audio => Some(MediumSlot::Audio),
        _ if last.eq_ignore_ascii_case("opus") => Some(MediumSlot::Audio),
        _ if is_video_extension(extension) => Some(MediumSlot::Video),
        _ => None,
    }
}

fn is_text(field: &Field) -> bool {
    match &field.media {
        Media::Text(_) => true,
        Media::Opaque(_) => kind_of_extension(&field.extension) == MediumKind::Text,
        _ => false,
    }
}

/// The JSON fields of a sample, by extension.
fn documents(sample: &Sample) -> impl Iterator<Item = (&str, &Value)> + Clone {
    sample.fields.iter().filter_map(|field| match &field.media {
        Media::Json(json) => Some((&*field.extension, json)),
        _ => None,
    })
}

fn document(sample: &Sample) -> Option<(&str, &Value)> {
    let mut documents = documents(sample);
    let names_media = |json: &Value| MediumSlot::ALL.iter().any(|&slot| named_in(json, slot).is_some());
    let content = documents.clone().find(|(_, json)| has_content(json));
    content.or_else(|| documents.clone().find(|(_, json)| names_media(json))).or_else(|| documents.next())
}

fn media_of<'a>(
    sample: &'a Sample,
    json: Option<&Value>,
    slot: MediumSlot,
) -> Result<Vec<&'a Field>, MediaFault> {
    let stored = in_order(sample, |field| slot_of(field) == Some(slot));
    match json.and_then(|json| named_in(json, slot)) {
        None => Ok(stored),
        Some(names) => resolve(&sample.key, &stored, &names)
            .map_err(|(name, reason)| MediaFault::new(sample, name, reason)),
    }
}

/// Fields of one kind: by number where all are numbered alike, else in shard order.
fn in_order(sample: &Sample, is_wanted: impl Fn(&Field) -> bool) -> Vec<&Field> {
    let mut fields: Vec<&Field> = sample.fields.iter().filter(|field| is_wanted(field)).collect();
    if are_numbered(&fields) {
        fields.sort_by_key(|field| split_number(&field.extension).map(|(_, number)| number));
    }
    fields
}

/// Whether all fields are numbered alike.
fn are_numbered(fields: &[&Field]) -> bool {
    let mut prefixes = fields.iter().map(|field| split_number(&field.extension).map(|(prefix, _)| prefix));
    let first = prefixes.next().flatten();
    first.is_some() && prefixes.all(|prefix| prefix == first)
}

/// Splits `img_12.png` into `img_` and 12, and `12.left.png` into an empty prefix and 12; the extension of the medium
/// itself does not count.
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
