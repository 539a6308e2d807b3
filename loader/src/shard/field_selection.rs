//! Selects the sample fields to read; nothing else is read, buffered or decoded.
//!
//! A pipeline stage needs only some fields: the LLM texts, the encoder images. A name selects by extension:
//! `seg.png` is that field, `jpg` also matches `0.jpg`, `*` any letters (`img_*.png`), and `images`, `audio`,
//! `video` and `text` all fields with that modality, whatever the extension. `jpg;png` is a single name for
//! both, as in the webdataset package. An extension that no sample has is an error; patterns and modalities
//! may match nothing where a different name matches.

use std::fmt;

use dflop_samples::media::{Content, Modality, extension_content, extension_modality};

use crate::error::{Error, Result};

/// Selection of fields by name.
///
/// # Examples
/// ```
/// use dflop_loader::shard::FieldSelection;
/// let fields = FieldSelection::new(["txt", "images"])?;
/// assert!(fields.wants("txt") && fields.wants("0.webp") && !fields.wants("json"));
/// # Ok::<(), dflop_loader::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSelection {
    /// `None` for all fields.
    names: Option<Vec<Name>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Name {
    /// Fields with this modality.
    Medium(Modality),
    Text,
    /// Lower-case extension, or the last part of an extension.
    Extension(String),
    /// Lower-case pattern parts between the stars.
    Pattern(Vec<String>),
    /// Alternative names; any may match.
    AnyOf(Vec<Self>),
}

impl FieldSelection {
    /// Selects all fields.
    pub const ALL: Self = Self { names: None };

    /// Selects the fields that match any of `names`, ignoring case.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no name, or an empty name.
    pub fn new<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Result<Self> {
        let invalid = |reason: &str| Error::Config { setting: "fields", reason: reason.to_owned() };
        let names: Vec<Name> = names.into_iter().map(|name| Name::parse(name.as_ref())).collect();
        if names.is_empty() {
            return Err(invalid("no field is named"));
        }
        if names.iter().any(Name::is_empty) {
            return Err(invalid("a name is empty"));
        }
        Ok(Self { names: Some(names) })
    }

    /// Selects the images.
    pub(crate) fn images() -> Self {
        Self { names: Some(vec![Name::Medium(Modality::Image)]) }
    }

    /// Selects the fields that `self` or `other` selects.
    pub(crate) fn and(self, other: &Self) -> Self {
        let names = self.names.zip(other.names.clone());
        Self { names: names.map(|(own, others)| [own, others].concat()) }
    }

    /// Returns the names that should match a field and match none of `extensions`: the extension names, or
    /// all names if none matches; `None` if there are no such names.
    pub(crate) fn unmatched<'a>(&self, extensions: &(impl Iterator<Item = &'a str> + Clone)) -> Option<Self> {
        let names = self.names.as_ref()?;
        let is_unmatched = |name: &&Name| !extensions.clone().any(|extension| name.fits(extension));
        let mut unmatched: Vec<Name> = names.iter().filter(is_unmatched).cloned().collect();
        if unmatched.len() < names.len() {
            unmatched.retain(|name| matches!(name, Name::Extension(_) | Name::AnyOf(_)));
        }
        (!unmatched.is_empty()).then_some(Self { names: Some(unmatched) })
    }

    /// Returns whether all fields are selected.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.names.is_none()
    }

    /// Returns whether the field with this lower-case extension is read.
    #[must_use]
    pub fn wants(&self, extension: &str) -> bool {
        self.names.as_ref().is_none_or(|names| names.iter().any(|name| name.fits(extension)))
    }
}

impl fmt::Display for FieldSelection {
    /// Writes the lower-cased names in order; `*` for all fields.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(names) = &self.names else { return formatter.write_str("*") };
        for (at, name) in names.iter().enumerate() {
            write!(formatter, "{}{name}", if at == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Medium(Modality::Image) => formatter.write_str("images"),
            Self::Medium(modality) => formatter.write_str(modality.name()),
            Self::Text => formatter.write_str("text"),
            Self::Extension(name) => formatter.write_str(name),
            Self::Pattern(pieces) => formatter.write_str(&pieces.join("*")),
            Self::AnyOf(names) => {
                let names: Vec<String> = names.iter().map(Self::to_string).collect();
                formatter.write_str(&names.join(";"))
            }
        }
    }
}

