//! Reads ranges from a remote object, with retries and a version check.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io};

use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore};

use super::answer::{Answer, CoalesceLimits, Found, Identity, Ranges, Refusal, Wanted, check_version};
use super::connect::Retries;
#[cfg(feature = "remote")]
use super::http::HttpServer;
use super::redact::redact_name;
use super::retry::{Attempts, Fault, Observed, is_missing, short_reason, store_fault};
use super::stores::Stores;
use super::url::{ObjectName, RemoteUrl, StoreKind};
use super::url_parts::{without_signature, without_user};
use crate::error::{Error, Result, SelectionError};

/// Maximum memory reserved for a body before the first byte arrives, in bytes.
const BODY_RESERVED_BYTES: usize = 16 << 20;
/// Maximum size of an object that is read to the end to determine the length, in bytes.
const UNKNOWN_BYTES_MAX: u64 = 1 << 40;

/// Source of an object's bytes.
#[derive(Clone)]
pub(super) enum Source {
    /// Key in a bucket.
    Bucket { store: Arc<dyn ObjectStore>, path: Path },
    /// URL on an HTTP server.
    #[cfg(feature = "remote")]
    Server { server: Arc<HttpServer>, address: url::Url },
}

/// Shard in a remote store. Nothing is requested until the shard is read.
#[derive(Clone)]
pub struct RemoteObject {
    stores: Stores,
    /// URL with credentials.
    url: Arc<str>,
    parsed: Arc<RemoteUrl>,
    source: Arc<Source>,
    /// Number of retried requests.
    retries: Arc<AtomicU64>,
}

impl fmt::Debug for RemoteObject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RemoteObject").field("url", &redact_name(&self.url)).finish_non_exhaustive()
    }
}

impl PartialEq for RemoteObject {
    /// Returns whether both objects have the same name.
    fn eq(&self, other: &Self) -> bool {
        self.url == other.url
    }
}

impl Eq for RemoteObject {}

impl Stores {
    /// Returns the object of a URL without requesting it.
    ///
    /// # Errors
    /// [`Error::Selection`] if the URL is malformed or its store cannot be configured.
    pub(crate) fn object(&self, url: &Arc<str>) -> Result<RemoteObject> {
        let invalid = |reason| {
            Error::Selection(SelectionError::ShardList { pattern: redact_name(url).into_owned(), reason })
        };
        let parsed = self.parse(url).map_err(invalid)?;
        let source = self.source(&parsed).map_err(invalid)?;
        Ok(RemoteObject::new(self.clone(), url.clone(), parsed, source))
    }

    /// Returns where the bytes of an object come from.
    fn source(&self, url: &RemoteUrl) -> Result<Source, String> {
        match &url.object {
            ObjectName::Key(path) => {
                Ok(Source::Bucket { store: self.connect(url, Retries::ByReader)?, path: path.clone() })
            }
            #[cfg(feature = "remote")]
            ObjectName::Address(address) => {
                Ok(Source::Server { server: self.server(url)?, address: address.clone() })
            }
            #[cfg(not(feature = "remote"))]
            ObjectName::Address(_) => Err(self.connect(url, Retries::ByReader).err().unwrap_or_default()),
        }
    }
}

impl RemoteObject {
    pub(super) fn new(stores: Stores, url: Arc<str>, parsed: RemoteUrl, source: Source) -> Self {
        let (parsed, source) = (Arc::new(parsed), Arc::new(source));
        Self { stores, url, parsed, source, retries: Arc::default() }
    }

    /// Returns the same object with this retry counter: each loader counts separately, even on a shared
    /// handle.
    pub(crate) fn counted_by(self, retries: Arc<AtomicU64>) -> Self {
        Self { retries, ..self }
    }

    /// Returns the stores through which the object is read.
    #[must_use]
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Returns whether the name is a directory name.
    pub(crate) fn is_directory(&self) -> bool {
        self.parsed.is_directory
    }

    pub(crate) fn url(&self) -> &Arc<str> {
        &self.url
    }

