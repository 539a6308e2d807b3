//! Collects document parts that no reader uses.

use serde_json::{Map, Value};

use super::is_blank;
use crate::error::{EXCERPT_CHARACTERS, excerpt, json_excerpt};
use crate::sample::document::names::is_media_column;

/// Maximum number of parts listed per document.
const PARTS_MAX: usize = 64;

/// Unread document parts, if requested.
#[derive(Debug, Default)]
pub(in crate::sample) struct Unread {
    parts: Option<Vec<(String, String)>>,
}

impl Unread {
    /// Creates an empty list.
    pub(in crate::sample) fn listed() -> Self {
        Self { parts: Some(Vec::new()) }
    }

    /// Returns whether parts are listed.
    pub(super) fn is_noted(&self) -> bool {
        self.parts.is_some()
    }

    /// Returns the key path and the shortened value for each part.
    pub(in crate::sample) fn into_parts(self) -> Vec<(String, String)> {
        self.parts.unwrap_or_default()
    }

    /// Notes a nonempty part, once.
    pub(super) fn note(&mut self, path: &str, value: &Value) {
        let Some(parts) = &mut self.parts else { return };
        let path = excerpt(path, EXCERPT_CHARACTERS);
        if !is_blank(value) && parts.len() < PARTS_MAX && !parts.iter().any(|(known, _)| *known == path) {
            parts.push((path.into_owned(), json_excerpt(value)));
        }
    }

    /// Notes the keys in a document without text, except keys that name media.
    pub(in crate::sample) fn note_document(&mut self, document: &Value) {
        for (key, value) in document.as_object().into_iter().flatten() {
            if !is_media_column(key, value) {
                self.note(key, value);
            }
        }
    }

    /// Notes the unread keys of an object in a list.
    pub(super) fn note_keys(
        &mut self,
        object: &Map<String, Value>,
        list: &str,
        is_read: impl Fn(&str) -> bool,
    ) {
        if self.is_noted() {
            for (key, value) in object.iter().filter(|(key, value)| !is_blank(value) && !is_read(key)) {
                self.note(&format!("{list}[].{key}"), value);
            }
        }
    }
}