impl Name {
    fn parse(name: &str) -> Self {
        let name = name.trim().to_lowercase();
        match name.as_str() {
            "images" => Self::Medium(Modality::Image),
            "audio" => Self::Medium(Modality::Audio),
            "video" => Self::Medium(Modality::Video),
            "text" => Self::Text,
            _ if name.contains(';') => Self::AnyOf(name.split(';').map(Self::parse).collect()),
            _ if name.contains('*') => Self::Pattern(name.split('*').map(str::to_owned).collect()),
            _ => Self::Extension(name),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Extension(name) => name.is_empty(),
            Self::AnyOf(names) => names.iter().any(Self::is_empty),
            Self::Medium(_) | Self::Text | Self::Pattern(_) => false,
        }
    }

    fn fits(&self, extension: &str) -> bool {
        match self {
            Self::Medium(modality) => extension_modality(extension) == Some(*modality),
            Self::Text => extension_content(extension) == Some(Content::Text),
            Self::Extension(name) => name == extension || extension.rsplit('.').next() == Some(name),
            Self::Pattern(pieces) => fits_pattern(pieces, extension),
            Self::AnyOf(names) => names.iter().any(|name| name.fits(extension)),
        }
    }
}

/// Matches the first part at the start, the last at the end, and every middle part at its first occurrence.
fn fits_pattern(pieces: &[String], extension: &str) -> bool {
    let [first, middle @ .., last] = pieces else { return false };
    let rest = extension.strip_prefix(first.as_str()).and_then(|rest| rest.strip_suffix(last.as_str()));
    let Some(mut rest) = rest else { return false };
    for piece in middle {
        let Some(at) = rest.find(piece.as_str()) else { return false };
        rest = &rest[at + piece.len()..];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wants(name: &str, extension: &str) -> bool {
        FieldSelection::new([name]).unwrap().wants(extension)
    }

    #[test]
    fn names_select_by_extension_last_part_pattern_or_kind() {
        let table = [
            ("jpg", "jpg", true),
            ("JPG", "0.jpg", true),
            ("jpg", "jpg.gz", false),
            ("0.jpg", "0.jpg", true),
            ("0.jpg", "1.jpg", false),
            ("img_*.png", "img_12.png", true),
            ("img_*.png", "img_.png", true),
            ("img_*.png", "img_1.jpg", false),
            ("*a*b*", "xxabyy", true),
            ("*a*b*", "ba", false),
            ("aa*aa", "aaa", false),
            ("*", "", true),
            ("images", "seg.png", true),
            ("images", "wav", false),
            ("audio", "0.flac", true),
            ("audio", "opus", true),
            ("text", "caption", true),
            ("text", "json", false),
            ("video", "mp4", true),
            ("jpg;png", "0.png", true),
            ("jpg; png", "webp", false),
        ];
        for (name, extension, expected) in table {
            assert_eq!(wants(name, extension), expected, "{name} for {extension}");
        }
        let names = FieldSelection::new(["JPG", "img_*.png", "images"]).unwrap();
        assert_eq!(names.to_string(), "jpg, img_*.png, images");
        assert!(FieldSelection::ALL.wants("anything") && FieldSelection::default().is_all());
    }

    #[test]
    fn a_selection_of_nothing_is_refused() {
        assert!(FieldSelection::new(Vec::<String>::new()).is_err());
        assert!(FieldSelection::new(["jpg", " "]).is_err());
        assert!(FieldSelection::new(["jpg;"]).is_err());
    }

    #[test]
    fn extensions_have_to_match_and_patterns_only_where_nothing_else_does() {
        let unmatched = |names: &[&str], extensions: &[&str]| {
            let names = FieldSelection::new(names).unwrap();
            names.unmatched(&extensions.iter().copied()).map(|names| names.to_string())
        };
        let found = ["0.jpg", "cls"];
        assert_eq!(unmatched(&["jpeg", "cls"], &found).as_deref(), Some("jpeg"));
        assert_eq!(unmatched(&["jpeg;jpg", "cls"], &found), None);
        assert_eq!(unmatched(&["png;webp", "cls"], &found).as_deref(), Some("png;webp"));
        assert_eq!(unmatched(&["images", "audio", "mask*"], &found), None);
        assert_eq!(unmatched(&["audio", "mask*", "txt"], &found).as_deref(), Some("audio, mask*, txt"));
        assert_eq!(FieldSelection::ALL.unmatched(&found.into_iter()), None);
    }
}
