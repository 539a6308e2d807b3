//! Finds the codec for a field: a registered codec, else a built-in codec.

use std::sync::{PoisonError, RwLock};

use super::{BUILT_IN, Codec, Content};
use crate::media::shape::Modality;

/// Codecs from other crates. The list is global to the process, because a field name has the same meaning
/// everywhere.
static REGISTERED: RwLock<Vec<&'static dyn Codec>> = RwLock::new(Vec::new());

/// Conflict between a codec and a codec registered before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecConflict {
    /// A registered codec already has this name.
    #[error("codec `{name}` is registered already")]
    Name {
        /// Name that both codecs have.
        name: &'static str,
    },
    /// A registered codec already claims an extension.
    #[error("`.{extension}` is claimed by codec `{known}`, so codec `{name}` cannot claim it")]
    Extension {
        /// The claimed extension.
        extension: &'static str,
        /// Name of the codec registered before.
        known: &'static str,
        /// Name of the rejected codec.
        name: &'static str,
    },
    /// An extension is empty, or has a dot or an upper-case letter, so that no field would match.
    #[error("codec `{name}` claims `{extension}`; expected the last part of an extension in lower case")]
    Spelling {
        /// The rejected extension.
        extension: &'static str,
        /// Name of the rejected codec.
        name: &'static str,
    },
}

/// Registers a codec for this process, before any dataset is opened. A registered codec replaces built-in
/// codecs for the same extensions.
///
/// Register the same codecs in every process that reads the data: an index names the registered codecs that
/// produced the shapes, and is rebuilt where they differ.
///
/// # Errors
/// [`CodecConflict`] if a registered codec has the same name or extension, or an extension cannot match.
pub fn register(codec: &'static dyn Codec) -> Result<(), CodecConflict> {
    let name = codec.name();
    let cannot_match = |extension: &&&'static str| {
        extension.is_empty() || extension.chars().any(|letter| letter == '.' || letter.is_uppercase())
    };
    if let Some(extension) = codec.extensions().iter().find(cannot_match) {
        return Err(CodecConflict::Spelling { extension, name });
    }
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    for known in registered.iter() {
        if known.name() == name {
            return Err(CodecConflict::Name { name });
        }
        if let Some(extension) = codec.extensions().iter().find(|own| known.extensions().contains(own)) {
            return Err(CodecConflict::Extension { extension, known: known.name(), name });
        }
    }
    registered.push(codec);
    Ok(())
}

/// Returns the codec for a field with this WebDataset extension: everything after the first dot of the file
/// name.
///
/// Only the part after the last dot counts, ignoring case: `seg.png` and `0.PNG` are images, `txt.gz` has no
/// codec.
///
/// # Examples
/// ```
/// use dflop_samples::media::codec::extension_codec;
/// assert_eq!(extension_codec("left.JPG").unwrap().name(), "image");
/// assert!(extension_codec("txt.gz").is_none());
/// ```
#[must_use]
pub fn extension_codec(extension: &str) -> Option<&'static dyn Codec> {
    registered_codec(extension).or_else(|| claiming(&BUILT_IN, extension))
}

/// Returns the content kind for a field extension; `None` without a codec.
#[must_use]
pub fn extension_content(extension: &str) -> Option<Content> {
    extension_codec(extension).map(Codec::content)
}

/// Returns the modality for a field extension, also if this build cannot decode the field (video); `None` for
/// texts and values.
#[must_use]
pub fn extension_modality(extension: &str) -> Option<Modality> {
    match extension_content(extension)? {
        Content::Medium(modality) => Some(modality),
        Content::Text | Content::Document | Content::Value => None,
    }
}

/// Returns whether the usual format for a field extension is decoded. False for a known medium without a
/// decoder, such as HEIC; such fields are rejected, unless the content has a different format.
#[must_use]
pub fn is_decoded(extension: &str) -> bool {
    let last = extension.rsplit('.').next().unwrap_or(extension);
    let decodes = |codec: &'static dyn Codec| {
        codec.decoded_extensions().iter().any(|decoded| decoded.eq_ignore_ascii_case(last))
    };
    extension_codec(extension).is_some_and(decodes)
}

