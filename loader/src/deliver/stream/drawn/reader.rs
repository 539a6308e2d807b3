//! Reads drawn samples at the index offsets, ahead of the decoders.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::Draw;
use crate::error::{Error, Result, Skipped};
use crate::fetch::{DatasetRanges, FieldRange, WantedFields};
use crate::flow::{ByteBudget, ByteLease, LoaderStage, Metrics};
use crate::index::FieldRow;
use crate::order::StepSample;
use crate::shard::{FieldSelection, RawField, RawSample, ShardItem, read_through};

/// Maximum number of queued samples, regardless of size, and of simultaneous requests.
const SAMPLES_WAITING: usize = 256;
/// Maximum number of decompressed shard bytes in memory; the last shard of each dataset is always kept.
const UNPACKED_BYTES_MAX: u64 = 256 << 20;

/// Settings for drawn sample readers.
#[derive(Debug, Clone)]
pub(in crate::deliver::stream) struct DrawnSettings {
    pub(in crate::deliver::stream) draw: Draw,
    pub(in crate::deliver::stream) metrics: Arc<Metrics>,
    pub(in crate::deliver::stream) field_bytes_max: u64,
    pub(in crate::deliver::stream) fields: FieldSelection,
    /// Whether every mapped payload byte is read, so that the consumer never waits for a disk.
    pub(in crate::deliver::stream) is_read_through: bool,
    /// Maximum number of bytes requested ahead from remote shards.
    pub(in crate::deliver::stream) requested_bytes_max: u64,
}

/// Sample of the rank's share, or the reason why it was skipped.
#[derive(Debug)]
pub(in crate::deliver::stream) struct DrawnItem {
    pub(in crate::deliver::stream) drawn: StepSample,
    pub(in crate::deliver::stream) item: ShardItem,
    /// Reader budget share that the sample holds.
    pub(in crate::deliver::stream) lease: Option<ByteLease>,
}

/// A sample without payloads, with its shard.
#[derive(Debug)]
struct PlannedSample {
    drawn: StepSample,
    shard: usize,
    sample: RawSample,
    /// Sample field ranges, in field order.
    ranges: Vec<FieldRange>,
}

/// Reads samples by draw.
#[derive(Debug)]
pub(super) struct DrawnReader {
    settings: DrawnSettings,
    ranges: DatasetRanges,
}

impl DrawnReader {
    pub(super) fn new(settings: DrawnSettings) -> Self {
        let ranges = DatasetRanges::new(settings.draw.datasets(), UNPACKED_BYTES_MAX, &settings.metrics);
        Self { settings, ranges }
    }

