//! Parses the byte range that a player requests.

use std::ops::Range;

/// Requested field part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum ByteRange {
    /// The whole field: there is no range, or the range is ignored.
    Whole,
    Part(Range<u64>),
    /// The range starts after the end.
    Outside,
}

/// Parses a header `Range`; several ranges and other units are ignored, as the standard allows.
///
/// - `bytes`: field length
///
/// # Source
/// RFC 9110, section 14.
pub(in super::super) fn byte_range(header: Option<&str>, bytes: u64) -> ByteRange {
    let Some(range) = header.and_then(|header| header.strip_prefix("bytes=")) else {
        return ByteRange::Whole;
    };
    let Some((first, last)) = range.split_once('-') else { return ByteRange::Whole };
    let part = match (number(first), number(last)) {
        (Some(first), Some(last)) if first > last => return ByteRange::Whole,
        (Some(first), Some(last)) => first..last.saturating_add(1).min(bytes),
        (Some(first), None) if last.is_empty() => first..bytes,
        (None, Some(suffix)) if first.is_empty() => bytes.saturating_sub(suffix)..bytes,
        _ => return ByteRange::Whole,
    };
    if part.start >= bytes { ByteRange::Outside } else { ByteRange::Part(part) }
}

fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_at_the_end() {
        let of = |header| byte_range(Some(header), 10);
        assert_eq!(of("bytes=0-"), ByteRange::Part(0..10));
        assert_eq!(of("bytes=2-3"), ByteRange::Part(2..4));
        assert_eq!(of("bytes=2-99"), ByteRange::Part(2..10));
        assert_eq!(of("bytes=-3"), ByteRange::Part(7..10));
        assert_eq!(of("bytes=-99"), ByteRange::Part(0..10));
        for outside in ["bytes=10-", "bytes=10-12", "bytes=-0"] {
            assert_eq!(of(outside), ByteRange::Outside, "{outside}");
        }
        for ignored in
            ["bytes=3-2", "bytes=", "bytes=-", "bytes=a-b", "bytes=0-1,3-4", "lines=0-1", "bytes=+1-2"]
        {
            assert_eq!(of(ignored), ByteRange::Whole, "{ignored}");
        }
        assert_eq!(byte_range(None, 10), ByteRange::Whole);
        assert_eq!(byte_range(Some("bytes=0-0"), 0), ByteRange::Outside);
    }
}
