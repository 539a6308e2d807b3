//! Reads ranges of a remote object, with retries and a check of its version.

use std::fmt;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::{GetOptions, GetRange, GetResult, ObjectStore};

use super::coalesce::CoalesceLimits;
use super::fault::{fault_of, hinted};
use super::observed::Observed;
use super::redact::{redact, redact_name};
use super::retry::{Attempts, Fault};
use super::stores::Stores;
use super::url::RemoteUrl;

/// Memory reserved for a body before its first byte arrives.
const BODY_RESERVED_BYTES: usize = 16 << 20;

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
    fn new(meta: &object_store::ObjectMeta) -> Self {
        let modified = meta.last_modified.timestamp_nanos_opt().and_then(|ns| u64::try_from(ns).ok());
        Self { bytes: meta.size, modified_ns: modified.unwrap_or(0), etag: meta.e_tag.clone() }
    }

    /// Returns the tag for `If-Match`, which weak tags never match.
    fn strong_etag(&self) -> Option<String> {
        self.etag.clone().filter(|etag| !etag.starts_with("W/"))
    }
}

/// Shard in a remote store. Nothing is requested until it is read.
#[derive(Clone)]
pub struct RemoteObject {
    stores: Stores,
    /// With credentials.
    url: Arc<str>,
    parsed: RemoteUrl,
    store: Arc<dyn ObjectStore>,
    /// Number of retried requests.
    retries: Arc<AtomicU64>,
}

impl fmt::Debug for RemoteObject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RemoteObject").field("url", &redact_name(&self.url)).finish_non_exhaustive()
    }
}

impl PartialEq for RemoteObject {
    /// Returns whether both have the same name.
    fn eq(&self, other: &Self) -> bool {
        self.url == other.url
    }
}

impl Eq for RemoteObject {}

/// Response of a server to requests for ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ranges {
    /// The requested range.
    Served,
    /// The whole object, so that many ranges cost many times the object.
    Ignored,
}

impl RemoteObject {
    pub(super) fn new(stores: Stores, url: Arc<str>, parsed: RemoteUrl, store: Arc<dyn ObjectStore>) -> Self {
        Self { stores, url, parsed, store, retries: Arc::default() }
    }

    /// Returns the same object with this counter of retries: each loader counts its own, even on a shared
    /// handle.
    pub(crate) fn counted_by(self, retries: Arc<AtomicU64>) -> Self {
        Self { retries, ..self }
    }

    /// Returns the stores through which it is read.
    #[must_use]
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Returns whether its name is that of a directory.
    pub(crate) fn is_directory(&self) -> bool {
        self.parsed.is_directory
    }

    pub(crate) fn url(&self) -> &Arc<str> {
        &self.url
    }

    pub(crate) fn coalesce_limits(&self) -> CoalesceLimits {
        self.stores.shared.settings.coalesce
    }

    pub(super) fn parsed(&self) -> &RemoteUrl {
        &self.parsed
    }

    pub(super) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// Requests length and version.
    ///
    /// # Errors
    /// The error of the store after all attempts, with advice.
    pub(crate) async fn identity(&self) -> io::Result<Identity> {
        let mut attempts = self.attempts(0);
        loop {
            let options = GetOptions { head: true, ..GetOptions::default() };
            let permit = self.permit().await;
            let fault = match self.request(options).await {
                Ok((result, _)) => return Ok(Identity::new(&result.meta)),
                // Some servers, and URLs signed for one method, only support `GET`.
                Err((_, Some(403 | 405 | 501))) if self.is_http() => {
                    let range = Some(GetRange::Bounded(0..1));
                    match self.request(GetOptions { range, ..GetOptions::default() }).await {
                        Ok((result, _)) => return Ok(Identity::new(&result.meta)),
                        Err((fault, _)) => fault,
                    }
                }
                Err((fault, _)) => fault,
            };
            drop(permit);
            self.pause(&mut attempts, fault, 0).await?;
        }
    }

    fn is_http(&self) -> bool {
        self.parsed.kind == super::url::StoreKind::Http
    }

    /// Reads a range of the version given by `identity`.
    ///
    /// After a failed request the received bytes are kept and the rest is requested.
    ///
    /// # Errors
    /// The error of the store after all attempts, with the offset; also if the object was replaced or
    /// truncated meanwhile.
    pub(crate) async fn read(&self, range: Range<u64>, identity: &Identity) -> io::Result<(Bytes, Ranges)> {
        let length = range.end - range.start;
        let mut attempts = self.attempts(length);
        let mut body = BytesMut::with_capacity((length as usize).min(BODY_RESERVED_BYTES));
        let mut ranges = Ranges::Served;
        while (body.len() as u64) < length {
            let before = body.len();
            let at = range.start + before as u64;
            let permit = self.permit().await;
            let attempt = self.attempt(at..range.end, identity, &mut body, &mut ranges);
            let ended = tokio::time::timeout(self.stores.shared.settings.request_timeout, attempt).await;
            drop(permit);
            // A server that delivers bytes is alive, even if it breaks off every response.
            if body.len() > before {
                attempts.progress();
            }
            let fault = match ended {
                Ok(Ok(())) => continue,
                Ok(Err(fault)) => fault,
                Err(_) => Fault::transient("the request took too long"),
            };
            self.pause(&mut attempts, fault, range.start + body.len() as u64).await?;
        }
        Ok((body.freeze(), ranges))
    }