    fn plan(&self, drawn: StepSample) -> PlannedSample {
        let DrawnSettings { draw, fields, .. } = &self.settings;
        let index = draw.datasets()[drawn.dataset].index();
        let row = index.sample(drawn.sample);
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
            epoch: drawn.epoch,
            fields,
        };
        PlannedSample { drawn, shard: row.shard, sample, ranges }
    }

    /// Plans samples that are requested at the same time.
    fn plan_chunk(&self, draws: &mut impl Iterator<Item = StepSample>) -> Vec<PlannedSample> {
        let (mut chunk, mut bytes) = (Vec::new(), 0);
        while chunk.len() < SAMPLES_WAITING && bytes < self.settings.requested_bytes_max {
            let Some(drawn) = draws.next() else { break };
            let planned = self.plan(drawn);
            bytes += planned.sample.bytes();
            chunk.push(planned);
        }
        chunk
    }

    /// Returns the first field over the limit, for which the sample is bad.
    fn long_field<'a>(&self, sample: &'a RawSample) -> Option<&'a RawField> {
        sample.fields.iter().find(|field| field.bytes > self.settings.field_bytes_max)
    }

    /// Returns the fields to fetch from remote shards and tables.
    fn fetched(&self, chunk: &[PlannedSample]) -> WantedFields {
        let datasets = self.settings.draw.datasets();
        let mut wanted = vec![Vec::new(); datasets.len()];
        for PlannedSample { drawn, shard, sample, ranges } in chunk {
            let is_fetched = datasets[drawn.dataset].index().is_fetched(*shard);
            if is_fetched && self.long_field(sample).is_none() {
                wanted[drawn.dataset].extend(ranges.iter().map(|range| (*shard, *range)));
            }
        }
        wanted
    }

    /// Reads the payloads of a sample; blocks on a cold disk.
    fn read(&mut self, planned: PlannedSample) -> Result<DrawnItem> {
        let PlannedSample { drawn, shard, mut sample, ranges } = planned;
        let meter = self.settings.metrics.stage(LoaderStage::Read);
        self.settings.metrics.reads_shard(self.ranges.shard_number(drawn.dataset, shard));
        if let Some(field) = self.long_field(&sample) {
            let reason = format!("field of {} bytes, over {}", field.bytes, self.settings.field_bytes_max);
            let (shard, field) = (sample.shard.to_string(), Some(field.extension.to_string()));
            let skipped = Skipped { shard, offset: sample.offset, key: Some(sample.key), field, reason };
            meter.count(1, 0);
            meter.fail(1);
            return Ok(DrawnItem { drawn, item: ShardItem::Skipped(skipped), lease: None });
        }
        for (field, range) in sample.fields.iter_mut().zip(ranges) {
            let place = (drawn.dataset, shard);
            field.payload = Some(self.ranges.read_field(place, range, &sample.key, &field.extension)?);
        }
        meter.count(1, sample.bytes());
        let item = ShardItem::Sample(sample);
        if self.settings.is_read_through {
            read_through(&item);
        }
        Ok(DrawnItem { drawn, item, lease: None })
    }

    /// Reads a few samples, on a separate thread.
    pub(super) async fn read_all(mut self, draws: Vec<StepSample>) -> Result<(Self, Vec<ShardItem>)> {
        let chunk: Vec<PlannedSample> = draws.into_iter().map(|drawn| self.plan(drawn)).collect();
        let wanted = self.fetched(&chunk);
        self.ranges.fetch(wanted).await?;
        let read = tokio::task::spawn_blocking(move || {
            let items = chunk.into_iter().map(|planned| self.read(planned).map(|read| read.item));
            let items: Result<Vec<ShardItem>> = items.collect();
            self.ranges.forget_fetched();
            items.map(|items| (self, items))
        });
        read.await.map_err(|_| Error::StageEnded { stage: "read" })?
    }
}

/// The receiver was dropped.
struct ReceiverDropped;

struct ReadTask {
    reader: DrawnReader,
    budget: ByteBudget,
    sender: mpsc::Sender<Result<DrawnItem>>,
    runtime: Handle,
}

/// Starts reading the rank's samples in all steps; the channel ends after the last sample, or after an error.
pub(in crate::deliver::stream) fn read_drawn(
    settings: DrawnSettings,
    mut steps: Range<u64>,
    budget: ByteBudget,
) -> mpsc::Receiver<Result<DrawnItem>> {
    let (sender, receiver) = mpsc::channel(SAMPLES_WAITING);
    let runtime = Handle::current();
    let draw = settings.draw.clone();
    // A step that cannot be laid out ends the samples; the batches report why.
    let shares = std::iter::from_fn(move || draw.share(steps.next()?).ok());
    tokio::task::spawn_blocking(move || {
        let to_end = sender.clone();
        let task = ReadTask { reader: DrawnReader::new(settings), budget, sender, runtime };
        // `run` only fails if the receiver was dropped. A panic must not look like the end of the samples.
        if catch_unwind(AssertUnwindSafe(move || task.run(shares.flatten()))).is_err() {
            let _ = to_end.blocking_send(Err(Error::StageEnded { stage: "read" }));
        }
    });
    receiver
}

impl ReadTask {
    fn run(mut self, mut draws: impl Iterator<Item = StepSample>) -> Result<(), ReceiverDropped> {
        loop {
            let chunk = self.reader.plan_chunk(&mut draws);
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

    /// Fetches the remote fields and table rows of a chunk.
    fn fetch(&mut self, chunk: &[PlannedSample]) -> Result<Result<()>, ReceiverDropped> {
        let wanted = self.reader.fetched(chunk);
        if wanted.iter().all(Vec::is_empty) {
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

    fn deliver(&self, mut item: DrawnItem) -> Result<(), ReceiverDropped> {
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
