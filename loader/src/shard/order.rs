//! Orders shards by epoch, selects the items to read from each shard, and records the reader position.
//!
//! An *item* is a sample or a skipped entry in a shard, counted from 0 in shard order. Reading one shard once
//! is a *pass*. The epoch order is computed arithmetically, so a [`Position`] with three numbers records
//! everything that was read. [`crate::shard`] runs the passes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

use super::list::Shard;
use crate::error::{Error, Result};
use crate::store::Location;
use dflop_costmodel::random::{Permutation, mix64};

/// Number of bytes at the start of a shard that the digest covers: the first header.
pub(crate) const HEADER_BYTES: usize = 512;

/// Order in which one rank reads the shards in a list, epoch by epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ShardOrder {
    /// Order seed; `None` keeps the list order.
    pub(crate) seed: Option<u64>,
    /// Rank index; the rank reads every `world`-th shard in epoch order, starting with shard `rank`.
    pub(crate) rank: usize,
    /// Number of ranks that share the shards.
    pub(crate) world: usize,
}

impl fmt::Display for ShardOrder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            Some(seed) => write!(formatter, "shuffled by seed {seed}")?,
            None => formatter.write_str("in the order of the list")?,
        }
        write!(formatter, " to rank {} of {}", self.rank, self.world)
    }
}

impl Default for ShardOrder {
    fn default() -> Self {
        Self { seed: None, rank: 0, world: 1 }
    }
}

impl ShardOrder {
    /// Checks that every rank has a shard to read.
    pub(crate) fn check(&self, shards: usize) -> Result<()> {
        let invalid = |reason| Err(Error::Config { setting: "shards_of_rank", reason });
        if self.rank >= self.world {
            return invalid(format!("rank {} is not below {} ranks", self.rank, self.world));
        }
        if shards < self.world {
            return invalid(format!("{shards} shards cannot be dealt to {} ranks, one each", self.world));
        }
        Ok(())
    }

    /// Returns the number of shards that this rank reads per epoch.
    pub(crate) fn places(&self, shards: usize) -> usize {
        (shards - self.rank).div_ceil(self.world)
    }

    /// Returns the list index of the shard at `place` in this rank's epoch order.
    pub(crate) fn shard_at(&self, shards: usize, epoch: u64, place: usize) -> usize {
        // Interleaved, so that shard counts differ between ranks by at most one.
        let at = self.rank + place * self.world;
        match self.seed {
            None => at,
            Some(seed) => Permutation::new(shards as u64, mix64(mix64(seed) ^ epoch)).at(at as u64) as usize,
        }
    }
}

/// Reader position: everything before it was consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Position {
    pub(crate) epoch: u64,
    /// Place of the shard in this rank's epoch order.
    pub(crate) place: usize,
    /// Number of consumed items in that shard.
    pub(crate) items: u64,
}

/// Item position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ItemPosition {
    /// Shard index in the list.
    pub(crate) shard: usize,
    /// Reader position after the item.
    pub(crate) behind: Position,
    /// Whether the item is read again because it was in a buffer when the state was saved.
    pub(crate) is_repeated: bool,
}

/// Item selection in a pass.
#[derive(Debug, Clone)]
pub(crate) enum WantedItems {
    /// All items from this item on.
    From(u64),
    /// Exactly these items, in order.
    Only(Vec<u64>),
}

/// Single pass over a shard.
#[derive(Debug, Clone)]
pub(crate) struct ShardPass {
    pub(crate) shard: usize,
    pub(crate) epoch: u64,
    pub(crate) place: usize,
    /// Index of the first item that the input contains.
    pub(crate) first: u64,
    pub(crate) wanted: WantedItems,
}

impl ShardPass {
    /// Returns whether the item is selected.
    pub(crate) fn wants(&self, item: u64) -> bool {
        match &self.wanted {
            WantedItems::From(first) => item >= *first,
            WantedItems::Only(items) => items.binary_search(&item).is_ok(),
        }
    }

    /// Returns whether neither this item nor any later item is selected.
    pub(crate) fn is_over(&self, item: u64) -> bool {
        matches!(&self.wanted, WantedItems::Only(items) if items.last().is_none_or(|last| item > *last))
    }

    /// Returns the first selected item from `item` on.
    pub(crate) fn next_wanted(&self, item: u64) -> Option<u64> {
        match &self.wanted {
            WantedItems::From(first) => Some(item.max(*first)),
            WantedItems::Only(items) => items.get(items.partition_point(|&wanted| wanted < item)).copied(),
        }
    }

    pub(crate) fn item_position(&self, item: u64) -> ItemPosition {
        let behind = Position { epoch: self.epoch, place: self.place, items: item + 1 };
        ItemPosition { shard: self.shard, behind, is_repeated: matches!(self.wanted, WantedItems::Only(_)) }
    }
}

/// All passes of a stream: the items in a saved buffer, then everything from a position on.
#[derive(Debug, Clone, Default)]
pub(crate) struct ShardPasses {
    pub(crate) order: ShardOrder,
    /// First epoch that is not read.
    pub(crate) end_epoch: u64,
    pub(crate) start: Position,
    /// Items to read again, by shard, in ascending order.
    pub(crate) again: BTreeMap<usize, Vec<u64>>,
    /// Whether the input begins at `start` instead of at the shard start.
    pub(crate) is_remainder: bool,
}

