//! Builds responses; all responses have the headers that isolate a page.

use std::convert::Infallible;

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

use super::request::Refusal;

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
}
