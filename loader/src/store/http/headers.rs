//! Reads response headers as far as possible: a missing or malformed header is unknown.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use object_store::HeaderMap;

use crate::store::answer::Found;

/// Minimum age of a modification time: a younger time belongs to the response, not to the object.
const MODIFIED_AGE_MIN: Duration = Duration::from_secs(2);

/// Object part, as described by `Content-Range`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ContentRange {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Object length in bytes; `None` if the server does not know it.
    pub(super) total: Option<u64>,
}

/// Parses `bytes START-LAST/TOTAL`, where the total may be `*`.
pub(super) fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    let value = text(headers, "content-range")?;
    let rest = value.strip_prefix("bytes")?.trim_start_matches([' ', '=']);
    let (range, total) = rest.split_once('/')?;
    let (start, last) = range.split_once('-')?;
    let total = match total.trim() {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    Some(ContentRange { start: start.trim().parse().ok()?, end: last.trim().parse::<u64>().ok()? + 1, total })
}

/// Returns the total in `bytes */TOTAL`, the response to a range that does not exist.
pub(super) fn total_without_range(headers: &HeaderMap) -> Option<u64> {
    text(headers, "content-range")?
        .strip_prefix("bytes")?
        .trim_start_matches([' ', '=', '*', '/'])
        .parse()
        .ok()
}

/// Returns the object properties in the headers; `bytes` is the length of the whole object.
pub(super) fn found(headers: &HeaderMap, bytes: Option<u64>) -> Found {
    let etag = headers.get("etag").and_then(|etag| std::str::from_utf8(etag.as_bytes()).ok());
    Found { bytes, modified_ns: modified_ns(headers).unwrap_or(0), etag: etag.map(str::to_owned) }
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    text(headers, "content-length")?.trim().parse().ok()
}

/// Returns the modification time in nanoseconds since 1970; `None` if it is as young as the response, which
/// reveals nothing about the object.
fn modified_ns(headers: &HeaderMap) -> Option<u64> {
    let time = |name: &str| httpdate::parse_http_date(text(headers, name)?.trim()).ok();
    let modified = time("last-modified")?;
    let now = time("date").unwrap_or_else(SystemTime::now);
    if now.duration_since(modified).is_ok_and(|age| age < MODIFIED_AGE_MIN) {
        return None;
    }
    u64::try_from(modified.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()
}

pub(super) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use object_store::HeaderValue;

    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let lines = lines.iter().map(|(name, value)| {
            (name.parse().expect("a name"), HeaderValue::from_str(value).expect("a value"))
        });
        lines.collect()
    }

    #[test]
    fn ranges_are_read_with_and_without_a_total() {
        let range = |value: &str| content_range(&headers(&[("content-range", value)]));
        assert_eq!(range("bytes 2-4/10"), Some(ContentRange { start: 2, end: 5, total: Some(10) }));
        assert_eq!(range("bytes 2-4/*"), Some(ContentRange { start: 2, end: 5, total: None }));
        for value in ["bytes */10", "bytes 2-4", "items 2-4/10", "bytes 2-x/10", "bytes 2-4/?"] {
            assert_eq!(range(value), None, "{value}");
        }
        assert_eq!(total_without_range(&headers(&[("content-range", "bytes */0")])), Some(0));
    }

    #[test]
    fn a_time_that_cannot_be_read_or_is_that_of_the_answer_is_unknown() {
        let modified = |modified: &str, date: &str| {
            found(&headers(&[("last-modified", modified), ("date", date)]), None).modified_ns
        };
        let date = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(modified(date, "Mon, 07 Nov 1994 08:49:37 GMT"), 784_111_777_000_000_000);
        for time in ["yesterday", "2026-01-01T00:00:00Z", date, "Sun, 06 Nov 1994 08:49:36 GMT", ""] {
            assert_eq!(modified(time, date), 0, "{time}");
        }
    }
}
