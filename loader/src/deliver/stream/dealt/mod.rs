//! Deals indexed samples to ranks, so that all ranks have the same number of batches.
//!
//! The *sequence* of an epoch has all dataset samples, shard by shard in epoch order. A rank starts at its
//! share and continues cyclically: each rank delivers the same number of samples, and a sample that cannot be
//! decoded is replaced by the next sample. An *item* is a position in the sequence, counted from the start of
//! the rank's share.

mod reader;
mod refill;

use std::fmt;

use serde::{Deserialize, Serialize};

pub(super) use self::reader::{DealtItem, DealtSettings, Replacements, read_dealt};
pub(super) use self::refill::Refill;

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::shard::ShardOrder;

/// A rank's share of a dataset.
#[derive(Debug, Clone)]
pub(super) struct Deal {
    pub(super) dataset: Dataset,
    pub(super) rank: usize,
    pub(super) world: usize,
}

impl Deal {
    /// Checks that the rank is below the number of ranks.
    pub(super) fn check(&self) -> Result<()> {
        if self.world == 0 {
            return Err(Error::Config { setting: "world", reason: "must be at least 1".into() });
        }
        if self.rank >= self.world {
            let reason = format!("{} is not below `world`, which is {}", self.rank, self.world);
            return Err(Error::Config { setting: "rank", reason });
        }
        Ok(())
    }

    /// Returns the number of samples that every rank delivers per epoch.
    pub(super) fn epoch_samples(&self, drops_last: bool) -> u64 {
        let (samples, world) = (self.dataset.len(), self.world as u64);
        if drops_last { samples / world } else { samples.div_ceil(world) }
    }

    /// Returns the position in the sequence at which the rank's share starts.
    fn start(&self) -> u64 {
        (self.rank as u128 * u128::from(self.dataset.len()) / self.world as u128) as u64
    }

    pub(super) fn identity(&self) -> DealIdentity {
        DealIdentity {
            rank: self.rank,
            world: self.world,
            fingerprint: self.dataset.index().fingerprint().to_owned(),
            split: self.dataset.split_digest().map(|digest| format!("{digest:016x}")),
        }
    }
}

/// Properties of dealt samples that a state must share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DealIdentity {
    rank: usize,
    world: usize,
    fingerprint: String,
    /// Digest over the samples in the split.
    split: Option<String>,
}

impl fmt::Display for DealIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "rank {} of {}", self.rank, self.world)
    }
}

impl DealIdentity {
    /// Describes how the samples dealt `now` differ from these.
    pub(super) fn difference(&self, now: &Self) -> Option<String> {
        if (self.rank, self.world) != (now.rank, now.world) {
            return Some(format!("samples were dealt to {self}, and are now dealt to {now}"));
        }
        if self.fingerprint != now.fingerprint {
            let (before, now) = (&self.fingerprint, &now.fingerprint);
            return Some(format!("the dataset has changed: its fingerprint was {before} and is {now}"));
        }
        (self.split != now.split).then(|| "the split has other samples".to_owned())
    }
}

/// Sample order in an epoch, over all ranks.
#[derive(Debug)]
struct Sequence {
    /// Shards with samples in the dataset.
    shards: Vec<DealtShard>,
    samples: u64,
}

#[derive(Debug)]
struct DealtShard {
    /// First sample position in the sequence.
    start: u64,
    /// Dataset index of the first sample.
    first_place: u64,
}

impl Sequence {
    fn new(dataset: &Dataset, order: ShardOrder, epoch: u64) -> Self {
        let index = dataset.index();
        let shards_len = index.shards().len();
        let (mut shards, mut samples) = (Vec::with_capacity(shards_len), 0);
        for place in 0..shards_len {
            let range = index.shard_samples(order.shard_at(shards_len, epoch, place));
            let first_place = dataset.places_below(range.start);
            let in_shard = dataset.places_below(range.end) - first_place;
            if in_shard > 0 {
                shards.push(DealtShard { start: samples, first_place });
                samples += in_shard;
            }
        }
        Self { shards, samples }
    }

    /// Returns the dataset index for the sample at a position, which wraps around.
    fn place_at(&self, position: u64) -> u64 {
        let position = position % self.samples;
        let shard = &self.shards[self.shards.partition_point(|shard| shard.start <= position) - 1];
        shard.first_place + position - shard.start
    }
}
