//! Reads samples for requests that come at the same time.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use dflop_loader::SampleReader;
use dflop_loader::error::Result;
use dflop_loader::index::Index;
use dflop_loader::shard::{Compression, RawSample};
use tokio::sync::Mutex;

/// Number of readers, each of which keeps up to 256 MiB of decompressed shards.
const READERS: u64 = 4;

/// Dataset readers. Samples in the same compressed shard have the same reader, which decompresses the shard
/// once.
#[derive(Debug)]
pub(super) struct Readers {
    index: Arc<Index>,
    readers: Vec<Mutex<SampleReader>>,
}

impl Readers {
    pub(super) fn new(index: &Arc<Index>) -> Self {
        let reader = |_| Mutex::new(SampleReader::new(index.clone()));
        Self { index: index.clone(), readers: (0..READERS).map(reader).collect() }
    }

    /// Reads a sample; see [`SampleReader::samples`].
    ///
    /// - `number`: number of the sample in the index
    pub(super) async fn sample(&self, number: u64, field_bytes_max: u64) -> Result<RawSample> {
        let mut samples = self.of(number).lock().await.samples(&[number], field_bytes_max).await?;
        Ok(samples.swap_remove(0))
    }

    /// Reads a field part; see [`SampleReader::field`].
    pub(super) async fn field(&self, number: u64, field: usize, range: Range<u64>) -> Result<Bytes> {
        self.of(number).lock().await.field(number, field, range).await
    }

    fn of(&self, number: u64) -> &Mutex<SampleReader> {
        let shard = self.index.sample(number).shard;
        let by = match self.index.indexed_shards()[shard].compression {
            Compression::None => number,
            _ => shard as u64,
        };
        &self.readers[(by % READERS) as usize]
    }
}
