//! Wraps every HTTP request from stores with buckets: requests are observed, and responses are corrected.
//!
//! Removes names that the bucket client cannot hold from listings, because a single such name would end the
//! listing.
//!
//! The stores turn responses into errors that no longer contain the time to wait. An observed request carries
//! an [`Observed`], which records the status and `Retry-After`. A 200 response to a range request is the
//! whole object: the requested part is cut out, and the response becomes the 206 that it should have been.
//! Names that the store could not hold are removed from listings.
//!
//! A key may have empty components, as in `a//b.tar`, but a listed key may not. Common prefixes are not used
//! here. Both are cut out of the response text; every other name stays as it is.

use crate::store::retry::Observed;
use bytes::{Buf, Bytes};
use http_body_util::BodyExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, HeaderMap, HeaderValue};
use std::borrow::Cow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Maximum size of a listing page in bytes; stores send at most 1,000 or 5,000 names of 1 KiB.
const LISTING_BYTES_MAX: usize = 64 << 20;

/// Creates clients whose requests are observed; TLS is `rustls` over `ring`.
#[derive(Debug)]
pub(in crate::store) struct Connector;

/// Selects the TLS provider for all connections.
pub(super) fn install_tls() {
    // This fails if the program has already installed a different provider, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        install_tls();
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Watched(client)))
    }
}

#[derive(Debug)]
struct Watched(HttpClient);

#[async_trait::async_trait]
impl HttpService for Watched {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let observed = request.extensions().get::<Arc<Observed>>().cloned();
        let is_listing = request.method() == "GET" && is_listing(request.uri().query());
        let range = request.headers().get("range").and_then(|range| parse_range(range.to_str().ok()?));
        if let Some(observed) = &observed {
            observed.sent();
        }
        let response = self.0.execute(request).await?;
        if let Some(observed) = &observed {
            let retry_after = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
            observed.answered(response.status().as_u16(), retry_after);
        }
        match (range, response.status().as_u16()) {
            (Some((start, end)), 200) => {
                if let Some(observed) = &observed {
                    observed.range_was_ignored();
                }
                Ok(cut(response, start, end))
            }
            (None, 200) if is_listing => corrected(response).await,
            _ => Ok(response),
        }
    }
}

/// Reads a listing page and removes the names that would end it.
async fn corrected(response: HttpResponse) -> Result<HttpResponse, HttpError> {
    let (mut parts, body) = response.into_parts();
    let page = http_body_util::Limited::new(body, LISTING_BYTES_MAX).collect().await;
    let page = match page {
        Ok(page) => page.to_bytes(),
        Err(error) => return Err(HttpError::new_boxed(HttpErrorKind::Interrupted, error)),
    };
    let kept = match std::str::from_utf8(&page).map(without_unusable_names) {
        Ok(std::borrow::Cow::Owned(kept)) => Bytes::from(kept),
        _ => page,
    };
    if parts.headers.contains_key("content-length") {
        parts.headers.insert("content-length", HeaderValue::from(kept.len()));
    }
    Ok(HttpResponse::from_parts(parts, kept.into()))
}

/// Parses `bytes=START-END`, where the inclusive end may be missing.
fn parse_range(header: &str) -> Option<(u64, Option<u64>)> {
    let (start, end) = header.strip_prefix("bytes=")?.split_once('-')?;
    let end = if end.is_empty() { None } else { Some(end.parse::<u64>().ok()?.checked_add(1)?) };
    Some((start.parse().ok()?, end))
}

/// Cuts a range out of the whole object.
fn cut(response: HttpResponse, start: u64, end: Option<u64>) -> HttpResponse {
    let Some(total) = content_length(response.headers()) else { return response };
    let end = end.unwrap_or(total).min(total);
    if start >= end {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let header = |text: String| HeaderValue::try_from(text).expect("digits are a valid header");
    parts.status = 206.try_into().expect("a valid status");
    parts.headers.insert("content-range", header(format!("bytes {start}-{}/{total}", end - 1)));
    parts.headers.insert("content-length", header((end - start).to_string()));
    HttpResponse::from_parts(parts, HttpResponseBody::new(Cut { body, skip: start, take: end - start }))
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get("content-length")?.to_str().ok()?.parse().ok()
}

/// Part of a body; the bytes after the part are not read.
struct Cut {
    body: HttpResponseBody,
    skip: u64,
    take: u64,
}

impl http_body::Body for Cut {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, HttpError>>> {
        while self.take > 0 {
            let mut frame = std::pin::pin!(self.body.frame());
            let Some(frame) = ready!(frame.as_mut().poll(context)) else { return Poll::Ready(None) };
            let Ok(mut data) = frame?.into_data() else { continue };
            let skipped = self.skip.min(data.len() as u64);
            self.skip -= skipped;
            data.advance(skipped as usize);
            data.truncate(self.take.min(data.len() as u64) as usize);
            self.take -= data.len() as u64;
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(http_body::Frame::data(data))));
            }
        }
        Poll::Ready(None)
    }
}

/// Listing elements that are names: prefixes, and objects with a name element.
const PREFIXES: [&str; 2] = ["CommonPrefixes", "BlobPrefix"];
const OBJECTS: [(&str, &str); 2] = [("Contents", "Key"), ("Blob", "Name")];

/// Returns whether a request query asks for a listing.
pub(super) fn is_listing(query: Option<&str>) -> bool {
    let mut parameters = query.unwrap_or_default().split('&');
    parameters.any(|parameter| matches!(parameter, "list-type=2" | "comp=list"))
}

