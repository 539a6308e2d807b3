//! Serves a page to look at the samples of a dataset: on this machine only, under a random address.
//!
//! Reads samples for requests that come at the same time.
//!
//! `table` holds the numbers that samples are sorted and filtered by, `query` and `selection` sort and
//! filter; `describe`, `content` and `media` answer for single samples; `http` rejects requests before
//! anything else. The page builds everything from JSON as text nodes; the server never puts data into a
//! document.

mod answer;
mod content;
mod http;
mod page;
mod query;
mod search;
mod table;

use super::failure::Failure;
use bytes::Bytes;
use dflop_costmodel::CostModel;
use dflop_loader::error::Result;
use dflop_loader::index::Index;
use dflop_loader::shard::{Compression, RawSample};
use dflop_loader::{Dataset, SampleReader};
use query::Selections;
use search::TextSearch;
use std::ops::Range;
use std::sync::Arc;
use table::SampleTable;
use tokio::sync::Mutex;

pub(crate) use http::Server;

/// Dataset with predicted sample costs.
#[derive(Debug)]
pub(crate) struct View {
    dataset: Dataset,
    model: CostModel,
    /// Model name and time source, for people.
    costs: String,
    table: SampleTable,
    selections: Selections,
    text_search: TextSearch,
    readers: Readers,
}

impl View {
    /// Predicts the costs for all samples.
    ///
    /// - `costs`: model name and time source, for people
    ///
    /// # Errors
    /// [`Failure::Misuse`] if the dataset has more than 2^32 samples.
    pub(crate) fn new(dataset: Dataset, model: CostModel, costs: String) -> Result<Self, Failure> {
        let table = SampleTable::new(&dataset, &model)?;
        let readers = Readers::new(dataset.index());
        let (selections, text_search) = (Selections::default(), TextSearch::default());
        Ok(Self { dataset, model, costs, table, selections, text_search, readers })
    }
}

/// Number of readers, each of which keeps up to 256 MiB of decompressed shards.
const READERS: u64 = 4;

/// Dataset readers. Samples in the same compressed shard have the same reader, which decompresses the shard
/// once.
#[derive(Debug)]
struct Readers {
    index: Arc<Index>,
    readers: Vec<Mutex<SampleReader>>,
}

impl Readers {
    fn new(index: &Arc<Index>) -> Self {
        let reader = |_| Mutex::new(SampleReader::new(index.clone()));
        Self { index: index.clone(), readers: (0..READERS).map(reader).collect() }
    }

    /// Reads a sample; see [`SampleReader::samples`].
    ///
    /// - `number`: number of the sample in the index
    async fn sample(&self, number: u64, field_bytes_max: u64) -> Result<RawSample> {
        let mut samples = self.of(number).lock().await.samples(&[number], field_bytes_max).await?;
        Ok(samples.swap_remove(0))
    }

    /// Reads a field part; see [`SampleReader::field`].
    async fn field(&self, number: u64, field: usize, range: Range<u64>) -> Result<Bytes> {
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
