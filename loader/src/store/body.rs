//! Streams whole remote shards in order, reading ahead so that request latencies overlap.
//!
//! A shard is read in chunks that are requested in parallel and delivered in order; once all chunks in a
//! shard are requested, the next shard's chunks are started. The bytes in flight are bounded. With a cache,
//! shards are read from cache files.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use tokio::io::{AsyncBufRead, AsyncRead, ReadBuf};
use tokio::sync::mpsc;

use super::answer::{Identity, Ranges};
use super::cache::{CacheKey, Room};
use super::connect::{Task, spawn};
use super::fetch::download;
use super::local::{Failure, LocalShard};
use super::object::RemoteObject;
use crate::flow::{ByteBudget, ByteLease};

/// Number of shards whose length and version are requested ahead.
const IDENTITIES_AHEAD: usize = 16;
/// Number of shards that are copied to the cache in parallel.
const CACHED_AHEAD: usize = 4;
/// Number of shards, started or cached, that wait for the reader.
const SHARDS_WAITING: usize = 4;
/// Minimum number of chunks in a budget, so that requests overlap.
const CHUNKS_MIN: u64 = 8;
/// Minimum chunk size in bytes.
const CHUNK_BYTES_MIN: u64 = 64 << 10;

/// Remote shard that is ready to be read.
pub(crate) enum RemoteShard {
    /// Cache file.
    Local(LocalShard),
    /// Byte stream.
    Body(ShardBody),
}

/// Remote shards in reading order.
pub(crate) struct ShardsAhead {
    shards: mpsc::Receiver<io::Result<RemoteShard>>,
    _task: Task<()>,
}

impl ShardsAhead {
    /// Starts to read `objects`, with at most `bytes` in flight; `None` without objects.
    pub(crate) fn start<I>(objects: I, bytes: u64) -> Option<Self>
    where
        I: Iterator<Item = RemoteObject> + Send + 'static,
    {
        let mut objects = objects.peekable();
        let stores = objects.peek()?.stores().clone();
        let (sender, shards) = mpsc::channel(SHARDS_WAITING);
        let task = spawn(async move {
            if stores.cache().is_some() {
                send_all(sender, futures::stream::iter(objects).map(open_cached).buffered(CACHED_AHEAD))
                    .await;
            } else {
                let budget = ByteBudget::new(bytes, Arc::default());
                let chunk_bytes = chunk_bytes(bytes, stores.chunk_bytes());
                stream_all(sender, objects, &budget, chunk_bytes).await;
            }
        });
        Some(Self { shards, _task: task })
    }

    /// Waits for the next shard; `None` after the last shard.
    pub(crate) async fn next(&mut self) -> Option<io::Result<RemoteShard>> {
        self.shards.recv().await
    }
}

/// Returns a chunk size in bytes, such that a budget holds several chunks.
fn chunk_bytes(budget_bytes: u64, most: u64) -> u64 {
    (budget_bytes / CHUNKS_MIN).max(CHUNK_BYTES_MIN).min(most)
}

async fn send_all(
    sender: mpsc::Sender<io::Result<RemoteShard>>,
    shards: impl Stream<Item = io::Result<RemoteShard>>,
) {
    let mut shards = std::pin::pin!(shards);
    while let Some(shard) = shards.next().await {
        if sender.send(shard).await.is_err() {
            return;
        }
    }
}

/// Copies a shard into the cache; a shard that does not fit is streamed instead.
async fn open_cached(object: RemoteObject) -> io::Result<RemoteShard> {
    let identity = object.identity().await?;
    if let (Some(cache), Some(key)) = (object.stores().cache(), CacheKey::packed(object.url(), &identity))
        && let Some(kept) = cache
            .get_or_fill(&key, Room::Any, |part| download(object.clone(), identity.clone(), part))
            .await?
    {
        return Ok(RemoteShard::Local(kept));
    }
    let chunk_bytes = object.stores().chunk_bytes();
    let budget = ByteBudget::new(CHUNKS_MIN * chunk_bytes, Arc::default());
    let (body, chunks) = ShardBody::new(identity.bytes);
    let task = spawn(async move { plan_chunks(&object, &identity, &chunks, &budget, chunk_bytes).await });
    Ok(RemoteShard::Body(body.driven_by(task)))
}

async fn stream_all<I>(
    sender: mpsc::Sender<io::Result<RemoteShard>>,
    objects: I,
    budget: &ByteBudget,
    chunk_bytes: u64,
) where
    I: Iterator<Item = RemoteObject> + Send,
{
    let identify = |object: RemoteObject| async move {
        let identity = object.identity().await?;
        Ok((object, identity))
    };
    let mut identified =
        std::pin::pin!(futures::stream::iter(objects).map(identify).buffered(IDENTITIES_AHEAD));
    while let Some(next) = identified.next().await {
        let next: io::Result<(RemoteObject, Identity)> = next;
        let (object, identity) = match next {
            Ok(identified) => identified,
            Err(error) => {
                // Sending only fails if the receiver was dropped; the stream ends either way.
                let _ = sender.send(Err(error)).await;
                return;
            }
        };
        let (body, chunks) = ShardBody::new(identity.bytes);
        // Sent before its chunks are requested, so that the reader consumes the first chunks meanwhile.
        if sender.send(Ok(RemoteShard::Body(body))).await.is_err() {
            return;
        }
        plan_chunks(&object, &identity, &chunks, budget, chunk_bytes).await;
    }
}

