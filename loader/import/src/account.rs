//! Accounts for packed source contents: shards, fields, columns, classes, and what was skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Summary of the shards that [`pack`](crate::pack) wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Shard paths, in order; URLs for shards in a store.
    pub shards: Vec<PathBuf>,
    /// Samples in all shards.
    pub samples: u64,
    /// Payload bytes in all fields, before compression.
    pub bytes: u64,
    /// Index file, unless disabled.
    pub index: Option<PathBuf>,
    /// Files and entries that were not packed, in source order.
    pub skipped: Vec<SkippedSource>,
    /// Fields, columns and classes that were packed.
    pub taken: Taken,
}

/// File, directory or source entry that was not packed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedSource {
    /// Path of a file or directory, or `FILE:NUMBER` for an entry: the line in JSON Lines or CSV, the
    /// position in JSON, both from 1, the table row from 0.
    pub path: String,
    /// Reason why it was not packed.
    pub reason: String,
}

/// Packing summary.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Number of fields by extension; `0.jpg` and `1.jpg` count as `jpg`.
    pub fields: BTreeMap<String, u64>,
    /// Fields that each table column is in: `jpg`, `json`, `key`.
    pub columns: BTreeMap<String, BTreeSet<String>>,
    /// Class names for the labels in `cls`, in label order.
    pub classes: Vec<String>,
}

impl Taken {
    pub(super) fn count_field(&mut self, extension: &str) {
        let name = unnumbered(extension);
        match self.fields.get_mut(name) {
            Some(fields) => *fields += 1,
            None => drop(self.fields.insert(name.to_owned(), 1)),
        }
    }

    pub(super) fn note_column(&mut self, column: &str, field: &str) {
        let name = unnumbered(field);
        if let Some(fields) = self.columns.get_mut(column) {
            if !fields.contains(name) {
                fields.insert(name.to_owned());
            }
        } else {
            self.columns.insert(column.to_owned(), BTreeSet::from([name.to_owned()]));
        }
    }

    /// Adds the account for a different part of the source.
    pub(super) fn add(&mut self, other: Self) {
        for (extension, fields) in other.fields {
            *self.fields.entry(extension).or_default() += fields;
        }
        for (column, fields) in other.columns {
            self.columns.entry(column).or_default().extend(fields);
        }
        if self.classes.is_empty() {
            self.classes = other.classes;
        }
    }
}

/// Removes the medium number: `0.jpg` becomes `jpg`.
fn unnumbered(extension: &str) -> &str {
    match extension.split_once('.') {
        Some((number, rest)) if number.bytes().all(|byte| byte.is_ascii_digit()) => rest,
        _ => extension,
    }
}