/// Returns a modality's extensions, built-in extensions first.
#[must_use]
pub fn modality_extensions(modality: Modality) -> Vec<&'static str> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    let codecs = BUILT_IN.iter().chain(registered.iter());
    let of_modality = codecs.filter(|codec| codec.content() == Content::Medium(modality));
    of_modality.flat_map(|codec| codec.extensions()).copied().collect()
}

/// Returns the names of registered codecs that claim any of these extensions, sorted.
#[must_use]
pub fn registered<'a>(extensions: impl Iterator<Item = &'a str>) -> Vec<&'static str> {
    let mut names: Vec<_> = extensions.filter_map(registered_codec).map(Codec::name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Returns the registered codec for a field extension; `None` if the field has a built-in codec or none.
#[must_use]
pub fn registered_codec(extension: &str) -> Option<&'static dyn Codec> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    claiming(&registered, extension)
}

fn claiming(codecs: &[&'static dyn Codec], extension: &str) -> Option<&'static dyn Codec> {
    let last = extension.rsplit('.').next().unwrap_or(extension);
    let claims = |codec: &&&'static dyn Codec| {
        codec.extensions().iter().any(|claimed| claimed.eq_ignore_ascii_case(last))
    };
    codecs.iter().find(claims).copied()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::media::{DecodeError, DecodeLimits, Media, MediaShape};

    /// Codec without content.
    #[derive(Debug)]
    struct Nothing(&'static str, &'static [&'static str]);

    impl Codec for Nothing {
        fn name(&self) -> &'static str {
            self.0
        }

        fn extensions(&self) -> &'static [&'static str] {
            self.1
        }

        fn content(&self) -> Content {
            Content::Value
        }

        fn probe(&self, _: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
            Ok(MediaShape::Opaque)
        }

        fn decode(&self, bytes: Bytes, _: &DecodeLimits) -> Result<Media, DecodeError> {
            Ok(Media::Opaque(bytes))
        }
    }

    #[test]
    fn built_in_codecs_share_no_extension_and_no_name() {
        let mut extensions: Vec<&str> =
            BUILT_IN.iter().flat_map(|codec| codec.extensions()).copied().collect();
        let count = extensions.len();
        extensions.sort_unstable();
        extensions.dedup();
        assert_eq!(extensions.len(), count);
        let mut names: Vec<&str> = BUILT_IN.iter().map(|codec| codec.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), BUILT_IN.len());
    }

    #[test]
    fn media_that_no_codec_reads_have_a_modality() {
        for (extension, modality) in [
            ("a.avif", Modality::Image),
            ("HEIC", Modality::Image),
            ("svg", Modality::Image),
            ("m4a", Modality::Audio),
            ("0.aac", Modality::Audio),
            ("m4v", Modality::Video),
        ] {
            assert_eq!(extension_modality(extension), Some(modality), "{extension}");
        }
        assert!(["jpg", "aiff", "txt", "mp4"].into_iter().all(is_decoded));
        assert!(!["heic", "x.JXL", "wma", "unknown"].into_iter().any(is_decoded));
        assert_eq!(is_decoded("a.avif"), cfg!(feature = "avif"));
    }

    #[test]
    fn a_registered_codec_is_found_and_conflicts_are_named() {
        static FIRST: Nothing = Nothing("first", &["first-ext"]);
        static SAME: Nothing = Nothing("first", &["same-ext"]);
        static TAKEN: Nothing = Nothing("taken", &["other-ext", "first-ext"]);
        static UPPER: Nothing = Nothing("upper", &["Ext"]);
        assert!(extension_codec("a.first-ext").is_none());
        register(&FIRST).unwrap();
        assert_eq!(extension_codec("a.FIRST-ext").unwrap().name(), "first");
        assert_eq!(registered(["jpg", "first-ext", "b.first-ext"].into_iter()), ["first"]);
        assert_eq!(register(&SAME), Err(CodecConflict::Name { name: "first" }));
        let conflict = CodecConflict::Extension { extension: "first-ext", known: "first", name: "taken" };
        assert_eq!(register(&TAKEN), Err(conflict));
        assert_eq!(register(&UPPER), Err(CodecConflict::Spelling { extension: "Ext", name: "upper" }));
        assert!(extension_codec("other-ext").is_none(), "a refused codec claims nothing");
    }
}
