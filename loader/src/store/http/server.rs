//! Requests objects on an HTTP server by URL; the server receives each URL unchanged.
//!
//! Properties that a server does not report are unknown, which is no fault: the object length, the range
//! total, the last modification date. A server that ignores a range sends the whole object, and the range is
//! cut out of it. Addresses that start with `https` are never left for `http`.

use std::fmt;
use std::io::ErrorKind;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use http_body_util::BodyExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody, ReqwestConnector,
};
use object_store::{ClientOptions, HeaderMap, HeaderValue};
use url::Url;

use super::client::install_tls;
use crate::store::answer::{Answer, Found, Ranges, Refusal, Wanted};
use crate::store::redact::redact;
use crate::store::retry::{Fault, permanent_cause, replaced, short_reason, wait_asked_for};
use crate::store::url::StoreKind;
use crate::store::url_parts::percent_decoded;

/// Maximum number of error page bytes that a message quotes.
const QUOTED_BYTES: usize = 400;
/// Maximum time for reading the text of an error response.
const QUOTE_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of upload bytes per request timeout.
const UPLOAD_BYTES: u64 = 16 << 20;

/// Maximum size of a page in bytes.
const PAGE_BYTES_MAX: usize = 64 << 20;

/// Connections to a server, with the user named in its URLs.
pub(in crate::store) struct HttpServer {
    client: HttpClient,
    authorization: Option<HeaderValue>,
    /// Kind of store, which determines the advice where a request is rejected.
    kind: StoreKind,
    timeout: Duration,
}

impl fmt::Debug for HttpServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HttpServer").finish_non_exhaustive()
    }
}

impl HttpServer {
    /// Prepares requests to a URL's server; nothing is sent.
    ///
    /// - `timeout`: limit until the response headers arrive
    /// - `token`: bearer token, in place of the user in the URL
    ///
    /// # Errors
    /// The reason why no client can be created, or that the token cannot be sent.
    pub(in crate::store) fn new(
        url: &Url,
        kind: StoreKind,
        timeout: Duration,
        token: Option<&str>,
    ) -> Result<Self, String> {
        install_tls();
        // Bodies have separate limits, where they are read.
        let options = ClientOptions::new().with_allow_http(url.scheme() == "http").with_timeout_disabled();
        let client = ReqwestConnector::default().connect(&options).map_err(|error| short_reason(&error))?;
        let authorization = match token {
            Some(token) => Some(bearer(token)?),
            None => basic(url),
        };
        Ok(Self { client, authorization, kind, timeout })
    }

    /// Requests an object, a part of it, or only its headers.
    pub(in crate::store) async fn get(&self, url: &Url, wanted: &Wanted) -> Result<Answer, Refusal> {
        let method = if wanted.is_head { "HEAD" } else { "GET" };
        let mut request = self.request(method, url, HttpRequestBody::empty())?;
        let headers = request.headers_mut();
        if let Some(range) = &wanted.range {
            headers.insert("range", header(&format!("bytes={}-{}", range.start, range.end - 1))?);
        }
        if let Some(etag) = &wanted.if_match {
            headers.insert("if-match", header(etag)?);
        }
        let response = self.send(request, self.timeout).await?;
        match response.status().as_u16() {
            206 if wanted.range.is_some() => partial(response, wanted),
            200..300 => Ok(whole(response, wanted)),
            _ => Err(refused(response, self.kind).await),
        }
    }

    /// Requests a page, and returns the address of the next page on the same server (RFC 8288).
    pub(in crate::store) async fn get_page(&self, url: &Url) -> Result<(Bytes, Option<Url>), Refusal> {
        let request = self.request("GET", url, HttpRequestBody::empty())?;
        let response = self.send(request, self.timeout).await?;
        if !response.status().is_success() {
            return Err(refused(response, self.kind).await);
        }
        let next = text(response.headers(), "link").and_then(next_page).and_then(|next| url.join(next).ok());
        // The token belongs to this server.
        let next = next.filter(|next| next.origin() == url.origin());
        let page = http_body_util::Limited::new(response.into_body(), PAGE_BYTES_MAX).collect();
        match tokio::time::timeout(self.timeout, page).await {
            Ok(Ok(page)) => Ok((page.to_bytes(), next)),
            Ok(Err(error)) => Err(Fault::transient(error.to_string()).into()),
            Err(_) => Err(Fault::transient("the server did not answer in time").into()),
        }
    }

