//! Counts sample parts that no reader uses: document keys, turn flags, fields without a codec.
//!
//! A document with an unknown layout contributes nothing to training. The index sees every document once, so
//! it reports for the whole dataset which parts are unused and how often, with an example.

use dflop_samples::media::{Content, extension_content};
use dflop_samples::sample::{FieldFault, MeasuredSample, Unused};
use serde::{Deserialize, Serialize};

use crate::error::{EXCERPT_CHARACTERS, excerpt};

/// Maximum number of parts that are counted separately.
const PARTS_MAX: usize = 256;
/// Name for all parts beyond [`PARTS_MAX`].
const OTHER_PARTS: &str = "other parts";
/// Part name for documents or media that no processor can turn into inputs.
const UNREADABLE: &str = "cannot be read";
/// Maximum number of parts that a summary names.
const NAMED_MAX: usize = 6;

/// Sample part that no reader uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnusedPart {
    /// Field extension.
    pub field: String,
    /// Key path in the field's document, such as `similarity` or `messages[].mask`; empty for the whole
    /// field.
    pub part: String,
    /// Number of samples with this part.
    pub samples: u64,
    /// Key of the first such sample.
    pub key: String,
    /// Value in that sample, truncated.
    pub example: String,
}

/// Unused parts of a shard or a dataset, in first-seen order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct UnusedParts(Vec<UnusedPart>);

impl UnusedParts {
    /// Counts a sample's unused parts.
    pub(super) fn count(&mut self, key: &str, measured: MeasuredSample) {
        for Unused { field, part, example } in measured.unused {
            self.add(&field, &part, key, &example);
        }
        if let Some(FieldFault { field, reason }) = measured.unreadable {
            self.add(&field, UNREADABLE, key, &reason);
        }
    }

    /// Counts a single sample part.
    fn add(&mut self, field: &str, part: &str, key: &str, example: &str) {
        let [field, part, key, example] = [field, part, key, example].map(str::to_owned);
        self.push(UnusedPart { field, part, samples: 1, key, example });
    }

    /// Adds the parts from a second shard.
    pub(super) fn append(&mut self, other: Self) {
        other.0.into_iter().for_each(|part| self.push(part));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn as_slice(&self) -> &[UnusedPart] {
        &self.0
    }

    fn push(&mut self, mut new: UnusedPart) {
        let is_same =
            |known: &&mut UnusedPart, new: &UnusedPart| known.field == new.field && known.part == new.part;
        if let Some(known) = self.0.iter_mut().find(|known| is_same(known, &new)) {
            known.samples += new.samples;
            return;
        }
        if self.0.len() < PARTS_MAX {
            return self.0.push(new);
        }
        // Keys that differ from sample to sample, such as names of persons.
        (new.field, new.part) = (OTHER_PARTS.to_owned(), String::new());
        match self.0.iter_mut().find(|known| is_same(known, &new)) {
            Some(known) => known.samples += new.samples,
            None => self.0.push(new),
        }
    }
}

/// Document keys that describe a sample and are not trained on: identifiers, addresses, sizes, digests,
/// scores and licenses, as img2dataset, LLaVA and COCO write them.
const METADATA: [&str; 40] = [
    "__key__",
    "__url__",
    "aesthetic",
    "aesthetic_score",
    "clip_similarity",
    "created",
    "data_source",
    "dataset",
    "date",
    "dataset_name",
    "duration",
    "error_message",
    "exif",
    "file_name",
    "filename",
    "height",
    "id",
    "idx",
    "image_id",
    "index",
    "key",
    "language",
    "license",
    "md5",
    "name",
    "nsfw",
    "original_height",
    "original_width",
    "punsafe",
    "pwatermark",
    "question_id",
    "sample_rate",
    "sha256",
    "similarity",
    "source",
    "split",
    "status",
    "timestamp",
    "url",
    "width",
];

/// Fields that hold a number in the webdataset package: labels and counts.
const NUMBERS: [&str; 7] = ["cls", "cls2", "class", "count", "index", "inx", "id"];

/// Names the most frequent parts, with counts and one example each; `None` without parts.
pub(super) fn summary(parts: &[UnusedPart]) -> Option<String> {
    let mut parts: Vec<&UnusedPart> = parts.iter().collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.samples));
    let named: Vec<String> = parts.iter().take(NAMED_MAX).map(|part| part.described()).collect();
    let more = parts.len().saturating_sub(NAMED_MAX);
    let more = if more == 0 { String::new() } else { format!(", and {more} more") };
    (!named.is_empty()).then(|| format!("{}{more}", named.join(", ")))
}

impl UnusedPart {
    /// Returns whether the part only describes the sample. A whole field does so if the value is a number, an
    /// array or a document next to the sample text; a document key does so if it is well known or the value
    /// is a number or a Boolean.
    #[must_use]
    pub fn is_metadata(&self) -> bool {
        let is_text = self.example.starts_with(['"', '[', '{']);
        match self.part.as_str() {
            UNREADABLE => false,
            "" => {
                let name = self.field.rsplit('.').next().unwrap_or_default();
                NUMBERS.contains(&name)
                    || matches!(extension_content(&self.field), Some(Content::Document | Content::Value))
            }
            part => METADATA.contains(&part) || !is_text && !part.contains('.'),
        }
    }

    /// Returns the part name: `json: similarity`, or `foo` for a whole field.
    #[must_use]
    pub fn name(&self) -> String {
        let [field, part] = [&self.field, &self.part].map(|name| excerpt(name, EXCERPT_CHARACTERS));
        if part.is_empty() { field.into_owned() } else { format!("{field}: {part}") }
    }

    /// Describes the part in one line: name, number of samples, example.
    #[must_use]
    pub fn described(&self) -> String {
        let Self { samples, example, .. } = self;
        let of = if *samples == 1 { "1 sample".to_owned() } else { format!("{samples} samples") };
        let example = if example.is_empty() { String::new() } else { format!(", such as {example}") };
        format!("`{}` ({of}{example})", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_by_field_and_name_and_keep_their_first_example() {
        let (mut first, mut second) = (UnusedParts::default(), UnusedParts::default());
        first.add("json", "query", "a", "\"what\"");
        first.add("json", "query", "b", "\"who\"");
        second.add("json", "query", "c", "\"where\"");
        second.add("foo", "", "c", "");
        first.append(second);
        assert_eq!(
            summary(first.as_slice()).unwrap(),
            "`json: query` (3 samples, such as \"what\"), `foo` (1 sample)"
        );
        assert_eq!((first.as_slice()[0].key.as_str(), summary(&[])), ("a", None));
        let is_metadata = |part: &str, example: &str| {
            let mut parts = UnusedParts::default();
            parts.add("json", part, "k", example);
            parts.as_slice()[0].is_metadata()
        };
        assert!(is_metadata("width", "8") && is_metadata("url", "\"x\"") && is_metadata("score", "0.5"));
        assert!(
            !is_metadata("query", "\"what\"")
                && is_metadata("", "{}")
                && !is_metadata("messages[].mask", "1")
        );
    }

    #[test]
    fn names_without_bound_take_bounded_room() {
        let mut parts = UnusedParts::default();
        (0..10_000).for_each(|number| parts.add("json", &format!("name {number}"), "k", ""));
        assert_eq!(parts.as_slice().len(), PARTS_MAX + 1);
        assert_eq!(parts.as_slice().iter().map(|part| part.samples).sum::<u64>(), 10_000);
        assert!(summary(parts.as_slice()).unwrap().ends_with(", and 251 more"));
    }
}
