//! The plain loader: shards in order, batches out.
//!
//! `reader thread → samples → decode pool → batches`; every arrow is a queue bounded in bytes or in batches,
//! so a slow consumer stops the reader. Needs no index. [`crate::balanced`] is the loader that plans ahead.

mod builder;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_stream::try_stream;
use futures::StreamExt;
use futures::stream::BoxStream;

pub use builder::LoaderBuilder;

use crate::batch::Batch;
use crate::collate::{Collator, Decode, PendingBatch};
use crate::error::Result;
use crate::pool::DecodePool;
use crate::prefetch::{ByteBudget, ByteLease, run_ahead};
use crate::read::ShardItem;
use crate::sample::RawSample;
use crate::shard::Shard;
use crate::skip::{SkipLog, Skipped};
use crate::source::{SourceConfig, read_shards};

/// Batches in order; an error is the last item.
pub type BatchStream = BoxStream<'static, Result<Batch>>;

/// Streams the samples of shards in shard order, decoded and in batches.
#[derive(Debug)]
pub struct Loader {
    settings: LoaderBuilder,
    pool: Arc<DecodePool>,
    skips: Arc<SkipLog>,
    kernel_cpu_ns: Arc<AtomicU64>,
}

impl Loader {
    /// Starts the settings of a loader over `shards`, which are read in this order.
    #[must_use]
    pub fn builder(shards: Vec<Shard>) -> LoaderBuilder {
        LoaderBuilder::new(shards)
    }

    /// Streams batches.
    ///
    /// Lazy: nothing is read until the first poll. Bad samples are left out, so a batch may be shorter than
    /// its size; they are listed by [`Loader::skipped`]. An unreadable shard, or more bad samples than the
    /// budget allows, is the last item. Dropping the stream ends the reader and the decoders.
    ///
    /// # Panics
    /// If it is polled outside a Tokio runtime.
    #[must_use]
    pub fn stream(&self) -> BatchStream {
        let settings = self.settings.clone();
        let (pool, skips) = (self.pool.clone(), self.skips.clone());
        let batches = try_stream! {
            let collator = Collator::new(settings.decode, pool, skips.clone()).augment(settings.augment);
            let ahead = settings.batches_ahead();
            let mut begun = run_ahead(begin_batches(settings, collator.clone()), ahead);
            while let Some(batch) = begun.recv().await {
                let batch = collator.finish(batch?.batch).await?;
                skips.check(false)?;
                if !batch.samples.is_empty() {
                    yield batch;
                }
            }
            skips.check(true)?;
        };
        batches.boxed()
    }

    /// Returns what was not delivered so far, in the order found.
    #[must_use]
    pub fn skipped(&self) -> Vec<Skipped> {
        self.skips.skipped()
    }

    /// Returns the CPU time spent inside decode, resize and normalise so far, over all threads.
    #[must_use]
    pub fn kernel_cpu(&self) -> Duration {
        Duration::from_nanos(self.kernel_cpu_ns.load(Ordering::Relaxed))
    }
}

/// A batch under way, and what it takes from the budgets until it is delivered.
struct BegunBatch {
    batch: PendingBatch,
    _leases: [ByteLease; 2],
}

/// Starts batches as their samples come.
///
/// A sample leaves the reader's budget when it joins a batch, or a batch that is larger than the budget could
/// never be filled; the whole batch then takes its bytes from budgets of its own, alone if it is larger.
struct BatchStarter {
    collator: Collator,
    encoded: ByteBudget,
    decoded: ByteBudget,
}

impl BatchStarter {
    async fn begin(&self, samples: Vec<RawSample>) -> Result<BegunBatch> {
        let encoded = self.encoded.lease(samples.iter().map(RawSample::bytes).sum()).await?;
        let decoded = self.decoded.lease(self.collator.decoded_bytes(&samples)).await?;
        Ok(BegunBatch { batch: self.collator.begin(samples).await?, _leases: [encoded, decoded] })
    }
}

/// Collects samples to batches and starts their decoding.
fn begin_batches(
    settings: LoaderBuilder,
    collator: Collator,
) -> impl futures::Stream<Item = Result<BegunBatch>> + Send {
    try_stream! {
        let skips = collator.skips();
        let half = settings.buffered_bytes_max / 2;
        let fields = settings.read_fields();
        let mut source = read_shards(SourceConfig {
            shards: settings.shards,
            epochs: settings.epochs,
            field_bytes_max: settings.field_bytes_max,
            fields,
            is_read_through: settings.decode == Decode::Raw,
            budget: ByteBudget::new(half),
        });
        let (encoded, decoded) = (ByteBudget::new(half), ByteBudget::new(settings.decoded_bytes_max));
        let starter = BatchStarter { collator, encoded, decoded };
        let mut batch = Vec::with_capacity(settings.batch_size);
        let mut left = settings.samples_max.unwrap_or(u64::MAX);
        while left > 0 && let Some(item) = source.recv().await {
            left -= 1;
            match item?.item {
                ShardItem::Skipped(skipped) => skips.push(skipped),
                ShardItem::Sample(sample) => batch.push(sample),
            }
            if batch.len() == settings.batch_size {
                yield starter.begin(std::mem::take(&mut batch)).await?;
            }
        }
        if !batch.is_empty() {
            yield starter.begin(batch).await?;
        }
    }
}
