//! Feeds a JPEG to the decoder and watches how its entropy-coded data end.
//!
//! The decoder fills missing data with zero bits and calls the image complete, so a JPEG that was cut
//! decodes without an error. What it reads tells the truth: a complete baseline scan is used up within 8
//! bytes of its end marker, because the decoder's bit buffer holds 64 bits. In place of the end marker this
//! source therefore first serves 9 bytes of padding. A decoder that wants more than the padding has run out
//! of data; one that looks for a marker instead gets the end marker at once, and if it skipped more than a few
//! bytes to find it, it lost its place in damaged data.

use std::cell::Cell;
use std::ops::Range;

use zune_core::bytestream::{ZByteIoError, ZByteReaderTrait, ZSeekFrom};

use crate::media::error::DecodeError;

const PADDING_BYTES: u8 = 9;
const END_OF_IMAGE: u8 = 0xD9;
/// Bytes between the scan and the end marker that some writers leave there.
const SURPLUS_BYTES_MAX: usize = 4;

/// How the entropy-coded data ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// No end marker was read.
    Unseen,
    /// The decoder found the end marker when it was done.
    Reached,
    /// The decoder wanted data beyond the end marker.
    Overrun,
    /// The decoder was done long before the end marker: it lost its place.
    Surplus,
}

/// What a [`JpegSource`] saw; shared with it because the decoder owns the source.
pub(super) struct EndTrace {
    end: Cell<End>,
    is_padded: Cell<bool>,
}

impl EndTrace {
    pub(super) fn new() -> Self {
        Self { end: Cell::new(End::Unseen), is_padded: Cell::new(false) }
    }

    /// Watches for overrun from now on: to be called before the scans of a baseline JPEG are decoded.
    ///
    /// A progressive decoder insists on meeting the marker behind each scan early, so it is not padded; only
    /// a missing end marker is seen.
    pub(super) fn watch_overrun(&self) {
        self.is_padded.set(true);
    }

    /// Returns the damage that the end of the data reveals: `Ok` if the decoder found the end marker just when it
    /// had all the data it wanted.
    ///
    /// - `bytes`: length of the file
    pub(super) fn verdict(&self, bytes: usize) -> Result<(), DecodeError> {
        match self.end.get() {
            End::Reached => Ok(()),
            End::Unseen | End::Overrun => Err(DecodeError::truncated("jpeg", bytes)),
            End::Surplus => Err(DecodeError::malformed("jpeg", bytes, "unused data before the end marker")),
        }
    }

    fn record(&self, end: End) {
        if self.end.get() == End::Unseen {
            self.end.set(end);
        }
    }
}

/// A cursor over the bytes of one JPEG.
pub(super) struct JpegSource<'a> {
    bytes: &'a [u8],
    position: usize,
    /// Bytes of padding still to be served, while it is being served.
    padding_left: Option<u8>,
    /// Where the decoder began to look for a marker byte by byte, and where it will go on.
    search: Range<usize>,
    trace: &'a EndTrace,
}

impl<'a> JpegSource<'a> {
    pub(super) fn new(bytes: &'a [u8], trace: &'a EndTrace) -> Self {
        Self { bytes, position: 0, padding_left: None, search: 0..0, trace }
    }

    fn ends_at_marker(&self) -> bool {
        let start = self.position.wrapping_sub(2);
        self.bytes.get(start..self.position) == Some(&[0xFF, END_OF_IMAGE])
    }

    /// Answers a read of the decoder's bit buffer that met the end marker: a stuffed `FF`, then padding.
    #[cold]
    fn start_padding(&mut self) -> u8 {
        if self.trace.is_padded.get() && self.trace.end.get() == End::Unseen {
            self.padding_left = Some(PADDING_BYTES);
            0x00
        } else {
            self.trace.record(End::Reached);
            END_OF_IMAGE
        }
    }

