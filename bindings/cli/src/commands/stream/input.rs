//! The arguments of `dflop stream` that say in which order input comes and where it goes on.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use dflop_loader::loader::{Loader, LoaderBuilder, RestoredInput, StreamState};
use dflop_loader::shuffle::ShuffleBuffer;

use crate::failure::Failure;

/// Order, share and state of the input.
#[derive(Debug, Args)]
pub(crate) struct InputArgs {
    /// Shuffle samples in a buffer of this many.
    #[arg(long, value_name = "N")]
    shuffle_buffer: Option<usize>,
    /// Payload bytes at which the shuffle buffer is full.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, requires = "shuffle_buffer")]
    shuffle_bytes: u64,
    /// Samples in the shuffle buffer before the first of an epoch leaves [default: all that it holds].
    #[arg(long, value_name = "N", requires = "shuffle_buffer")]
    shuffle_initial: Option<usize>,
    /// Shuffle the order of shards, anew in every epoch.
    #[arg(long)]
    shuffle_shards: bool,
    /// Seed of both shuffles and of random changes of images.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// Read only every WORLD-th shard, from shard RANK on.
    #[arg(long, value_name = "RANK/WORLD", value_parser = parse_share)]
    shards_of_rank: Option<(usize, usize)>,
    /// Write where the stream stands at its end, also after an error.
    #[arg(long, value_name = "FILE")]
    state_out: Option<PathBuf>,
    /// Go on where a state was written; shards and shuffles must be the same.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Where standard input or a pipe begins when it is resumed.
    #[arg(long, value_enum, default_value_t = ResumedInput::Start, requires = "resume")]
    resumed_input: ResumedInput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ResumedInput {
    /// At its beginning; what was read before is passed over.
    Start,
    /// Behind what was read before, as an archive of its own.
    Rest,
}

fn parse_share(text: &str) -> Result<(usize, usize), String> {
    let share =
        text.split_once('/').and_then(|(rank, world)| Some((rank.parse().ok()?, world.parse().ok()?)));
    share.ok_or_else(|| "is not RANK/WORLD, such as 0/8".to_owned())
}

impl InputArgs {
    /// The seed of everything random.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    pub(crate) fn is_resumed(&self) -> bool {
        self.resume.is_some()
    }

    /// Hands the settings over.
    pub(crate) fn apply(&self, mut builder: LoaderBuilder) -> Result<LoaderBuilder, Failure> {
        if let Some(samples) = self.shuffle_buffer {
            let samples_initial = self.shuffle_initial.unwrap_or(samples);
            let (samples_max, bytes_max, seed) = (samples, self.shuffle_bytes, self.seed);
            builder = builder.shuffle(ShuffleBuffer { samples_max, bytes_max, samples_initial, seed });
        }
        if self.shuffle_shards {
            builder = builder.shuffle_shards(self.seed);
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

    /// Writes the state, if that is asked for.
    pub(crate) fn save(&self, loader: &Loader) -> Result<(), Failure> {
        let Some(path) = &self.state_out else { return Ok(()) };
        let text =
            serde_json::to_vec(&loader.state()?).map_err(|error| Failure::Failed(error.to_string()))?;
        // Under another name first: a state that is cut is worse than an old one.
        let mut partial = path.clone().into_os_string();
        partial.push(".partial");
        let written = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path));
        written.map_err(|error| Failure::from(error).in_file(path))
    }
}

fn read_state(path: &Path) -> Result<StreamState, Failure> {
    let text = std::fs::read(path).map_err(|error| Failure::from(error).in_file(path))?;
    let state = serde_json::from_slice(&text);
    state.map_err(|error| Failure::Failed(format!("it is no state of a stream: {error}")).in_file(path))
}
