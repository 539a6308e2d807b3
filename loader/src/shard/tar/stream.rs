//! Walks an archive that arrives as a byte stream: a pipe, a decompressor, a network body.

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::header::BLOCK_BYTES;
use super::headers::{Headers, Next};
use super::{Entry, padded};
use crate::error::{ArchiveFault, TarFault};

/// Bytes after the end marker that are searched for data that should not be there.
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

/// Reads the entries of an archive one after another.
#[derive(Debug)]
pub struct StreamEntries<R> {
    reader: R,
    offset: u64,
    headers: Headers,
    payload_bytes_max: u64,
    is_done: bool,
}

impl<R: AsyncRead + Unpin> StreamEntries<R> {
    /// Starts at the beginning of `reader`; payloads over `payload_bytes_max` are skipped.
    pub fn new(reader: R, payload_bytes_max: u64) -> Self {
        Self { reader, offset: 0, headers: Headers::default(), payload_bytes_max, is_done: false }
    }

    /// Reads the next entry and its payload, which is `None` if it exceeded the limit and was skipped.
    ///
    /// Returns `None` after the last entry. After an error there are no more entries.
    ///
    /// # Cancel safety
    /// Not cancel safe: a dropped future loses the bytes that it had read.
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
        loop {
            let offset = self.offset;
            let at = |fault: TarFault| fault.at(offset);
            let Some(block) = self.read_block().await? else { return Ok(None) };
            match self.headers.block(offset, &block).map_err(at)? {
                Next::Entry(entry) => {
                    let payload = self.read_payload(&entry, is_read(&entry)).await?;
                    return Ok(Some((entry, payload)));
                }
                Next::Extension { bytes } => {
                    let payload = self.read_exactly(offset, bytes).await?;
                    self.headers.extension(&payload).map_err(at)?;
                }
                Next::Skip { bytes } => self.pass_over(offset, bytes).await?,
                Next::End => return self.check_tail().await,
            }
        }
    }

    async fn read_block(&mut self) -> Result<Option<[u8; BLOCK_BYTES]>, StreamFault> {
        let mut block = [0u8; BLOCK_BYTES];
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            let read = self.reader.read(&mut block[filled..]).await;
            match read.map_err(|source| StreamFault::Read { offset: self.offset, source })? {
                0 if filled == 0 && self.offset > 0 => return Ok(None),
                0 if filled == 0 => return Err(TarFault::Empty.at(0).into()),
                0 => {
                    let missing = (BLOCK_BYTES - filled) as u64;
                    return Err(TarFault::Truncated { missing }.at(self.offset).into());
                }
                read => filled += read,
            }
        }
        self.offset += BLOCK_BYTES as u64;
        Ok(Some(block))
    }

    async fn read_payload(&mut self, entry: &Entry, is_read: bool) -> Result<Option<Bytes>, StreamFault> {
        let is_kept = is_read && entry.bytes <= self.payload_bytes_max;
        let payload = if is_kept {
            self.read_exactly(entry.header_offset, entry.bytes).await.map(Some)
        } else {
            self.pass_over(entry.header_offset, entry.bytes).await.map(|()| None)
        };
        payload.map_err(|fault| match fault {
            StreamFault::Archive(fault) => {
                StreamFault::Archive(fault.in_entry(&entry.name, entry.header_offset))
            }
            read @ StreamFault::Read { .. } => read,
        })
    }

    /// Grows its buffer as bytes arrive, so that a false length in a header cannot allocate more than was
    /// received.
    async fn read_exactly(&mut self, header: u64, bytes: u64) -> Result<Bytes, StreamFault> {
        let mut payload = Vec::with_capacity(bytes.min(1 << 20) as usize);
        let read = (&mut self.reader).take(bytes).read_to_end(&mut payload).await;
        self.advance(header, read.map(|read| read as u64), bytes)?;
        self.read_padding(bytes).await?;
        Ok(payload.into())
    }

    async fn pass_over(&mut self, header: u64, bytes: u64) -> Result<(), StreamFault> {
        let copied = tokio::io::copy(&mut (&mut self.reader).take(bytes), &mut tokio::io::sink()).await;
        self.advance(header, copied, bytes)?;
        self.read_padding(bytes).await
    }

    fn advance(&mut self, header: u64, read: std::io::Result<u64>, wanted: u64) -> Result<(), StreamFault> {
        let read = read.map_err(|source| StreamFault::Read { offset: self.offset, source })?;
        self.offset += read;
        match wanted - read {
            0 => Ok(()),
            missing => Err(TarFault::Truncated { missing }.at(header).into()),
        }
    }

    /// Reads padding; only padding may be missing at the end of an archive.
    async fn read_padding(&mut self, bytes: u64) -> Result<(), StreamFault> {
        let padding = padded(bytes).map_or(0, |whole| whole - bytes);
        let mut block = [0u8; BLOCK_BYTES];
        let mut left = padding as usize;
        while left > 0 {
            let read = self.reader.read(&mut block[..left]).await;
            match read.map_err(|source| StreamFault::Read { offset: self.offset, source })? {
                0 => break,
                read => left -= read,
            }
        }
        self.offset += padding - left as u64;
        Ok(())
    }

    async fn check_tail(&mut self) -> Result<Option<(Entry, Option<Bytes>)>, StreamFault> {
        let mut chunk = vec![0u8; 16 << 10];
        let mut tail = (&mut self.reader).take(TAIL_BYTES_MAX);
        loop {
            let read = tail.read(&mut chunk).await;
            let read =
                read.map_err(|error| TarFault::UnreadableTail { reason: error.to_string() }.at(self.offset))?;
            if read == 0 {
                return Ok(None);
            }
            if let Some(position) = chunk[..read].iter().position(|&byte| byte != 0) {
                let offset = self.offset + position as u64;
                return Err(TarFault::TrailingBytes.at(offset).into());
            }
            self.offset += read as u64;
        }
    }
}
