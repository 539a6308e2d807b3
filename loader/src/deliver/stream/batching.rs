//! Starts batches: every sample is sent to a decoder as soon as it joins a batch.
//!
//! A sample that is decoded separately holds the undecoded bytes until it is decoded, whatever becomes of the
//! batch, so those bytes stay within the budget or within one sample. Data that is delivered together,
//! decoded media and samples as stored, is held per batch: within the budget, or one batch.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_stream::try_stream;
use tokio::sync::mpsc::Receiver;

use super::builder::StreamSettings;
use super::drawn::{DrawnItem, DrawnSettings, read_drawn};
use super::shuffle_stage::{ShuffleStage, ShuffledItem};
use super::stream_state::Progressed;
use crate::decode::{Collator, Decode, PendingBatch, PendingSample};
use crate::deliver::settings::no_field_in_stream;
use crate::error::{Error, Result};
use crate::flow::{ByteBudget, ByteLease, LoaderStage, Metrics};
use crate::order::StepSample;
use crate::shard::{
    FieldSelection, KnownShards, Position, RawSample, ReaderItem, ReaderSettings, ShardItem, read_shards,
};

/// A batch in progress, with the leases that it holds until delivery.
pub(super) struct BegunBatch {
    pub(super) batch: PendingBatch,
    pub(super) samples: u64,
    /// Reading and shuffling since the previous batch.
    pub(super) progressed: Progressed,
    /// For drawn samples, the step and the samples that were drawn for it.
    pub(super) drawn: Option<(u64, Vec<DrawnSlot>)>,
    _leases: [ByteLease; 2],
}

/// Sample drawn for a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrawnSlot {
    pub(super) drawn: StepSample,
    /// Whether the sample was read, and is in the batch that is being decoded.
    pub(super) is_read: bool,
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
    /// Samples that wait until the batch is complete, because they share a tensor.
    waiting: Vec<RawSample>,
    encoded: ByteLease,
    decoded: ByteLease,
}

impl BatchStarter {
    fn new(settings: &StreamSettings, collator: Collator) -> Self {
        let metrics = collator.metrics();
        let encoded = ByteBudget::new(settings.buffered_bytes_max() / 2, metrics.undecoded.clone());
        let decoded = ByteBudget::new(settings.decoded_bytes_max, metrics.decoded.clone());
        Self { collator, encoded, decoded, batch_size: settings.batch_size }
    }

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

    /// Adds a sample; `lease` is the reader's, if the sample comes from a reader.
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
        Ok(BegunBatch { batch, samples, progressed, drawn: None, _leases: [self.encoded, self.decoded] })
    }
}

/// Collects samples into batches and starts decoding; the last batch may have no sample.
pub(super) fn begin_batches(
    settings: Arc<StreamSettings>,
    known: KnownShards,
    collator: Collator,
) -> impl futures::Stream<Item = Result<BegunBatch>> + Send {
    try_stream! {
        let (starter, mut feed) = start(&settings, known, collator).await?;
        let mut batch = starter.open();
        let mut fields = FieldWatch::new(&settings);
        let mut left = settings.samples_max.unwrap_or(u64::MAX);
        while left > 0 {
            let fed = feed.next().await.inspect_err(|_| {
                // Samples skipped before the end do not belong to a batch any more.
                let skips = starter.collator.skips();
                feed.progressed().skipped.into_iter().for_each(|skipped| skips.push(skipped));
            })?;
            let Some(fed) = fed else { break };
            left -= 1;
            if let ShuffledItem::Sample(sample, lease) = fed {
                fields.note(&sample).await?;
                batch.add(sample, lease).await?;
            }
            if batch.len() == settings.batch_size {
                let full = std::mem::replace(&mut batch, starter.open());
                yield full.finish(feed.progressed()).await?;
            }
        }
        fields.check().await?;
        if settings.drops_last {
            batch = starter.open();
        }
        yield batch.finish(feed.progressed()).await?;
    }
}

/// Watches whether samples have the fields that were named, until every name has matched.
struct FieldWatch<'a> {
    settings: &'a StreamSettings,
    /// Sample extensions so far; `None` once every name has matched an extension.
    found: Option<BTreeSet<Arc<str>>>,
    samples: u64,
    epoch: Option<u64>,
}

impl<'a> FieldWatch<'a> {
    fn new(settings: &'a StreamSettings) -> Self {
        // A restored stream does not know the samples before.
        let is_watching = !settings.shared.fields.is_all() && settings.input.restored.is_none();
        Self { settings, found: is_watching.then(BTreeSet::new), samples: 0, epoch: None }
    }

