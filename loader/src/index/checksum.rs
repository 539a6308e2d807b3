//! Computes the index file checksum while writing and when reading.
//!
//! The checksum is the XXH3 digest over the digests of all file chunks. It covers everything except the
//! digits in the footer.

use std::io::{self, Write};
use std::ops::Range;

use arrow_ipc::reader::read_footer_length;
use arrow_schema::ArrowError;
use xxhash_rust::xxh3::xxh3_64;

use crate::flow::{cores, in_parallel};

/// Metadata key for the checksum in the footer.
pub(super) const CHECKSUM_KEY: &str = "dflop.xxh3";
/// Number of hex digits in the checksum.
pub(super) const CHECKSUM_DIGITS: usize = 16;
/// Number of file bytes per digest.
const CHECKSUM_CHUNK_BYTES: usize = 1 << 20;
/// Length of the trailer after an Arrow footer: four length bytes, six magic bytes.
const TRAILER_BYTES: usize = 10;

/// Error while writing an index file.
#[derive(Debug)]
pub(super) enum WriteFault {
    /// The index cannot be encoded.
    Encode(ArrowError),
    /// The rows cannot be read back.
    Rows(io::Error),
    /// The file cannot be written.
    Write(io::Error),
}

impl From<ArrowError> for WriteFault {
    fn from(error: ArrowError) -> Self {
        match error {
            ArrowError::IoError(_, source) => Self::Write(source),
            other => Self::Encode(other),
        }
    }
}

pub(super) fn damaged(what: &str) -> ArrowError {
    ArrowError::ParseError(format!("damaged: {what}"))
}

/// Returns the footer of a file, or of a file's end, before anything in it is verified.
pub(super) fn file_footer(file: &[u8]) -> Result<arrow_ipc::Footer<'_>, ArrowError> {
    let trailer_start = file
        .len()
        .checked_sub(TRAILER_BYTES)
        .ok_or_else(|| damaged("the file is shorter than its trailer"))?;
    let trailer = file[trailer_start..].try_into().map_err(|_| damaged("trailer"))?;
    let footer_start = trailer_start.checked_sub(read_footer_length(trailer)?);
    let footer_start = footer_start.ok_or_else(|| damaged("the file is shorter than its footer"))?;
    arrow_ipc::root_as_footer(&file[footer_start..trailer_start]).map_err(|error| damaged(&error.to_string()))
}

/// Returns the location of the checksum digits in the file.
pub(super) fn checksum_place(
    file: &[u8],
    footer: &arrow_ipc::Footer<'_>,
) -> Result<Range<usize>, ArrowError> {
    let stored = footer.custom_metadata().iter().flatten().find(|pair| pair.key() == Some(CHECKSUM_KEY));
    let stored = stored.and_then(|pair| pair.value()).filter(|digits| digits.len() == CHECKSUM_DIGITS);
    let stored = stored.ok_or_else(|| damaged("no checksum"))?;
    // The digits are a view into `file`, so the digits' address determines the offset.
    let start = stored.as_ptr().addr() - file.as_ptr().addr();
    Ok(start..start + CHECKSUM_DIGITS)
}

/// Computes a file's checksum as hex digits, hashing chunks in parallel.
pub(super) fn checksum(file: &[u8], digits: &Range<usize>) -> String {
    let parts = [&file[..digits.start], &file[digits.end..]];
    let chunks: Vec<&[u8]> = parts.iter().flat_map(|part| part.chunks(CHECKSUM_CHUNK_BYTES)).collect();
    checksum_digits(&in_parallel(cores(), &chunks, |chunk| xxh3_64(chunk).to_le_bytes()).concat())
}

fn checksum_digits(digests: &[u8]) -> String {
    format!("{:0CHECKSUM_DIGITS$x}", xxh3_64(digests))
}

/// Arrow file writer that hashes all bytes and writes them in chunks.
#[derive(Debug)]
pub(super) struct ChecksumWriter<W> {
    sink: W,
    /// Chunk digests so far.
    digests: Vec<u8>,
    /// Bytes of the incomplete chunk.
    chunk: Vec<u8>,
    /// Bytes written after [`Self::hold`].
    held: Option<Vec<u8>>,
}

impl<W: Write> ChecksumWriter<W> {
    pub(super) fn new(sink: W) -> Self {
        Self { sink, digests: Vec::new(), chunk: Vec::with_capacity(CHECKSUM_CHUNK_BYTES), held: None }
    }

    /// Keeps everything written from now on in memory: the footer, whose checksum is not known yet.
    pub(super) fn hold(&mut self) {
        self.held = Some(Vec::new());
    }

    /// Writes the footer with the checksum, and returns the file writer.
    ///
    /// # Errors
    /// [`WriteFault`] if the file cannot be written, or if the held bytes are not a footer.
    pub(super) fn finish(mut self) -> Result<W, WriteFault> {
        let footer = self.held.take().unwrap_or_default();
        let digits = checksum_place(&footer, &file_footer(&footer)?)?;
        let after = &footer[digits.end..];
        let written = self.write_all(&footer[..digits.start]).and_then(|()| {
            self.end_chunk()?;
            self.digests
                .extend(after.chunks(CHECKSUM_CHUNK_BYTES).flat_map(|chunk| xxh3_64(chunk).to_le_bytes()));
            self.sink.write_all(checksum_digits(&self.digests).as_bytes())?;
            self.sink.write_all(after)
        });
        written.map_err(WriteFault::Write)?;
        Ok(self.sink)
    }

    fn end_chunk(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        self.digests.extend(xxh3_64(&self.chunk).to_le_bytes());
        self.sink.write_all(&self.chunk)?;
        self.chunk.clear();
        Ok(())
    }
}

impl<W: Write> Write for ChecksumWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(held) = &mut self.held {
            held.extend_from_slice(bytes);
            return Ok(bytes.len());
        }
        let room = CHECKSUM_CHUNK_BYTES - self.chunk.len();
        let taken = &bytes[..room.min(bytes.len())];
        self.chunk.extend_from_slice(taken);
        if self.chunk.len() == CHECKSUM_CHUNK_BYTES {
            self.end_chunk()?;
        }
        Ok(taken.len())
    }

    /// Does nothing, because each digest covers a full chunk.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_in_pieces_has_the_checksum_that_is_read() {
        for bytes in [0, 1, CHECKSUM_CHUNK_BYTES - 1, CHECKSUM_CHUNK_BYTES, 2 * CHECKSUM_CHUNK_BYTES + 9] {
            let content: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
            let mut writer = ChecksumWriter::new(Vec::new());
            content.chunks(100_003).for_each(|piece| writer.write_all(piece).unwrap());
            writer.end_chunk().unwrap();
            let end = content.len()..content.len();
            assert_eq!(checksum_digits(&writer.digests), checksum(&content, &end), "{bytes} bytes");
            assert_eq!(writer.sink, content);
        }
    }
}
