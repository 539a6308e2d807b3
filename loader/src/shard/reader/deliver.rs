//! Delivers items to the consumer, bounding waiting samples and bytes.

use super::{Reader, ReaderItem, ReceiverDropped};
use crate::flow::{ByteLease, LoaderStage};
use crate::shard::order::ShardPass;
use crate::shard::samples::ShardItem;

impl Reader {
    pub(super) async fn deliver(
        &self,
        item: ShardItem,
        pass: &ShardPass,
        number: u64,
    ) -> Result<(), ReceiverDropped> {
        match self.deliver_now(item, pass, number) {
            Ok(()) => Ok(()),
            Err(item) => self.deliver_later(item, pass, number).await,
        }
    }

    /// Delivers an item if there is room, without reading the clock; else returns it.
    pub(super) fn deliver_now(
        &self,
        mut item: ShardItem,
        pass: &ShardPass,
        number: u64,
    ) -> Result<(), ShardItem> {
        if let ShardItem::Sample(sample) = &mut item {
            sample.epoch = pass.epoch;
        }
        let Ok(room) = self.sender.try_reserve() else { return Err(item) };
        let lease = match &item {
            ShardItem::Skipped(_) => None,
            ShardItem::Sample(sample) => match self.config.budget.try_lease(sample.bytes()) {
                Some(lease) => Some(lease),
                None => return Err(item),
            },
        };
        room.send(Ok(self.counted(item, pass, number, lease)));
        Ok(())
    }

    /// Waits for room and delivers an item.
    pub(super) async fn deliver_later(
        &self,
        item: ShardItem,
        pass: &ShardPass,
        number: u64,
    ) -> Result<(), ReceiverDropped> {
        let paused = self.pause_work();
        let lease = match &item {
            ShardItem::Skipped(_) => None,
            ShardItem::Sample(sample) => {
                Some(self.config.budget.lease(sample.bytes()).await.map_err(|_| ReceiverDropped)?)
            }
        };
        let room = self.sender.reserve().await.map_err(|_| ReceiverDropped)?;
        room.send(Ok(self.counted(item, pass, number, lease)));
        self.config.metrics.stage(LoaderStage::Read).waited_for_room(self.resume_work() - paused);
        Ok(())
    }

    fn counted(
        &self,
        item: ShardItem,
        pass: &ShardPass,
        number: u64,
        lease: Option<ByteLease>,
    ) -> ReaderItem {
        let meter = self.config.metrics.stage(LoaderStage::Read);
        let (bytes, errors) = match &item {
            ShardItem::Sample(sample) => (sample.bytes(), 0),
            ShardItem::Skipped(_) => (0, 1),
        };
        meter.count(1, bytes);
        if errors > 0 {
            meter.fail(errors);
        }
        meter.depth.add(1);
        ReaderItem { item, place: pass.item_position(number), lease }
    }
}
