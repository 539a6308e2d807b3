//! The plain loader: shards in order, batches out.
//!
//! `reader thread → samples → decode pool → batches`; every arrow is a queue bounded in bytes or in batches,
//! so a slow consumer stops the reader. Needs no index. [`crate::balanced`] is the loader that plans ahead.

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_stream::try_stream;
use futures::StreamExt;
use futures::stream::BoxStream;

use crate::batch::Batch;
use crate::collate::{Collator, Decode, PendingBatch};
use crate::error::{Error, Result};
use crate::pool::{DecodePool, SIDE_WITHOUT_PIXELS};
use crate::prefetch::{ByteBudget, run_ahead};
use crate::read::{FIELD_BYTES_MAX, ShardItem};
use crate::shard::Shard;
use crate::skip::{ErrorBudget, SkipLog, Skipped};
use crate::source::{SourceConfig, SourceItem, read_shards};

/// Batches in order; an error is the last item.
pub type BatchStream = BoxStream<'static, Result<Batch>>;

/// Settings of a [`Loader`].
#[derive(Debug, Clone)]
pub struct LoaderBuilder {
    shards: Vec<Shard>,
    decode: Decode,
    batch_size: usize,
    workers: usize,
    epochs: u64,
    samples_max: Option<u64>,
    error_budget: ErrorBudget,
    field_bytes_max: u64,
    buffered_bytes_max: u64,
    decoded_bytes_max: u64,
}

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
        LoaderBuilder {
            shards,
            decode: Decode::Media,
            batch_size: 32,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            epochs: 1,
            samples_max: None,
            error_budget: ErrorBudget::default(),
            field_bytes_max: FIELD_BYTES_MAX,
            buffered_bytes_max: 64 << 20,
            decoded_bytes_max: 64 << 20,
        }
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
            let collator = Collator::new(settings.decode, pool, skips.clone());
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

impl LoaderBuilder {
    /// Sets what is done with the bytes of a sample. Default: [`Decode::Media`].
    #[must_use]
    pub fn decode(mut self, decode: Decode) -> Self {
        self.decode = decode;
        self
    }

    /// Sets how many samples a batch has. Default: 32.
    #[must_use]
    pub fn batch_size(mut self, samples: usize) -> Self {
        self.batch_size = samples;
        self
    }

    /// Sets how many threads decode. Default: one per core.
    #[must_use]
    pub fn workers(mut self, threads: usize) -> Self {
        self.workers = threads;
        self
    }

    /// Sets how many times the shards are read. Default: once.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.epochs = epochs;
        self
    }

    /// Ends the stream after this many good or bad samples. Default: never.
    #[must_use]
    pub fn samples_max(mut self, samples: u64) -> Self {
        self.samples_max = Some(samples);
        self
    }

    /// Sets how many bad samples are tolerated. Default: 5 %, counted after the first 1,000.
    #[must_use]
    pub fn error_budget(mut self, budget: ErrorBudget) -> Self {
        self.error_budget = budget;
        self
    }

    /// Sets the largest field in bytes; a sample with a larger one is bad. Default: 1 GiB.
    #[must_use]
    pub fn field_bytes_max(mut self, bytes: u64) -> Self {
        self.field_bytes_max = bytes;
        self
    }

    /// Sets how many payload bytes may wait for the decoders; one sample more is possible. Default: 64 MiB.
    #[must_use]
    pub fn buffered_bytes_max(mut self, bytes: u64) -> Self {
        self.buffered_bytes_max = bytes;
        self
    }

    /// Sets how many bytes of pixel tensors may be under way; at least two batches are. Default: 64 MiB.
    #[must_use]
    pub fn decoded_bytes_max(mut self, bytes: u64) -> Self {
        self.decoded_bytes_max = bytes;
        self
    }

    /// Checks the settings and starts the decode threads.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no shard, or batch size, workers or epochs are zero.
    pub fn build(self) -> Result<Loader> {
        let zero = |setting| Err(Error::Config { setting, reason: "must be at least 1".into() });
        if self.shards.is_empty() {
            return Err(Error::Config { setting: "shards", reason: "no shard is named".into() });
        }
        if NonZeroUsize::new(self.batch_size).is_none() {
            return zero("batch_size");
        }
        if NonZeroUsize::new(self.workers).is_none() {
            return zero("workers");
        }
        if NonZeroU64::new(self.epochs).is_none() {
            return zero("epochs");
        }
        let side = if let Decode::Pixels { side } = self.decode { side } else { SIDE_WITHOUT_PIXELS };
        let pool = DecodePool::new(self.workers, side)?;
        let kernel_cpu_ns = pool.cpu_ns();
        let skips = Arc::new(SkipLog::new(self.error_budget, None));
        Ok(Loader { settings: self, pool: Arc::new(pool), skips, kernel_cpu_ns })
    }

    /// Batches between the dispatcher and the consumer.
    fn batches_ahead(&self) -> usize {
        let Decode::Pixels { side } = self.decode else { return 2 };
        let row_bytes = 3 * u64::from(side.get()).pow(2) * size_of::<f32>() as u64;
        let batch_bytes = row_bytes.saturating_mul(self.batch_size as u64);
        // One is filled and one is consumed beside those that wait.
        (self.decoded_bytes_max / batch_bytes.max(1)).saturating_sub(2).clamp(1, 64) as usize
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
