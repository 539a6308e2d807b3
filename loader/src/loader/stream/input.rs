//! Order and origin of the stream input: which shards, from where, and how they are shuffled.

use std::sync::Arc;

use dflop_costmodel::random::Seed;

use super::stream_state::{StreamKind, StreamState, Tracker};
use crate::error::{Result, check_at_most};
use crate::order::ShuffleBuffer;
use crate::shard::{KnownShards, Position, ShardOrder, ShardPasses};

/// Maximum first epoch; far from overflow.
const FIRST_EPOCH_MAX: u64 = 1 << 40;

/// Start of standard input, or of a pipe, when a stream resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoredInput {
    /// The beginning, unchanged; the consumed input is read again and passed over.
    #[default]
    Start,
    /// After the consumed part, as a new archive.
    Rest,
}

/// Order and origin of the input.
#[derive(Debug, Clone, Default)]
pub(super) struct Input {
    pub(super) order: ShardOrder,
    /// Whether the shard order is shuffled; [`Self::seed`] sets the seed.
    pub(super) is_shuffled: bool,
    pub(super) shuffle: Option<ShuffleBuffer>,
    pub(super) restored: Option<Arc<StreamState>>,
    /// First epoch in the builder; a restored state contains the first epoch.
    pub(super) first_epoch: u64,
    pub(super) begins: RestoredInput,
}

impl Input {
    /// Assigns a seed stream to each random choice without an explicit seed.
    pub(super) fn seed(&mut self, seed: Seed) {
        self.order.seed = self.is_shuffled.then(|| seed.stream("shards"));
        if let Some(buffer) = &mut self.shuffle {
            buffer.seed.get_or_insert(seed.stream("buffer"));
        }
    }

    pub(super) fn check(&self, kind: &StreamKind<'_>) -> Result<()> {
        self.order.check(kind.shards.len())?;
        check_at_most("first_epoch", self.first_epoch, FIRST_EPOCH_MAX)?;
        if let Some(buffer) = &self.shuffle {
            buffer.check()?;
        }
        match &self.restored {
            Some(state) => state.check(kind),
            None => Ok(()),
        }
    }

    pub(super) fn passes(&self, epochs: u64) -> ShardPasses {
        let start = Position { epoch: self.first_epoch, ..Position::default() };
        let end_epoch = self.first_epoch().saturating_add(epochs);
        match &self.restored {
            Some(state) => state.passes(end_epoch, self.begins == RestoredInput::Rest),
            None => ShardPasses { order: self.order, end_epoch, start, ..ShardPasses::default() },
        }
    }

    /// The epoch from which epochs are counted.
    fn first_epoch(&self) -> u64 {
        self.restored.as_ref().map_or(self.first_epoch, |state| state.first_epoch())
    }

    /// Returns the start of a stream.
    pub(super) fn tracker(&self) -> Result<Tracker> {
        match &self.restored {
            Some(state) => Tracker::restore(state),
            None => Ok(Tracker::begin(self.first_epoch)),
        }
    }

    /// Returns the first epoch of the stream, and the number of samples from that epoch that left the shuffle
    /// buffer before.
    pub(super) fn shuffled(&self) -> (u64, u64) {
        self.restored.as_ref().map_or((self.first_epoch, 0), |state| (state.epoch(), state.drawn()))
    }

    pub(super) fn known(&self) -> KnownShards {
        self.restored.as_ref().map_or_else(KnownShards::default, |state| state.known())
    }
}
