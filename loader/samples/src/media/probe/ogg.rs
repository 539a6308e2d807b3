//! Finds the position of the last intact page in an Ogg stream that is truncated or damaged near the end.
//!
//! A page is 27 header bytes, a segment length table, and the segments. The granule position counts the
//! frames up to the page end; the checksum covers the whole page with the checksum field set to 0.
//!
//! Source: RFC 3533, section 6.

use symphonia::core::checksum::Crc32;
use symphonia::core::io::Monitor;

use super::field::u32_le;

const HEADER_BYTES: usize = 27;
const CHECKSUM_AT: usize = 22;
/// Granule position of a page without a packet end.
const NO_POSITION: u64 = u64::MAX;

/// Returns the granule position of the last intact page in the stream `serial`.
pub(super) fn last_position(bytes: &[u8], serial: u32) -> Option<u64> {
    let mut last = None;
    let mut start = 0;
    while start < bytes.len() {
        let rest = &bytes[start..];
        let Some(page) = intact_page(rest) else {
            // Resynchronize at the next capture pattern after damage.
            start += 1 + rest[1..].windows(4).position(|window| window == b"OggS").unwrap_or(rest.len());
            continue;
        };
        if u32_le(page, 14) == Some(serial) {
            let position = u64::from(u32_le(page, 6)?) | u64::from(u32_le(page, 10)?) << 32;
            // A page without a packet end has no position, so the previous position stays valid.
            last = Some(position).filter(|&position| position != NO_POSITION).or(last);
        }
        start += page.len();
    }
    last
}

/// Returns the page at the start of the bytes if the page is complete and the checksum matches.
fn intact_page(bytes: &[u8]) -> Option<&[u8]> {
    let header = bytes.get(..HEADER_BYTES).filter(|header| header.starts_with(b"OggS"))?;
    let segments = bytes.get(HEADER_BYTES..HEADER_BYTES + usize::from(header[HEADER_BYTES - 1]))?;
    let body_bytes: usize = segments.iter().map(|&length| usize::from(length)).sum();
    let page = bytes.get(..HEADER_BYTES + segments.len() + body_bytes)?;
    let mut checksum = Crc32::new(0);
    checksum.process_buf_bytes(&page[..CHECKSUM_AT]);
    checksum.process_buf_bytes(&[0; 4]);
    checksum.process_buf_bytes(&page[CHECKSUM_AT + 4..]);
    (u32_le(page, CHECKSUM_AT) == Some(checksum.crc())).then_some(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(serial: u32, position: u64, body: &[u8]) -> Vec<u8> {
        let mut page = b"OggS\0\0".to_vec();
        page.extend(position.to_le_bytes());
        page.extend(serial.to_le_bytes());
        page.extend([0; 8]);
        page.extend([1, body.len() as u8]);
        page.extend(body);
        let mut checksum = Crc32::new(0);
        checksum.process_buf_bytes(&page);
        page[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.crc().to_le_bytes());
        page
    }

    #[test]
    fn last_sound_page_of_the_stream_counts() {
        let mut damaged = page(7, 400, b"damaged");
        damaged[30] ^= 1;
        let file = [
            page(7, 100, b"first"),
            page(7, 200, b"second"),
            page(8, 900, b"another stream"),
            page(7, NO_POSITION, b"packet continues"),
            damaged,
            b"garbage".to_vec(),
        ]
        .concat();
        assert_eq!(last_position(&file, 7), Some(200));
        assert_eq!(last_position(&file, 9), None);
        let resumed = [file, page(7, 500, b"behind garbage")].concat();
        assert_eq!(last_position(&resumed, 7), Some(500));
    }
}
