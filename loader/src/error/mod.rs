//! Defines the error type of the crate, with variants by what the caller does next.

mod archive;
mod excerpt;
mod guard;
mod index_shard;
mod skipped;

pub use self::archive::{ArchiveFault, TarFault};
pub use self::excerpt::excerpt;
pub(crate) use self::guard::guarded;
pub use self::index_shard::ShardFault;
pub use self::skipped::Skipped;
pub(crate) use self::skipped::reason_of;

/// Cause of an error in user code or in a crate that this one depends on.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a setting, a dataset or a whole stream cannot be used.
///
/// A single bad sample is not an error: it is skipped and accounted for as [`Skipped`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A setting is invalid; raised when something is built, never while it streams.
    #[error("invalid `{setting}`: {reason}")]
    Config { setting: &'static str, reason: String },
    /// A model, device or profile is invalid.
    #[error(transparent)]
    Model(dflop_costmodel::Error),
    /// A shard pattern cannot be expanded.
    #[error("invalid shard list `{pattern}`: {reason}")]
    ShardList { pattern: String, reason: String },
    /// A shard cannot be opened or read; ends the stream.
    #[error("could not read shard `{shard}`")]
    Read { shard: String, source: std::io::Error },
    /// A shard has an unsupported compression.
    #[error("shard `{shard}` is compressed with {format}; recompress it with gzip or zstd")]
    UnsupportedCompression { shard: String, format: &'static str },
    /// A shard is damaged from an offset on; everything before it was delivered.
    #[error("shard `{shard}` is damaged: {fault}")]
    Shard { shard: String, fault: ArchiveFault },
    /// The dataset has no sample at all.
    #[error("dataset `{dataset}` has no samples: {reason}")]
    NoSamples { dataset: String, reason: String },
    /// No sample has a field of these names. Known at once with an index; without, it ends the first epoch.
    #[error("invalid `{setting}`: none of {samples} samples has a field `{fields}`{}", they_have(.found))]
    NoField { setting: &'static str, fields: String, samples: u64, found: Vec<String> },
    /// More samples are bad than the error budget tolerates; ends the stream.
    #[error(
        "{skipped} of {samples} samples are bad, over the error budget of {fraction}; the first: shard `{}`, \
         offset {}, key `{}`: {}",
        .first.shard, .first.offset, .first.key.as_deref().unwrap_or("unknown"), .first.reason
    )]
    ErrorBudget { skipped: u64, samples: u64, fraction: f64, first: Box<Skipped> },
    /// More samples are bad than the error budget tolerates by number; ends the stream.
    #[error(
        "{skipped} samples are bad, over the error budget of {most}; the first: shard `{}`, offset {}, key `{}`: {}",
        .first.shard, .first.offset, .first.key.as_deref().unwrap_or("unknown"), .first.reason
    )]
    ErrorCount { skipped: u64, most: u64, first: Box<Skipped> },
    /// Nothing has happened for longer than allowed; ends the stream. A state taken now continues exactly
    /// here.
    #[error("the {stage} stage is stuck{}: nothing has happened for {seconds:.0} s", in_shard(.shard.as_deref()))]
    Stalled { stage: &'static str, shard: Option<String>, seconds: f64 },
    /// An index file cannot be read or written.
    #[error("index `{path}`: {reason}")]
    Index { path: String, reason: String },
    /// Bytes are not a whole part of an index; parts count from 0 in the order given.
    #[error("part {part} of the index cannot be merged: {reason}")]
    IndexPart { part: usize, reason: String },
    /// The parts of an index do not fit a shard of the dataset.
    #[error("the index cannot be merged at shard `{shard}`: {fault}")]
    IndexShard { shard: String, fault: ShardFault },
    /// A saved state belongs to another dataset or another order.
    #[error("state does not fit: {reason}")]
    State { reason: String },
    /// A global batch cannot be planned.
    #[error("could not plan step {step}")]
    Plan { step: u64, source: dflop_balancer::Error },
    /// Microbatches of a fixed number of tokens have no room for the samples of a step.
    #[error(
        "could not plan step {step}: {tokens} tokens in {microbatches} microbatches of at most {tokens_max}; \
         {reason}; a `pad_to_tokens` (and `tokens_max`, if set) of {tokens_needed} would do for this step, as more \
         microbatches or a smaller global batch might"
    )]
    StepTooLong {
        step: u64,
        tokens: u64,
        microbatches: usize,
        tokens_max: u64,
        tokens_needed: u64,
        reason: String,
    },
    /// The counted tokens of a microbatch exceed the fixed number. Ends the stream.
    #[error(
        "microbatch {microbatch} of DP rank {dp_rank} at step {step} has {tokens} tokens, over `pad_to_tokens` of \
         {pad_to_tokens}: {planned_tokens} were planned; count texts in the index with the model's tokenizer, so that plans \
         are exact, or set `pad_to_tokens` to {tokens_needed} at least for this rank's step, or a `tokens_max` below it \
         that leaves room, or cut or drop samples by `long_sample`"
    )]
    MicrobatchTooLong {
        step: u64,
        dp_rank: usize,
        microbatch: usize,
        tokens: u64,
        planned_tokens: u64,
        pad_to_tokens: u64,
        tokens_needed: u64,
    },
    /// The samples of a microbatch do not fit into memory, by their shapes in the index. Ends the stream.
    #[error(
        "microbatch {microbatch} of DP rank {dp_rank} at step {step} has {samples} samples, which take about {} decoded \
         and prepared, of {} available; use more microbatches or a smaller global batch",
        readable_bytes(*bytes), readable_bytes(*bytes_max)
    )]
    MicrobatchTooLarge {
        step: u64,
        dp_rank: usize,
        microbatch: usize,
        samples: usize,
        bytes: u64,
        bytes_max: u64,
    },
    /// A step after the end of a run was requested.
    #[error("step {step} does not exist: the run has {steps} steps, counted from 0")]
    RunEnded { step: u64, steps: u64 },
    /// A file next to the shards cannot be written or read.
    #[error("could not access `{path}`")]
    File { path: String, source: std::io::Error },
    /// A sample would not be read back from a shard as it was; nothing of it was written.
    #[error("could not write sample `{key}`: {reason}")]
    Write { key: String, reason: String },
    /// Old shards, or files of a killed writer, occupy the place of new shards.
    #[error("`{path}` is in the way of new shards; remove it or write to another directory")]
    ShardExists { path: String },
    /// A remote store permanently refuses a file.
    #[error("could not upload `{url}`")]
    Upload { url: String, source: std::io::Error },
    /// A path is not a source of samples, or holds none.
    #[error("could not pack `{path}`: {reason}")]
    Pack { path: String, reason: String },
    /// A part of a source was packed in another way than the others; parts count from 0.
    #[error("part {part} cannot be packed or joined: {reason}")]
    PackPart { part: u32, reason: String },
    /// A model cannot take a medium; the sample is bad for this model, the next one may be good.
    #[error("the model cannot take the {medium}")]
    Medium { medium: &'static str, source: BoxError },
    /// User code that changes fields failed as a whole, not on one field; ends the stream.
    #[error("the transform of `{fields}` failed")]
    Transform { fields: String, source: BoxError },
    /// The user's cost function failed, or returned no costs for this global batch; ends the stream.
    #[error("the cost function failed at step {step}")]
    CostFunction { step: u64, source: BoxError },
    /// A stage of the loader ended without an error; a defect, or a runtime that was shut down.
    #[error("the {stage} stage ended early")]
    StageEnded { stage: &'static str },
}

fn they_have(extensions: &[String]) -> String {
    if extensions.is_empty() { String::new() } else { format!("; they have: {}", extensions.join(", ")) }
}

fn in_shard(shard: Option<&str>) -> String {
    shard.map_or_else(String::new, |shard| format!(" in shard `{shard}`"))
}

/// Writes bytes with a decimal unit.
fn readable_bytes(bytes: u64) -> String {
    let (unit, name) = if bytes < 1_000_000_000 { (1e6, "MB") } else { (1e9, "GB") };
    format!("{:.1} {name}", bytes as f64 / unit)
}

/// Refuses a setting over its limit.
pub(crate) fn check_at_most(setting: &'static str, value: u64, most: u64) -> Result<()> {
    if value <= most {
        return Ok(());
    }
    Err(Error::Config { setting, reason: format!("{value} is more than {most}") })
}
