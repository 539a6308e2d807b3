//! Delivers sample batches from a list of shards, in order.
//!
//! `reader thread → samples → decode pool → batches`; every arrow is a queue bounded in bytes or in batches,
//! so a slow consumer stops the reader. A shuffle buffer may follow the reader. The stream position is small
//! JSON, [`StreamState`]. Whole shards need no index; samples that are dealt to ranks are read through an
//! index. [`crate::deliver`] is the loader that plans ahead.

mod batching;
mod builder;
mod dealt;
mod shuffle_stage;
mod stream_state;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_stream::try_stream;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc::{Receiver, unbounded_channel};

use self::batching::{BegunBatch, begin_batches, begin_dealt_batches};
pub use self::builder::LoaderBuilder;
use self::dealt::Refill;
use self::stream_state::Tracker;
pub use self::stream_state::{HELD_BYTES_MAX, StreamState};
pub use builder::RestoredInput;
use builder::StreamSettings;

use super::settings::no_field_in_stream;
use super::watchdog::Watchdog;
use crate::decode::{Batch, Collator, DecodePool, TransformStage};
use crate::error::{Result, Skipped};
use crate::flow::{LoaderStage, MetricsSnapshot, SkipLog, metered, run_ahead};
use crate::shard::{KnownShards, Shard};

/// Batches in order; an error is the last item.
pub type BatchStream = BoxStream<'static, Result<Batch>>;

/// Streams shard samples in shard order, decoded and in batches.
#[derive(Debug)]
pub struct Loader {
    settings: Arc<StreamSettings>,
    pool: Arc<DecodePool>,
    skips: Arc<SkipLog>,
    kernel_cpu_ns: Arc<AtomicU64>,
    transforms: Option<Arc<TransformStage>>,
    known: KnownShards,
    tracker: Arc<Mutex<Tracker>>,
}

impl Loader {
    /// Starts the settings for a loader over `shards`, which are read in this order.
    #[must_use]
    pub fn builder(shards: Vec<Shard>) -> LoaderBuilder {
        LoaderBuilder::new(shards)
    }

    /// Streams batches.
    ///
    /// Lazy: nothing is read until the first poll. Bad samples are left out, so a batch may be shorter than
    /// the batch size; [`Loader::skipped`] lists them. An unreadable shard, or more bad samples than the
    /// budget allows, is the last item. Dropping the stream ends the reader and the decoders.
    ///
    /// # Panics
    /// If it is polled outside a Tokio runtime, or in a runtime without a timer.
    #[must_use]
    pub fn stream(&self) -> BatchStream {
        let settings = self.settings.clone();
        let (pool, skips, known) = (self.pool.clone(), self.skips.clone(), self.known.clone());
        let (metrics, tracker) = (self.pool.metrics().clone(), self.tracker.clone());
        let transforms = self.transforms.clone();
        let batches = try_stream! {
            metrics.begin_stream();
            *lock(&tracker) = settings.input.tracker()?;
            let collator = Collator::new(settings.shared.decode, pool, skips.clone())
                .augment(settings.shared.augment)
                .transforms(transforms)
                .strictness(settings.shared.strictness)
                .pixel_format(settings.pixel_format)
                .video_sampling(settings.video_sampling);
            let ahead = settings.batches_ahead();
            let watchdog = Watchdog::new(settings.shared.stalls.clone(), metrics.clone(), settings.shards.clone());
            let (mut begun, mut refill) = begin(settings.clone(), known, &collator, ahead);
            loop {
                let next = next_batch(&mut begun, refill.as_mut(), &collator, &tracker);
                let next = watchdog.watch(metered(metrics.stage(LoaderStage::Collate), next)).await?;
                let Some(batch) = next? else { break };
                if !batch.samples.is_empty() {
                    let bytes = batch.samples.iter().map(|sample| sample.bytes).sum();
                    metrics.stage(LoaderStage::Deliver).count(batch.samples.len() as u64, bytes);
                    let yielded = Instant::now();
                    yield batch;
                    metrics.stage(LoaderStage::Deliver).busy(yielded.elapsed());
                }
            }
            skips.check(true)?;
            check_transforms(&collator, &settings).await?;
        };
        batches.boxed()
    }

    /// Returns the stream position after the last delivered batch. Batches read ahead are not included.
    ///
    /// With more than one stream, the position is in the stream that delivered last; before the first batch
    /// it is the start. A shuffle buffer is written as shard positions, so that the state is small; see
    /// [`StreamState`].
    ///
    /// # Errors
    /// [`Error::State`](crate::error::Error::State) if more than [`HELD_BYTES_MAX`] wait in a buffer over
    /// pipes or standard input.
    pub fn state(&self) -> Result<StreamState> {
        lock(&self.tracker).state(&self.settings.kind(), &self.known)
    }

