//! Builds the rows of a remote shard without downloading payloads that no row needs.
//!
//! Headers, texts and audio are read, and the start of long images; the bytes between are skipped where that
//! is cheaper than reading on.

use std::io;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::build::Builder;
use crate::error::Result;
use crate::media::probe::ImageFormat;
use crate::media::{FieldKind, kind_of_extension};
use crate::sample::measure_sample;
use crate::shard::tar::Entry;
use crate::shard::tar::ranged::Archive;
use crate::shard::{
    Compression, FIELD_BYTES_MAX, RangedSamples, RawSample, Shard, ShardItem, StreamedSamples, decompress,
    sniff_compression, split_key,
};
use crate::store::{Identity, RemoteObject, ShardBody, Task, spawn};

/// Longest payload that is read whole: a request costs as much as reading that many bytes.
const READ_WHOLE_BYTES: u64 = 1 << 20;
/// Bytes that are read of a longer payload.
const PREFIX_BYTES: u64 = 64 << 10;
/// Bytes that are requested after a jump.
const WINDOW_BYTES_MIN: u64 = 128 << 10;
/// Bytes per request when everything is read; two such windows are in flight.
const WINDOW_BYTES_MAX: u64 = 4 << 20;
/// Bytes of a compressed shard in flight.
const PACKED_BYTES_AHEAD: u64 = 16 << 20;

/// Reads a remote shard into `builder`, and sets its compression.
///
/// # Errors
/// [`crate::Error::Read`] if the store fails permanently.
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
        Ok(Compression::None) => push_plain(builder, shard, window),
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

fn push_plain(builder: &mut Builder, shard: &Shard, window: RangeWindow) -> io::Result<()> {
    let wanted = if builder.is_verified() { all_bytes } else { wanted_bytes };
    let mut samples = RangedSamples::new(shard.url.clone(), window, FIELD_BYTES_MAX, wanted);
    while let Some(item) = samples.next() {
        let mut item = item?;
        if let ShardItem::Sample(sample) = &mut item {
            complete(sample, samples.archive())?;
        }
        builder.push(item);
    }
    Ok(())
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
    let mut samples = StreamedSamples::new(shard.url.clone(), reader, FIELD_BYTES_MAX);
    futures::executor::block_on(async {
        while let Some(item) = samples.next().await {
            builder.push(item);
        }
    });
    builder.end_unpacked();
    let failed = failure.lock().expect("no holder panics").take();
    failed.map_or(Ok(()), Err)
}

/// Returns how much of a payload is needed for its shape, judged by its name.
fn wanted_bytes(entry: &Entry) -> u64 {
    let extension = split_key(&entry.name).map(|(_, extension)| extension).unwrap_or_default();
    let is_jumped = match kind_of_extension(&extension) {
        FieldKind::Image | FieldKind::Npy => true,
        FieldKind::Opaque => !extension.ends_with("opus"),
        _ => false,
    };
    if is_jumped && entry.bytes > READ_WHOLE_BYTES { PREFIX_BYTES } else { entry.bytes }
}

fn all_bytes(entry: &Entry) -> u64 {
    entry.bytes
}

/// Reads the rest of a sample's fields where their start does not determine the shape: images that store
/// their orientation after the pixels, and everything that cannot be parsed.
fn complete(sample: &mut RawSample, archive: &mut RangeWindow) -> io::Result<()> {
    let is_cut = |payload: &Option<Bytes>, bytes: u64| {
        payload.as_ref().is_some_and(|payload| (payload.len() as u64) < bytes)
    };
    if !sample.fields.iter().any(|field| is_cut(&field.payload, field.bytes)) {
        return Ok(());
    }
    let is_understood = measure_sample(sample).is_ok();
    for field in &mut sample.fields {
        let is_jpeg = field.payload.as_deref().and_then(ImageFormat::from_bytes) == Some(ImageFormat::Jpeg);
        let is_image = kind_of_extension(&field.extension) == FieldKind::Image;
        let is_enough = is_understood && (is_jpeg || !is_image);
        if is_cut(&field.payload, field.bytes) && !is_enough {
            field.payload = Some(archive.read(field.offset..field.offset + field.bytes)?);
        }
    }
    Ok(())
}

/// View of a remote archive through a window that moves forward, and grows while nothing is skipped.
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

    /// Restarts at `start`; requests ahead are canceled.
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
        // Reading over a small gap is cheaper than another request.
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

/// Requests lengths and versions of all remote shards, many in parallel.
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
