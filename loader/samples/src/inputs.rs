//! Model inputs: samples and microbatches as tensors, and the processor that creates them.

use crate::error::{BoxError, Result};
use crate::media::{Modality, PixelBuffer, TextLength};
use crate::sample::document::MediaFault;
use crate::sample::{BatchLayout, Sample};
use dflop_costmodel::{Module, SampleShape};
use half::bf16;
use std::fmt::Debug;
use std::sync::Arc;

/// Converts decoded samples to model inputs, and microbatches to tensors.
///
/// A balanced loader calls the processor on its pool threads. Every method is a pure function of the
/// arguments, so that all ranks and all runs get the same tensors.
pub trait SampleProcessor: Debug + Send + Sync {
    /// Prepares a decoded sample.
    ///
    /// # Errors
    /// The reason why the model rejects the sample; if [`PrepareError::is_dropped`], a setting excludes the
    /// sample.
    fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError>;

    /// Creates the tensors for a microbatch that a model can run, for any samples; `filler` completes the
    /// microbatch.
    fn pack(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs;

    /// Creates the filler for microbatches that all have to run `encoders`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if there is no blank medium for an encoder.
    fn filler(&self, encoders: &[Module]) -> Result<Filler>;

    /// Returns the same processor with a lower limit on tokens per sample, and with a fixed number of tokens
    /// per row, where given.
    fn limited(&self, tokens_max: Option<u64>, pad_to_tokens: Option<usize>) -> Arc<dyn SampleProcessor>;

    /// Returns how microbatch tensors arrange samples.
    fn layout(&self) -> BatchLayout;

    /// Returns whether lengths or pixels are rounded up, so that a microbatch is longer than the sum over
    /// samples.
    fn has_buckets(&self) -> bool;

    /// Returns whether a step without target tokens is an error. Default: no.
    fn requires_targets(&self) -> bool {
        false
    }

    /// Returns whether images must be decoded; if not, image sizes are sufficient.
    fn reads_pixels(&self) -> bool;

    /// Estimates the size of a sample's media tensors in bytes.
    fn tensor_bytes(&self, shape: &SampleShape) -> u64;
}

/// Reason why a sample cannot be converted to model inputs; the sample is skipped and recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum PrepareError {
    /// The turns cannot be read, or placeholders and media do not match.
    #[error("{reason}")]
    Conversation { field: Option<String>, reason: String },
    /// The chat template rejects the turns.
    #[error("the chat template rejects the sample: {reason}")]
    ChatTemplate { reason: String },
    /// The tokenizer rejects the text.
    #[error("the tokenizer rejects the text: {reason}")]
    Tokenizer { reason: String },
    /// The number of placeholder tokens in the text differs from the number of media.
    #[error("the text has {found} `{token}` tokens for {media} {}", modality.plural())]
    MediaTokens { token: String, modality: Modality, found: usize, media: usize },
    /// The modality's processor rejects a medium.
    #[error("could not convert the medium to model inputs")]
    Medium { field: String, source: BoxError },
    /// The sample has more tokens than the limit.
    #[error("{tokens} tokens exceed the limit of {tokens_max}{note}")]
    TooLong { tokens: usize, tokens_max: usize, note: &'static str, is_dropped: bool },
}

impl PrepareError {
    /// Returns the field that caused the error, if a single field did.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Conversation { field, .. } => field.as_deref(),
            Self::Medium { field, .. } => Some(field),
            _ => None,
        }
    }

    /// Returns whether a setting excluded the sample, rather than a fault in the sample.
    #[must_use]
    pub fn is_dropped(&self) -> bool {
        matches!(self, Self::TooLong { is_dropped: true, .. })
    }

    /// Creates the error for turns that cannot be read, at a field or at the sample.
    pub fn conversation(field: Option<&str>, reason: impl Into<String>) -> Self {
        Self::Conversation { field: field.map(str::to_owned), reason: reason.into() }
    }
}

impl From<MediaFault> for PrepareError {
    fn from(fault: MediaFault) -> Self {
        Self::Conversation {
            field: Some(fault.field).filter(|field| !field.is_empty()),
            reason: fault.reason,
        }
    }
}

/// Counts the tokens in a sample's texts.
pub trait TextCounter: Debug + Send + Sync {
    /// Returns 16 hex digits that are equal only for counters with equal results.
    fn digest(&self) -> String;

    /// Returns whether counts depend on video frame times, which are written as text. Default: no.
    fn reads_video_times(&self) -> bool {
        false
    }

    /// Returns whether counts depend on image sizes, because image crops are surrounded by text. Default: no.
    fn reads_image_sizes(&self) -> bool {
        false
    }

