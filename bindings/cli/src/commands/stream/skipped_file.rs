//! Writes every skipped sample to a JSON Lines file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use dflop_loader::error::Skipped;
use dflop_loader::flow::SkipListener;

use crate::failure::Failure;

/// File that receives a line per skipped sample and epoch.
#[derive(Debug)]
pub(crate) struct SkippedFile {
    file: Mutex<(BufWriter<File>, Option<std::io::Error>)>,
}

impl SkippedFile {
    /// Creates the file, or empties it.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let file = File::create(path).map_err(|error| Failure::from(error).in_file(path))?;
        Ok(Self { file: Mutex::new((BufWriter::new(file), None)) })
    }

    /// Writes the buffered lines.
    ///
    /// # Errors
    /// The first write error.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        match file.1.take() {
            Some(error) => Err(error.into()),
            None => Ok(file.0.flush()?),
        }
    }
}

impl SkipListener for SkippedFile {
    fn skipped(&self, skipped: &Skipped) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if file.1.is_some() {
            return;
        }
        let line = serde_json::to_vec(skipped).map_err(std::io::Error::from);
        let written = line.and_then(|line| file.0.write_all(&line)).and_then(|()| file.0.write_all(b"\n"));
        file.1 = written.err();
    }
}
