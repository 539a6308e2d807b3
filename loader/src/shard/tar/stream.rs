//! Walks an archive that arrives as a byte stream: a pipe, a decompressor, a network body.

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::header::BLOCK_BYTES;
use super::headers::Next;
use super::{Entry, Walker, with_padding};
use crate::error::{ArchiveFault, TarFault};

/// Maximum number of bytes after the end marker that are searched for unexpected data.
pub(super) const TAIL_BYTES_MAX: u64 = 1 << 20;

/// Reason why a streamed archive cannot be read further.
#[derive(Debug, thiserror::Error)]
pub enum StreamFault {
    /// The archive is damaged at an offset.
    #[error(transparent)]
    Archive(#[from] ArchiveFault),
    /// The bytes ended or could not be decompressed, at an offset.
    #[error("read failed at offset {offset}")]
    Read {
        /// Offset in the archive, after decompression.
        offset: u64,
        /// Error of the reader.
        source: std::io::Error,
    },
}

/// Reads archive entries sequentially.
#[derive(Debug)]
pub struct StreamEntries<R> {
    reader: R,
    walker: Walker,
    payload_bytes_max: u64,
    is_done: bool,
}

impl<R: AsyncRead + Unpin> StreamEntries<R> {
    /// Starts at the beginning of `reader`; payloads over `payload_bytes_max` are skipped.
    pub fn new(reader: R, payload_bytes_max: u64) -> Self {
        Self { reader, walker: Walker::default(), payload_bytes_max, is_done: false }
    }

    /// Reads the next entry and payload, which is `None` if it exceeded the limit and was skipped.
    ///
    /// Returns `None` after the last entry. After an error there are no more entries.
    ///
    /// # Cancel safety
    /// Not cancel safe: a dropped future loses the bytes already read.
    pub async fn next(&mut self) -> Result<Option<(Entry, Option<Bytes>)>, StreamFault> {
        self.next_if(|_| true).await
    }

    /// Like [`next`](Self::next), but skips the payloads of entries for which `is_read` is false, without a
    /// buffer.
    ///
    /// # Cancel safety
    /// See [`next`](Self::next).
    pub async fn next_if(
        &mut self,
        is_read: impl Fn(&Entry) -> bool,
    ) -> Result<Option<(Entry, Option<Bytes>)>, StreamFault> {
        if self.is_done {
            return Ok(None);
        }
        let step = self.step(is_read).await;
        self.is_done = !matches!(step, Ok(Some(_)));
        step
    }

    async fn step(
        &mut self,
        is_read: impl Fn(&Entry) -> bool,
    ) -> Result<Option<(Entry, Option<Bytes>)>, StreamFault> {
        let mut announced = None;
        loop {
            let next = if let Some(next) = announced.take() {
                next
            } else {
                let mut block = [0u8; BLOCK_BYTES];
                let found = self.read_up_to(&mut block, self.walker.offset()).await?;
                let Some(next) = self.walker.header(&block[..found])? else { return Ok(None) };
                next
            };
            match next {
                Next::Entry(entry) => {
                    let is_kept = is_read(&entry) && entry.bytes <= self.payload_bytes_max;
                    let payload = self.pass_entry(&entry, is_kept).await?;
                    return Ok(Some((entry, payload)));
                }
                Next::Extension { bytes } => {
                    let (payload, found) = self.read_payload(bytes).await?;
                    self.walker.pass(bytes, found)?;
                    announced = self.walker.extension(&payload)?;
                }
                Next::Skip { bytes } => {
                    let found = self.skip_payload(bytes).await?;
                    self.walker.pass(bytes, found)?;
                }
                Next::End => return self.check_tail().await.map(|()| None),
            }
        }
    }

    /// Moves past an entry; returns the payload if it is kept.
    async fn pass_entry(&mut self, entry: &Entry, is_kept: bool) -> Result<Option<Bytes>, StreamFault> {
        let stored_bytes = entry.stored_bytes();
        if !is_kept || entry.sparse.as_ref().is_some_and(|map| map.fault().is_some()) {
            let found = self.skip_payload(stored_bytes).await?;
            self.walker.pass_entry(entry, found)?;
            return Ok(None);
        }
        let (stored, found) = self.read_payload(stored_bytes).await?;
        self.walker.pass_entry(entry, found)?;
        Ok(Some(match &entry.sparse {
            None => stored,
            Some(map) => map.expand(&stored, entry.bytes),
        }))
    }

    /// Reads the next payload; returns the available bytes, and the length with padding.
    ///
    /// Grows the buffer as bytes arrive, so that a false length in a header cannot allocate more than was
    /// received.
    async fn read_payload(&mut self, bytes: u64) -> Result<(Bytes, u64), StreamFault> {
        let mut payload = Vec::with_capacity(bytes.min(1 << 20) as usize);
        let read = (&mut self.reader).take(bytes).read_to_end(&mut payload).await;
        let found = read.map_err(|source| StreamFault::Read { offset: self.walker.offset(), source })?;
        let found = self.skip_padding(bytes, found as u64).await?;
        Ok((payload.into(), found))
    }

    /// Skips the next payload; returns the available length, with padding.
    async fn skip_payload(&mut self, bytes: u64) -> Result<u64, StreamFault> {
        let copied = tokio::io::copy(&mut (&mut self.reader).take(bytes), &mut tokio::io::sink()).await;
        let found = copied.map_err(|source| StreamFault::Read { offset: self.walker.offset(), source })?;
        self.skip_padding(bytes, found).await
    }

    /// Skips the padding after a payload, unless the archive ends before; returns the total length.
    async fn skip_padding(&mut self, bytes: u64, found: u64) -> Result<u64, StreamFault> {
        let mut block = [0u8; BLOCK_BYTES];
        let padding = if found < bytes { 0 } else { with_padding(bytes) - bytes };
        let offset = self.walker.offset() + found;
        Ok(found + self.read_up_to(&mut block[..padding as usize], offset).await? as u64)
    }

    /// Fills a buffer, except at the stream end; returns the number of bytes read.
    async fn read_up_to(&mut self, buffer: &mut [u8], offset: u64) -> Result<usize, StreamFault> {
        let mut filled = 0;
        while filled < buffer.len() {
            let read = self.reader.read(&mut buffer[filled..]).await;
            match read.map_err(|source| StreamFault::Read { offset, source })? {
                0 => break,
                read => filled += read,
            }
        }
        Ok(filled)
    }

    async fn check_tail(&mut self) -> Result<(), StreamFault> {
        let mut chunk = vec![0u8; 16 << 10];
        let mut tail = (&mut self.reader).take(TAIL_BYTES_MAX);
        loop {
            let read = tail.read(&mut chunk).await.map_err(|error| {
                TarFault::UnreadableTail { reason: error.to_string() }.at(self.walker.offset())
            })?;
            if read == 0 {
                return Ok(());
            }
            self.walker.tail(&chunk[..read])?;
        }
    }
}
