//! Starts batches: every sample is sent to a decoder as soon as it joins a batch.
//!
//! A sample that is decoded separately holds the undecoded bytes until it is decoded, whatever becomes of the
//! batch, so those bytes stay within the budget or within one sample. Data that is delivered together,
//! decoded media and samples as stored, is held per batch: within the budget, or one batch.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_stream::try_stream;
use tokio::sync::mpsc::{Receiver, UnboundedReceiver};

use super::builder::StreamSettings;
use super::dealt::{Deal, DealtItem, DealtSettings, Replacements, read_dealt};
use super::shuffle_stage::{ShuffleStage, ShuffledItem};
use super::stream_state::Progressed;
use crate::decode::{Collator, Decode, PendingBatch, PendingSample};
use crate::deliver::settings::no_field_in_stream;
use crate::error::{Error, Result, SelectionError};
use crate::flow::{ByteBudget, ByteLease, LoaderStage, Metrics};
use crate::shard::{
    FieldSelection, KnownShards, Position, RawSample, ReaderItem, ReaderSettings, ShardItem, ShardPasses,
    read_shards,
};

/// A batch in progress, with the leases that it holds until delivery.
pub(super) struct BegunBatch {
    pub(super) batch: PendingBatch,
    pub(super) samples: u64,
    /// Reading and shuffling since the previous batch.
    pub(super) progressed: Progressed,
    /// For dealt samples, reading and shuffling per sample; `progressed` is empty then.
    pub(super) steps: Vec<Progressed>,
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
        Ok(BegunBatch {
            batch,
            samples,
            progressed,
            steps: Vec::new(),
            _leases: [self.encoded, self.decoded],
        })
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

/// Collects dealt samples into batches and starts decoding; after the samples in the pass, adds as many more
/// as `replace` requests.
pub(super) fn begin_dealt_batches(
    settings: Arc<StreamSettings>,
    deal: Deal,
    collator: Collator,
    mut replace: UnboundedReceiver<u64>,
) -> impl futures::Stream<Item = Result<BegunBatch>> + Send {
    try_stream! {
        let (starter, mut feed) = start_dealt(&settings, &deal, collator).await?;
        let (mut batch, mut steps) = (starter.open(), Vec::with_capacity(settings.batch_size));
        let mut behind = Progressed::default();
        let mut left = settings.left_samples(&deal);
        while left > 0 {
            let (fed, progressed) = feed.next().await?;
            behind.append(progressed);
            if behind.skipped.len() as u64 > deal.dataset.len() {
                Err(no_samples(&deal, &mut behind, &starter.collator))?;
            }
            if let ShuffledItem::Sample(sample, lease) = fed {
                batch.add(sample, lease).await?;
                steps.push(std::mem::take(&mut behind));
                left -= 1;
            }
            if batch.len() == settings.batch_size || (left == 0 && batch.len() > 0) {
                let full = std::mem::replace(&mut batch, starter.open());
                let begun = full.finish(Progressed::default()).await?;
                yield BegunBatch { steps: std::mem::take(&mut steps), ..begun };
            }
            if left == 0 {
                left = asked_for(&mut replace).await;
            }
        }
    }
}

/// Accounts for the samples of a complete epoch, all of which were skipped.
fn no_samples(deal: &Deal, behind: &mut Progressed, collator: &Collator) -> Error {
    let reason = format!("{} in a row were skipped", behind.skipped.len());
    behind.skipped.drain(..).for_each(|skipped| collator.skips().push(skipped));
    Error::Selection(SelectionError::NoSamples { dataset: deal.dataset.display(), reason })
}

/// Waits for samples to be asked for; 0 if no more will be.
async fn asked_for(replace: &mut UnboundedReceiver<u64>) -> u64 {
    let Some(mut samples) = replace.recv().await else { return 0 };
    while let Ok(more) = replace.try_recv() {
        samples += more;
    }
    samples
}

/// Feeds the samples in a pass, then the replacements for bad samples.
struct DealtFeed {
    own: ShuffleStage,
    replacements: Replacements,
    is_own_over: bool,
}

impl DealtFeed {
    /// Waits for the next sample, and returns the progress with it.
    async fn next(&mut self) -> Result<(ShuffledItem, Progressed)> {
        if !self.is_own_over {
            if let Some(fed) = self.own.next().await? {
                return Ok((fed, self.own.progressed()));
            }
            self.is_own_over = true;
        }
        let item = self.replacements.next().await?;
        let mut progressed = Progressed { position: item.place.behind, ..self.own.progressed() };
        let fed = match item.item {
            ShardItem::Sample(sample) => ShuffledItem::Sample(sample, None),
            ShardItem::Skipped(skipped) => {
                progressed.skipped.push(skipped);
                ShuffledItem::Skipped
            }
        };
        Ok((fed, progressed))
    }
}

/// Starts the dealt sample reader, at the position in the state if there is a state.
async fn start_dealt(
    settings: &StreamSettings,
    deal: &Deal,
    collator: Collator,
) -> Result<(BatchStarter, DealtFeed)> {
    let input = &settings.input;
    let metrics = collator.metrics().clone();
    let ShardPasses { order, start, end_epoch, again, .. } = input.passes(settings.epochs);
    let reader = DealtSettings {
        deal: deal.clone(),
        order,
        metrics: metrics.clone(),
        field_bytes_max: settings.field_bytes_max,
        fields: settings.read_fields(),
        is_read_through: settings.shared.decode == Decode::Raw,
        requested_bytes_max: settings.buffered_bytes_max(),
    };
    let of_epoch = deal.epoch_samples(settings.drops_last);
    let held = again.into_values().flatten();
    let held = held.map(move |item| DealtItem { epoch: start.epoch, item, is_repeated: true });
    let own = (start.epoch..end_epoch).flat_map(move |epoch| {
        let from = if epoch == start.epoch { start.items } else { 0 };
        (from..of_epoch).map(move |item| DealtItem { epoch, item, is_repeated: false })
    });
    let last_epoch = end_epoch.saturating_sub(1);
    let item = if start.epoch >= last_epoch { start.items.max(of_epoch) } else { of_epoch };
    let replacement = DealtItem { epoch: start.epoch.max(last_epoch), item, is_repeated: false };
    let replacements = Replacements::new(reader.clone(), replacement);
    let source = read_dealt(
        reader,
        held.chain(own),
        ByteBudget::new(settings.reader_bytes(), metrics.undecoded.clone()),
    );
    let own = shuffled(settings, source, start, metrics.clone()).await?;
    let starter = BatchStarter::new(settings, collator);
    Ok((starter, DealtFeed { own, replacements, is_own_over: false }))
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
