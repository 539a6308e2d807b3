//! Settings of a [`LoaderBuilder`] that say in which order input comes, from where, and how long it may take.

use std::sync::Arc;

use super::LoaderBuilder;
use super::state::{StreamKind, StreamState, Tracker};
use crate::collate::Decode;
use crate::error::{Result, check_at_most};
use crate::passes::{KnownShards, Passes, Position, ShardOrder};
use crate::shuffle::ShuffleBuffer;
use crate::watchdog::StallListener;

/// Largest epoch to begin with; far from where its arithmetic would overflow.
const FIRST_EPOCH_MAX: u64 = 1 << 40;

/// Where standard input or a pipe begins when a stream goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoredInput {
    /// At its beginning, as it was; what was consumed is read again and passed over.
    #[default]
    Start,
    /// Behind what was consumed, as an archive of its own.
    Rest,
}

/// Order and origin of the input.
#[derive(Debug, Clone, Default)]
pub(super) struct Input {
    pub(super) order: ShardOrder,
    pub(super) shuffle: Option<ShuffleBuffer>,
    pub(super) restored: Option<Arc<StreamState>>,
    /// That of the builder; a restored state has its own.
    first_epoch: u64,
    begins: RestoredInput,
}

impl Input {
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

    pub(super) fn passes(&self, epochs: u64) -> Passes {
        let start = Position { epoch: self.first_epoch, ..Position::default() };
        let end_epoch = self.first_epoch().saturating_add(epochs);
        match &self.restored {
            Some(state) => state.passes(end_epoch, self.begins == RestoredInput::Rest),
            None => Passes { order: self.order, end_epoch, start, ..Passes::default() },
        }
    }

    /// The epoch from which epochs are counted.
    fn first_epoch(&self) -> u64 {
        self.restored.as_ref().map_or(self.first_epoch, |state| state.first_epoch())
    }

    /// Where a stream begins.
    pub(super) fn tracker(&self) -> Result<Tracker> {
        match &self.restored {
            Some(state) => Tracker::restore(state),
            None => Ok(Tracker::begin(self.first_epoch)),
        }
    }

    /// Epoch that a stream begins in, and samples of it that left the shuffle buffer before.
    pub(super) fn shuffled(&self) -> (u64, u64) {
        self.restored.as_ref().map_or((self.first_epoch, 0), |state| (state.epoch(), state.drawn()))
    }

    pub(super) fn known(&self) -> KnownShards {
        self.restored.as_ref().map_or_else(KnownShards::default, |state| state.known())
    }
}

impl LoaderBuilder {
    /// What another loader must have in common with this one to go on from its state.
    pub(super) fn kind(&self) -> StreamKind<'_> {
        let has_videos = cfg!(feature = "video") && self.decode == Decode::Media;
        StreamKind {
            shards: &self.shards,
            order: self.input.order,
            shuffle: self.input.shuffle,
            video_sampling: has_videos.then(|| self.video_sampling.unwrap_or_default()),
        }
    }

    /// Shuffles samples in a bounded buffer, which drains at the end of every epoch. Default: not at all.
    #[must_use]
    pub fn shuffle(mut self, buffer: ShuffleBuffer) -> Self {
        self.input.shuffle = Some(buffer);
        self
    }

    /// Shuffles the order of shards anew in every epoch, drawn from (seed, epoch). Default: the order given.
    #[must_use]
    pub fn shuffle_shards(mut self, seed: u64) -> Self {
        self.input.order.seed = Some(seed);
        self
    }

    /// Reads every `world`-th shard of an epoch's order, from shard `rank` on, as webdataset splits shards by
    /// node: ranks read apart without an index. Default: all shards.
    ///
    /// Shards hold different numbers of samples, so ranks deliver different numbers of batches; where steps must
    /// agree, use [`crate::balanced`], or stop all ranks together. With [`Self::shuffle_shards`], and the same
    /// seed on all ranks, a rank gets other shards in every epoch.
    #[must_use]
    pub fn shards_of_rank(mut self, rank: usize, world: usize) -> Self {
        (self.input.order.rank, self.input.order.world) = (rank, world);
        self
    }

    /// Sets the epoch to begin with, from which [`Self::epochs`] counts: epoch 2 of a loader that begins there has the
    /// order, shuffle and random changes of the third epoch of one that begins at 0. For trainers that make a loader
    /// for every pass. Default: 0.
    #[must_use]
    pub fn first_epoch(mut self, epoch: u64) -> Self {
        self.input.first_epoch = epoch;
        self
    }

    /// Goes on where another loader was when it gave this state: the batches that follow are those that the other
    /// would have delivered, epochs counted from its first, which replaces [`Self::first_epoch`]. Shards, rank, shuffle buffer, shard shuffle and frames of
    /// videos must be the same; [`Self::samples_max`] counts from here. Default: from the first sample.
    #[must_use]
    pub fn restore(mut self, state: StreamState) -> Self {
        self.input.restored = Some(Arc::new(state));
        self
    }

    /// Says where standard input, or the pipe that was being read, begins after [`Self::restore`]. Default: at
    /// its beginning.
    #[must_use]
    pub fn restored_input(mut self, begins: RestoredInput) -> Self {
        self.input.begins = begins;
        self
    }

    /// Reports a loader that gets nothing done for so long while its consumer waits, again each time it has
    /// passed; infinity is never. Default: 60 seconds.
    #[must_use]
    pub fn stall_seconds_max(mut self, seconds: f64) -> Self {
        self.stalls.warn_seconds = seconds;
        self
    }

    /// Ends the stream with [`crate::Error::Stalled`] after so long. Default: infinity, never.
    #[must_use]
    pub fn stall_seconds_error(mut self, seconds: f64) -> Self {
        self.stalls.error_seconds = seconds;
        self
    }

    /// Sets who is told about stalls. Default: [`crate::watchdog::LogStalls`].
    #[must_use]
    pub fn stall_listener(mut self, listener: Arc<dyn StallListener>) -> Self {
        self.stalls.listener = listener;
        self
    }
}
