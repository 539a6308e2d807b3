//! Checks whether a video file is as long as its container declares.
//!
//! A truncated file still plays up to the cut, where the demuxer ends normally. MP4 and MOV declare box
//! lengths, Matroska and WebM the segment length, AVI the RIFF chunk length. A live stream declares nothing,
//! and a fragmented MP4 that was cut between two fragments looks complete.

/// MP4 and MOV boxes that hold other boxes or frames; the walk stops at an unknown box.
const BOXES: [&[u8; 4]; 13] = [
    b"ftyp", b"moov", b"mdat", b"moof", b"free", b"skip", b"wide", b"mfra", b"sidx", b"styp", b"uuid",
    b"meta", b"udta",
];
const EBML_HEADER: u32 = 0x1A45_DFA3;
const SEGMENT: u32 = 0x1853_8067;

/// Returns whether the container declares more bytes than the file has.
pub(super) fn is_cut(file: &[u8]) -> bool {
    let end = match file.get(..4) {
        Some([0x1A, 0x45, 0xDF, 0xA3]) => segment_end(file),
        Some(b"RIFF") => riff_end(file),
        _ => box_end(file),
    };
    end.is_some_and(|end| end > file.len() as u64)
}

/// Returns the end of the first box that ends after the file, else the end of the last known box.
fn box_end(file: &[u8]) -> Option<u64> {
    let mut at = 0_usize;
    let mut known = None;
    while let Some(header) = file.get(at..at.checked_add(8)?) {
        if !BOXES.iter().any(|kind| kind[..] == header[4..]) {
            break;
        }
        let end = match number(&header[..4]) {
            0 => break,
            1 => (at as u64).checked_add(number(file.get(at + 8..at + 16)?))?,
            bytes => at as u64 + bytes,
        };
        if end < at as u64 + 8 {
            break;
        }
        known = Some(end);
        if end > file.len() as u64 {
            break;
        }
        at = end as usize;
    }
    known
}

/// Returns the segment end in a Matroska file; `None` if it is not declared.
fn segment_end(file: &[u8]) -> Option<u64> {
    let mut at = 0;
    loop {
        let id = number(file.get(at..at + 4)?) as u32;
        let (bytes, width) = vint(file.get(at + 4..)?)?;
        let content = at + 4 + width;
        let end = (content as u64).checked_add(bytes)?;
        match id {
            SEGMENT => return Some(end),
            EBML_HEADER => at = usize::try_from(end).ok()?,
            _ => return None,
        }
    }
}

/// Reads a variable-length number and returns it with its encoded length; `None` if the number means an
/// unknown length.
fn vint(bytes: &[u8]) -> Option<(u64, usize)> {
    let first = *bytes.first()?;
    let width = first.leading_zeros() as usize + 1;
    if width > 8 {
        return None;
    }
    let value = number(bytes.get(..width)?);
    let mask = (1_u64 << (7 * width)) - 1;
    (value & mask != mask).then_some((value & mask, width))
}

/// Returns the end of the last RIFF chunk; `None` if a length is missing.
fn riff_end(file: &[u8]) -> Option<u64> {
    let mut end = 0_u64;
    while let Some(header) = file.get(end as usize..end as usize + 8).filter(|header| &header[..4] == b"RIFF")
    {
        let bytes = u32::from_le_bytes(header[4..].try_into().ok()?);
        if bytes == 0 || bytes == u32::MAX {
            return None;
        }
        end += 8 + u64::from(bytes);
        if end >= file.len() as u64 {
            break;
        }
        // RIFF chunks start at even offsets.
        end += end % 2;
    }
    Some(end)
}

fn number(big_endian: &[u8]) -> u64 {
    big_endian.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn atom(kind: &[u8], payload: usize) -> Vec<u8> {
        let size = (8 + payload as u32).to_be_bytes();
        [&size[..], kind, &vec![7; payload]].concat()
    }

    fn matroska(payload: usize, size: &[u8]) -> Vec<u8> {
        let header = [&[0x1A, 0x45, 0xDF, 0xA3, 0x82][..], &[1, 2]].concat();
        [&header[..], &[0x18, 0x53, 0x80, 0x67], size, &vec![7; payload]].concat()
    }

    fn avi(chunks: &[usize]) -> Vec<u8> {
        let chunk = |payload: &usize| {
            let padding = vec![0; payload % 2];
            [b"RIFF", &(*payload as u32).to_le_bytes()[..], &vec![7; *payload], &padding].concat()
        };
        chunks.iter().flat_map(chunk).collect()
    }

    #[test]
    fn a_whole_file_misses_nothing_and_every_cut_is_seen() {
        let mp4 = [atom(b"ftyp", 8), atom(b"moov", 30), atom(b"mdat", 100)].concat();
        // Cuts start after the header of the last box, segment or chunk.
        for (file, first) in [(mp4, 62), (matroska(100, &[0xE4]), 12), (avi(&[60, 40]), 76)] {
            assert!(!is_cut(&file), "{file:?}");
            for cut in first..file.len() {
                assert!(is_cut(&file[..cut]), "{cut} of {file:?}");
            }
        }
    }

    #[test]
    fn what_a_container_does_not_say_is_not_missed() {
        assert!(!is_cut(&matroska(10, &[0x01, 255, 255, 255, 255, 255, 255, 255])));
        assert!(!is_cut(&matroska(10, &[0xFF])));
        let mut live = avi(&[20]);
        live[4..8].fill(0);
        assert!(!is_cut(&live));
        let mut to_the_end = [atom(b"ftyp", 8), atom(b"mdat", 100)].concat();
        to_the_end[16..20].fill(0);
        assert!(!is_cut(&to_the_end[..60]));
        let junk = [atom(b"ftyp", 8), atom(b"mdat", 9), vec![255; 30]].concat();
        assert!(!is_cut(&junk));
        assert!(!is_cut(b""));
    }

    #[test]
    fn large_boxes_have_long_sizes() {
        let long = |bytes: u64| [&[0, 0, 0, 1][..], b"mdat", &bytes.to_be_bytes(), &[7; 10]].concat();
        assert!(!is_cut(&long(26)));
        assert!(is_cut(&long(27)) && is_cut(&long(1 << 40)));
        assert!(!is_cut(&long(3)));
        let behind_all = [atom(b"ftyp", 8), long(u64::MAX)].concat();
        assert!(!is_cut(&behind_all));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            start in prop::sample::select(vec![&b"RIFF"[..], &[0x1A, 0x45, 0xDF, 0xA3], b"\0\0\0\x08ftyp", b""]),
        ) {
            let _ = is_cut(&[start, &bytes[..]].concat());
        }
    }
}
