//! Defines a sample in the form of model inputs.

use dflop_costmodel::Module;

use crate::media::Modality;
use crate::media::PixelBuffer;

/// Label of a token that no loss is computed on.
pub const IGNORED: i32 = -100;

/// Sample in the form of model inputs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PreparedSample {
    /// Ids of the whole sample, with media expanded.
    pub input_ids: Vec<u32>,
    /// Ids of target tokens, elsewhere [`IGNORED`]; media and the first token, which nothing predicts, are
    /// not targets.
    pub labels: Vec<i32>,
    /// Token ranges of the media, in the order of the ids.
    pub runs: Vec<MediaRun>,
    /// Images, in the order of their placeholders; includes videos if the family writes frames as images
    /// .
    pub images: Vec<PixelValues>,
    /// Audio clips, in the order of their placeholders.
    pub clips: Vec<AudioFeatures>,
    /// Videos, in the order of their placeholders.
    pub videos: Vec<VideoValues>,
    /// Tokens that were cut from the text to fit the limit.
    pub cut_tokens: usize,
}

impl PreparedSample {
    /// Returns the number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// Returns the number of tokens that the loss is computed on.
    #[must_use]
    pub fn target_tokens(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORED).count()
    }
}

impl PreparedSample {
    /// Returns whether an encoder has something to do in this sample.
    pub(crate) fn runs_encoder(&self, module: Module) -> bool {
        self.runs.iter().any(|run| match run.modality {
            Modality::Image | Modality::Video => module == Module::Vision,
            Modality::Audio => module == Module::Audio,
        })
    }
}

/// Range of the tokens of one medium within the ids of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaRun {
    /// Modality of the medium.
    pub modality: Modality,
    /// Index of the first copy of the placeholder.
    pub start: usize,
    /// Number of copies of the placeholder, and of tokens between them.
    pub tokens: usize,
    /// Whether the run is enclosed by a marker on either side.
    pub has_markers: bool,
}

impl MediaRun {
    /// Returns the range of the medium, including its markers.
    #[must_use]
    pub fn with_markers(&self) -> std::ops::Range<usize> {
        let markers = usize::from(self.has_markers);
        self.start.saturating_sub(markers)..self.start + self.tokens + markers
    }
}

/// Pixels of one image, or of all its tiles or patches, or of a video, ready for the vision encoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PixelValues {
    /// Row-major; empty if the image was only counted.
    pub values: PixelBuffer,
    /// `[tiles, 3, side, side]`, `[patches, values of a patch]` for Qwen, `[3, height, width]` for Pixtral.
    pub shape: Vec<usize>,
    /// Layers of frames, rows and columns: of patches in Qwen models, of features in Pixtral, of tiles in
    /// Idefics3.
    pub grid_thw: Option<[u32; 3]>,
    /// Height and width of a LLaVA-OneVision image before resizing, of a Pixtral image after it.
    pub image_size: Option<[u32; 2]>,
    /// LLM positions of the features, with newlines of the family but without markers around the medium.
    pub tokens: u32,
}

/// Spectrogram of one clip.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AudioFeatures {
    /// Row-major; empty if the clip was only counted.
    pub values: Vec<f32>,
    /// `[windows, mels, 3000]`, like a batch of that many clips.
    pub shape: Vec<usize>,
    /// `[windows, 3000]`: 1 if a mel frame starts before the clip ends, the `feature_attention_mask`.
    pub attention_mask: Vec<u8>,
    /// LLM positions of the features of all windows, without markers around the clip.
    pub tokens: u32,
}

/// Video in the form of vision encoder inputs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VideoValues {
    /// Pixels of the selected frames, their grid and their tokens.
    pub pixels: PixelValues,
    /// Number of selected frames.
    pub frames: u32,
    /// Seconds covered by one layer of `pixels.grid_thw`; in models without grids, by one frame.
    pub seconds_per_grid: f32,
}
