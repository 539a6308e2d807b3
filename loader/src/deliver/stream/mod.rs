//! Delivers sample batches from a list of shards, in order.
//!
//! `reader thread → samples → decode pool → batches`; every arrow is a queue bounded in bytes or in batches,
//! so a slow consumer stops the reader. A shuffle buffer may follow the reader. The stream position is small
//! JSON, [`StreamState`]. Whole shards need no index. Samples that are drawn through indexes have the order
//! and the state of the balanced loader. [`crate::deliver`] is the loader that plans ahead.

mod batching;
mod builder;
mod drawn;
mod shuffle_stage;
mod stream_state;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_stream::try_stream;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc::Receiver;

use self::batching::{BegunBatch, begin_batches, begin_drawn_batches};
pub use self::builder::LoaderBuilder;
use self::drawn::{DrawnSettings, Refill};
use self::stream_state::Tracker;
pub use self::stream_state::{HELD_BYTES_MAX, StreamState};
pub use builder::RestoredInput;
use builder::StreamSettings;

use super::settings::no_field_in_stream;
use super::watchdog::Watchdog;
use crate::dataset::Dataset;
use crate::decode::{Batch, Collator, Decode, DecodePool, TransformStage};
use crate::error::{Error, Result, Skipped};
use crate::flow::{LoaderStage, MetricsSnapshot, SkipLog, metered, run_ahead};
use crate::order::LoaderState;
use crate::shard::{KnownShards, Shard};

/// Batches in order; an error is the last item.
pub type BatchStream = BoxStream<'static, Result<Batch>>;