    /// Uploads an object, and creates the directories above it if the server requires them (RFC 4918).
    pub(in crate::store) async fn put(&self, url: &Url, file: &Bytes) -> Result<(), Fault> {
        match self.put_once(url, file).await {
            Err(Refusal { status: Some(404 | 409), .. }) => {
                self.make_directories(url).await;
                self.put_once(url, file).await.map_err(|refusal| refusal.fault)
            }
            sent => sent.map_err(|refusal| refusal.fault),
        }
    }

    async fn put_once(&self, url: &Url, file: &Bytes) -> Result<(), Refusal> {
        let request = self.request("PUT", url, file.clone().into())?;
        let parts = u32::try_from(file.len() as u64 / UPLOAD_BYTES).unwrap_or(u32::MAX).saturating_add(1);
        let response = self.send(request, self.timeout.saturating_mul(parts)).await?;
        if response.status().is_success() { Ok(()) } else { Err(refused(response, self.kind).await) }
    }

    async fn make_directories(&self, url: &Url) {
        let path = url.path().to_owned();
        for (slash, _) in path.match_indices('/').skip(1) {
            let mut directory = url.clone();
            directory.set_path(&path[..=slash]);
            if let Ok(request) = self.request("MKCOL", &directory, HttpRequestBody::empty()) {
                // An existing directory is rejected; if a directory cannot be created, the upload is rejected
                // again.
                let _ = self.send(request, self.timeout).await;
            }
        }
    }

    fn request(&self, method: &str, url: &Url, body: HttpRequestBody) -> Result<HttpRequest, Refusal> {
        let mut bare = url.clone();
        // A URL with a host allows all three changes.
        let _ = bare.set_username("").and_then(|()| bare.set_password(None));
        bare.set_fragment(None);
        let invalid = |error: &dyn std::error::Error| {
            Refusal::from(Fault::is_final(ErrorKind::InvalidInput, short_reason(error)))
        };
        let mut request = HttpRequest::new(body);
        *request.method_mut() = method.parse().expect("a method");
        *request.uri_mut() = bare.as_str().parse().map_err(|error| invalid(&error))?;
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert("authorization", authorization.clone());
        }
        Ok(request)
    }

    async fn send(&self, request: HttpRequest, timeout: Duration) -> Result<HttpResponse, Refusal> {
        match tokio::time::timeout(timeout, self.client.execute(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => {
                Err(permanent_cause(&error).unwrap_or_else(|| Fault::transient(short_reason(&error))).into())
            }
            Err(_) => Err(Fault::transient("the server did not answer in time").into()),
        }
    }
}

/// Returns the target of the link `next` in a header.
fn next_page(header: &str) -> Option<&str> {
    let link = header.split(',').find(|link| link.contains("rel=\"next\""))?;
    link.split_once('<')?.1.split_once('>').map(|(target, _)| target)
}

