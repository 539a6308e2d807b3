//! Reads dealt samples at the index offsets, ahead of the decoders.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::{Deal, Sequence};
use crate::error::{Error, Result, Skipped};
use crate::fetch::{FieldRange, ShardRanges};
use crate::flow::{ByteBudget, LoaderStage, Metrics};
use crate::index::FieldRow;
use crate::shard::{
    FieldSelection, ItemPosition, Position, RawField, RawSample, ReaderItem, ShardItem, ShardOrder,
    read_through,
};

/// Maximum number of queued samples, regardless of size, and of simultaneous requests.
const SAMPLES_WAITING: usize = 256;
/// Maximum number of decompressed shard bytes in memory; the last shard is always kept.
const UNPACKED_BYTES_MAX: u64 = 256 << 20;

/// Settings for dealt sample readers.
#[derive(Debug, Clone)]
pub(in crate::deliver::stream) struct DealtSettings {
    pub(in crate::deliver::stream) deal: Deal,
    pub(in crate::deliver::stream) order: ShardOrder,
    pub(in crate::deliver::stream) metrics: Arc<Metrics>,
    pub(in crate::deliver::stream) field_bytes_max: u64,
    pub(in crate::deliver::stream) fields: FieldSelection,
    /// Whether every mapped payload byte is read, so that the consumer never waits for a disk.
    pub(in crate::deliver::stream) is_read_through: bool,
    /// Maximum number of bytes requested ahead from remote shards.
    pub(in crate::deliver::stream) requested_bytes_max: u64,
}

/// Item in the rank's sequence for an epoch.
#[derive(Debug, Clone, Copy)]
pub(in crate::deliver::stream) struct DealtItem {
    pub(in crate::deliver::stream) epoch: u64,
    pub(in crate::deliver::stream) item: u64,
    /// Whether it is read again because it was in a buffer when the state was saved.
    pub(in crate::deliver::stream) is_repeated: bool,
}

/// A sample without payloads, with its position.
#[derive(Debug)]
struct PlannedSample {
    place: ItemPosition,
    sample: RawSample,
    /// Sample field ranges, in field order.
    ranges: Vec<FieldRange>,
}

#[derive(Debug)]
struct SampleReader {
    settings: DealtSettings,
    ranges: ShardRanges,
    /// The sequence for the current epoch.
    sequence: Option<(u64, Sequence)>,
}

impl SampleReader {
    fn new(settings: DealtSettings) -> Self {
        let index = settings.deal.dataset.index().clone();
        let ranges = ShardRanges::new(index, UNPACKED_BYTES_MAX, settings.metrics.retries());
        Self { settings, ranges, sequence: None }
    }

    fn plan(&mut self, item: DealtItem) -> PlannedSample {
        let DealtSettings { deal, order, fields, .. } = &self.settings;
        let kept = self.sequence.take().filter(|(epoch, _)| *epoch == item.epoch);
        let (_, sequence) = self
            .sequence
            .insert(kept.unwrap_or_else(|| (item.epoch, Sequence::new(&deal.dataset, *order, item.epoch))));
        let place = sequence.place_at(deal.start() + item.item % deal.dataset.len());
        let index = deal.dataset.index();
        let row = index.sample(deal.dataset.sample_number(place));
        let wanted = FieldRange::row_fields(&row).filter(|(field, _)| fields.wants(field.extension));
        let (fields, ranges) = wanted
            .map(|(FieldRow { extension, offset, bytes, .. }, range)| {
                (RawField { extension: extension.into(), offset, bytes, payload: None, size: None }, range)
            })
            .unzip();
        let sample = RawSample {
            key: row.key().to_owned(),
            shard: index.shards()[row.shard].url.clone(),
            offset: row.offset(),
            epoch: item.epoch,
            fields,
        };
        let behind = Position { epoch: item.epoch, place: 0, items: item.item + 1 };
        let place = ItemPosition { shard: row.shard, behind, is_repeated: item.is_repeated };
        PlannedSample { place, sample, ranges }
    }

    /// Plans samples that are requested at the same time.
    fn plan_chunk(&mut self, items: &mut impl Iterator<Item = DealtItem>) -> Vec<PlannedSample> {
        let (mut chunk, mut bytes) = (Vec::new(), 0);
        while chunk.len() < SAMPLES_WAITING && bytes < self.settings.requested_bytes_max {
            let Some(item) = items.next() else { break };
            let planned = self.plan(item);
            bytes += planned.sample.bytes();
            chunk.push(planned);
        }
        chunk
    }

    /// Returns the first field over the limit, for which the sample is bad.
    fn long_field<'a>(&self, sample: &'a RawSample) -> Option<&'a RawField> {
        sample.fields.iter().find(|field| field.bytes > self.settings.field_bytes_max)
    }

    /// Returns the ranges to request from remote shards.
    fn remote(&self, chunk: &[PlannedSample]) -> Vec<(usize, u64, u64)> {
        let shards = self.settings.deal.dataset.index().shards();
        let is_read = |planned: &&PlannedSample| {
            shards[planned.place.shard].remote().is_some() && self.long_field(&planned.sample).is_none()
        };
        let fields = |planned: &PlannedSample| {
            let shard = planned.place.shard;
            planned.ranges.iter().map(|range| range.in_shard(shard)).collect::<Vec<_>>()
        };
        chunk.iter().filter(is_read).flat_map(fields).collect()
    }

    /// Reads the payloads of a sample; blocks on a cold disk.
    fn read(&mut self, planned: PlannedSample) -> Result<ReaderItem> {
        let PlannedSample { place, mut sample, ranges } = planned;
        let meter = self.settings.metrics.stage(LoaderStage::Read);
        self.settings.metrics.reads_shard(place.shard);
        if let Some(field) = self.long_field(&sample) {
            let reason = format!("field of {} bytes, over {}", field.bytes, self.settings.field_bytes_max);
            let (shard, field) = (sample.shard.to_string(), Some(field.extension.to_string()));
            let skipped = Skipped { shard, offset: sample.offset, key: Some(sample.key), field, reason };
            meter.count(1, 0);
            meter.fail(1);
            return Ok(ReaderItem { item: ShardItem::Skipped(skipped), place, lease: None });
        }
        for (field, range) in sample.fields.iter_mut().zip(ranges) {
            let payload = self.ranges.read_field(place.shard, range, &sample.key, &field.extension)?;
            field.payload = Some(payload);
        }
        meter.count(1, sample.bytes());
        let item = ShardItem::Sample(sample);
        if self.settings.is_read_through {
            read_through(&item);
        }
        Ok(ReaderItem { item, place, lease: None })
    }
}

