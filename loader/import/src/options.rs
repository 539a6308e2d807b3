//! Settings for packing: source format, labels, columns, limits.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use dflop_loader::error::{Error, Result, excerpt};
use dflop_loader::flow::{NoProgress, Progress};
use dflop_loader::store::Stores;
use dflop_loader::write::SHARD_BYTES;

use super::record::{KNOWN_COLUMNS, SHOWN_MAX};
use super::row::ColumnMap;

/// Formats that the Python package converts with their own readers, and the functions that do.
pub(super) const CONVERTED: [(&str, &str); 2] = [("mds", "from_mds"), ("litdata", "from_litdata")];

/// Settings for [`pack`](crate::pack).
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// Maximum number of bytes per shard, before compression. Default: [`SHARD_BYTES`].
    pub shard_bytes: u64,
    /// Maximum number of samples per shard; `None` is unlimited. Default: `None`.
    pub shard_samples: Option<u64>,
    /// Whether the index is written, together with the shards. Default: true.
    pub is_indexed: bool,
    /// Whether shards are compressed with Zstandard. Default: false, so that they can be read by range.
    pub is_zstd: bool,
    /// Source format. Default: detected.
    pub format: Option<SourceFormat>,
    /// Split to pack from a source with more than one split. Default: the only split.
    pub split: Option<String>,
    /// Fields for columns whose names and contents do not determine a field. Default: none.
    pub map: ColumnMap,
    /// Source of class labels. Default: the source itself.
    pub labels: LabelSource,
    /// Base directory for relative paths in a manifest, which also replaces a leading placeholder such as
    /// `{data_root}` or `$data_root`. Default: the directory with the manifest or the tables.
    pub root: Option<PathBuf>,
    /// Whether files outside the source are packed: manifest paths that lead out of `root`, and links that
    /// lead out of a directory. Default: false, because manifests and directories may come from third
    /// parties.
    pub is_outside_allowed: bool,
    /// Stores, for shards that are written to a store. Default: the default settings.
    pub stores: Stores,
    /// Listener that is notified of every sample. Default: none.
    pub progress: Arc<dyn Progress>,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            shard_bytes: SHARD_BYTES,
            shard_samples: None,
            is_indexed: true,
            is_zstd: false,
            format: None,
            split: None,
            map: ColumnMap::default(),
            labels: LabelSource::default(),
            root: None,
            is_outside_allowed: false,
            stores: Stores::default(),
            progress: Arc::new(NoProgress),
        }
    }
}

/// Source of class labels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LabelSource {
    /// Labels are in the source itself: `.cls` files, table columns.
    #[default]
    Source,
    /// The class is the top-level directory that contains the file, as in `ImageFolder` in torchvision; the
    /// label is the position of this directory in name order.
    Directory,
}

/// Source format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceFormat {
    /// A directory with files.
    Files,
    /// JSON Lines: an object per line.
    Jsonl,
    /// A JSON document: an array of objects, or an object of id → object.
    Json,
    /// CSV with a header.
    Csv,
    /// Parquet and Arrow files, a single file or a directory, also as stored by Hugging Face `datasets`.
    Table,
}

impl fmt::Display for SourceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Files => "files",
            Self::Jsonl => "jsonl",
            Self::Json => "json",
            Self::Csv => "csv",
            Self::Table => "table",
        })
    }
}

impl FromStr for SourceFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "files" => Self::Files,
            "jsonl" => Self::Jsonl,
            "json" => Self::Json,
            "csv" => Self::Csv,
            "table" | "parquet" | "arrow" | "huggingface" => Self::Table,
            _ => {
                let converted = CONVERTED.iter().find(|(format, _)| *format == name);
                let reason = if let Some((format, function)) = converted {
                    conversion(format, function)
                } else {
                    let known = "files, jsonl, json, csv, table (parquet, arrow, huggingface)";
                    format!("expected {known}, found `{}`", excerpt(name, SHOWN_MAX))
                };
                return Err(Error::Config { setting: "format", reason });
            }
        })
    }
}

impl SourceFormat {
    /// Describes a sample in this source format, for messages.
    pub(super) fn sample_description(self) -> String {
        match self {
            Self::Files => "regular files with an extension, not hidden".to_owned(),
            Self::Jsonl => format!("a JSON object per line with {KNOWN_COLUMNS}"),
            Self::Json => {
                format!("a JSON array of objects, or an object of objects, with {KNOWN_COLUMNS}")
            }
            Self::Csv => format!("a header and rows with {KNOWN_COLUMNS}"),
            Self::Table => format!("rows with {KNOWN_COLUMNS}"),
        }
    }
}

/// Returns the reason for refusing a format that a Python function converts.
pub(super) fn conversion(format: &str, function: &str) -> String {
    format!("the Python function `dflop.{function}(source, out)` converts the format {format}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_formats_come_back_and_others_are_refused() {
        for name in ["files", "jsonl", "json", "csv", "table"] {
            assert_eq!(name.parse::<SourceFormat>().unwrap().to_string(), name);
        }
        assert!("xml".parse::<SourceFormat>().unwrap_err().to_string().contains("expected files, jsonl"));
    }
}