    /// Returns the URL without credentials and signatures, which do not distinguish objects.
    pub(crate) fn name(&self) -> String {
        without_signature(&without_user(&self.url))
    }

    pub(crate) fn coalesce_limits(&self) -> CoalesceLimits {
        self.stores.shared.settings.coalesce
    }

    pub(super) fn parsed(&self) -> &RemoteUrl {
        &self.parsed
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// Requests length and version. If the server reports no length, the object is read to the end.
    ///
    /// # Errors
    /// The store error after all attempts, with advice.
    pub(crate) async fn identity(&self) -> io::Result<Identity> {
        let mut attempts = self.attempts(0);
        loop {
            let permit = self.permit().await;
            let fault = match self.identify().await {
                Ok(identity) => return Ok(identity),
                Err(fault) => fault,
            };
            drop(permit);
            self.pause(&mut attempts, fault, 0).await?;
        }
    }

    async fn identify(&self) -> Result<Identity, Fault> {
        match self.request(Wanted { is_head: true, ..Wanted::default() }).await {
            // Some servers report no length, or only 0, without a body.
            Ok(Answer { found: Found { bytes: Some(bytes), modified_ns, etag }, .. })
                if bytes > 0 || !self.is_http() =>
            {
                return Ok(Identity { bytes, modified_ns, etag });
            }
            // Some servers report no length without a body, or 0.
            Ok(_) => {}
            // Some servers, and URLs signed for one method, only support `GET`.
            Err(Refusal { status: Some(400 | 403 | 405 | 501), .. }) if self.is_http() => {}
            Err(refusal) => return Err(refusal.fault),
        }
        let first = self.request(Wanted { range: Some(0..1), ..Wanted::default() }).await;
        let first = match first {
            Ok(first) => first,
            // An empty object has no first byte.
            Err(Refusal { status: Some(416), total, .. }) if total.unwrap_or(0) == 0 => {
                return Ok(Identity { bytes: 0, modified_ns: 0, etag: None });
            }
            Err(refusal) => return Err(refusal.fault),
        };
        if let Some(bytes) = first.found.bytes {
            return Ok(first.found.with_length(bytes));
        }
        drop(first);
        let whole = self.request(Wanted::default()).await.map_err(|refusal| refusal.fault)?;
        let bytes = match whole.found.bytes {
            Some(bytes) => bytes,
            None => self.counted(whole.chunks).await?,
        };
        Ok(whole.found.with_length(bytes))
    }

    /// Counts the bytes in a body that is not kept.
    async fn counted(&self, mut chunks: BoxStream<'static, Result<Bytes, Fault>>) -> Result<u64, Fault> {
        let timeout = self.stores.shared.settings.request_timeout;
        let mut bytes = 0u64;
        loop {
            match tokio::time::timeout(timeout, chunks.next()).await {
                Ok(Some(chunk)) => bytes += chunk?.len() as u64,
                Ok(None) => return Ok(bytes),
                Err(_) => return Err(Fault::transient("no byte came in time")),
            }
            if bytes > UNKNOWN_BYTES_MAX {
                let reason = format!("an object of unknown length has more than {UNKNOWN_BYTES_MAX} bytes");
                return Err(Fault::is_final(ErrorKind::InvalidData, reason));
            }
        }
    }

    pub(crate) fn is_http(&self) -> bool {
        matches!(self.parsed.kind, StoreKind::Http | StoreKind::Hub)
    }

    /// Reads a range from the version given by `identity`.
    ///
    /// After a failed request the received bytes are kept and the rest is requested.
    ///
    /// # Errors
    /// The store error after all attempts, with the offset; also if the object was replaced or truncated
    /// meanwhile.
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
            // A server that delivers bytes is alive, even if it aborts every response.
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
                                // A slow consumer must not use up the server's deadline.
                                attempts = self.attempts(range.end - at);
                            }
                            Ok(Some(Err(fault))) => break fault,
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

