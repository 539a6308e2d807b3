//! Reasons why a cost cannot be predicted.

/// Result type for this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Reason why a model, a device, a profile or a sample cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// No model preset has this name; raised before any sample is costed.
    #[error("unknown model `{name}`, known are {known}")]
    UnknownModel { name: String, known: String },
    /// No device preset has this name; raised before any sample is costed.
    #[error("unknown device `{name}`, known are {known}")]
    UnknownDevice { name: String, known: String },
    /// No model part, or recomputation kind, has this name; raised before any sample is costed.
    #[error("unknown part `{name}`, known are {known}")]
    UnknownPart { name: String, known: String },
    /// A configuration field is invalid or not supported; raised before any sample is costed.
    #[error("`{file}`: `{field}` {problem}")]
    Configuration { file: &'static str, field: String, problem: String },
    /// The given modules do not form a model: no language model, or two encoders for the same modality.
    #[error("`{name}` is not a model: {problem}")]
    Composition { name: String, problem: String },
    /// The model does not have what is to be frozen, or cannot be laid out as requested.
    #[error("`{name}`: {problem}")]
    Incompatible { name: String, problem: String },
    /// An image or a video frame has no pixels; skip the sample, others are not affected.
    #[error("image of {width} x {height} pixels is empty")]
    EmptyImage { width: u32, height: u32 },
    /// The model does not support images this long and thin; skip the sample, a different model may support
    /// it.
    #[error("image of {width} x {height} pixels has an aspect ratio above {aspect_max}")]
    AspectRatio { width: u32, height: u32, aspect_max: u32 },
    /// The model does not support videos; skip the sample, a different model may support it.
    #[error("video of {frames} frames, but the model takes no videos")]
    Video { frames: u32 },
    /// Audio without a sample rate has no duration; skip the sample.
    #[error("audio of {frames} frames has a sample rate of 0 Hz")]
    SampleRate { frames: u64 },
    /// The model does not support clips this short; skip the sample, a different model may support it.
    #[error("audio of {samples} samples at 16 kHz is too short, the model takes {samples_min} or more")]
    ShortAudio { samples: u64, samples_min: u64 },
    /// The model's token table has no row for the medium; skip the sample, or count the size.
    #[error(
        "{medium} was not counted when the model was described: describe it again with this size, or count \
         tokens in Python with `dflop.Custom`"
    )]
    Uncounted { medium: String },
    /// The model's own processor rejects the medium; skip the sample.
    #[error("{medium} is rejected by the model's processor")]
    Rejected { medium: String },
    /// A sample count does not fit into 32 bits; skip the sample.
    #[error("sample has {count} {quantity}, more than {max}", max = u32::MAX)]
    TooLarge { quantity: &'static str, count: u64 },
    /// A file is not a profile, or a row is not a measurement; nothing was predicted.
    #[error("{file}:{line}:{column} {reason}")]
    ProfileFormat { file: String, line: u64, column: String, reason: String },
    /// The files do not form a single profile; nothing was predicted.
    #[error("not one profile: {reason}")]
    ProfileMixed { reason: String },
    /// The profile has no points for the request; the message lists the points to measure.
    #[error("the profile lacks {needed}")]
    ProfileLacks { needed: String },
    /// The profile does not predict the microbatches that were held out when it was measured; times from a
    /// stated rate are no worse.
    #[error(
        "the profile predicts {microbatches} held-out microbatches with a median error of {median} and a 95th \
         percentile of {p95}, at most 5% and 12% are allowed: measure again on a quiet device with more time, use \
         a device preset, or turn the check off"
    )]
    ProfileInaccurate { microbatches: usize, median: String, p95: String },
    /// Measured memory has no answer for a module; the message lists the points to measure.
    #[error("memory of {module}: {reason}")]
    Memory { module: crate::Module, reason: String },
    /// A correction table or a correction setting is invalid; the table in force stays.
    #[error("invalid correction: {reason}")]
    Correction { reason: String },
}