    /// Returns the number of sample tokens without media tokens, and how many are targets.
    ///
    /// - `sample`: texts and JSON documents, videos without pixels if the counter
    ///   [reads their times](Self::reads_video_times), and images without pixels if the counter
    ///   [reads their sizes](Self::reads_image_sizes); all other fields are undecoded and empty
    ///
    /// # Errors
    /// The reason why the sample cannot be counted; the index then keeps the estimate.
    fn count(&self, sample: &Sample) -> Result<TextLength, BoxError>;
}

/// Label for tokens without loss.
pub const IGNORED: i32 = -100;

/// Sample as model inputs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PreparedSample {
    /// Token ids for the whole sample, with media expanded.
    pub input_ids: Vec<u32>,
    /// Token ids of targets, [`IGNORED`] elsewhere; media and the first token, which nothing predicts, are
    /// not targets.
    pub labels: Vec<i32>,
    /// Media token ranges, in token order.
    pub runs: Vec<MediaRun>,
    /// Images, in placeholder order; includes videos if the family writes frames as images.
    pub images: Vec<PixelValues>,
    /// Audio clips, in placeholder order.
    pub clips: Vec<AudioFeatures>,
    /// Videos, in placeholder order.
    pub videos: Vec<VideoValues>,
    /// Index of every image, clip and video among the sample's media of the modality, in placeholder order;
    /// by modality, in the order of [`Modality::ALL`].
    pub media_order: [Vec<u32>; 3],
    /// Number of tokens cut from the text to fit the limit.
    pub cut_tokens: usize,
}

impl PreparedSample {
    /// Returns the number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// Returns the number of tokens in the loss.
    #[must_use]
    pub fn target_tokens(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORED).count()
    }
}

impl PreparedSample {
    /// Returns a range of the tokens as a sample, whose first token is no target; `None` if the sample has no
    /// such tokens, or has media, which are not cut.
    #[must_use]
    pub fn part(mut self, tokens: std::ops::Range<usize>) -> Option<Self> {
        if tokens == (0..self.tokens()) {
            return Some(self);
        }
        if !self.runs.is_empty() {
            return None;
        }
        self.input_ids = self.input_ids.get(tokens.clone())?.to_vec();
        self.labels = self.labels.get(tokens)?.to_vec();
        if let Some(first) = self.labels.first_mut() {
            *first = IGNORED;
        }
        Some(self)
    }

    /// Returns whether this sample has input for an encoder.
    fn runs_encoder(&self, module: Module) -> bool {
        self.runs.iter().any(|run| match run.modality {
            Modality::Image | Modality::Video => module == Module::Vision,
            Modality::Audio => module == Module::Audio,
        })
    }
}

/// Token range of a medium within the token ids of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaRun {
    /// Modality of the medium.
    pub modality: Modality,
    /// Index of the first placeholder copy.
    pub start: usize,
    /// Number of placeholder copies, including tokens between them.
    pub tokens: usize,
    /// Whether a marker token encloses the run on either side.
    pub has_markers: bool,
}

impl MediaRun {
    /// Returns the medium's token range, including markers.
    #[must_use]
    pub fn with_markers(&self) -> std::ops::Range<usize> {
        let markers = usize::from(self.has_markers);
        self.start.saturating_sub(markers)..self.start + self.tokens + markers
    }
}

/// Pixels for the vision encoder: an image, all tiles or patches of an image, or a video.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PixelValues {
    /// Pixel values, row-major; empty if the image was only counted.
    pub values: PixelBuffer,
    /// `[tiles, 3, side, side]`, `[patches, values per patch]` for Qwen, `[3, height, width]` for Pixtral.
    pub shape: Vec<usize>,
    /// Number of frame layers, rows and columns, counted in patches for Qwen models, in features for Pixtral,
    /// in tiles for Idefics3.
    pub grid_thw: Option<[u32; 3]>,
    /// Image height and width, for LLaVA-OneVision before resizing, for Pixtral after resizing.
    pub image_size: Option<[u32; 2]>,
    /// Number of LLM positions for the features, with the family's newlines but without markers around the
    /// medium.
    pub tokens: u32,
}

/// Spectrogram of an audio clip.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AudioFeatures {
    /// Mel values, row-major; empty if the clip was only counted.
    pub values: Vec<f32>,
    /// `[windows, mels, 3000]`, like a batch with that many clips.
    pub shape: Vec<usize>,
    /// `[windows, 3000]`: 1 if a mel frame starts before the clip ends, the `feature_attention_mask`.
    pub attention_mask: Vec<u8>,
    /// Number of LLM positions for the features in all windows, without markers around the clip.
    pub tokens: u32,
}

