//! Feeds samples to batches: in shard order, or through the shuffle buffer.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::stream_state::{BufferedSample, BufferedSampleState, Change, Progressed};
use crate::error::{Error, Result, Skipped};
use crate::flow::{ByteLease, LoaderStage, Metrics};
use crate::order::{ShuffleBuffer, Shuffler};
use crate::shard::{Position, RawSample, ReaderItem, Shard, ShardItem, is_rereadable};

/// Next input item.
#[derive(Debug)]
pub(super) enum ShuffledItem {
    /// A sample; the reader's lease, if it comes straight from there.
    Sample(RawSample, Option<ByteLease>),
    /// A sample was skipped; see [`ShuffleStage::progressed`].
    Skipped,
}

/// Draws samples from the reader and keeps account of the consumed input.
#[derive(Debug)]
pub(super) struct ShuffleStage {
    source: mpsc::Receiver<Result<ReaderItem>>,
    shards: Vec<Shard>,
    metrics: Arc<Metrics>,
    shuffler: Option<Shuffler<RawSample>>,
    /// The first item of the next epoch, which waits until the buffer has drained.
    ahead: Option<ReaderItem>,
    progressed: Progressed,
}

impl ShuffleStage {
    pub(super) fn new(
        source: mpsc::Receiver<Result<ReaderItem>>,
        shards: Vec<Shard>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let progressed = Progressed::default();
        Self { source, shards, metrics, shuffler: None, ahead: None, progressed }
    }

    /// Sets the position that the input starts at.
    pub(super) fn start_at(&mut self, position: Position) {
        self.progressed.position = position;
    }

    /// Starts to shuffle, with the buffered samples from a state that was saved inside an epoch.
    pub(super) async fn shuffle(
        mut self,
        buffer: ShuffleBuffer,
        epoch: u64,
        drawn: u64,
        held: &[BufferedSampleState],
    ) -> Result<Self> {
        let waiting = self.read_again(held).await?;
        self.shuffler = Some(Shuffler::resume(buffer, (epoch, drawn), waiting));
        Ok(self)
    }

    /// Returns and resets the progress since the previous call.
    pub(super) fn progressed(&mut self) -> Progressed {
        let position = self.progressed.position;
        std::mem::replace(&mut self.progressed, Progressed { position, ..Progressed::default() })
    }

    /// Waits for the next sample; `None` after the last.
    pub(super) async fn next(&mut self) -> Result<Option<ShuffledItem>> {
        if self.shuffler.is_none() {
            let Some(item) = self.receive().await? else { return Ok(None) };
            self.progressed.position = item.place.behind;
            return Ok(Some(match item.item {
                ShardItem::Sample(sample) => ShuffledItem::Sample(sample, item.lease),
                ShardItem::Skipped(skipped) => self.skip(skipped),
            }));
        }
        self.next_shuffled().await
    }

    async fn next_shuffled(&mut self) -> Result<Option<ShuffledItem>> {
        while self.shuffler.as_ref().is_some_and(Shuffler::has_room) {
            let Some(item) = self.next_of_epoch().await? else { break };
            self.progressed.position = item.place.behind;
            match item.item {
                ShardItem::Skipped(skipped) => return Ok(Some(self.skip(skipped))),
                ShardItem::Sample(sample) => {
                    let is_rereadable = is_rereadable(&self.shards[item.place.shard]);
                    let held = BufferedSample::new(&item.place, &sample, is_rereadable);
                    self.progressed.changes.push(Change::Push(held));
                    let bytes = sample.bytes();
                    if let Some(shuffler) = &mut self.shuffler {
                        shuffler.push(sample, bytes);
                    }
                }
            }
        }
        let Some((at, sample)) = self.shuffler.as_mut().and_then(Shuffler::draw) else { return Ok(None) };
        self.progressed.changes.push(Change::Draw(at));
        Ok(Some(ShuffledItem::Sample(sample, None)))
    }

    /// Returns the next item, unless it is from the next epoch and the buffer still has samples from this
    /// epoch.
    async fn next_of_epoch(&mut self) -> Result<Option<ReaderItem>> {
        let item = match self.ahead.take() {
            Some(item) => item,
            None => match self.receive().await? {
                Some(item) => item,
                None => return Ok(None),
            },
        };
        let epoch = item.place.behind.epoch;
        let Some(shuffler) = &mut self.shuffler else { return Ok(Some(item)) };
        if epoch == shuffler.epoch() {
            return Ok(Some(item));
        }
        if !shuffler.is_empty() {
            self.ahead = Some(item);
            return Ok(None);
        }
        shuffler.begin_epoch(epoch);
        self.progressed.changes.push(Change::Epoch);
        Ok(Some(item))
    }

    fn skip(&mut self, skipped: Skipped) -> ShuffledItem {
        self.progressed.skipped.push(skipped);
        ShuffledItem::Skipped
    }

    async fn receive(&mut self) -> Result<Option<ReaderItem>> {
        let Some(item) = self.source.recv().await.transpose()? else { return Ok(None) };
        self.metrics.stage(LoaderStage::Read).depth.remove(1);
        Ok(Some(item))
    }

    /// Receives the samples that the reader reads again and restores the buffer positions.
    async fn read_again(&mut self, held: &[BufferedSampleState]) -> Result<Vec<(RawSample, u64)>> {
        let mut missing = BTreeMap::new();
        let mut waiting: Vec<Option<RawSample>> = Vec::with_capacity(held.len());
        for (at, held) in held.iter().enumerate() {
            waiting.push(held.read()?.sample);
            if held.sample.is_none() && missing.insert((held.shard, held.item), at).is_some() {
                let (shard, item) = (held.shard, held.item);
                let reason = format!("item {item} of shard {shard} is twice in the buffer");
                return Err(Error::State { reason });
            }
        }
        while let Some((_, &first)) = missing.first_key_value() {
            let item = self.receive().await?.filter(|item| item.place.is_repeated);
            let Some(item) = item else { return Err(held[first].is_gone(&self.shards)) };
            let place = (item.place.shard, item.place.behind.items - 1);
            let Some(at) = missing.remove(&place) else { return Err(held[first].is_gone(&self.shards)) };
            match item.item {
                ShardItem::Sample(sample) if sample.offset == held[at].offset => waiting[at] = Some(sample),
                _ => return Err(held[at].is_gone(&self.shards)),
            }
        }
        let with_bytes = |sample: RawSample| {
            let bytes = sample.bytes();
            (sample, bytes)
        };
        Ok(waiting.into_iter().flatten().map(with_bytes).collect())
    }
}
