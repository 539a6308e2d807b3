//! Searches the texts of all samples, in the background, for the text that was asked for last.
//!
//! Texts are not in the index, so that a search reads the text fields, in the order of the dataset. Answers
//! contain what has been found so far. A search for another text ends the earlier one.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dflop_loader::{Dataset, SampleReader};
use serde_json::Value;

use super::table::content_kind;
use crate::output::runtime;

/// Maximum number of bytes that are searched in a field.
const FIELD_BYTES_MAX: u64 = 4 << 20;
/// Time for which the first answer waits, so that the search in a small dataset is complete.
const PATIENCE: Duration = Duration::from_millis(300);
const POLL: Duration = Duration::from_millis(5);

/// The search that was started last.
#[derive(Debug, Default)]
pub(super) struct TextSearch(Mutex<Option<Arc<Search>>>);

/// Search for a text.
#[derive(Debug, Default)]
pub(super) struct Search {
    text: String,
    /// Places of the samples that contain the text, in rising order.
    found: Mutex<Vec<u32>>,
    /// Number of samples that have been searched.
    searched: AtomicU32,
    is_stopped: AtomicBool,
}

impl TextSearch {
    /// Returns the search for a lower-case text; starts it if another text was asked for last.
    pub(super) fn search(&self, dataset: &Dataset, text: &str) -> Arc<Search> {
        let search = {
            let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(search) = last.as_ref().filter(|search| search.text == text) {
                return search.clone();
            }
            let search = Arc::new(Search { text: text.to_owned(), ..Search::default() });
            if let Some(earlier) = last.replace(search.clone()) {
                earlier.is_stopped.store(true, Ordering::Relaxed);
            }
            search
        };
        let (own, dataset) = (search.clone(), dataset.clone());
        std::thread::spawn(move || own.run(&dataset));
        search
    }
}

impl Search {
    /// Number of samples that have been searched; first waits a moment for the end.
    pub(super) fn searched(&self, samples: u32) -> u32 {
        let end = Instant::now() + PATIENCE;
        while self.searched.load(Ordering::Acquire) < samples && Instant::now() < end {
            std::thread::sleep(POLL);
        }
        self.searched.load(Ordering::Acquire)
    }

    /// Keeps the places of samples in which the text has been found.
    pub(super) fn retain(&self, places: &[u32]) -> Vec<u32> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        places.iter().copied().filter(|place| found.binary_search(place).is_ok()).collect()
    }

    fn run(&self, dataset: &Dataset) {
        let Ok(runtime) = runtime() else { return };
        let mut reader = SampleReader::new(dataset.index().clone());
        for place in 0..u32::try_from(dataset.len()).unwrap_or(u32::MAX) {
            if self.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            if runtime.block_on(self.is_in(dataset, &mut reader, place)) {
                self.found.lock().unwrap_or_else(PoisonError::into_inner).push(place);
            }
            self.searched.store(place + 1, Ordering::Release);
        }
    }

    /// Returns whether a sample contains the text; a field that cannot be read does not.
    async fn is_in(&self, dataset: &Dataset, reader: &mut SampleReader, place: u32) -> bool {
        let number = dataset.sample_number(place.into());
        let row = dataset.index().sample(number);
        for (at, field) in row.fields().enumerate() {
            let kind = content_kind(field.extension);
            if !matches!(kind, "text" | "document" | "value") {
                continue;
            }
            let payload = reader.field(number, at, 0..field.bytes.min(FIELD_BYTES_MAX)).await;
            if payload.is_ok_and(|payload| is_in(&payload, kind == "document", &self.text)) {
                return true;
            }
        }
        false
    }
}

/// Returns whether a field contains a lower-case text; documents are compared without escapes.
fn is_in(payload: &[u8], is_document: bool, text: &str) -> bool {
    let shown = String::from_utf8_lossy(payload);
    if is_document && let Ok(document) = serde_json::from_str::<Value>(&shown) {
        return has_text(&document, text);
    }
    shown.to_lowercase().contains(text)
}

fn has_text(value: &Value, text: &str) -> bool {
    match value {
        Value::String(own) => own.to_lowercase().contains(text),
        Value::Array(values) => values.iter().any(|value| has_text(value, text)),
        Value::Object(values) => values.values().any(|value| has_text(value, text)),
        Value::Number(number) => number.to_string() == text,
        Value::Null | Value::Bool(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_searched_as_people_read_them() {
        let document = br#"{"messages": [{"content": "A K\u00efte\n\"red\"", "n": 12}]}"#;
        for text in ["kïte", "a k", "\"red\"", "12"] {
            assert!(is_in(document, true, text), "{text}");
        }
        for text in ["messages", "\\n", "blue", "1"] {
            assert!(!is_in(document, true, text), "{text}");
        }
        assert!(is_in(b"{broken: Kite", true, "kite"));
        assert!(is_in("Ein Drachen, ÜBER".as_bytes(), false, "über"));
    }
}