/// Video as vision encoder inputs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VideoValues {
    /// Pixels, grid and tokens for the selected frames.
    pub pixels: PixelValues,
    /// Number of selected frames.
    pub frames: u32,
    /// Seconds per layer in `pixels.grid_thw`; in models without grids, per frame.
    pub seconds_per_grid: f32,
    /// Time of each layer in `pixels.grid_thw`, in seconds since the first video frame: the mean of the first
    /// and last frame times in the layer; empty for families without times in the text.
    pub layer_seconds: Vec<f64>,
}

/// Sequences that complete microbatches.
#[derive(Debug, Clone)]
pub struct Filler {
    /// Padding token for empty microbatches; `None` if rows have a fixed length anyway.
    padding: Option<PreparedSample>,
    /// Blank medium for every encoder that has to run in all microbatches.
    blanks: Vec<(Module, PreparedSample)>,
}

impl Filler {
    /// Creates a filler from a padding token and blank encoder media.
    #[must_use]
    pub fn new(padding: Option<PreparedSample>, blanks: Vec<(Module, PreparedSample)>) -> Self {
        Self { padding, blanks }
    }

    /// Returns the sequences that complete a microbatch with these `samples`.
    pub fn of(&self, samples: &[PreparedSample]) -> impl Iterator<Item = &PreparedSample> {
        let is_missing = |module: Module| !samples.iter().any(|sample| sample.runs_encoder(module));
        let blanks = || self.blanks.iter().filter(move |(module, _)| is_missing(*module));
        let is_empty = samples.is_empty() && blanks().next().is_none();
        blanks().map(|(_, blank)| blank).chain(self.padding.as_ref().filter(move |_| is_empty))
    }

    /// Returns the id of the padding token; `None` if rows have a fixed length.
    #[must_use]
    pub fn pad_id(&self) -> Option<u32> {
        self.padding.as_ref().and_then(|padding| padding.input_ids.first().copied())
    }

    /// Returns the number of blank-media tokens that complete a microbatch with these `samples`.
    #[must_use]
    pub fn tokens_for(&self, samples: &[PreparedSample]) -> u64 {
        let is_blank = |filler: &&PreparedSample| !filler.runs.is_empty();
        self.of(samples).filter(is_blank).map(|filler| filler.tokens() as u64).sum()
    }
}

/// Tensor values, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum TensorValues {
    /// Ids, positions, masks and counts.
    I64(Vec<i64>),
    /// Pixels and mel values.
    F32(Vec<f32>),
    /// Pixels in half precision.
    Bf16(Vec<bf16>),
    /// Unnormalized pixels.
    U8(Vec<u8>),
}

impl TensorValues {
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::U8(values) => values.len(),
        }
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the name of the value type: `int64`, `float32`, `bfloat16` or `uint8`.
    #[must_use]
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::I64(_) => "int64",
            Self::F32(_) => "float32",
            Self::Bf16(_) => "bfloat16",
            Self::U8(_) => "uint8",
        }
    }
}

impl From<PixelBuffer> for TensorValues {
    fn from(pixels: PixelBuffer) -> Self {
        match pixels {
            PixelBuffer::F32(values) => Self::F32(values),
            PixelBuffer::Bf16(values) => Self::Bf16(values),
            PixelBuffer::U8(values) => Self::U8(values),
        }
    }
}

/// Tensor with a keyword argument name.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// Keyword argument of the model's forward pass.
    pub name: &'static str,
    /// Axis lengths.
    pub shape: Vec<usize>,
    /// Values, as many as the product of `shape`.
    pub values: TensorValues,
}

impl NamedTensor {
    /// Creates a tensor from values and a shape.
    ///
    /// # Panics
    /// If the number of values does not match the shape, which is a bug in the caller.
    #[must_use]
    pub fn new(name: &'static str, shape: Vec<usize>, values: TensorValues) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "`{name}` of shape {shape:?}");
        Self { name, shape, values }
    }

    /// Creates an integer tensor.
    ///
    /// # Panics
    /// If the number of values does not match the shape.
    #[must_use]
    pub fn ints(name: &'static str, shape: Vec<usize>, values: Vec<i64>) -> Self {
        Self::new(name, shape, TensorValues::I64(values))
    }
}

/// Microbatch tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelInputs {
    /// Keyword arguments for the model: `input_ids`, `labels`, `position_ids` or `attention_mask`, and media.
    pub tensors: Vec<NamedTensor>,
    /// First token of every sample in packed order, then the number of tokens: `[samples + 1]`. Padded
    /// tensors have the same cumulative lengths. Blank media, and padding to a fixed row length, are
    /// additional sequences after the samples.
    pub cu_seqlens: Vec<i32>,
    /// Number of tokens in the longest sequence in `cu_seqlens`.
    pub max_seqlen: u32,
    /// Number of tokens in all samples, without padding.
    pub tokens: u64,
    /// Number of tokens in the loss: labels that are not -100.
    pub target_tokens: u64,
}

impl ModelInputs {
    /// Returns a tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&NamedTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}
