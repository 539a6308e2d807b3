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
use crate::prefetch::{ByteBudget, run_ahead};
use crate::read::ShardItem;
use crate::shard::Shard;
use crate::skip::{SkipLog, Skipped};
use crate::source::{SourceConfig, SourceItem, read_shards};

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
            let collator = Collator::new(settings.decode, pool, skips.clone(), settings.decoded_bytes_max);
            let ahead = settings.batches_ahead();
            let mut begun = run_ahead(begin_batches(settings, collator.clone()), ahead);
            while let Some(batch) = begun.recv().await {
                let batch = collator.finish(batch?).await?;
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

/// Collects samples to batches and starts their decoding.
fn begin_batches(
    settings: LoaderBuilder,
    collator: Collator,
) -> impl futures::Stream<Item = Result<PendingBatch>> + Send {
    try_stream! {
        let skips = collator.skips();
        let mut source = read_shards(SourceConfig {
            shards: settings.shards,
            epochs: settings.epochs,
            field_bytes_max: settings.field_bytes_max,
            is_read_through: settings.decode == Decode::Raw,
            budget: ByteBudget::new(settings.buffered_bytes_max),
        });
        let mut batch = Vec::with_capacity(settings.batch_size);
        let mut left = settings.samples_max.unwrap_or(u64::MAX);
        while left > 0 && let Some(item) = source.recv().await {
            let SourceItem { item, lease } = item?;
            left -= 1;
            match item {
                ShardItem::Skipped(skipped) => skips.push(skipped),
                ShardItem::Sample(sample) => batch.push((sample, lease)),
            }
            if batch.len() == settings.batch_size {
                yield collator.begin(std::mem::take(&mut batch)).await?;
            }
        }
        if !batch.is_empty() {
            yield collator.begin(batch).await?;
        }
    }
}
