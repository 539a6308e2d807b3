//! Errors about data: contents, requests for what does not exist, and user code.

use super::{BoxError, EXCERPT_CHARACTERS, Skipped, as_text, excerpt};
use serde::Serialize;
use std::borrow::Cow;

/// Reason why data that was read cannot be used.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum DataError {
    /// A shard has an unsupported compression.
    #[error("shard `{shard}` is compressed with {format}; recompress it with gzip or zstd")]
    UnsupportedCompression { shard: String, format: &'static str },
    /// A shard is damaged from an offset on; everything before the offset was delivered.
    #[error("shard `{shard}` is damaged: {fault}")]
    Shard {
        shard: String,
        #[serde(serialize_with = "as_text")]
        fault: ArchiveFault,
    },
    /// Bytes are not a complete index part; parts are numbered from 0 in input order.
    #[error("part {part} of the index cannot be merged: {reason}")]
    IndexPart { part: usize, reason: String },
    /// The index parts do not fit a dataset shard.
    #[error("the index cannot be merged at shard `{shard}`: {fault}")]
    IndexShard {
        shard: String,
        #[serde(serialize_with = "as_text")]
        fault: ShardFault,
    },
    /// A model cannot process a medium. The sample is bad for this model; the next sample may be good.
    #[error("the model cannot take the {medium}")]
    Medium {
        medium: &'static str,
        #[serde(skip)]
        source: BoxError,
    },
}

impl DataError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UnsupportedCompression { .. } => "unsupported_compression",
            Self::Shard { .. } => "shard",
            Self::IndexPart { .. } => "index_part",
            Self::IndexShard { .. } => "index_shard",
            Self::Medium { .. } => "medium",
        }
    }
}

/// Archive fault with an offset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{fault} at offset {offset}")]
pub struct ArchiveFault {
    /// Offset in the archive after decompression, in bytes.
    pub offset: u64,
    /// Name of the truncated member, if the fault is in a member.
    pub entry: Option<String>,
    /// Kind of damage.
    pub fault: TarFault,
}

impl ArchiveFault {
    /// Attributes the fault to the member that starts at `offset`.
    pub(crate) fn in_entry(self, name: &str, offset: u64) -> Self {
        Self { offset, entry: Some(name.to_owned()), ..self }
    }
}

impl TarFault {
    /// Locates the fault.
    pub(crate) fn at(self, offset: u64) -> ArchiveFault {
        ArchiveFault { offset, entry: None, fault: self }
    }
}

/// Reason why an archive cannot be read further. Everything before the fault is sound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum TarFault {
    /// The archive holds no bytes at all.
    #[error("the file is empty")]
    Empty,
    /// The header checksum is wrong.
    #[error("bad checksum")]
    BadChecksum,
    /// The file has a different format.
    #[error("this is {format}, not a tar; {advice}")]
    OtherFormat { format: &'static str, advice: &'static str },
    /// A number in a header is not octal or does not fit 64 bits.
    #[error("bad number in header field `{field}`")]
    BadNumber { field: &'static str },
    /// A PAX record is malformed.
    #[error("bad PAX {what}")]
    BadPax { what: &'static str },
    /// A global PAX header sets a path, a size or a sparse map.
    #[error("global PAX header overrides paths, sizes or sparse maps")]
    GlobalOverride,
    /// The archive ends inside a header or a payload.
    #[error("truncated: {missing} bytes are missing")]
    Truncated { missing: u64 },
    /// An extension header is followed by no member.
    #[error("an extension header is not followed by a member")]
    DanglingExtension,
    /// Too many extension headers before a member; no known writer creates that many.
    #[error("more than {most} extension headers in front of one member")]
    TooManyExtensions { most: u32 },
    /// An extension header is too large; no known writer creates such headers.
    #[error("extension header of {bytes} bytes, over {most}")]
    ExtensionTooLarge { bytes: u64, most: u64 },
    /// A member name is longer than any file system allows.
    #[error("name of {bytes} bytes, over {most}")]
    NameTooLong { bytes: usize, most: usize },
    /// Nonzero bytes follow the end mark, such as a second archive.
    #[error("non-zero bytes after the end mark; only the first archive of a file is read")]
    TrailingBytes,
    /// The compressed stream is damaged after the end mark; all members are whole.
    #[error("the bytes after the end mark cannot be read: {reason}")]
    UnreadableTail { reason: String },
}

/// Reason why parts do not form a dataset index, at a specific shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ShardFault {
    /// No part covers the shard.
    #[error("no part covers it; index it and merge again")]
    Missing,
    /// More than one part covers the shard.
    #[error("it is covered more than once; give each part once")]
    Repeated,
    /// The shard length, modification time or entity tag has changed.
    #[error("it has changed since its part was made; make the part again")]
    Changed,
    /// The shard does not belong to the dataset.
    #[error("a part covers it, but it is not in the dataset; parts and dataset have to name the same shards")]
    Unknown,
    /// The shard's texts were counted by different tokenizers than the first shard's texts.
    #[error(
        "its texts were counted by other tokenizers than those of the first shard; make all parts with the same"
    )]
    OtherCounters,
    /// The shard's texts were not counted by the requested tokenizer.
    #[error("its texts were not counted by the requested tokenizer; make its part with it")]
    NotCounted,
    /// The shard's videos have a different sampling than requested.
    #[error("its videos were sampled in another way than requested; make its part with the same sampling")]
    OtherSampling,
}