impl ShardPasses {
    pub(crate) fn over<'a>(&'a self, shards: &'a [Shard]) -> impl Iterator<Item = ShardPass> + 'a {
        let start = self.start;
        let again = self.again.iter().map(move |(&shard, items)| ShardPass {
            shard,
            epoch: start.epoch,
            place: 0,
            first: 0,
            wanted: WantedItems::Only(items.clone()),
        });
        let places = self.order.places(shards.len());
        let all = (start.epoch..self.end_epoch).flat_map(move |epoch| {
            let from = if epoch == start.epoch { start.place } else { 0 };
            (from..places).map(move |place| self.pass(shards, epoch, place))
        });
        again.chain(all)
    }

    /// Returns the shard indices for all passes, in the same order as [`Self::over`].
    pub(crate) fn into_shards(self, shards: &[Shard]) -> impl Iterator<Item = usize> + Send + 'static {
        let (order, start, shards) = (self.order, self.start, shards.len());
        let places = order.places(shards);
        let all = (start.epoch..self.end_epoch).flat_map(move |epoch| {
            let from = if epoch == start.epoch { start.place } else { 0 };
            (from..places).map(move |place| order.shard_at(shards, epoch, place))
        });
        self.again.into_keys().chain(all)
    }

    fn pass(&self, shards: &[Shard], epoch: u64, place: usize) -> ShardPass {
        let shard = self.order.shard_at(shards.len(), epoch, place);
        let is_start = (epoch, place) == (self.start.epoch, self.start.place);
        let from = if is_start { self.start.items } else { 0 };
        // A continued pipe delivers only the remainder, so its first item is not item 0.
        let first = if is_start && self.is_remainder && !is_rereadable(&shards[shard]) { from } else { 0 };
        ShardPass { shard, epoch, place, first, wanted: WantedItems::From(from) }
    }
}

/// Returns whether the shard bytes can be read a second time.
pub(crate) fn is_rereadable(shard: &Shard) -> bool {
    !matches!(shard.location, Location::StandardInput | Location::Pipe(_))
}

/// Shard content identity.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ShardIdentity {
    /// Stored length in bytes, compressed or not.
    pub(crate) bytes: u64,
    /// Digest of the first 512 stored bytes, in hexadecimal digits.
    pub(crate) header: String,
}

impl ShardIdentity {
    /// Creates a shard identity from the first [`HEADER_BYTES`] bytes.
    pub(crate) fn from_header(bytes: u64, header: &[u8]) -> Self {
        Self { bytes, header: format!("{:016x}", xxh3_64(header)) }
    }
}

/// Shard identities when a state was saved, and now.
#[derive(Debug, Clone, Default)]
pub(crate) struct KnownShards {
    expected: Arc<BTreeMap<usize, ShardIdentity>>,
    seen: Arc<Mutex<BTreeMap<usize, ShardIdentity>>>,
}

impl KnownShards {
    /// Expects shards to be unchanged, by list index.
    pub(crate) fn expecting(expected: BTreeMap<usize, ShardIdentity>) -> Self {
        Self { expected: Arc::new(expected), seen: Arc::default() }
    }

    pub(crate) fn get(&self, shard: usize) -> Option<ShardIdentity> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner).get(&shard).cloned();
        seen.or_else(|| self.expected.get(&shard).cloned())
    }

    /// Records a shard identity; rejects it if it differs from the expected identity.
    ///
    /// # Errors
    /// [`Error::State`], naming the shard.
    pub(crate) fn check_identity(&self, number: usize, shard: &Shard, now: ShardIdentity) -> Result<()> {
        if let Some(before) = self.expected.get(&number).filter(|before| **before != now) {
            let reason = if before.bytes == now.bytes {
                format!("shard `{}` has changed: its first header is another", shard.url)
            } else {
                let (was, is) = (before.bytes, now.bytes);
                format!("shard `{}` has changed: it had {was} bytes and has {is}", shard.url)
            };
            return Err(Error::State { reason });
        }
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(number, now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_ranks_of_an_epoch_read_every_shard_once(
            shards in 1usize..60, world in 1usize..9, seed in prop::option::of(0u64..9), epoch in 0u64..4,
        ) {
            prop_assume!(shards >= world);
            let mut read = Vec::new();
            for rank in 0..world {
                let order = ShardOrder { seed, rank, world };
                order.check(shards).unwrap();
                read.extend((0..order.places(shards)).map(|place| order.shard_at(shards, epoch, place)));
            }
            read.sort_unstable();
            prop_assert!(read.into_iter().eq(0..shards));
        }
    }

    #[test]
    fn epochs_and_seeds_order_shards_apart() {
        let order = |seed, epoch| {
            let order = ShardOrder { seed: Some(seed), ..ShardOrder::default() };
            (0..50).map(|place| order.shard_at(50, epoch, place)).collect::<Vec<_>>()
        };
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 3), order(1, 3));
    }

    #[test]
    fn fewer_shards_than_ranks_are_refused() {
        let order = ShardOrder { seed: None, rank: 2, world: 4 };
        assert!(order.check(4).is_ok());
        assert!(order.check(3).unwrap_err().to_string().contains("3 shards"));
        assert!(ShardOrder { rank: 4, ..order }.check(9).unwrap_err().to_string().contains("rank 4"));
    }
}