/// Streams shard samples, decoded and in batches: in shard order, or in a global order through indexes.
#[derive(Debug)]
pub struct Loader {
    settings: Arc<StreamSettings>,
    pool: Arc<DecodePool>,
    skips: Arc<SkipLog>,
    kernel_cpu_ns: Arc<AtomicU64>,
    transforms: Option<Arc<TransformStage>>,
    known: KnownShards,
    tracker: Arc<Mutex<Tracker>>,
    /// Step after the last delivered batch, where samples are drawn.
    next_step: Arc<AtomicU64>,
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
    /// the batch size, or replaced where samples are drawn through an index; [`Loader::skipped`] lists them.
    /// An unreadable shard, or more bad samples than the budget allows, is the last item. Dropping the stream
    /// ends the reader and the decoders.
    ///
    /// # Panics
    /// If it is polled outside a Tokio runtime, or in a runtime without a timer.
    #[must_use]
    pub fn stream(&self) -> BatchStream {
        let settings = self.settings.clone();
        let (pool, skips, known) = (self.pool.clone(), self.skips.clone(), self.known.clone());
        let (metrics, delivered) = (self.pool.metrics().clone(), self.delivered());
        let transforms = self.transforms.clone();
        let batches = try_stream! {
            metrics.begin_stream();
            delivered.restart(&settings)?;
            if let Some(draw) = &settings.draw {
                metrics.name_sources(draw.datasets().iter().map(Dataset::name));
            }
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
                let next = next_batch(&mut begun, refill.as_mut(), &collator, &delivered);
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
    /// [`Error::State`] if more than [`HELD_BYTES_MAX`] wait in a buffer over pipes or standard input;
    /// [`Error::Config`] if samples are drawn through an index, see [`Self::run_state`].
    pub fn state(&self) -> Result<StreamState> {
        if self.is_drawn() {
            let reason = "samples are drawn through an index: use `run_state`".into();
            return Err(Error::Config { setting: "state", reason });
        }
        lock(&self.tracker).state(&self.settings.kind(), &self.known)
    }

    /// Returns the position after the last delivered batch, where samples are drawn through an index: the
    /// same on every rank after the same batch, for any number of ranks.
    ///
    /// # Errors
    /// [`Error::Config`] if whole shards are read, see [`Self::state`].
    pub fn run_state(&self) -> Result<LoaderState> {
        let Some(draw) = &self.settings.draw else {
            let reason = "whole shards are read: use `state`".into();
            return Err(Error::Config { setting: "run_state", reason });
        };
        draw.run.state(self.next_step.load(Ordering::Relaxed))
    }

    /// Returns whether samples are drawn through an index, by [`LoaderBuilder::samples_of_rank`].
    #[must_use]
    pub fn is_drawn(&self) -> bool {
        self.settings.draw.is_some()
    }

    fn delivered(&self) -> Delivered {
        Delivered { tracker: self.tracker.clone(), next_step: self.next_step.clone() }
    }

    /// Returns the number of batches that a stream delivers from the first epoch on; `None` if whole shards
    /// are read, whose samples no index has counted, or if the run has no end.
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

/// Account of the delivered batches, from which a state is saved.
struct Delivered {
    tracker: Arc<Mutex<Tracker>>,
    next_step: Arc<AtomicU64>,
}

impl Delivered {
    /// Goes back to the start of a stream.
    fn restart(&self, settings: &StreamSettings) -> Result<()> {
        *lock(&self.tracker) = settings.input.tracker()?;
        self.next_step.store(settings.first_step(), Ordering::Relaxed);
        Ok(())
    }
}

/// Checks, at the end of a stream, that every transform had a field; a restored stream does not know the
/// earlier samples, and the fields in an index were checked before.
async fn check_transforms(collator: &Collator, settings: &StreamSettings) -> Result<()> {
    let without_field = collator.transform_stage().and_then(|stage| stage.without_field());
    let samples = collator.skips().samples();
    let is_checked = settings.input.restored.is_some() || settings.draw.is_some();
    match without_field.filter(|_| samples > 0 && !is_checked) {
        Some(names) => Err(no_field_in_stream("transforms", names, samples, &settings.shards).await),
        None => Ok(()),
    }
}

/// Starts batches, ahead of the consumer; [`Refill`] finishes batches of drawn samples.
fn begin(
    settings: Arc<StreamSettings>,
    known: KnownShards,
    collator: &Collator,
    ahead: usize,
) -> (Receiver<Result<BegunBatch>>, Option<Refill>) {
    let Some(draw) = settings.draw.clone() else {
        return (run_ahead(begin_batches(settings, known, collator.clone()), ahead), None);
    };
    let drawn = DrawnSettings {
        draw,
        metrics: collator.metrics().clone(),
        field_bytes_max: settings.field_bytes_max,
        fields: settings.read_fields(),
        is_read_through: settings.shared.decode == Decode::Raw,
        requested_bytes_max: settings.buffered_bytes_max(),
    };
    let refill = Refill::new(drawn.clone());
    (run_ahead(begin_drawn_batches(settings, drawn, collator.clone()), ahead), Some(refill))
}

/// Waits for the next begun batch and the decoders.
///
/// Bad samples are accounted for in batch order, so that a state contains exactly the bad samples up to the
/// delivered batch.
async fn next_batch(
    begun: &mut Receiver<Result<BegunBatch>>,
    refill: Option<&mut Refill>,
    collator: &Collator,
    delivered: &Delivered,
) -> Result<Option<Batch>> {
    let Some(begun) = begun.recv().await.transpose()? else { return Ok(None) };
    let mut progressed = begun.progressed;
    let (skips, meter) = (collator.skips(), collator.metrics().stage(LoaderStage::Collate));
    let skipped = progressed.skipped.len() as u64;
    progressed.skipped.drain(..).for_each(|skipped| skips.push(skipped));
    let batch = match (refill, &begun.drawn) {
        (Some(refill), Some((_, slots))) => refill.finish(begun.batch, slots, collator).await?,
        _ => collator.finish(begun.batch).await?.0,
    };
    meter.depth.remove(1);
    meter.count(1, batch.samples.iter().map(|sample| sample.bytes).sum());
    // A batch that ends the stream is not delivered: a state after it would lose the good samples.
    skips.check(false)?;
    if let Some((step, _)) = begun.drawn {
        delivered.next_step.store(step + 1, Ordering::Relaxed);
        return Ok(Some(batch));
    }
    let good = batch.samples.len() as u64;
    let mut tracker = lock(&delivered.tracker);
    tracker.advance(progressed, good, skipped + begun.samples - good);
    tracker.note_first(skips.first());
    Ok(Some(batch))
}