/// Removes names that the client cannot hold from a listing, and warns about removed objects.
pub(super) fn without_unusable_names(listing: &str) -> Cow<'_, str> {
    let mut kept = Cow::Borrowed(listing);
    for prefix in PREFIXES {
        kept = without_elements(kept, prefix, |_| true);
    }
    for (object, name) in OBJECTS {
        kept = without_elements(kept, object, |element| {
            let key = inside(element, name).map(unescaped).unwrap_or_default();
            let is_unusable = !is_usable(&key);
            if is_unusable {
                tracing::warn!(%key, "an object is left out of a listing: the client cannot name it");
            }
            is_unusable
        });
    }
    kept
}

/// Removes the `name` elements that `is_removed` selects.
fn without_elements<'a>(
    text: Cow<'a, str>,
    name: &str,
    mut is_removed: impl FnMut(&str) -> bool,
) -> Cow<'a, str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let (mut kept, mut from, mut at) = (String::new(), 0, 0);
    while let Some(start) = text[at..].find(&open).map(|start| at + start) {
        let Some(end) = text[start..].find(&close).map(|end| start + end + close.len()) else { break };
        if is_removed(&text[start..end]) {
            kept.push_str(&text[from..start]);
            from = end;
        }
        at = end;
    }
    if from == 0 {
        return text;
    }
    kept.push_str(&text[from..]);
    Cow::Owned(kept)
}

fn inside<'a>(element: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = element.split_once(&format!("<{name}>"))?;
    Some(rest.split_once(&format!("</{name}>"))?.0)
}

/// Returns whether a key is a valid object path: no component is empty, `.` or `..`, or has control
/// characters.
fn is_usable(key: &str) -> bool {
    let key = key.strip_suffix('/').unwrap_or(key);
    object_store::path::Path::parse(key).is_ok_and(|path| path.as_ref() == key)
}

/// Replaces XML entities by the corresponding characters.
fn unescaped(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('&') {
        plain.push_str(&rest[..start]);
        let entity = rest[start..].split_once(';');
        let character = entity.and_then(|(entity, behind)| Some((entity_character(&entity[1..])?, behind)));
        let (character, behind) = character.unwrap_or(('&', &rest[start + 1..]));
        plain.push(character);
        rest = behind;
    }
    plain.push_str(rest);
    plain
}

fn entity_character(entity: &str) -> Option<char> {
    match entity {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => {
            let number = entity.strip_prefix('#')?;
            let code = match number.strip_prefix('x') {
                Some(digits) => u32::from_str_radix(digits, 16).ok()?,
                None => number.parse().ok()?,
            };
            char::from_u32(code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(bytes: &'static [u8]) -> HttpResponse {
        let mut response = HttpResponse::new(Bytes::from_static(bytes).into());
        response.headers_mut().insert("content-length", HeaderValue::from(bytes.len()));
        response
    }

    #[tokio::test]
    async fn the_asked_for_part_is_cut_out_of_a_whole_body() {
        for (range, expected, header) in [
            ("bytes=2-4", &b"234"[..], "bytes 2-4/10"),
            ("bytes=7-99", b"789", "bytes 7-9/10"),
            ("bytes=0-0", b"0", "bytes 0-0/10"),
            ("bytes=5-", b"56789", "bytes 5-9/10"),
        ] {
            let (start, end) = parse_range(range).unwrap();
            let response = cut(whole(b"0123456789"), start, end);
            assert_eq!(response.status().as_u16(), 206);
            assert_eq!(response.headers()["content-range"], header);
            assert_eq!(response.headers()["content-length"], expected.len().to_string().as_str());
            assert_eq!(response.into_body().bytes().await.unwrap(), expected);
        }
    }

    #[test]
    fn names_that_the_client_cannot_hold_are_removed_and_others_stay() {
        let object = |key: &str| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
        let listing = |keys: &[&str]| {
            let objects: String = keys.iter().map(|key| object(key)).collect();
            format!("<ListBucketResult><Prefix>a/</Prefix>{objects}</ListBucketResult>")
        };
        let usable = ["a/b.tar", "a/b &amp; c.tar", "a/%2F?#.tar", "a/"];
        let all = [
            "a/b.tar",
            "a//b.tar",
            "a/b &amp; c.tar",
            "a/&#x2e;./b.tar",
            "/a.tar",
            "a/%2F?#.tar",
            "a/&#10;",
            "a/",
        ];
        assert_eq!(without_unusable_names(&listing(&all)), listing(&usable));
        assert!(matches!(without_unusable_names(&listing(&usable)), Cow::Borrowed(_)));
        let prefixes = "<L><CommonPrefixes><Prefix>a//</Prefix></CommonPrefixes><K>1</K></L>";
        assert_eq!(without_unusable_names(prefixes), "<L><K>1</K></L>");
        let blobs = "<Blobs><Blob><Name>a//b</Name></Blob><BlobPrefix><Name>a/</Name></BlobPrefix></Blobs>";
        assert_eq!(without_unusable_names(blobs), "<Blobs></Blobs>");
        assert_eq!(without_unusable_names("<Contents><Key>a"), "<Contents><Key>a");
    }

    #[test]
    fn only_listings_are_changed() {
        assert!(is_listing(Some("delimiter=%2F&list-type=2&prefix=a")));
        assert!(is_listing(Some("restype=container&comp=list")));
        assert!(!is_listing(Some("uploads")) && !is_listing(None));
    }
}
