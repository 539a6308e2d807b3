//! Streams every sample in a shard list, in order and undecoded, and reports bad samples.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::BoxStream;

use super::field_selection::FieldSelection;
use super::list::Shard;
use super::order::{KnownShards, ShardPasses};
use super::reader::{ReaderSettings, read_shards};
use super::samples::{FIELD_BYTES_MAX, ShardItem};
use crate::error::Result;
use crate::flow::{ByteBudget, Metrics};

/// Maximum size of waiting payloads, in bytes.
const BUFFERED_BYTES_MAX: u64 = 64 << 20;

/// Reads shards from start to end, without an index and without an error budget.
///
/// Lazy: nothing is read until the first poll. A bad sample is an item and the stream continues; a shard that
/// cannot be opened is the last item, an error. Dropping the stream stops reading.
///
/// # Panics
/// If it is polled outside a Tokio runtime.
#[must_use]
pub fn scan_shards(shards: Vec<Shard>) -> BoxStream<'static, Result<ShardItem>> {
    let items = async_stream::stream! {
        let mut source = read_shards(ReaderSettings {
            shards,
            passes: ShardPasses { end_epoch: 1, ..ShardPasses::default() },
            known: KnownShards::default(),
            metrics: Arc::new(Metrics::new(0)),
            field_bytes_max: FIELD_BYTES_MAX,
            fields: FieldSelection::ALL,
            is_read_through: false,
            budget: ByteBudget::new(BUFFERED_BYTES_MAX, Arc::default()),
            requested_bytes_max: BUFFERED_BYTES_MAX,
        });
        while let Some(item) = source.recv().await {
            yield item.map(|item| item.item);
        }
    };
    items.boxed()
}