/// The receiver was dropped.
struct ReceiverDropped;

struct ReadTask {
    reader: SampleReader,
    budget: ByteBudget,
    sender: mpsc::Sender<Result<ReaderItem>>,
    runtime: Handle,
}

/// Starts reading; the channel ends after the last item, or after an error.
pub(in crate::deliver::stream) fn read_dealt(
    settings: DealtSettings,
    items: impl Iterator<Item = DealtItem> + Send + 'static,
    budget: ByteBudget,
) -> mpsc::Receiver<Result<ReaderItem>> {
    let (sender, receiver) = mpsc::channel(SAMPLES_WAITING);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let to_end = sender.clone();
        let task = ReadTask { reader: SampleReader::new(settings), budget, sender, runtime };
        // `run` only fails if the receiver was dropped. A panic must not look like the end of the samples.
        if catch_unwind(AssertUnwindSafe(move || task.run(items))).is_err() {
            let _ = to_end.blocking_send(Err(Error::StageEnded { stage: "read" }));
        }
    });
    receiver
}

impl ReadTask {
    fn run(mut self, mut items: impl Iterator<Item = DealtItem>) -> Result<(), ReceiverDropped> {
        loop {
            let chunk = self.reader.plan_chunk(&mut items);
            if chunk.is_empty() {
                return Ok(());
            }
            if let Err(error) = self.fetch(&chunk)? {
                return self.fail(error);
            }
            for planned in chunk {
                let metrics = self.reader.settings.metrics.clone();
                match metrics.stage(LoaderStage::Read).timed(|| self.reader.read(planned)) {
                    Ok(item) => self.deliver(item)?,
                    Err(error) => return self.fail(error),
                }
            }
        }
    }

    /// Requests the remote fields of a chunk.
    fn fetch(&mut self, chunk: &[PlannedSample]) -> Result<Result<()>, ReceiverDropped> {
        let wanted = self.reader.remote(chunk);
        if wanted.is_empty() {
            return Ok(Ok(()));
        }
        let (ranges, sender) = (&mut self.reader.ranges, &self.sender);
        let fetch = async {
            tokio::select! {
                fetched = ranges.fetch(wanted) => Ok(fetched),
                () = sender.closed() => Err(ReceiverDropped),
            }
        };
        self.runtime.block_on(fetch)
    }

    fn deliver(&self, mut item: ReaderItem) -> Result<(), ReceiverDropped> {
        let meter = self.reader.settings.metrics.stage(LoaderStage::Read);
        if let ShardItem::Sample(sample) = &item.item {
            let bytes = sample.bytes();
            item.lease = self.budget.try_lease(bytes);
            if item.lease.is_none() {
                let since = Instant::now();
                let lease = self.runtime.block_on(self.budget.lease(bytes));
                meter.waited_for_room(since.elapsed());
                item.lease = Some(lease.map_err(|_| ReceiverDropped)?);
            }
        }
        meter.depth.add(1);
        let Err(refused) = self.sender.try_send(Ok(item)) else { return Ok(()) };
        let since = Instant::now();
        let sent = self.sender.blocking_send(refused.into_inner()).map_err(|_| ReceiverDropped);
        meter.waited_for_room(since.elapsed());
        sent
    }

    fn fail(&self, error: Error) -> Result<(), ReceiverDropped> {
        self.reader.settings.metrics.stage(LoaderStage::Read).fail(1);
        self.sender.blocking_send(Err(error)).map_err(|_| ReceiverDropped)
    }
}

/// Reads a sample at a time, to replace bad samples: the items that follow the rank's share in the last
/// epoch.
#[derive(Debug)]
pub(in crate::deliver::stream) struct Replacements {
    settings: DealtSettings,
    reader: Option<SampleReader>,
    next: DealtItem,
}

impl Replacements {
    /// Starts with an item; nothing is read until the first call to [`Self::next`].
    pub(in crate::deliver::stream) fn new(settings: DealtSettings, next: DealtItem) -> Self {
        Self { settings, reader: None, next }
    }

    /// Reads the next item.
    pub(in crate::deliver::stream) async fn next(&mut self) -> Result<ReaderItem> {
        let mut reader = self.reader.take().unwrap_or_else(|| SampleReader::new(self.settings.clone()));
        let planned = reader.plan(self.next);
        self.next.item += 1;
        let wanted = reader.remote(std::slice::from_ref(&planned));
        if !wanted.is_empty() {
            reader.ranges.fetch(wanted).await?;
        }
        let read = tokio::task::spawn_blocking(move || {
            let item = reader.read(planned);
            (reader, item)
        });
        let (reader, item) = read.await.map_err(|_| Error::StageEnded { stage: "read" })?;
        self.reader = Some(reader);
        item
    }
}