/// Returns the authorization header for the user in a URL (RFC 7617).
fn basic(url: &Url) -> Option<HeaderValue> {
    if url.username().is_empty() && url.password().is_none() {
        return None;
    }
    let mut pair = percent_decoded(url.username());
    pair.push(b':');
    pair.extend(percent_decoded(url.password().unwrap_or_default()));
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(pair))).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Returns the authorization header for a token (RFC 6750).
fn bearer(token: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::from_str(&format!("Bearer {token}"));
    let mut value = value.map_err(|_| "the token has a character that cannot be sent".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

fn header(value: &str) -> Result<HeaderValue, Refusal> {
    HeaderValue::from_str(value)
        .map_err(|error| Fault::is_final(ErrorKind::InvalidInput, short_reason(&error)).into())
}

/// Checks the response to a range request.
fn partial(response: HttpResponse, wanted: &Wanted) -> Result<Answer, Refusal> {
    let invalid = |reason: String| Err(Fault::is_final(ErrorKind::InvalidData, reason).into());
    let Some(range) = content_range(response.headers()) else {
        return invalid("the server sent a part of the object and did not tell which".to_owned());
    };
    let asked = wanted.range.clone().unwrap_or_default();
    let end = range.total.map_or(asked.end, |total| total.min(asked.end));
    // Without a total, the object may end inside the range.
    let is_asked_for = range.start == asked.start
        && (range.end == end || (range.total.is_none() && (asked.start + 1..end).contains(&range.end)));
    if !is_asked_for {
        let (from, to) = (range.start, range.end);
        return invalid(format!("bytes {} to {end} were requested, and {from} to {to} came", asked.start));
    }
    let found = found(response.headers(), range.total);
    let bytes = range.end - range.start;
    let ends = content_length(response.headers()).is_none();
    let part = BodyPart { skip: 0, take: Some(bytes), ends };
    Ok(Answer { found, ranges: Ranges::Served, chunks: part.of(response.into_body()) })
}

/// Converts a response with the whole object, and cuts out the requested range.
fn whole(response: HttpResponse, wanted: &Wanted) -> Answer {
    let found = found(response.headers(), content_length(response.headers()));
    let (ranges, mut part) = match &wanted.range {
        Some(range) => {
            let take = Some(range.end - range.start);
            let ends = wanted.is_to_end && found.bytes.is_none();
            (Ranges::Ignored, BodyPart { skip: range.start, take, ends })
        }
        None => (Ranges::Served, BodyPart { skip: 0, take: None, ends: false }),
    };
    if wanted.is_head {
        part = BodyPart { skip: 0, take: Some(0), ends: false };
    }
    Answer { found, ranges, chunks: part.of(response.into_body()) }
}

/// Part of a body.
struct BodyPart {
    skip: u64,
    take: Option<u64>,
    /// Whether the body ends with the part: nothing else shows that it has the right length.
    ends: bool,
}

impl BodyPart {
    /// Reads the part; the bytes after it are not read, unless there must be none.
    fn of(self, mut body: HttpResponseBody) -> BoxStream<'static, Result<Bytes, Fault>> {
        let Self { mut skip, take, ends } = self;
        let stream = async_stream::stream! {
            let mut rest = take.unwrap_or(u64::MAX);
            while rest > 0 || ends {
                let Some(frame) = body.frame().await else { return };
                // Trailers have no data.
                let data = match frame.map(|frame| frame.into_data().unwrap_or_default()) {
                    Ok(data) => data,
                    Err(error) => {
                        yield Err(Fault::transient(short_reason(&error)));
                        return;
                    }
                };
                let skipped = skip.min(data.len() as u64);
                skip -= skipped;
                let mut wanted = data.slice(skipped as usize..);
                if ends && wanted.len() as u64 > rest {
                    let reason = "the server sent more bytes than the object has";
                    yield Err(Fault::is_final(ErrorKind::InvalidData, reason));
                    return;
                }
                wanted.truncate(rest.min(wanted.len() as u64) as usize);
                rest -= wanted.len() as u64;
                // Also without bytes, so that a waiting caller sees that the server is alive.
                yield Ok(wanted);
            }
        };
        stream.boxed()
    }
}

/// Returns the fault for a failed response.
async fn refused(response: HttpResponse, kind: StoreKind) -> Refusal {
    let status = response.status();
    let retry_after = text(response.headers(), "retry-after").and_then(wait_asked_for);
    let total = total_without_range(response.headers());
    let quoted = tokio::time::timeout(QUOTE_TIMEOUT, quoted(response.into_body())).await.unwrap_or_default();
    let mut reason = format!("the server answered {status}");
    if !quoted.is_empty() {
        reason = format!("{reason}: {quoted}");
    }
    let fault = match status.as_u16() {
        412 => replaced(),
        // A server will not learn soon what it does not support.
        501 | 505 => Fault::is_final(ErrorKind::Unsupported, reason),
        408 | 425 | 429 | 500.. => Fault::Transient { reason, retry_after },
        404 | 410 => Fault::is_final(ErrorKind::NotFound, reason),
        401 | 403 => {
            let hint = kind.credentials_hint();
            Fault::is_final(ErrorKind::PermissionDenied, format!("{reason}; {hint}"))
        }
        416 => Fault::is_final(
            ErrorKind::UnexpectedEof,
            format!("{reason}; the object is shorter than expected"),
        ),
        _ => Fault::is_final(ErrorKind::Other, reason),
    };
    Refusal { fault, status: Some(status.as_u16()), total }
}

/// Returns the beginning of an error page, as a single line without credentials.
async fn quoted(mut body: HttpResponseBody) -> String {
    let mut page = Vec::new();
    while page.len() < QUOTED_BYTES
        && let Some(Ok(frame)) = body.frame().await
    {
        page.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
    }
    page.truncate(QUOTED_BYTES);
    let text = String::from_utf8_lossy(&page);
    redact(&text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Minimum age of a modification time: a younger time belongs to the response, not to the object.
const MODIFIED_AGE_MIN: Duration = Duration::from_secs(2);

/// Object part, as described by `Content-Range`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ContentRange {
    start: u64,
    end: u64,
    /// Object length in bytes; `None` if the server does not know it.
    total: Option<u64>,
}

/// Parses `bytes START-LAST/TOTAL`, where the total may be `*`.
fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
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
fn total_without_range(headers: &HeaderMap) -> Option<u64> {
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
