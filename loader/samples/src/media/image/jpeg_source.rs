//! Feeds a JPEG to the decoder and watches how the entropy-coded data end.
//!
//! The decoder fills missing data with zero bits and reports a complete image, so a truncated JPEG decodes
//! without an error. The reads reveal the truncation: a complete baseline scan is consumed within 8 bytes
//! from the end marker, because the decoder's bit buffer holds 64 bits. Instead of the end marker this source
//! therefore first serves 9 padding bytes. A decoder that reads beyond the padding has run out of data. A
//! decoder that looks for a marker gets the end marker immediately; if the decoder skipped more than a few
//! bytes to find the marker, the decoder may have lost the position in damaged data.

use std::cell::Cell;
use std::ops::Range;

use zune_core::bytestream::{ZByteIoError, ZByteReaderTrait, ZSeekFrom};

use crate::media::DecodeError;
use crate::media::shape::Strictness;

const PADDING_BYTES: u8 = 9;
const END_OF_IMAGE: u8 = 0xD9;
/// Maximum number of bytes that some writers insert between the scan and the end marker.
const SURPLUS_BYTES_MAX: usize = 4;

/// How the entropy-coded data end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanEnd {
    /// No end marker was read.
    Unseen,
    /// The decoder found the end marker when decoding was complete.
    Reached,
    /// The decoder read beyond the end marker.
    Overrun,
    /// The decoder finished long before the end marker: it lost the position, or a writer left extra bytes
    /// there.
    Surplus,
}

/// Observations made by a [`JpegSource`]; shared because the decoder owns the source.
pub(super) struct EndTrace {
    end: Cell<ScanEnd>,
    is_padded: Cell<bool>,
}

impl EndTrace {
    pub(super) fn new() -> Self {
        Self { end: Cell::new(ScanEnd::Unseen), is_padded: Cell::new(false) }
    }

    /// Starts to watch for overrun; must be called before the scans in a baseline JPEG are decoded.
    ///
    /// A progressive decoder must find the marker after each scan early, so progressive data are not padded
    /// and only a missing end marker is detected.
    pub(super) fn watch_overrun(&self) {
        self.is_padded.set(true);
    }

    /// Returns the damage found at the end of the data: `Ok` if the decoder found the end marker when it had
    /// all required data; exactly then, if any damage is an error.
    ///
    /// - `bytes`: file length in bytes
    pub(super) fn verdict(&self, bytes: usize, strictness: Strictness) -> Result<(), DecodeError> {
        match self.end.get() {
            ScanEnd::Reached => Ok(()),
            ScanEnd::Surplus if strictness != Strictness::Strict => Ok(()),
            ScanEnd::Unseen | ScanEnd::Overrun => Err(DecodeError::truncated("jpeg", bytes)),
            ScanEnd::Surplus => {
                Err(DecodeError::malformed("jpeg", bytes, "unused data before the end marker"))
            }
        }
    }

    fn record(&self, end: ScanEnd) {
        if self.end.get() == ScanEnd::Unseen {
            self.end.set(end);
        }
    }
}

/// Cursor over JPEG bytes.
pub(super) struct JpegSource<'a> {
    bytes: &'a [u8],
    position: usize,
    /// Padding bytes still to be served; `None` while no padding is served.
    padding_left: Option<u8>,
    /// Range of a byte-by-byte marker search: start, and next byte to read.
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

    /// Serves the end marker to a bit buffer read: a stuffed `FF`, then padding.
    #[cold]
    fn start_padding(&mut self) -> u8 {
        if self.trace.is_padded.get() && self.trace.end.get() == ScanEnd::Unseen {
            self.padding_left = Some(PADDING_BYTES);
            0x00
        } else {
            self.trace.record(ScanEnd::Reached);
            END_OF_IMAGE
        }
    }

    #[cold]
    fn next_padding(&mut self, left: u8) -> u8 {
        if left > 0 {
            self.padding_left = Some(left - 1);
            return 0x00;
        }
        self.trace.record(ScanEnd::Overrun);
        self.stop_padding();
        self.position += 1;
        0xFF
    }

    /// Ends the padding and moves back to the end marker.
    fn stop_padding(&mut self) {
        if self.padding_left.take().is_some() {
            self.position -= 2;
        }
    }

    /// Records a single-byte read, which the decoder uses when looking for the next marker.
    fn record_search(&mut self, byte: u8) {
        if self.search.end != self.position - 1 {
            self.search.start = self.position - 1;
        }
        self.search.end = self.position;
        if byte == END_OF_IMAGE && self.ends_at_marker() {
            let is_surplus = self.trace.is_padded.get() && self.search.len() > 2 + SURPLUS_BYTES_MAX;
            self.trace.record(if is_surplus { ScanEnd::Surplus } else { ScanEnd::Reached });
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
                // The bit buffer reads four bytes at a time; failing this read makes the decoder read single
                // bytes.
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
            self.record_search(byte);
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
        self.position = target.ok_or(ZByteIoError::SeekError("seek before the first byte"))?;
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
