//! Wraps every HTTP request from stores with buckets: requests are observed, and responses are corrected.
//!
//! The stores turn responses into errors that no longer contain the time to wait. An observed request carries
//! an [`Observed`], which records the status and `Retry-After`. A 200 response to a range request is the
//! whole object: the requested part is cut out, and the response becomes the 206 that it should have been.
//! Names that the store could not hold are removed from listings.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http_body_util::BodyExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, HeaderMap, HeaderValue};

use super::listing::{is_listing, without_unusable_names};
use crate::store::observed::Observed;

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
}
