//! Requests for objects and their answers: what is wanted of an object, in few requests, and what a server
//! answers.
//!
//! Nearby ranges in an object are combined into one request.

use super::retry::{Fault, other_version};
use bytes::Bytes;
use futures::stream::BoxStream;
use std::ops::Range;

/// Version of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Length.
    pub(crate) bytes: u64,
    /// Time of the last change, in nanoseconds since 1970; 0 if unknown.
    pub(crate) modified_ns: u64,
    /// Entity tag, as written by the server.
    pub(crate) etag: Option<String>,
}

impl Identity {
    /// Returns the tag for `If-Match`, which weak tags never match.
    pub(super) fn strong_etag(&self) -> Option<String> {
        self.etag.clone().filter(|etag| !etag.starts_with("W/"))
    }
}

/// What an answer tells of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// Length; `None` if the server does not tell it.
    pub(super) bytes: Option<u64>,
    /// Time of the last change, in nanoseconds since 1970; 0 if unknown.
    pub(super) modified_ns: u64,
    /// Entity tag, as written by the server.
    pub(super) etag: Option<String>,
}

impl Found {
    pub(super) fn from_meta(meta: &object_store::ObjectMeta) -> Self {
        let modified = meta.last_modified.timestamp_nanos_opt().and_then(|ns| u64::try_from(ns).ok());
        Self { bytes: Some(meta.size), modified_ns: modified.unwrap_or(0), etag: meta.e_tag.clone() }
    }

    pub(super) fn with_length(self, bytes: u64) -> Identity {
        Identity { bytes, modified_ns: self.modified_ns, etag: self.etag }
    }
}

/// What is requested of an object.
#[derive(Debug, Clone, Default)]
pub(super) struct Wanted {
    /// Whether only the headers are.
    pub(super) is_head: bool,
    pub(super) range: Option<Range<u64>>,
    /// Whether the range ends where the object is known to end.
    #[cfg_attr(not(feature = "remote"), expect(dead_code, reason = "only HTTP servers are asked for less"))]
    pub(super) is_to_end: bool,
    /// Entity tag that the object must have.
    pub(super) if_match: Option<String>,
}

/// Successful answer to a request.
pub(super) struct Answer {
    pub(super) found: Found,
    pub(super) ranges: Ranges,
    pub(super) chunks: BoxStream<'static, Result<Bytes, Fault>>,
}

/// Request without success.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) fault: Fault,
    /// Status of the answer, if one came.
    pub(super) status: Option<u16>,
    /// Length of the object, where a range outside of it was requested.
    pub(super) total: Option<u64>,
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self { fault, status: None, total: None }
    }
}

/// Response of a server to requests for ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ranges {
    /// The requested range.
    Served,
    /// The whole object, so that many ranges cost many times the object.
    Ignored,
}

/// Rejects bytes of another version of the object. What a server does not tell, or tells only once, is not
/// compared.
pub(super) fn check_version(expected: &Identity, found: &Found) -> Result<(), Fault> {
    if let (Some(expected), Some(found)) = (&expected.etag, &found.etag)
        && comparable_tag(expected) != comparable_tag(found)
    {
        return Err(other_version(&format!("its entity tag was {expected} and is {found}")));
    }
    if let Some(bytes) = found.bytes.filter(|&bytes| bytes != expected.bytes) {
        return Err(other_version(&format!("it had {} bytes and has {bytes}", expected.bytes)));
    }
    let is_dated = expected.modified_ns.min(found.modified_ns) != 0;
    if expected.etag.is_none() && is_dated && expected.modified_ns != found.modified_ns {
        return Err(other_version(
            "its date of the last change is another, and the server sends no entity tag",
        ));
    }
    Ok(())
}

/// Returns an entity tag for the weak comparison (RFC 9110, section 8.8.3.2).
pub(crate) fn comparable_tag(etag: &str) -> &str {
    etag.strip_prefix("W/").unwrap_or(etag)
}

/// Limits for combined requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CoalesceLimits {
    /// Maximum number of unwanted bytes that are read to save a request.
    pub(crate) gap_bytes_max: u64,
    /// Maximum size of a combined request in bytes; a single longer range is still one request.
    pub(crate) request_bytes_max: u64,
}

/// Request with the wanted ranges inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// Range to read.
    pub(crate) range: Range<u64>,
    /// Indices into the list of wanted ranges.
    pub(crate) wanted: Vec<usize>,
}

/// Combines wanted ranges in an object into few requests, in offset order. Empty ranges need no request.
pub(crate) fn coalesce(wanted: &[Range<u64>], limits: CoalesceLimits) -> Vec<Request> {
    let mut order: Vec<usize> = (0..wanted.len()).filter(|&at| !wanted[at].is_empty()).collect();
    order.sort_by_key(|&at| (wanted[at].start, wanted[at].end));
    let mut requests: Vec<Request> = Vec::new();
    for at in order {
        let next = &wanted[at];
        if let Some(last) = requests.last_mut() {
            let end = last.range.end.max(next.end);
            let is_near = next.start <= last.range.end.saturating_add(limits.gap_bytes_max);
            let is_inside = next.end <= last.range.end;
            if is_inside || (is_near && end - last.range.start <= limits.request_bytes_max) {
                last.range.end = end;
                last.wanted.push(at);
                continue;
            }
        }
        requests.push(Request { range: next.clone(), wanted: vec![at] });
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: CoalesceLimits = CoalesceLimits { gap_bytes_max: 10, request_bytes_max: 100 };

    #[test]
    fn near_ranges_share_a_request_and_far_ones_do_not() {
        let requests = coalesce(&[50..60, 0..20, 30..45, 200..210, 7..7], LIMITS);
        let expected =
            [Request { range: 0..60, wanted: vec![1, 2, 0] }, Request { range: 200..210, wanted: vec![3] }];
        assert_eq!(requests, expected);
    }

    #[test]
    fn a_request_is_bounded_unless_one_range_is_longer() {
        let requests = coalesce(&[0..60, 60..120, 120..400, 130..140], LIMITS);
        let ranges: Vec<_> = requests.iter().map(|request| request.range.clone()).collect();
        assert_eq!(ranges, [0..60, 60..120, 120..400]);
        assert_eq!(requests[2].wanted, [2, 3]);
    }

    proptest::proptest! {
        #[test]
        fn every_wanted_range_is_in_one_request_and_gaps_are_small(
            wanted in proptest::collection::vec((0u64..2_000, 0u64..150), 0..40)
        ) {
            let wanted: Vec<Range<u64>> = wanted.into_iter().map(|(start, bytes)| start..start + bytes).collect();
            let requests = coalesce(&wanted, LIMITS);
            let mut seen = vec![0; wanted.len()];
            for request in &requests {
                let longest = request.wanted.iter().map(|&at| wanted[at].end - wanted[at].start).max().unwrap();
                let bytes = request.range.end - request.range.start;
                proptest::prop_assert!(bytes <= LIMITS.request_bytes_max || bytes == longest);
                let mut covered = request.range.start;
                for &at in &request.wanted {
                    seen[at] += 1;
                    proptest::prop_assert!(request.range.start <= wanted[at].start);
                    proptest::prop_assert!(wanted[at].end <= request.range.end);
                    proptest::prop_assert!(wanted[at].start <= covered + LIMITS.gap_bytes_max);
                    covered = covered.max(wanted[at].end);
                }
                proptest::prop_assert_eq!(covered, request.range.end);
            }
            for (at, range) in wanted.iter().enumerate() {
                proptest::prop_assert_eq!(seen[at], usize::from(!range.is_empty()));
            }
        }
    }
}
