//! Builds the rows for a remote shard without downloading payloads that no row needs.
//!
//! Headers, texts and audio are read, and the start of long images; the bytes between are skipped where that
//! is cheaper than reading on.

use std::io;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::builder::{Builder, push_plain, push_table};
use crate::error::Result;
use crate::shard::tar::entries::Archive;
use crate::shard::{
    Compression, FIELD_BYTES_MAX, OpenTable, Shard, StreamedSamples, decompress, sniff_compression,
};
use crate::store::{Identity, RemoteObject, ShardBody, Task, spawn};

/// Maximum size of a payload that is read whole, and of a gap that is read over, in bytes: a request costs as
/// much as reading that many bytes.
const READ_WHOLE_BYTES: u64 = 1 << 20;
/// Number of bytes requested after a jump.
const WINDOW_BYTES_MIN: u64 = 128 << 10;
/// Number of bytes per request when everything is read; two such windows are in flight.
const WINDOW_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of bytes of a compressed shard in flight.
const PACKED_BYTES_AHEAD: u64 = 16 << 20;

/// Reads a remote shard into `builder`, and sets the compression.
///
/// # Errors
/// [`crate::Error::Storage`] if the store fails permanently.
pub(super) fn push_remote(
    builder: &mut Builder,
    shard: &Shard,
    object: &RemoteObject,
    identity: &Identity,
) -> Result<()> {
    let mut window = RangeWindow::new(object.clone(), identity.clone());
    let first = window.read(0..identity.bytes.min(WINDOW_BYTES_MIN));
    let first = first.map_err(|source| shard.read_error(source))?;
    let result = match sniff_compression(&shard.url, &first) {
        Ok(Compression::None) => push_plain(builder, shard, window, READ_WHOLE_BYTES),
        Ok(Compression::Table) => {
            push_table(builder, shard, OpenTable::remote(shard, object.clone(), identity.clone()))
        }
        Ok(compression) => {
            builder.compression(compression);
            push_compressed(builder, shard, object, identity, compression)
        }
        Err(unsupported) => {
            builder.skip_shard(shard, unsupported.to_string());
            Ok(())
        }
    };
    result.map_err(|source| shard.read_error(source))
}

fn push_compressed(
    builder: &mut Builder,
    shard: &Shard,
    object: &RemoteObject,
    identity: &Identity,
    compression: Compression,
) -> io::Result<()> {
    let body = ShardBody::of(object.clone(), identity.clone(), PACKED_BYTES_AHEAD);
    let failure = body.failure();
    let reader = decompress(compression, body);
    let mut samples = StreamedSamples::new(shard.url.clone(), reader, FIELD_BYTES_MAX).by_range();
    futures::executor::block_on(async {
        while let Some(item) = samples.next().await {
            builder.push(item);
        }
    });
    builder.end_unpacked();
    let failed = failure.lock().expect("no holder panics").take();
    failed.map_or(Ok(()), Err)
}

/// View into a remote archive through a window that moves forward, and grows while nothing is skipped.
struct RangeWindow {
    object: RemoteObject,
    identity: Identity,
    start: u64,
    bytes: Bytes,
    next_bytes: u64,
    next: Option<(Range<u64>, Task<io::Result<Bytes>>)>,
}

impl RangeWindow {
    fn new(object: RemoteObject, identity: Identity) -> Self {
        Self { object, identity, start: 0, bytes: Bytes::new(), next_bytes: WINDOW_BYTES_MIN, next: None }
    }

    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn request(&self, range: Range<u64>) -> Task<io::Result<Bytes>> {
        let (object, identity) = (self.object.clone(), self.identity.clone());
        spawn(async move { Ok(object.read(range, &identity).await?.0) })
    }

    /// Moves to the bytes after the window.
    fn advance(&mut self) -> io::Result<()> {
        let start = self.end();
        let task = match self.next.take().filter(|(range, _)| range.start == start) {
            Some((_, task)) => task,
            None => self.request(start..self.identity.bytes.min(start + self.next_bytes)),
        };
        self.bytes = task.wait()??;
        self.start = start;
        let is_second = self.next_bytes > WINDOW_BYTES_MIN;
        self.next_bytes = (2 * self.next_bytes).min(WINDOW_BYTES_MAX);
        let next = self.end()..self.identity.bytes.min(self.end() + self.next_bytes);
        // Only after two consecutive windows is the next one likely to be needed.
        if is_second && !next.is_empty() {
            self.next = Some((next.clone(), self.request(next)));
        }
        Ok(())
    }

    /// Restarts at `start`; cancels requests ahead.
    fn jump(&mut self, start: u64) {
        (self.start, self.bytes, self.next) = (start, Bytes::new(), None);
        self.next_bytes = WINDOW_BYTES_MIN;
    }
}

impl Archive for RangeWindow {
    fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    fn read(&mut self, range: Range<u64>) -> io::Result<Bytes> {
        // Reading over a small gap is cheaper than a new request.
        let is_near = self.start <= range.start && range.start <= self.end() + READ_WHOLE_BYTES;
        if !is_near {
            self.jump(range.start);
        }
        while self.end() <= range.start && !range.is_empty() {
            self.advance()?;
        }
        let from = (range.start.min(self.end()) - self.start) as usize;
        if range.end <= self.end() {
            return Ok(self.bytes.slice(from..from + (range.end - range.start) as usize));
        }
        let mut joined = BytesMut::with_capacity((range.end - range.start) as usize);
        joined.extend_from_slice(&self.bytes[from..]);
        while (joined.len() as u64) < range.end - range.start {
            self.advance()?;
            let missing = (range.end - range.start) as usize - joined.len();
            joined.extend_from_slice(&self.bytes[..missing.min(self.bytes.len())]);
        }
        Ok(joined.freeze())
    }
}

/// Requests the length and version of all remote shards, many in parallel.
pub(super) fn identities(shards: &[Shard]) -> Result<Vec<Option<Identity>>> {
    let tasks = shards.iter().map(|shard| {
        let object = shard.remote()?.clone();
        Some(spawn(async move { object.identity().await }))
    });
    let tasks: Vec<_> = tasks.collect();
    let wait = |(shard, task): (&Shard, Option<Task<io::Result<Identity>>>)| match task {
        None => Ok(None),
        Some(task) => {
            let identity = task.wait().flatten();
            identity.map(Some).map_err(|source| shard.read_error(source))
        }
    };
    shards.iter().zip(tasks).map(wait).collect()
}