/// Reason why a stream with bad samples ends: they exceed the error budget.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum BudgetError {
    /// The fraction of bad samples exceeds the error budget; ends the stream.
    #[error(
        "{skipped} of {samples} samples are bad, over the error budget of {fraction}; the first: shard `{}`, \
         offset {}, key `{}`: {}",
        .first.shard, .first.offset, sample_key(.first), .first.reason
    )]
    Share { skipped: u64, samples: u64, fraction: f64, first: Box<Skipped> },
    /// No sample was found at all, and the bad shards exceed the error budget; ends the stream.
    #[error(
        "no sample was found in {bad} shards that cannot be read; the first: shard `{}`, offset {}: {}",
        .first.shard, .first.offset, .first.reason
    )]
    NoSample { bad: u64, first: Box<Skipped> },
    /// The number of bad samples exceeds the error budget; ends the stream.
    #[error(
        "{skipped} samples are bad, over the error budget of {most}; the first: shard `{}`, offset {}, key `{}`: {}",
        .first.shard, .first.offset, sample_key(.first), .first.reason
    )]
    Count { skipped: u64, most: u64, first: Box<Skipped> },
}

fn sample_key(skipped: &Skipped) -> Cow<'_, str> {
    excerpt(skipped.key.as_deref().unwrap_or("unknown"), EXCERPT_CHARACTERS)
}

impl BudgetError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Share { .. } => "error_budget",
            Self::NoSample { .. } => "no_sample",
            Self::Count { .. } => "error_count",
        }
    }
}

/// Reason why the requested item does not exist in the data.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum SelectionError {
    /// A shard pattern cannot be expanded.
    #[error("invalid shard list `{pattern}`: {reason}")]
    ShardList { pattern: String, reason: String },
    /// The dataset has no sample at all.
    #[error("dataset `{dataset}` has no samples: {reason}")]
    NoSamples { dataset: String, reason: String },
    /// No sample has a field with any of these names. Known at once with an index; without an index, it ends
    /// the first epoch.
    #[error("invalid `{setting}`: none of {samples} samples has a field `{fields}`{}", they_have(.found))]
    NoField {
        setting: &'static str,
        #[serde(rename = "named")]
        fields: String,
        samples: u64,
        #[serde(serialize_with = "joined")]
        found: Vec<String>,
    },
    /// A step after the end of a run was requested.
    #[error("step {step} does not exist: the run has {steps} steps, counted from 0")]
    RunEnded { step: u64, steps: u64 },
}

impl SelectionError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::ShardList { .. } => "shard_list",
            Self::NoSamples { .. } => "no_samples",
            Self::NoField { .. } => "no_field",
            Self::RunEnded { .. } => "run_ended",
        }
    }
}

fn they_have(extensions: &[String]) -> String {
    if extensions.is_empty() { String::new() } else { format!("; they have: {}", extensions.join(", ")) }
}

fn joined<S: serde::Serializer>(names: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&names.join(", "))
}

/// Failure of user code as a whole, not on a single sample.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum UserCodeError {
    /// User code that changes fields failed as a whole, not on a single field; ends the stream.
    #[error("the transform of `{fields}` failed")]
    Transform {
        #[serde(rename = "transformed")]
        fields: String,
        #[serde(skip)]
        source: BoxError,
    },
    /// The user's cost function failed, or returned no costs for this global batch; ends the stream.
    #[error("the cost function failed at step {step}")]
    CostFunction {
        step: u64,
        #[serde(skip)]
        source: BoxError,
    },
}

impl UserCodeError {
    /// Returns the error from the user code.
    #[must_use]
    pub fn cause(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        match self {
            Self::Transform { source, .. } | Self::CostFunction { source, .. } => &**source,
        }
    }

    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Transform { .. } => "transform",
            Self::CostFunction { .. } => "cost_function",
        }
    }
}