    async fn note(&mut self, sample: &RawSample) -> Result<()> {
        if self.found.is_none() {
            return Ok(());
        }
        if *self.epoch.get_or_insert(sample.epoch) != sample.epoch {
            self.check().await?;
        }
        self.samples += 1;
        let Some(found) = &mut self.found else { return Ok(()) };
        let known = found.len();
        for field in &sample.fields {
            if !found.contains(&field.extension) {
                found.insert(field.extension.clone());
            }
        }
        if found.len() > known && self.unmatched().is_none() {
            self.found = None;
        }
        Ok(())
    }

    /// Checks that the samples in the epoch had all fields.
    async fn check(&self) -> Result<()> {
        match self.unmatched().filter(|_| self.samples > 0) {
            Some(fields) => {
                Err(no_field_in_stream("fields", &fields, self.samples, &self.settings.shards).await)
            }
            None => Ok(()),
        }
    }

    /// Returns the names that no sample has matched.
    fn unmatched(&self) -> Option<FieldSelection> {
        let found = self.found.as_ref()?;
        self.settings.shared.fields.unmatched(&found.iter().map(|extension| &**extension))
    }
}

/// Collects the rank's samples in each step into a batch and starts decoding.
pub(super) fn begin_drawn_batches(
    settings: Arc<StreamSettings>,
    drawn: DrawnSettings,
    collator: Collator,
) -> impl futures::Stream<Item = Result<BegunBatch>> + Send {
    try_stream! {
        let (draw, metrics) = (drawn.draw.clone(), drawn.metrics.clone());
        let steps = draw.run.first_step()..draw.end.unwrap_or(u64::MAX);
        let budget = ByteBudget::new(settings.reader_bytes(), metrics.undecoded.clone());
        let mut source = read_drawn(drawn, steps.clone(), budget);
        let starter = BatchStarter::new(&settings, collator);
        for step in steps {
            let (mut batch, mut progressed) = (starter.open(), Progressed::default());
            let mut slots = Vec::with_capacity(starter.batch_size);
            for _ in 0..draw.share_len(step)? {
                let read = source.recv().await.transpose().inspect_err(|_| {
                    let skips = starter.collator.skips();
                    progressed.skipped.drain(..).for_each(|skipped| skips.push(skipped));
                })?;
                let DrawnItem { drawn, item, lease } = read.ok_or(Error::StageEnded { stage: "read" })?;
                metrics.stage(LoaderStage::Read).depth.remove(1);
                slots.push(DrawnSlot { drawn, is_read: matches!(item, ShardItem::Sample(_)) });
                match item {
                    ShardItem::Sample(sample) => batch.add(sample, lease).await?,
                    ShardItem::Skipped(skipped) => progressed.skipped.push(skipped),
                }
            }
            let begun = batch.finish(progressed).await?;
            yield BegunBatch { drawn: Some((step, slots)), ..begun };
        }
    }
}

/// Starts the reader, at the position in the state if there is a state.
async fn start(
    settings: &StreamSettings,
    known: KnownShards,
    collator: Collator,
) -> Result<(BatchStarter, ShuffleStage)> {
    let metrics = collator.metrics().clone();
    let passes = settings.input.passes(settings.epochs);
    let start = passes.start;
    let source = read_shards(ReaderSettings {
        shards: settings.shards.clone(),
        passes,
        known,
        metrics: metrics.clone(),
        field_bytes_max: settings.field_bytes_max,
        fields: settings.read_fields(),
        is_read_through: settings.shared.decode == Decode::Raw,
        budget: ByteBudget::new(settings.reader_bytes(), metrics.undecoded.clone()),
        requested_bytes_max: settings.buffered_bytes_max(),
    });
    let feed = shuffled(settings, source, start, metrics).await?;
    Ok((BatchStarter::new(settings, collator), feed))
}

/// Starts the shuffle buffer, if there is one, over a reader that starts at a position.
async fn shuffled(
    settings: &StreamSettings,
    source: Receiver<Result<ReaderItem>>,
    start: Position,
    metrics: Arc<Metrics>,
) -> Result<ShuffleStage> {
    let input = &settings.input;
    let mut feed = ShuffleStage::new(source, settings.shards.clone(), metrics);
    feed.start_at(start);
    if let Some(buffer) = input.shuffle {
        let (epoch, drawn) = input.shuffled();
        let held = input.restored.as_ref().map_or(&[][..], |state| state.held());
        feed = feed.shuffle(buffer, epoch, drawn, held).await?;
    }
    Ok(feed)
}