    /// Appends the bytes that a single request delivers from `range` to `body`.
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
            let mut chunk = chunk?;
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
    ) -> Result<(BoxStream<'static, Result<Bytes, Fault>>, Ranges), Fault> {
        let is_to_end = range.end == identity.bytes;
        let if_match = identity.strong_etag();
        let wanted = Wanted { is_head: false, range: Some(range), is_to_end, if_match };
        let answer = self.request(wanted).await.map_err(|refusal| refusal.fault)?;
        check_version(identity, &answer.found)?;
        if answer.ranges == Ranges::Served {
            self.stores.shared.has_served_ranges(&self.parsed.root);
        }
        Ok((answer.chunks, answer.ranges))
    }

    /// Returns whether the server is known to support ranges.
    pub(crate) fn has_served_ranges(&self) -> bool {
        self.stores.shared.are_ranges_served(&self.parsed.root)
    }

    /// Waits for an in-flight request permit; no permit is held while waiting between attempts.
    pub(super) async fn permit(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        self.stores.shared.requests.acquire().await.ok()
    }

    /// Sends a single request.
    async fn request(&self, wanted: Wanted) -> Result<Answer, Refusal> {
        match &*self.source {
            Source::Bucket { store, path } => self.request_key(&**store, path, wanted).await,
            #[cfg(feature = "remote")]
            Source::Server { server, address } => server.get(address, &wanted).await,
        }
    }

    async fn request_key(
        &self,
        store: &dyn ObjectStore,
        path: &Path,
        wanted: Wanted,
    ) -> Result<Answer, Refusal> {
        let observed = Arc::new(Observed::default());
        let Wanted { is_head: head, range, if_match, .. } = wanted;
        let range = range.map(GetRange::Bounded);
        let mut options = GetOptions { head, range, if_match, ..GetOptions::default() };
        options.extensions.insert(observed.clone());
        let result = store.get_opts(path, options).await;
        let notes = observed.notes();
        let ranges = if notes.is_range_ignored { Ranges::Ignored } else { Ranges::Served };
        match result {
            Ok(result) => {
                let found = Found::from_meta(&result.meta);
                let chunks = result.into_stream();
                let chunks =
                    chunks.map(|chunk| chunk.map_err(|error| Fault::transient(short_reason(&error))));
                Ok(Answer { found, ranges, chunks: chunks.boxed() })
            }
            Err(error) => {
                let fault = store_fault(&error, notes, self.parsed.kind);
                Err(Refusal { fault, status: notes.status, total: None })
            }
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
        self.stores.shared.report_wait(&self.url, &wait);
        tokio::time::sleep(wait.time).await;
        Ok(())
    }
}

/// Returns the message of an error, with advice.
fn hinted(error: &io::Error, object: &RemoteObject) -> String {
    let is_bucket = !object.is_http();
    if is_bucket && is_missing(error) && !object.url().ends_with(".tar") {
        return format!("{error}; the URL of a directory ends with `/`");
    }
    error.to_string()
}

/// Source of shard bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// Local file.
    File(PathBuf),
    /// Standard input, named `-`.
    StandardInput,
    /// Shell command output, named `pipe:COMMAND`.
    Pipe(String),
    /// Object on a remote store.
    Remote(RemoteObject),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_contradiction_is_another_version() {
        let expected = Identity { bytes: 5, modified_ns: 7, etag: Some("\"a\"".into()) };
        let found =
            |bytes, modified_ns, etag: Option<&str>| Found { bytes, modified_ns, etag: etag.map(Into::into) };
        for same in [
            found(Some(5), 7, Some("\"a\"")),
            found(Some(5), 7, Some("W/\"a\"")),
            found(None, 9, Some("\"a\"")),
            found(None, 0, None),
        ] {
            assert!(check_version(&expected, &same).is_ok(), "{same:?}");
        }
        for other in [found(Some(6), 7, Some("\"a\"")), found(None, 7, Some("W/\"b\""))] {
            assert!(check_version(&expected, &other).is_err(), "{other:?}");
        }
        let untagged = Identity { etag: None, ..expected };
        assert!(check_version(&untagged, &found(Some(5), 8, None)).is_err());
        assert!(check_version(&untagged, &found(Some(5), 0, Some("\"new\""))).is_ok());
    }
}