    #[cold]
    fn next_padding(&mut self, left: u8) -> u8 {
        if left > 0 {
            self.padding_left = Some(left - 1);
            return 0x00;
        }
        self.trace.record(End::Overrun);
        self.stop_padding();
        self.position += 1;
        0xFF
    }

    /// Ends the padding and steps back to the end marker.
    fn stop_padding(&mut self) {
        if self.padding_left.take().is_some() {
            self.position -= 2;
        }
    }

    /// Notes a byte that was read on its own, as the decoder does when it looks for the next marker.
    fn searched(&mut self, byte: u8) {
        if self.search.end != self.position - 1 {
            self.search.start = self.position - 1;
        }
        self.search.end = self.position;
        if byte == END_OF_IMAGE && self.ends_at_marker() {
            let is_surplus = self.trace.is_padded.get() && self.search.len() > 2 + SURPLUS_BYTES_MAX;
            self.trace.record(if is_surplus { End::Surplus } else { End::Reached });
        }
    }

    fn remaining(&self) -> &'a [u8] {
        self.bytes.get(self.position..).unwrap_or_default()
    }
}

impl ZByteReaderTrait for JpegSource<'_> {
    #[inline]
    fn read_byte_no_error(&mut self) -> u8 {
        if let Some(left) = self.padding_left {
            return self.next_padding(left);
        }
        let byte = self.bytes.get(self.position).copied().unwrap_or(0);
        self.position += 1;
        if byte == END_OF_IMAGE && self.ends_at_marker() { self.start_padding() } else { byte }
    }

    #[inline]
    fn read_exact_bytes(&mut self, buf: &mut [u8]) -> Result<(), ZByteIoError> {
        if self.padding_left.is_some() {
            if buf.len() > 1 {
                // The bit buffer's read of four bytes at once: make it read them one by one.
                return Err(ZByteIoError::NotEnoughBytes(0, buf.len()));
            }
            self.stop_padding();
        }
        let Some(bytes) = self.remaining().get(..buf.len()) else {
            return Err(ZByteIoError::NotEnoughBytes(0, buf.len()));
        };
        buf.copy_from_slice(bytes);
        self.position += buf.len();
        if let [byte] = *buf {
            self.searched(byte);
        }
        Ok(())
    }

    fn read_bytes(&mut self, buf: &mut [u8]) -> Result<usize, ZByteIoError> {
        let read = self.peek_bytes(buf)?;
        self.position += read;
        Ok(read)
    }

    fn peek_bytes(&mut self, buf: &mut [u8]) -> Result<usize, ZByteIoError> {
        let read = buf.len().min(self.remaining().len());
        buf[..read].copy_from_slice(&self.remaining()[..read]);
        Ok(read)
    }

    fn peek_exact_bytes(&mut self, buf: &mut [u8]) -> Result<(), ZByteIoError> {
        match self.peek_bytes(buf)? {
            read if read == buf.len() => Ok(()),
            read => Err(ZByteIoError::NotEnoughBytes(read, buf.len())),
        }
    }

    fn z_seek(&mut self, from: ZSeekFrom) -> Result<u64, ZByteIoError> {
        let target = match from {
            ZSeekFrom::Start(offset) => usize::try_from(offset).ok(),
            ZSeekFrom::End(offset) => self.bytes.len().checked_add_signed(offset as isize),
            ZSeekFrom::Current(offset) => self.position.checked_add_signed(offset as isize),
        };
        self.position = target.ok_or(ZByteIoError::SeekError("seek to before the first byte"))?;
        Ok(self.position as u64)
    }

    #[inline]
    fn is_eof(&mut self) -> Result<bool, ZByteIoError> {
        Ok(self.position >= self.bytes.len() && self.padding_left.is_none())
    }

    fn z_position(&mut self) -> Result<u64, ZByteIoError> {
        Ok(self.position as u64)
    }

    fn read_remaining(&mut self, sink: &mut Vec<u8>) -> Result<usize, ZByteIoError> {
        sink.extend_from_slice(self.remaining());
        let read = self.remaining().len();
        self.position += read;
        Ok(read)
    }
}
