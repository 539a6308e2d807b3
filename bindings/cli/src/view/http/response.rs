//! Decides which requests are answered, parses the requested content, and builds responses.
//!
//! All responses have the headers that isolate a page.
//!
//! Every request must name this machine in `Host`, so that a page on another site cannot reach the server
//! under a foreign name (DNS rebinding), and the random token in the path, so that other users on this
//! machine cannot read the dataset. Paths are compared with the known ones and never decoded or turned into a
//! file system path; samples and fields are named by numbers.

use crate::view::query::Query;
use bytes::Bytes;
use dflop_loader::error::BoxError;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{
    CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Response, StatusCode};
use serde::Serialize;
use std::convert::Infallible;
use std::ops::Range;

pub(in super::super) type Body = UnsyncBoxBody<Bytes, BoxError>;
pub(in super::super) type Reply = Response<Body>;

/// The page loads everything from this server, nothing from elsewhere, and is in no frame.
const POLICY: &str = "default-src 'none'; img-src 'self'; media-src 'self'; script-src 'self'; style-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// What is downloaded runs nothing, even if a browser shows it.
const POLICY_OF_DATA: &str = "default-src 'none'; frame-ancestors 'none'; sandbox";

/// Answers with bytes.
pub(in super::super) fn bytes(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Reply {
    let body =
        Full::new(body.into()).map_err(|never: Infallible| -> BoxError { match never {} }).boxed_unsync();
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    let is_document = content_type.starts_with("text/html");
    let headers = [
        (CONTENT_TYPE, content_type),
        (CONTENT_SECURITY_POLICY, if is_document { POLICY } else { POLICY_OF_DATA }),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in headers {
        reply.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    reply
}

/// Answers with a plain text, which ends with a line break.
pub(in super::super) fn text(status: StatusCode, message: &str) -> Reply {
    bytes(status, "text/plain; charset=utf-8", format!("{message}\n"))
}

/// Answers with a value as JSON.
pub(in super::super) fn json(value: &impl Serialize) -> Reply {
    match serde_json::to_vec(value) {
        Ok(body) => bytes(StatusCode::OK, "application/json", body),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// Lets a browser store a reply as a file with this name instead of showing it.
pub(in super::super) fn attachment(reply: &mut Reply, name: &str) {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let encode = |byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    let encoded = name.bytes().map(encode).collect::<Vec<_>>().concat();
    let value = HeaderValue::from_str(&format!("attachment; filename*=UTF-8''{encoded}"))
        .unwrap_or(HeaderValue::from_static("attachment"));
    reply.headers_mut().insert(CONTENT_DISPOSITION, value);
}

/// Answers a rejected request.
pub(in super::super) fn refusal(refusal: &Refusal) -> Reply {
    match refusal {
        Refusal::Host => text(
            StatusCode::FORBIDDEN,
            "expected the address that `dflop view` printed, with its port: 127.0.0.1 or localhost",
        ),
        Refusal::Method => {
            let mut reply = text(StatusCode::METHOD_NOT_ALLOWED, "expected GET or HEAD");
            reply.headers_mut().insert(hyper::header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            reply
        }
        Refusal::NotFound => text(StatusCode::NOT_FOUND, "there is nothing at this address"),
        Refusal::Query(message) => text(StatusCode::BAD_REQUEST, message),
    }
}

/// Requested content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::view) enum Route {
    Page,
    Style,
    Script,
    Icon,
    Summary,
    Samples(Query),
    Histogram(Query),
    /// A page of skipped samples; only the query's offset and limit apply.
    Skipped(Query),
    /// Sample row and content, by place.
    Sample(u32),
    /// Field bytes, by place and position.
    Field(u32, usize),
    /// An image in table row size.
    Thumbnail(u32, usize),
    /// An image as a JPEG, for formats that browsers do not show.
    Rendered(u32, usize),
}

/// Request that is not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::view) enum Refusal {
    /// `Host` is not this machine.
    Host,
    /// The method is neither `GET` nor `HEAD`.
    Method,
    /// The token is missing or wrong, or there is no such content.
    NotFound,
    /// The query is invalid.
    Query(String),
}

/// Server token and port.
#[derive(Debug, Clone)]
pub(super) struct Gate {
    pub(super) token: String,
    pub(super) port: u16,
}

impl Gate {
    /// Returns the request route.
    ///
    /// - `host`: the header `Host`, if there is exactly one; `authority`: from the request line, if any
    pub(super) fn route(
        &self,
        method: &str,
        path: &str,
        query: &str,
        host: Option<&str>,
        authority: Option<&str>,
    ) -> Result<Route, Refusal> {
        let is_own = |host: &str| {
            ["127.0.0.1", "localhost"]
                .iter()
                .any(|name| host.eq_ignore_ascii_case(&format!("{name}:{}", self.port)))
        };
        if !(host.is_some_and(is_own) && authority.is_none_or(is_own)) {
            return Err(Refusal::Host);
        }
        if !["GET", "HEAD"].contains(&method) {
            return Err(Refusal::Method);
        }
        let mut parts = path.strip_prefix('/').ok_or(Refusal::NotFound)?.split('/');
        if !is_equal(parts.next().unwrap_or_default(), &self.token) {
            return Err(Refusal::NotFound);
        }
        let parts: Vec<&str> = parts.collect();
        let query = || Query::parse(query).map_err(Refusal::Query);
        match *parts {
            [""] => Ok(Route::Page),
            ["view.css"] => Ok(Route::Style),
            ["view.js"] => Ok(Route::Script),
            ["icon.svg"] => Ok(Route::Icon),
            ["summary"] => Ok(Route::Summary),
            ["samples"] => query().map(Route::Samples),
            ["histogram"] => query().map(Route::Histogram),
            ["skipped"] => query().map(Route::Skipped),
            ["sample", place] => Ok(Route::Sample(number(place)?)),
            ["sample", place, kind, field] => {
                let (place, field) = (number(place)?, number(field)? as usize);
                match kind {
                    "field" => Ok(Route::Field(place, field)),
                    "thumbnail" => Ok(Route::Thumbnail(place, field)),
                    "rendered" => Ok(Route::Rendered(place, field)),
                    _ => Err(Refusal::NotFound),
                }
            }
            _ => Err(Refusal::NotFound),
        }
    }
}

/// Compares in a time that does not depend on where the texts differ.
fn is_equal(given: &str, token: &str) -> bool {
    let differing = given.bytes().zip(token.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    given.len() == token.len() && differing == 0
}

fn number(text: &str) -> Result<u32, Refusal> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_plain).ok_or(Refusal::NotFound)
}

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
    let part = match (position(first), position(last)) {
        (Some(first), Some(last)) if first > last => return ByteRange::Whole,
        (Some(first), Some(last)) => first..last.saturating_add(1).min(bytes),
        (Some(first), None) if last.is_empty() => first..bytes,
        (None, Some(suffix)) if first.is_empty() => bytes.saturating_sub(suffix)..bytes,
        _ => return ByteRange::Whole,
    };
    if part.start >= bytes { ByteRange::Outside } else { ByteRange::Part(part) }
}

fn position(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reply_keeps_to_itself() {
        for reply in [text(StatusCode::OK, "a"), json(&1), refusal(&Refusal::Host), refusal(&Refusal::Method)]
        {
            let header = |name: &str| reply.headers().get(name).and_then(|value| value.to_str().ok());
            assert_eq!(header("x-content-type-options"), Some("nosniff"));
            assert_eq!(header("cache-control"), Some("no-store"));
            assert_eq!(header("referrer-policy"), Some("no-referrer"));
            assert!(header("content-security-policy").is_some_and(|policy| policy.contains("sandbox")));
        }
        let page = bytes(StatusCode::OK, "text/html; charset=utf-8", "");
        let policy = page.headers()["content-security-policy"].to_str().unwrap();
        assert!(policy.contains("script-src 'self'") && !policy.contains("unsafe"));
    }

    #[test]
    fn names_of_files_are_escaped() {
        let mut reply = text(StatusCode::OK, "");
        attachment(&mut reply, "a\"; filename=x\r\nSet-Cookie: b/ä.jpg");
        let value = reply.headers()["content-disposition"].to_str().unwrap();
        let name = "a%22%3B%20filename%3Dx%0D%0ASet-Cookie%3A%20b%2F%C3%A4.jpg";
        assert_eq!(value, format!("attachment; filename*=UTF-8''{name}"));
    }

    const HOST: Option<&str> = Some("127.0.0.1:7000");

    fn gate() -> Gate {
        Gate { token: "secret".into(), port: 7000 }
    }

    fn get(path: &str) -> Result<Route, Refusal> {
        gate().route("GET", path, "", HOST, None)
    }

    #[test]
    fn known_paths_have_routes() {
        assert_eq!(get("/secret/"), Ok(Route::Page));
        assert_eq!(get("/secret/view.js"), Ok(Route::Script));
        assert_eq!(get("/secret/sample/12"), Ok(Route::Sample(12)));
        assert_eq!(get("/secret/sample/12/field/3"), Ok(Route::Field(12, 3)));
        let local = gate().route("HEAD", "/secret/summary", "", Some("LOCALHOST:7000"), None);
        assert_eq!(local, Ok(Route::Summary));
        assert!(matches!(
            gate().route("GET", "/secret/samples", "limit=3", HOST, HOST),
            Ok(Route::Samples(_))
        ));
    }

    #[test]
    fn a_wrong_token_finds_nothing() {
        for path in
            ["/", "", "//", "/secre/", "/secrets/", "/Secret/", "/summary", "/wrong/summary", "secret/"]
        {
            assert_eq!(get(path), Err(Refusal::NotFound), "{path}");
        }
    }

    #[test]
    fn another_host_is_refused_before_anything_else() {
        let none = [
            None,
            Some(""),
            Some("127.0.0.1"),
            Some("127.0.0.1:7001"),
            Some("attacker.example:7000"),
            Some("127.0.0.1:7000.attacker.example"),
            Some("localhost"),
        ];
        for host in none {
            assert_eq!(gate().route("POST", "/secret/", "", host, None), Err(Refusal::Host), "{host:?}");
        }
        let authority = Some("attacker.example:7000");
        assert_eq!(gate().route("GET", "/secret/", "", HOST, authority), Err(Refusal::Host));
    }

    #[test]
    fn nothing_is_written() {
        for method in ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "get"] {
            assert_eq!(gate().route(method, "/secret/", "", HOST, None), Err(Refusal::Method), "{method}");
        }
    }

    #[test]
    fn paths_of_the_file_system_are_unknown() {
        let paths = [
            "/secret/../../etc/passwd",
            "/secret/..%2f..%2fetc%2fpasswd",
            "/secret/sample/../summary",
            "/secret/sample/+1",
            "/secret/sample/-1",
            "/secret/sample/4294967296",
            "/secret/sample/1/field/a.jpg",
            "/secret/sample/1/field/",
            "/secret/sample/1/field/0/",
            "/secret/sample/1/other/0",
            "/secret/sample/",
            "/secret",
            "/secret//",
        ];
        for path in paths {
            assert_eq!(get(path), Err(Refusal::NotFound), "{path}");
        }
    }

    #[test]
    fn a_query_without_sense_has_a_message() {
        let refused = gate().route("GET", "/secret/samples", "sort=x", HOST, None);
        assert!(matches!(refused, Err(Refusal::Query(message)) if message.contains('x')));
    }

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
