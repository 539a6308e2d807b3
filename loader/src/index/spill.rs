//! Keeps byte records outside memory, in temporary files without names.
//!
//! Records wait in memory until they exceed [`HELD_BYTES_MAX`], and are then written to a file in the first
//! directory that accepts it; nothing is left when the process ends, however it ends. If no directory has
//! room, records remain in memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;

/// Maximum size of records waiting in memory, apart from the record that exceeds it, in bytes.
const HELD_BYTES_MAX: usize = 16 << 20;

/// Records in temporary files and, at the end, in memory; addressed by offset.
#[derive(Debug)]
pub(super) struct Spill {
    /// Directories not yet tried, in reverse order.
    directories: Vec<PathBuf>,
    files: Vec<SpillFile>,
    /// Records after the records in files.
    held: Vec<u8>,
    held_bytes_max: usize,
    /// Bytes in memory held by rows that are not records.
    batch_bytes: usize,
}

#[derive(Debug)]
struct SpillFile {
    file: File,
    range: Range<u64>,
}

impl Spill {
    /// Creates a spill without records. Files are created in the first of these directories that has room,
    /// else in the system's temporary directory.
    pub(super) fn new(mut directories: Vec<PathBuf>) -> Self {
        directories.push(std::env::temp_dir());
        directories.reverse();
        Self { directories, held_bytes_max: HELD_BYTES_MAX, ..Self::in_memory() }
    }

    /// Creates a spill without records that keeps all records in memory.
    pub(super) fn in_memory() -> Self {
        let (directories, files, held) = Default::default();
        Self { directories, files, held, held_bytes_max: usize::MAX, batch_bytes: 0 }
    }

    /// Creates a spill like [`Self::new`], with a different limit for waiting bytes.
    #[cfg(test)]
    pub(super) fn holding(directories: Vec<PathBuf>, held_bytes_max: usize) -> Self {
        Self { held_bytes_max, ..Self::new(directories) }
    }

    /// Returns the number of bytes waiting in memory.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.held.capacity()
    }

    /// Returns whether rows with this many bytes may wait in memory, and counts them if so; the limit is the
    /// same as for records.
    pub(super) fn holds(&mut self, bytes: usize) -> bool {
        let has_room = self.batch_bytes.saturating_add(bytes) <= self.held_bytes_max;
        if has_room {
            self.batch_bytes += bytes;
        }
        has_room
    }

    /// Adds a record and returns the record's range.
    pub(super) fn append(&mut self, record: &[u8]) -> Range<u64> {
        let start = self.files_end() + self.held.len() as u64;
        self.held.extend_from_slice(record);
        if self.held.len() > self.held_bytes_max {
            self.write_held();
        }
        start..start + record.len() as u64
    }

    /// Reads a record.
    ///
    /// # Errors
    /// The file error.
    pub(super) fn read(&self, record: &Range<u64>) -> io::Result<Bytes> {
        let bytes = (record.end - record.start) as usize;
        let Some(spilled) = self.files.iter().find(|spilled| spilled.range.contains(&record.start)) else {
            let start = (record.start - self.files_end()) as usize;
            return Ok(Bytes::copy_from_slice(&self.held[start..start + bytes]));
        };
        let mut read = vec![0; bytes];
        spilled.file.read_exact_at(&mut read, record.start - spilled.range.start)?;
        Ok(read.into())
    }

    /// Returns whether records use disk space.
    pub(super) fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    /// Moves all records to memory, which frees the disk space.
    ///
    /// # Errors
    /// A file error; the records then remain where they are.
    pub(super) fn hold_all(&mut self) -> io::Result<()> {
        let mut held = Vec::new();
        for SpillFile { range, .. } in &self.files {
            held.extend_from_slice(&self.read(range)?);
        }
        held.append(&mut self.held);
        (self.held, self.held_bytes_max) = (held, usize::MAX);
        self.files.clear();
        Ok(())
    }

    fn files_end(&self) -> u64 {
        self.files.last().map_or(0, |last| last.range.end)
    }

    /// Writes the records in memory to the last file, or to a file in the next directory if the last has no
    /// room.
    fn write_held(&mut self) {
        loop {
            if let Some(SpillFile { file, range }) = self.files.last_mut()
                && file.write_all_at(&self.held, range.end - range.start).is_ok()
            {
                range.end += self.held.len() as u64;
                self.held.clear();
                self.held.shrink_to(self.held_bytes_max);
                return;
            }
            let Some(directory) = self.directories.pop() else {
                self.held_bytes_max = usize::MAX;
                return;
            };
            if let Ok(file) = file_in(&directory) {
                let start = self.files_end();
                self.files.push(SpillFile { file, range: start..start });
            }
        }
    }
}

fn file_in(directory: &Path) -> io::Result<File> {
    std::fs::create_dir_all(directory)?;
    tempfile::tempfile_in(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: usize) -> Vec<u8> {
        (0..number * 7 % 50).map(|at| (number + at) as u8).collect()
    }

    fn spill(directories: Vec<PathBuf>) -> Spill {
        Spill::holding(directories, 100)
    }

    fn check(spill: &Spill, ranges: &[Range<u64>]) {
        for (number, range) in ranges.iter().enumerate() {
            assert_eq!(spill.read(range).unwrap(), record(number), "record {number}");
        }
    }

    #[test]
    fn records_are_read_back_and_only_the_last_ones_are_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let mut spill = spill(vec![directory.path().join("made")]);
        let mut ranges = Vec::new();
        for number in 0..200 {
            ranges.push(spill.append(&record(number)));
            assert!(spill.held.len() <= 100 && spill.held_bytes() <= 300, "record {number}");
            check(&spill, &ranges);
        }
        assert_eq!(spill.files.len(), 1);
        let names = std::fs::read_dir(directory.path().join("made")).unwrap().count();
        assert_eq!(names, 0, "the file has no name");
        spill.hold_all().unwrap();
        assert!(!spill.has_files());
        ranges.extend((200..210).map(|number| spill.append(&record(number))));
        assert!(!spill.has_files(), "what was moved to memory stays there");
        check(&spill, &ranges);
    }

    #[test]
    fn a_directory_without_room_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let blocked = directory.path().join("file");
        std::fs::write(&blocked, b"").unwrap();
        let mut spill = spill(vec![blocked, directory.path().to_owned()]);
        let mut ranges: Vec<_> = (0..20).map(|number| spill.append(&record(number))).collect();
        assert_eq!(spill.files.len(), 1);
        // A file that rejects writes, like a file on a full disk.
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let start = spill.files_end();
        spill.files.push(SpillFile { file: full, range: start..start });
        ranges.extend((20..60).map(|number| spill.append(&record(number))));
        assert_eq!(spill.files.len(), 3, "the system's directory follows");
        check(&spill, &ranges);
    }

    #[test]
    fn records_stay_in_memory_where_no_directory_accepts_them() {
        let mut spill = Spill { directories: Vec::new(), ..spill(Vec::new()) };
        let ranges: Vec<_> = (0..60).map(|number| spill.append(&record(number))).collect();
        assert!(!spill.has_files());
        check(&spill, &ranges);
    }
}
