//! `dflop stream` arguments for input order, share per rank, and resumption.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use dflop_loader::{Loader, LoaderBuilder, RestoredInput, ShuffleBuffer, StreamState};

use crate::failure::Failure;
use crate::output::write_file;
use dflop_loader::store::file;

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
    /// Seed for both shuffles and for random augmentation.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// Read only every WORLD-th shard, starting with shard RANK.
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

    /// Sets order, share and state for a loader builder.
    pub(crate) fn apply(&self, builder: LoaderBuilder) -> Result<LoaderBuilder, Failure> {
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
        if let Some((rank, world)) = self.shards_of_rank {
            builder = builder.shards_of_rank(rank, world);
        }
        if let Some(path) = &self.resume {
            let begins = match self.resumed_input {
                ResumedInput::Start => RestoredInput::Start,
                ResumedInput::Rest => RestoredInput::Rest,
            };
            builder = builder.restore(read_state(path)?).restored_input(begins);
        }
        Ok(builder)
    }

    /// Writes the state, if `--state-out` is given.
    pub(crate) fn save(&self, loader: &Loader) -> Result<(), Failure> {
        let Some(path) = &self.state_out else { return Ok(()) };
        let text =
            serde_json::to_vec(&loader.state()?).map_err(|error| Failure::Failed(error.to_string()))?;
        write_file(path, text)
    }
}

fn read_state(path: &Path) -> Result<StreamState, Failure> {
    let text = file::read_named(path).map_err(|error| Failure::from(error).in_file(path))?;
    let state = serde_json::from_slice(&text);
    state.map_err(|error| Failure::Failed(format!("expected the state of a stream: {error}")).in_file(path))
}
