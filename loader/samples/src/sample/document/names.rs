//! Resolves media names in a JSON document to sample fields.

use serde_json::Value;

use super::extension_modality;
use crate::error::{EXCERPT_CHARACTERS, excerpt};
use crate::media::Modality;
use crate::sample::Field;

/// Maximum number of digits in a field number; longer numbers are file names, as in COCO.
const NUMBER_DIGITS_MAX: usize = 4;

/// Data URL prefix.
const INLINE: &str = "data:";

/// Columns that name media, a modality per row; the first filled column counts.
pub const MEDIA_COLUMNS: [&[&str]; 3] = [
    &["image", "images", "image_path"],
    &["audio_filepath", "audio", "audios", "wav", "audio_path", "sound"],
    &["video", "videos", "video_path"],
];

/// Returns the media with a modality that a document column names, in column order.
///
/// A column without a name for this modality, such as a caption under `image`, is ignored.
pub(super) fn column_media(json: &Value, modality: Modality) -> Option<Vec<&str>> {
    // `MEDIA_COLUMNS` has the order of `Modality::ALL`.
    let columns = MEDIA_COLUMNS[modality as usize];
    columns.iter().find_map(|column| media_names(json.get(*column)?, modality))
}

/// Returns whether a document column names media.
pub(in crate::sample) fn names_media(json: &Value) -> bool {
    Modality::ALL.iter().any(|&modality| column_media(json, modality).is_some())
}

/// Returns whether a column names media, so that the column is read.
pub(in crate::sample) fn is_media_column(column: &str, value: &Value) -> bool {
    let is_named = |&modality: &Modality| {
        MEDIA_COLUMNS[modality as usize].contains(&column) && media_names(value, modality).is_some()
    };
    Modality::ALL.iter().any(is_named)
}

/// Returns a single name or a list of names; null entries, which mark texts in interleaved lists, are
/// omitted.
fn media_names(value: &Value, modality: Modality) -> Option<Vec<&str>> {
    let names: Option<Vec<&str>> = match value {
        Value::Array(values) => values.iter().filter(|value| !value.is_null()).map(named_path).collect(),
        value => named_path(value).map(|name| vec![name]),
    };
    let is_inline =
        |name: &str| name.strip_prefix(INLINE).is_some_and(|kind| kind.starts_with(modality.name()));
    names.filter(|names| {
        names.iter().any(|name| extension_modality(name) == Some(modality) || is_inline(name))
    })
}

/// Finds the field for each name; fails with the first name without a field, and the reason.
///
/// - `fields`: all fields with the modality, in order
pub(super) fn resolve<'a, 'n>(
    key: &str,
    fields: &[&'a Field],
    names: &[&'n str],
) -> Result<Vec<&'a Field>, (&'n str, String)> {
    if let Some(inline) = names.iter().find(|name| is_inline(name)) {
        return Err((inline, no_field(inline)));
    }
    let found: Vec<Option<&'a Field>> = names.iter().map(|name| field_named(key, fields, name)).collect();
    let is_field =
        |name: &&str| is_numbered(name) && fields.iter().any(|field| is_numbered(&field.extension));
    // Names that match no field are paths to imported files, unless they have the form of field names.
    if found.iter().all(Option::is_none) && !names.iter().any(is_field) {
        return match_imported(fields, names);
    }
    names.iter().zip(found).map(|(&name, field)| field.ok_or_else(|| (name, no_field(name)))).collect()
}

/// Finds the field with this extension or entry name, ignoring directories.
pub(super) fn field_named<'a>(key: &str, fields: &[&'a Field], name: &str) -> Option<&'a Field> {
    let key_base = key.rsplit('/').next().unwrap_or_default();
    let base = name.rsplit('/').next().unwrap_or_default();
    let in_entry = base.strip_prefix(key_base).and_then(|rest| rest.strip_prefix('.'));
    let is_named = |field: &&&Field| {
        field.extension.eq_ignore_ascii_case(name)
            || in_entry.is_some_and(|extension| field.extension.eq_ignore_ascii_case(extension))
    };
    fields.iter().find(is_named).copied()
}

/// Returns whether the name is `NUMBER.EXTENSION`, the pattern for samples with several fields per modality.
fn is_numbered(name: &str) -> bool {
    let Some((number, extension)) = name.split_once('.') else { return false };
    (1..=NUMBER_DIGITS_MAX).contains(&number.len())
        && number.bytes().all(|byte| byte.is_ascii_digit())
        && !extension.contains(['.', '/'])
}

/// Matches source file paths with fields: the importer names the n-th `N.EXTENSION`, or `EXTENSION` if there
/// is a single field. Fields with a different name or format match by position if the counts are equal.
fn match_imported<'a, 'n>(
    fields: &[&'a Field],
    names: &[&'n str],
) -> Result<Vec<&'a Field>, (&'n str, String)> {
    let last_part = |name: &str| name.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
    let field = |(number, &name): (usize, &&'n str)| {
        let extension = last_part(name);
        let expected = if names.len() > 1 { format!("{number}.{extension}") } else { extension };
        let found = fields.iter().find(|field| *field.extension == *expected);
        let counts = format!("{} names for {} fields", names.len(), fields.len());
        let reason = || match no_field(name) {
            reason if is_url(name) => reason,
            reason => format!("{reason} or `{}`, and {counts}", excerpt(&expected, EXCERPT_CHARACTERS)),
        };
        found.copied().ok_or_else(|| (name, reason()))
    };
    let matched: Result<Vec<_>, _> = names.iter().enumerate().map(field).collect();
    if matched.is_err() && fields.len() == names.len() { Ok(fields.to_vec()) } else { matched }
}

/// Returns the fault for a name without a field.
pub(super) fn no_field(name: &str) -> String {
    if is_url(name) {
        let shown = excerpt(name, EXCERPT_CHARACTERS);
        return format!("`{shown}` is a URL, nothing is downloaded, and the sample has no field for it");
    }
    if is_inline(name) {
        let shown = excerpt(name, EXCERPT_CHARACTERS);
        return format!(
            "`{shown}` holds a medium inline; `dflop pack` makes fields of media in JSON Lines and tables"
        );
    }
    "the sample has no field of this name".to_owned()
}

/// Returns whether a name is the medium itself instead of a name.
pub(super) fn is_inline(name: &str) -> bool {
    name.starts_with(INLINE)
}

/// Returns whether a name is a URL for something outside the shard.
pub(super) fn is_url(name: &str) -> bool {
    name.starts_with("http://") || name.starts_with("https://")
}

/// Returns the path in a string, or in an object that holds a path; `None` for anything else.
#[must_use]
pub fn named_path(value: &Value) -> Option<&str> {
    let path = match value {
        Value::Object(object) => ["file", "path"].iter().find_map(|column| object.get(*column)?.as_str()),
        value => value.as_str(),
    };
    path.filter(|path| !path.trim().is_empty())
}