/// Requests all chunks in a shard in order, within the budget; stops when the shard is dropped.
async fn plan_chunks(
    object: &RemoteObject,
    identity: &Identity,
    chunks: &mpsc::UnboundedSender<Chunk>,
    budget: &ByteBudget,
    chunk_bytes: u64,
) {
    let mut start = 0;
    let mut are_ranges_served = object.has_served_ranges();
    while start < identity.bytes {
        let range = start..identity.bytes.min(start + chunk_bytes);
        let Ok(lease) = budget.lease(range.end - range.start).await else { return };
        let read = spawn(read_chunk(object.clone(), identity.clone(), range.clone()));
        // Chunks are only requested in parallel once the server is known to serve ranges; otherwise every
        // chunk request would deliver the whole object.
        if are_ranges_served {
            start = range.end;
            if chunks.send(Chunk { bytes: Fetch::Task(read), _lease: lease }).is_err() {
                return;
            }
            continue;
        }
        let Ok(first) = read.await else { return };
        are_ranges_served = !matches!(first, Ok((_, Ranges::Ignored)));
        start = range.end;
        let bytes = Fetch::Done(first.map(|(bytes, _)| bytes));
        if chunks.send(Chunk { bytes, _lease: lease }).is_err() {
            return;
        }
        if !are_ranges_served && start < identity.bytes {
            // This server sends the whole object for every range, so the rest is read with a single request.
            let rest = object.clone().read_in_order(start..identity.bytes, identity.clone());
            // The stream passes bytes on as they arrive, so it uses no budget.
            let Ok(lease) = budget.lease(0).await else { return };
            let _ = chunks.send(Chunk { bytes: Fetch::Rest(rest), _lease: lease });
            return;
        }
    }
}

async fn read_chunk(
    object: RemoteObject,
    identity: Identity,
    range: Range<u64>,
) -> io::Result<(Bytes, Ranges)> {
    object.read(range, &identity).await
}

/// Bytes in flight, with their budget share.
struct Chunk {
    bytes: Fetch,
    _lease: ByteLease,
}

enum Fetch {
    Task(Task<io::Result<(Bytes, Ranges)>>),
    Done(io::Result<Bytes>),
    Rest(BoxStream<'static, io::Result<Bytes>>),
}

/// Shard bytes, in order.
pub(crate) struct ShardBody {
    chunks: BoxStream<'static, io::Result<Bytes>>,
    current: Bytes,
    failure: Failure,
    bytes: u64,
    _task: Option<Task<()>>,
}

impl ShardBody {
    fn new(bytes: u64) -> (Self, mpsc::UnboundedSender<Chunk>) {
        let (sender, mut receiver) = mpsc::unbounded_channel::<Chunk>();
        let chunks = async_stream::stream! {
            while let Some(Chunk { bytes, _lease }) = receiver.recv().await {
                match bytes {
                    Fetch::Task(task) => yield task.await.flatten().map(|(bytes, _)| bytes),
                    Fetch::Done(bytes) => yield bytes,
                    Fetch::Rest(mut rest) => while let Some(bytes) = rest.next().await {
                        yield bytes;
                    }
                }
            }
        };
        let (chunks, current, failure) = (chunks.boxed(), Bytes::new(), Failure::default());
        (Self { chunks, current, failure, bytes, _task: None }, sender)
    }

    fn driven_by(self, task: Task<()>) -> Self {
        Self { _task: Some(task), ..self }
    }

    /// Reads a single object from start to end, with at most `bytes` in flight.
    pub(crate) fn of(object: RemoteObject, identity: Identity, bytes: u64) -> Self {
        let chunk_bytes = chunk_bytes(bytes, object.stores().chunk_bytes());
        let (body, chunks) = Self::new(identity.bytes);
        let task = spawn(async move {
            plan_chunks(&object, &identity, &chunks, &ByteBudget::new(bytes, Arc::default()), chunk_bytes)
                .await;
        });
        body.driven_by(task)
    }

    /// Returns the stored shard length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the slot with the reason after the body has ended early.
    pub(crate) fn failure(&self) -> Failure {
        self.failure.clone()
    }

    fn fail(&self, error: io::Error) -> io::Error {
        // `io::Error` cannot be cloned: the reader gets a copy, the account the original.
        let same = io::Error::new(error.kind(), error.to_string());
        *self.failure.lock().expect("no holder panics") = Some(error);
        same
    }
}

/// Reads chunks in place, without copying them to a second buffer.
impl AsyncBufRead for ShardBody {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        let body = self.get_mut();
        while body.current.is_empty() {
            match ready!(body.chunks.poll_next_unpin(context)) {
                None => break,
                Some(Ok(chunk)) => body.current = chunk,
                Some(Err(error)) => return Poll::Ready(Err(body.fail(error))),
            }
        }
        Poll::Ready(Ok(&body.current))
    }

    fn consume(mut self: Pin<&mut Self>, bytes: usize) {
        self.current.advance(bytes);
    }
}

impl AsyncRead for ShardBody {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let chunk = ready!(self.as_mut().poll_fill_buf(context))?;
        let length = buffer.remaining().min(chunk.len());
        buffer.put_slice(&chunk[..length]);
        self.consume(length);
        Poll::Ready(Ok(()))
    }
}
