//! Records which checkpoints are being moved aside, so that a killed process has moved all or none.
//!
//! The record is published by one rename, before the first checkpoint moves. From then on the listed
//! checkpoints belong to an earlier run, regardless of where they are.

use std::fs;
use std::io;
use std::path::Path;

use dflop_loader::files;
use dflop_loader::store::file;
use serde_json::{Value, json};

use super::files::{failed, sync};
use crate::error::{Error, Result};

const RECORD_FILE: &str = ".set-aside";

/// Checkpoints to move, and their destination; both are names in the checkpoint directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SetAside {
    pub(super) into: String,
    pub(super) states: Vec<String>,
}

impl SetAside {
    /// Publishes the record.
    pub(super) fn write(&self, root: &Path) -> Result<()> {
        let path = root.join(RECORD_FILE);
        let document = json!({"into": self.into, "states": self.states});
        files::replace(&path, format!("{document}\n").as_bytes())
            .and_then(|()| sync(root))
            .map_err(failed("write", &path))
    }

    /// Reads the record; `None` if nothing moves.
    ///
    /// # Errors
    /// [`Error::Saved`] if it is damaged, [`Error::File`] if it cannot be read.
    pub(super) fn read(root: &Path) -> Result<Option<Self>> {
        let path = root.join(RECORD_FILE);
        let text = match file::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(failed("read", &path))?,
        };
        let damaged = || Error::Saved { path, problem: "the record is damaged".to_owned() };
        serde_json::from_slice(&text)
            .ok()
            .and_then(|document| Self::parse(&document))
            .map(Some)
            .ok_or_else(damaged)
    }

    fn parse(document: &Value) -> Option<Self> {
        // a name with a path could refer to directories elsewhere
        let plain = |name: &Value| {
            let name = name.as_str()?;
            (Path::new(name).file_name() == Some(name.as_ref())).then(|| name.to_owned())
        };
        let states = document.get("states")?.as_array()?.iter().map(plain).collect::<Option<_>>()?;
        Some(Self { into: plain(document.get("into")?)?, states })
    }

    /// Removes the record, after everything has moved.
    pub(super) fn remove(root: &Path) -> io::Result<()> {
        fs::remove_file(root.join(RECORD_FILE))?;
        sync(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_and_damaged_ones_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        assert_eq!(SetAside::read(root).unwrap(), None);
        let record = SetAside { into: "earlier-1".into(), states: vec!["step-00000003".into()] };
        record.write(root).unwrap();
        assert_eq!(SetAside::read(root).unwrap(), Some(record));
        SetAside::remove(root).unwrap();
        assert_eq!(SetAside::read(root).unwrap(), None);
        for text in
            ["", "{", r#"{"into":"a"}"#, r#"{"into":"../a","states":[]}"#, r#"{"into":"a","states":["b/c"]}"#]
        {
            fs::write(root.join(RECORD_FILE), text).unwrap();
            let error = SetAside::read(root).unwrap_err().to_string();
            assert!(error.contains(RECORD_FILE) && error.contains("damaged"), "{text}: {error}");
        }
    }
}
