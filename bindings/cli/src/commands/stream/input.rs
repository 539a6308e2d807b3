//! Input of a stream: order, share of a rank, and the state that it resumes from and leaves.
//!
//! Whole shards are read in their order, without an index. With settings of the group `order`, samples are
//! drawn through the index in a global order, and a share is an equal part of every batch.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use dflop_loader::settings::Settings;
use dflop_loader::shard::Shard;
use dflop_loader::store::file;
use dflop_loader::{Loader, LoaderBuilder, RestoredInput, ShuffleBuffer, StreamState};

use super::StreamAccepted;
use crate::args::dataset::DatasetArgs;
use crate::args::set::SetArgs;
use crate::args::step_plan::read_state as read_run_state;
use crate::failure::Failure;
use crate::output::write_file;

/// Input order, shard share, and saved state.
#[derive(Debug, Args)]
pub(crate) struct InputArgs {
    /// Shuffle samples in a buffer with this many samples.
    #[arg(long, value_name = "N")]
    shuffle_buffer: Option<usize>,
    /// Payload bytes at which the shuffle buffer counts as full.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, requires = "shuffle_buffer")]
    shuffle_bytes: u64,
    /// Number of samples that the shuffle buffer collects before the first sample in an epoch leaves
    /// [default: the buffer size].
    #[arg(long, value_name = "N", requires = "shuffle_buffer")]
    shuffle_initial: Option<usize>,
    /// Shuffle the shard order, differently in every epoch.
    #[arg(long)]
    shuffle_shards: bool,
    /// Seed for all shuffles and for random augmentation.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// Read only every WORLD-th shard, starting with shard RANK; with `order` settings, rank RANK's part of
    /// every batch.
    #[arg(long, value_name = "RANK/WORLD", value_parser = parse_share)]
    shards_of_rank: Option<(usize, usize)>,
    /// Write the state at the end of the stream, also after an error.
    #[arg(long, value_name = "FILE")]
    state_out: Option<PathBuf>,
    /// Resume from a written state; shards and shuffles must be the same.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Start position for standard input or a pipe in a resumed stream.
    #[arg(long, value_enum, default_value_t = ResumedInput::Start, requires = "resume")]
    resumed_input: ResumedInput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ResumedInput {
    /// The beginning; samples read before are passed over.
    Start,
    /// The first sample that was not read yet: the input is an archive that starts there.
    Rest,
}

fn parse_share(text: &str) -> Result<(usize, usize), String> {
    let share =
        text.split_once('/').and_then(|(rank, world)| Some((rank.parse().ok()?, world.parse().ok()?)));
    share.ok_or_else(|| "expected RANK/WORLD, such as 0/8".to_owned())
}

impl InputArgs {
    pub(crate) fn is_resumed(&self) -> bool {
        self.resume.is_some()
    }

    /// Returns whether samples are drawn through the index.
    pub(super) fn is_drawn(set: &SetArgs<StreamAccepted>) -> bool {
        set.is_given("order")
    }

    /// Rejects arguments that have no effect beside other arguments.
    pub(super) fn check(&self, set: &SetArgs<StreamAccepted>, settings: &Settings) -> Result<(), Failure> {
        if !Self::is_drawn(set) {
            return set.refuse(&["index.directory"], "has no effect without `order` settings; leave it out");
        }
        let given = [
            ("--shuffle-buffer", self.shuffle_buffer.is_some()),
            ("--shuffle-shards", self.shuffle_shards),
            ("--resumed-input", self.resumed_input != ResumedInput::Start),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
            let reason = "has no effect with `order` settings, which draw samples through the index";
            return Err(Failure::Misuse(format!("`{option}` {reason}; leave it out")));
        }
        if self.is_resumed() {
            let reason = "has no effect with `--resume`; leave it out";
            return set.refuse(&["order.first_epoch"], reason);
        }
        if settings.order.accept_changed_data {
            return Err(Failure::Misuse("`order.accept_changed_data` needs `--resume`".into()));
        }
        Ok(())
    }

    /// Starts a loader builder over whole shards, or over the samples in the index in a global order.
    pub(super) fn source(
        &self,
        dataset: &DatasetArgs,
        set: &SetArgs<StreamAccepted>,
        settings: &Settings,
    ) -> Result<LoaderBuilder, Failure> {
        if !Self::is_drawn(set) {
            let builder = Loader::builder(dataset.shards(settings)?);
            return Ok(match self.shards_of_rank {
                Some((rank, world)) => builder.shards_of_rank(rank, world),
                None => builder,
            });
        }
        let (rank, world) = self.shards_of_rank.unwrap_or((0, 1));
        let builder = Loader::builder(Vec::new());
        let builder = builder.samples_of_rank(dataset.open(settings)?, rank, world);
        Ok(settings.order.apply_to_draws(builder))
    }

    /// Sets order and state for a loader builder.
    pub(super) fn apply(
        &self,
        builder: LoaderBuilder,
        set: &SetArgs<StreamAccepted>,
    ) -> Result<LoaderBuilder, Failure> {
        let mut builder = builder.seed(self.seed);
        if let Some(samples) = self.shuffle_buffer {
            let samples_initial = self.shuffle_initial.unwrap_or(samples);
            let bytes_max = self.shuffle_bytes;
            let buffer = ShuffleBuffer { bytes_max, samples_initial, ..ShuffleBuffer::new(samples) };
            builder = builder.shuffle(buffer);
        }
        if self.shuffle_shards {
            builder = builder.shuffle_shards();
        }
        let Some(path) = &self.resume else { return Ok(builder) };
        if Self::is_drawn(set) {
            return Ok(builder.restore_run(read_run_state(path)?));
        }
        let begins = match self.resumed_input {
            ResumedInput::Start => RestoredInput::Start,
            ResumedInput::Rest => RestoredInput::Rest,
        };
        Ok(builder.restore(read_state(path)?).restored_input(begins))
    }

    /// Writes the state, if `--state-out` is given.
    pub(super) fn save(&self, loader: &Loader) -> Result<(), Failure> {
        let Some(path) = &self.state_out else { return Ok(()) };
        let text = if loader.is_drawn() {
            loader.run_state()?.to_json().into_bytes()
        } else {
            serde_json::to_vec(&loader.state()?).map_err(|error| Failure::Failed(error.to_string()))?
        };
        write_file(path, text)
    }

    /// Returns the shards that a stream over whole shards reads in every epoch; `None` if they differ from
    /// epoch to epoch.
    pub(super) fn shards_read(&self, shards: Vec<Shard>) -> Option<Vec<Shard>> {
        match self.shards_of_rank {
            None => Some(shards),
            Some(_) if self.shuffle_shards => None,
            Some((rank, world)) => Some(shards.into_iter().skip(rank).step_by(world.max(1)).collect()),
        }
    }
}

fn read_state(path: &Path) -> Result<StreamState, Failure> {
    let text = file::read_named(path).map_err(|error| Failure::from(error).in_file(path))?;
    let state = serde_json::from_slice(&text);
    state.map_err(|error| Failure::Failed(format!("expected the state of a stream: {error}")).in_file(path))
}