    /// Reads a range with as few requests as possible, for servers that send the whole object each time.
    pub(crate) fn read_in_order(
        self,
        range: Range<u64>,
        identity: Identity,
    ) -> BoxStream<'static, io::Result<Bytes>> {
        let timeout = self.stores.shared.settings.request_timeout;
        let stream = async_stream::try_stream! {
            let mut attempts = self.attempts(range.end - range.start);
            let mut at = range.start;
            while at < range.end {
                let fault = match self.open(at..range.end, &identity).await {
                    Err(fault) => fault,
                    Ok((mut chunks, _)) => loop {
                        match tokio::time::timeout(timeout, chunks.next()).await {
                            Ok(Some(Ok(mut chunk))) => {
                                chunk.truncate((range.end - at) as usize);
                                at += chunk.len() as u64;
                                yield chunk;
                                // A slow consumer must not use up the deadline of the server.
                                attempts = self.attempts(range.end - at);
                            }
                            Ok(Some(Err(error))) => break Fault::transient(short_reason(&error)),
                            Ok(None) => break Fault::transient("the body ended early"),
                            Err(_) => break Fault::transient("no byte came in time"),
                        }
                    },
                };
                if at < range.end {
                    self.pause(&mut attempts, fault, at).await?;
                }
            }
        };
        stream.boxed()
    }

    /// Appends to `body` the bytes that one request delivers of `range`.
    async fn attempt(
        &self,
        range: Range<u64>,
        identity: &Identity,
        body: &mut BytesMut,
        ranges: &mut Ranges,
    ) -> Result<(), Fault> {
        let wanted = (range.end - range.start) as usize;
        let (mut chunks, answered) = self.open(range, identity).await?;
        *ranges = answered;
        let mut came = 0;
        while let Some(chunk) = chunks.next().await {
            let mut chunk = chunk.map_err(|error| Fault::transient(short_reason(&error)))?;
            chunk.truncate(wanted - came);
            body.extend_from_slice(&chunk);
            came += chunk.len();
        }
        if came < wanted {
            return Err(Fault::transient(format!("the body ended {} bytes early", wanted - came)));
        }
        Ok(())
    }

    /// Requests a range and checks the response headers.
    async fn open(
        &self,
        range: Range<u64>,
        identity: &Identity,
    ) -> Result<(BoxStream<'static, object_store::Result<Bytes>>, Ranges), Fault> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(range)),
            if_match: identity.strong_etag(),
            ..GetOptions::default()
        };
        let (result, ranges) = self.request(options).await.map_err(|(fault, _)| fault)?;
        check_version(identity, &Identity::new(&result.meta))?;
        if ranges == Ranges::Served {
            self.stores.shared.has_served_ranges(&self.parsed.root);
        }
        Ok((result.into_stream(), ranges))
    }

    /// Returns whether the server is known to support ranges.
    pub(crate) fn has_served_ranges(&self) -> bool {
        self.stores.shared.are_ranges_served(&self.parsed.root)
    }

    /// Waits for a permit among the requests in flight; none is held while waiting between attempts.
    pub(super) async fn permit(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        self.stores.shared.requests.acquire().await.ok()
    }

    /// Sends one request.
    async fn request(&self, mut options: GetOptions) -> Result<(GetResult, Ranges), (Fault, Option<u16>)> {
        let observed = Arc::new(Observed::default());
        options.extensions.insert(observed.clone());
        let result = self.store.get_opts(&self.parsed.path, options).await;
        let notes = observed.notes();
        let ranges = if notes.is_range_ignored { Ranges::Ignored } else { Ranges::Served };
        match result {
            Ok(result) => Ok((result, ranges)),
            Err(error) => Err((fault_of(&error, notes, self.parsed.kind), notes.status)),
        }
    }

    pub(super) fn attempts(&self, bytes: u64) -> Attempts {
        Attempts::new(self.stores.shared.settings.retry, bytes)
    }

    /// Waits for the next attempt.
    pub(super) async fn pause(&self, attempts: &mut Attempts, fault: Fault, offset: u64) -> io::Result<()> {
        let wait = attempts.next_wait(fault).map_err(|error| {
            io::Error::new(error.kind(), format!("at offset {offset}: {}", hinted(&error, self)))
        })?;
        self.retries.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

/// Rejects bytes of another version of the object.
fn check_version(expected: &Identity, found: &Identity) -> Result<(), Fault> {
    let has_other_tag = match (&expected.etag, &found.etag) {
        (Some(expected), Some(found)) => expected != found,
        _ => false,
    };
    let is_other = has_other_tag
        || expected.bytes != found.bytes
        || (expected.etag.is_none()
            && expected.modified_ns != found.modified_ns
            && expected.modified_ns.min(found.modified_ns) != 0);
    if is_other { Err(super::fault::replaced()) } else { Ok(()) }
}

/// Returns an error with its causes, without credentials, and shortened, because a server may send a whole
/// page.
pub(super) fn short_reason(error: &dyn std::error::Error) -> String {
    const CHARACTERS_MAX: usize = 400;
    let reason = crate::error::reason_of(error);
    let line = redact(&reason).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(CHARACTERS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Returns whether the error is that of a missing object.
pub(super) fn is_missing(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound
}
