//! Requests for objects and their answers: what is wanted of an object, and what a server tells of it.

use std::ops::Range;

use bytes::Bytes;
use futures::stream::BoxStream;

use super::retry::{Fault, other_version};

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
