//! Packs JSON Lines: an object per line; blank lines are ignored.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::packer::Packer;
use dflop_loader::error::{Error, OutputError, Result, StorageError};
use dflop_loader::store::file;

/// Longest line: 64 MiB.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// Packs every line; skips lines that are not JSON objects.
pub(super) fn pack_lines(path: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let shown = path.display();
    let unreadable = |source| Error::Storage(StorageError::File { path: shown.to_string(), source });
    let mut reader = open_text(path).map_err(unreadable)?;
    packer.begin(0);
    let mut line = Vec::new();
    for number in 1u64.. {
        if packer.is_done() {
            break;
        }
        match read_line(&mut reader, &mut line).map_err(unreadable)? {
            None => break,
            // The rest of an oversized line could pass for an entry, so nothing after it is read.
            Some(false) => {
                let reason = format!("line {number} has more than {LINE_BYTES_MAX} bytes");
                return Err(Error::Output(OutputError::Pack { path: shown.to_string(), reason }));
            }
            Some(true) if line.trim_ascii().is_empty() => {}
            Some(true) => packer.add_entry(&format!("{shown}:{number}"), None, line.trim_ascii())?,
        }
    }
    Ok(())
}

/// Reads the next line into `line`: `None` after the last line, `Some(false)` if it is too long and was cut.
pub(super) fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> std::io::Result<Option<bool>> {
    line.clear();
    let read = reader.take(LINE_BYTES_MAX).read_until(b'\n', line)? as u64;
    Ok((read > 0).then_some(read < LINE_BYTES_MAX || line.ends_with(b"\n")))
}

/// Opens a text file after the byte order mark, if there is one.
pub(super) fn open_text(path: &Path) -> std::io::Result<BufReader<File>> {
    const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
    let mut reader = BufReader::with_capacity(1 << 18, file::open(path)?);
    if reader.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        reader.consume(BYTE_ORDER_MARK.len());
    }
    Ok(reader)
}
