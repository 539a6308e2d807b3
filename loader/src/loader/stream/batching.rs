//! Starts batches: every sample goes to its decoder as soon as it joins one.
//!
//! A sample that is decoded by itself holds its undecoded bytes until it is decoded, whatever becomes of its
//! batch, so those bytes stay within the budget or within one sample. What is delivered as one, decoded media
//! and samples as stored, is held per batch: within the budget, or one batch alone.

use async_stream::try_stream;

use super::builder::LoaderBuilder;
use super::shuffle_stage::{ShuffleStage, ShuffledItem};
use super::stream_state::Progressed;
use crate::decode::{Collator, Decode, PendingBatch, PendingSample};
use crate::error::Result;
use crate::flow::{ByteBudget, ByteLease, LoaderStage};
use crate::shard::{KnownShards, RawSample, ReaderSettings, read_shards};

/// A batch under way, and what it takes from the budgets until it is delivered.
pub(super) struct BegunBatch {
    pub(super) batch: PendingBatch,
    pub(super) samples: u64,
    /// Reading and shuffling since the previous batch.
    pub(super) progressed: Progressed,
    _leases: [ByteLease; 2],
}

/// Opens batches, and holds the budgets that they share.
struct BatchStarter {
    collator: Collator,
    encoded: ByteBudget,
    decoded: ByteBudget,
    batch_size: usize,
}

/// A batch that samples join.
struct OpenBatch<'a> {
    starter: &'a BatchStarter,
    /// Samples that were handed to decoders.
    pending: Vec<PendingSample>,
    /// Samples that wait until all of their batch are there, because they share a tensor.
    waiting: Vec<RawSample>,
    encoded: ByteLease,
    decoded: ByteLease,
}

impl BatchStarter {
    fn open(&self) -> OpenBatch<'_> {
        let (encoded, decoded) = (self.encoded.empty_lease(), self.decoded.empty_lease());
        let pending = Vec::with_capacity(self.batch_size);
        OpenBatch { starter: self, pending, waiting: Vec::new(), encoded, decoded }
    }
}

impl OpenBatch<'_> {
    fn len(&self) -> usize {
        self.pending.len() + self.waiting.len()
    }

    /// Takes a sample in; `lease` is the reader's, if the sample comes from there.
    async fn add(&mut self, raw: RawSample, lease: Option<ByteLease>) -> Result<()> {
        let (collator, bytes) = (&self.starter.collator, raw.bytes());
        match collator.decode_mode() {
            Decode::Media => {
                let lease = match lease {
                    Some(lease) => lease,
                    None => self.starter.encoded.lease(bytes).await?,
                };
                self.decoded.grow(collator.decoded_bytes(std::slice::from_ref(&raw))).await?;
                self.pending.push(collator.start_leased(raw, lease).await?);
            }
            mode => {
                self.encoded.grow(bytes).await?;
                drop(lease);
                if mode == Decode::Raw {
                    self.pending.push(collator.start_sample(raw).await?);
                } else {
                    self.waiting.push(raw);
                }
            }
        }
        Ok(())
    }

    async fn finish(mut self, progressed: Progressed) -> Result<BegunBatch> {
        let samples = self.len() as u64;
        let collator = &self.starter.collator;
        let batch = if matches!(collator.decode_mode(), Decode::Pixels { .. }) {
            collator.start(self.waiting).await?
        } else {
            collator.transform(self.pending.iter_mut());
            PendingBatch::Fields(self.pending)
        };
        collator.metrics().stage(LoaderStage::Collate).depth.add(1);
        Ok(BegunBatch { batch, samples, progressed, _leases: [self.encoded, self.decoded] })
    }
}

/// Collects samples to batches and starts their decoding; the last batch may have no sample.
pub(super) fn begin_batches(
    settings: LoaderBuilder,
    known: KnownShards,
    collator: Collator,
) -> impl futures::Stream<Item = Result<BegunBatch>> + Send {
    try_stream! {
        let (starter, mut feed) = start(&settings, known, collator).await?;
        let mut batch = starter.open();
        let mut left = settings.samples_max.unwrap_or(u64::MAX);
        while left > 0 {
            let fed = feed.next().await.inspect_err(|_| {
                // What was found before the end belongs to no batch any more.
                let skips = starter.collator.skips();
                feed.progressed().skipped.into_iter().for_each(|skipped| skips.push(skipped));
            })?;
            let Some(fed) = fed else { break };
            left -= 1;
            if let ShuffledItem::Sample(sample, lease) = fed {
                batch.add(sample, lease).await?;
            }
            if batch.len() == settings.batch_size {
                let full = std::mem::replace(&mut batch, starter.open());
                yield full.finish(feed.progressed()).await?;
            }
        }
        yield batch.finish(feed.progressed()).await?;
    }
}

/// Starts the reader, where a state says if there is one.
async fn start(
    settings: &LoaderBuilder,
    known: KnownShards,
    collator: Collator,
) -> Result<(BatchStarter, ShuffleStage)> {
    let input = &settings.input;
    let metrics = collator.metrics().clone();
    let is_leased_through = settings.decode == Decode::Media && input.shuffle.is_none();
    let half = settings.buffered_bytes_max / 2;
    let reader_bytes = if is_leased_through { settings.buffered_bytes_max } else { half };
    let passes = input.passes(settings.epochs);
    let start = passes.start;
    let source = read_shards(ReaderSettings {
        shards: settings.shards.clone(),
        passes,
        known,
        metrics: metrics.clone(),
        field_bytes_max: settings.field_bytes_max,
        fields: settings.read_fields(),
        is_read_through: settings.decode == Decode::Raw,
        budget: ByteBudget::new(reader_bytes, metrics.undecoded.clone()),
        requested_bytes_max: settings.buffered_bytes_max,
    });
    let mut feed = ShuffleStage::new(source, settings.shards.clone(), metrics.clone());
    feed.start_at(start);
    if let Some(buffer) = input.shuffle {
        let (epoch, drawn) = input.shuffled();
        let held = input.restored.as_ref().map_or(&[][..], |state| state.held());
        feed = feed.shuffle(buffer, epoch, drawn, held).await?;
    }
    let encoded = ByteBudget::new(half, metrics.undecoded.clone());
    let decoded = ByteBudget::new(settings.decoded_bytes_max, metrics.decoded.clone());
    Ok((BatchStarter { collator, encoded, decoded, batch_size: settings.batch_size }, feed))
}
