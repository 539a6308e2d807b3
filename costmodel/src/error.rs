//! Why a cost could not be predicted.

/// The result of everything fallible in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a model, a device or a sample was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// No model preset has this name; raised before any sample is looked at.
    #[error("unknown model `{name}`, known are {known}")]
    UnknownModel { name: String, known: String },
    /// No device preset has this name; raised before any sample is looked at.
    #[error("unknown device `{name}`, known are {known}")]
    UnknownDevice { name: String, known: String },
    /// A model has no part of this name; raised before any sample is looked at.
    #[error("unknown part `{name}`, known are {known}")]
    UnknownPart { name: String, known: String },
    /// A field of a configuration makes no sense, or has no counterpart here; raised before any sample is looked at.
    #[error("`{file}`: `{field}` {problem}")]
    Configuration { file: &'static str, field: String, problem: String },
    /// Parts do not make a model: no language model, or two encoders of a kind.
    #[error("`{name}` is no model: {problem}")]
    Composition { name: String, problem: String },
    /// The model cannot be trained, or laid out, as it was asked for.
    #[error("`{name}`: {problem}")]
    Incompatible { name: String, problem: String },
    /// An image or a video frame has no pixels; the sample is bad, the next one may be good.
    #[error("image of {width} x {height} pixels is empty")]
    EmptyImage { width: u32, height: u32 },
    /// The model refuses images this long and thin; the sample is bad for this model only.
    #[error("image of {width} x {height} pixels has an aspect ratio above {aspect_max}")]
    AspectRatio { width: u32, height: u32, aspect_max: u32 },
    /// Audio without a sample rate has no duration; the sample is bad.
    #[error("audio of {frames} frames has a sample rate of 0 Hz")]
    SampleRate { frames: u64 },
    /// A count of the sample does not fit into 32 bits; the sample is bad.
    #[error("sample has {count} {quantity}, more than {max}", max = u32::MAX)]
    TooLarge { quantity: &'static str, count: u64 },
    /// A file is not a profile, or one of its rows is no measurement; nothing was predicted.
    #[error("{file}:{line}:{column} {reason}")]
    ProfileFormat { file: String, line: u64, column: String, reason: String },
    /// Files that do not make one profile; nothing was predicted.
    #[error("not one profile: {reason}")]
    ProfileMixed { reason: String },
    /// The profile cannot answer; says which points have to be measured.
    #[error("the profile lacks {needed}")]
    ProfileLacks { needed: String },
    /// Measured memory has no answer for a module; says which points to measure.
    #[error("memory of {module}: {reason}")]
    Memory { module: crate::module::Module, reason: String },
    /// A correction table or a rule for it was refused; the one in force stays.
    #[error("invalid correction: {reason}")]
    Correction { reason: String },
}