    /// Returns the number of batches that a stream delivers from the first epoch on; `None` if whole shards
    /// are read, whose samples no index has counted.
    #[must_use]
    pub fn batches(&self) -> Option<u64> {
        self.settings.batches()
    }

    /// Returns the number of batches that a stream over whole shards with this many good samples delivers
    /// from the first epoch on, unless all samples in a batch are bad.
    #[must_use]
    pub fn stream_batches(&self, shard_samples: u64) -> u64 {
        self.settings.stream_batches(shard_samples)
    }

    /// Returns the metrics of every stage so far, over all streams from this loader.
    #[must_use]
    pub fn metrics(&self) -> MetricsSnapshot {
        self.pool.metrics().snapshot()
    }

    /// Returns the first 1,000 samples that were not delivered, each once, in the order found.
    #[must_use]
    pub fn skipped(&self) -> Vec<Skipped> {
        self.skips.skipped()
    }

    /// Returns the account of samples that were not delivered: exact numbers, and the first samples by name.
    #[must_use]
    pub fn skip_log(&self) -> &SkipLog {
        &self.skips
    }

    /// Returns the CPU time spent inside decode, resize and normalize so far, over all threads.
    #[must_use]
    pub fn kernel_cpu(&self) -> Duration {
        Duration::from_nanos(self.kernel_cpu_ns.load(Ordering::Relaxed))
    }
}

fn lock(tracker: &Mutex<Tracker>) -> MutexGuard<'_, Tracker> {
    tracker.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks, at the end of a stream, that every transform had a field; a restored stream does not know the
/// earlier samples.
async fn check_transforms(collator: &Collator, settings: &StreamSettings) -> Result<()> {
    let without_field = collator.transform_stage().and_then(|stage| stage.without_field());
    let samples = collator.skips().samples();
    match without_field.filter(|_| samples > 0 && settings.input.restored.is_none()) {
        Some(names) => Err(no_field_in_stream("transforms", names, samples, &settings.shards).await),
        None => Ok(()),
    }
}

/// Starts batches, ahead of the consumer; [`Refill`] cuts dealt samples into full batches.
fn begin(
    settings: Arc<StreamSettings>,
    known: KnownShards,
    collator: &Collator,
    ahead: usize,
) -> (Receiver<Result<BegunBatch>>, Option<Refill>) {
    let Some(deal) = settings.deal.clone() else {
        return (run_ahead(begin_batches(settings, known, collator.clone()), ahead), None);
    };
    let (replace, replaced) = unbounded_channel();
    let size = (settings.batch_size, settings.left_samples(&deal));
    let refill = Refill::new(size, &deal.dataset, replace);
    (run_ahead(begin_dealt_batches(settings, deal, collator.clone(), replaced), ahead), Some(refill))
}

/// Waits for the next begun batch and the decoders.
///
/// Bad samples are accounted for in batch order, so that a state contains exactly the bad samples up to the
/// delivered batch.
async fn next_batch(
    begun: &mut Receiver<Result<BegunBatch>>,
    refill: Option<&mut Refill>,
    collator: &Collator,
    tracker: &Mutex<Tracker>,
) -> Result<Option<Batch>> {
    if let Some(refill) = refill {
        return refill.next(begun, collator, tracker).await;
    }
    let Some(begun) = begun.recv().await.transpose()? else { return Ok(None) };
    let mut progressed = begun.progressed;
    let (skips, metrics) = (collator.skips(), collator.metrics());
    let skipped = progressed.skipped.len() as u64;
    progressed.skipped.drain(..).for_each(|skipped| skips.push(skipped));
    let (batch, _) = collator.finish(begun.batch).await?;
    let delivered = batch.samples.len() as u64;
    let (bad, bytes) = (begun.samples - delivered, batch.samples.iter().map(|sample| sample.bytes).sum());
    metrics.stage(LoaderStage::Collate).depth.remove(1);
    metrics.stage(LoaderStage::Collate).count(1, bytes);
    // A batch that ends the stream is not delivered: a state after it would lose the good samples.
    skips.check(false)?;
    let mut tracker = lock(tracker);
    tracker.advance(progressed, delivered, skipped + bad);
    tracker.note_first(skips.first());
    Ok(Some(batch))
}
