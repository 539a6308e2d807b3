//! Packs prepared samples into the tensors for a microbatch.
//!
//! Rounds lengths up to a few values, so that compiled models see few shapes.
//!
//! In the *packed* layout, samples follow each other in a row, `position_ids` restart at zero with each
//! sample, and `cu_seqlens` holds the boundaries; attention must not cross them. In the *padded* layout,
//! every sample has a row with the length of the longest sample. Either layout may be padded to a fixed
//! length. No target crosses a boundary: the first token in a sample, which has no predecessor, is never a
//! target.
//!
//! Token positions are for rotary embeddings. Text and audio positions count up; native-resolution models
//! assign a layer, a row and a column to the tokens of an image or a video, and continue after the largest
//! coordinate. Video layers are counted, or spaced by duration: Qwen2.5-VL and Qwen2.5-Omni. Layers that are
//! separate in the text are like images: Qwen3-VL.
//!
//! # Source
//! Multimodal rotary embedding: Wang et al., "Qwen2-VL", 2024, arXiv:2409.12191, section 2.1; by time: Bai et
//! al., "Qwen2.5-VL Technical Report", 2025, arXiv:2502.13923, section 2.1.2; Xu et al., "Qwen2.5-Omni
//! Technical Report", 2025, arXiv:2503.20215, section 2.1. The begin of every layer is truncated to a
//! position, in single precision, as in `get_rope_index` in transformers 5.24.0; version 4.57.1 truncates the
//! layer duration in Qwen2.5-VL to whole seconds. In version 5.24.0 the text after a Qwen2-VL or Qwen2.5-VL
//! video continues after the larger side, regardless of the number of layers; here the text continues after
//! the largest position, as Qwen2-VL defines it.

use super::Preparer;
use super::pixels::{feature_tensors, pixel_tensors, video_tensors};
use crate::family::{LayerTime, PixelLayout};
use dflop_samples::inputs::{
    IGNORED, MediaRun, ModelInputs, NamedTensor, PixelValues, PreparedSample, VideoValues,
};
use dflop_samples::media::Modality;
use dflop_samples::sample::{BatchLayout, PaddingSide};

/// Packs microbatches.
#[derive(Debug, Clone)]
pub(super) struct Packer {
    pub(super) layout: BatchLayout,
    pub(super) pixel_layout: Option<PixelLayout>,
    pub(super) pad_id: u32,
    /// Fixed length of packed rows, or of each padded row, in tokens.
    pub(super) pad_to_tokens: Option<usize>,
    /// Lengths that a packed row, or the longest padded row, is rounded up to, if there is no fixed length.
    pub(super) length_buckets: Option<Buckets>,
    /// Every packed sequence length is a multiple of this number of tokens.
    pub(super) sample_multiple: usize,
}

impl Packer {
    /// Packs samples in order, then `fillers`, which have no targets; without either, returns `None` or, if
    /// the length is fixed, a padding row. Samples beyond the fixed length make the row longer.
    ///
    /// - packed: `input_ids`, `labels` `[1, tokens]`; `position_ids` `[1, tokens]`, for native-resolution
    ///   models `[4, 1, tokens]`, which are the positions in the text, then layer, row and column;
    /// - padded: `input_ids`, `labels`, `attention_mask` `[samples, longest]`; the model counts positions
    ///   itself;
    /// - native-resolution models, except Qwen2.5-Omni, also require `mm_token_type_ids`, with the shape of
    ///   `input_ids`, 1 for images and 2 for videos; models with typed tiles the same as `token_type_ids`;
    /// - media: see the crate.
    pub(super) fn pack(
        &self,
        mut samples: Vec<PreparedSample>,
        fillers: Vec<PreparedSample>,
    ) -> Option<ModelInputs> {
        let tokens = samples.iter().map(|sample| sample.tokens() as u64).sum();
        samples.extend(fillers);
        if self.layout.is_packed() {
            for sample in &mut samples {
                self.pad_sample(sample);
            }
        }
        samples.extend(self.padding(&samples));
        let lengths: Vec<usize> = samples.iter().map(PreparedSample::tokens).collect();
        let max_seqlen = *lengths.iter().max()?;
        let mut cu_seqlens = vec![0];
        for length in &lengths {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *length as i32);
        }
        let target_tokens = samples.iter().map(|sample| sample.target_tokens() as u64).sum();
        let mut tensors = match self.layout {
            BatchLayout::Packed => self.packed(&samples, &lengths),
            BatchLayout::Padded { side } => {
                self.padded(&samples, self.row_tokens(max_seqlen).max(max_seqlen), side)
            }
        };
        let clips = samples.iter().flat_map(|sample| &sample.clips);
        tensors.extend(feature_tensors(&clips.collect::<Vec<_>>()));
        if let Some(layout) = self.pixel_layout {
            let (images, videos): (Vec<_>, Vec<_>) =
                samples.into_iter().map(|sample| (sample.images, sample.videos)).unzip();
            tensors.extend(pixel_tensors(layout, images));
            tensors.extend(video_tensors(layout, videos.into_iter().flatten().collect()));
        }
        Some(ModelInputs { tensors, cu_seqlens, max_seqlen: max_seqlen as u32, tokens, target_tokens })
    }

    /// Creates the padding up to the row length, also if the padding is the whole row: a separate sequence
    /// without targets, which attends only to itself.
    fn padding(&self, samples: &[PreparedSample]) -> Option<PreparedSample> {
        let of_samples: usize = samples.iter().map(PreparedSample::tokens).sum();
        // Padded rows are extended individually instead; an empty padded batch still needs a row.
        let is_filled = self.layout.is_packed() || samples.is_empty();
        let missing = Some(self.row_tokens(of_samples)).filter(|_| is_filled)?.saturating_sub(of_samples);
        let (input_ids, labels) = (vec![self.pad_id; missing], vec![IGNORED; missing]);
        (missing > 0).then(|| PreparedSample { input_ids, labels, ..PreparedSample::default() })
    }

    /// Returns the row length for `tokens` tokens.
    fn row_tokens(&self, tokens: usize) -> usize {
        let bucket = || self.length_buckets.as_ref().map_or(tokens, |buckets| buckets.round_up(tokens));
        self.pad_to_tokens.unwrap_or_else(bucket)
    }

    /// Appends padding to a sample, as a part of the sample's sequence, up to the multiple.
    fn pad_sample(&self, sample: &mut PreparedSample) {
        let padded = sample.tokens().next_multiple_of(self.sample_multiple);
        sample.input_ids.resize(padded, self.pad_id);
        sample.labels.resize(padded, IGNORED);
    }

    fn packed(&self, samples: &[PreparedSample], lengths: &[usize]) -> Vec<NamedTensor> {
        let tokens = lengths.iter().sum();
        let row = |name, of: fn(&PreparedSample) -> Vec<i64>| {
            NamedTensor::ints(name, vec![1, tokens], samples.iter().flat_map(of).collect())
        };
        let mut tensors = vec![row("input_ids", input_ids), row("labels", labels)];
        let counted = lengths.iter().flat_map(|&length| 0..length as i64);
        if let Some(PixelLayout::Patches { merge, time }) = self.pixel_layout {
            let mut positions: Vec<i64> = counted.collect();
            let of_samples: Vec<_> =
                samples.iter().map(|sample| grid_positions(sample, merge, time)).collect();
            for axis in 0..3 {
                positions.extend(of_samples.iter().flat_map(|positions| &positions[axis]));
            }
            tensors.push(NamedTensor::ints("position_ids", vec![4, 1, tokens], positions));
            if time.has_token_types() {
                tensors.push(row("mm_token_type_ids", token_types));
            }
        } else {
            tensors.push(NamedTensor::ints("position_ids", vec![1, tokens], counted.collect()));
        }
        if self.pixel_layout == Some(PixelLayout::TypedTiles) {
            tensors.push(row("token_type_ids", token_types));
        }
        tensors
    }

    fn padded(&self, samples: &[PreparedSample], longest: usize, side: PaddingSide) -> Vec<NamedTensor> {
        let rows = |name, of: fn(&PreparedSample) -> Vec<i64>, padding: i64| {
            let row = |sample: &PreparedSample| {
                let mut row = of(sample);
                let missing = std::iter::repeat_n(padding, longest - row.len());
                match side {
                    PaddingSide::Right => row.extend(missing),
                    PaddingSide::Left => drop(row.splice(0..0, missing)),
                }
                row
            };
            NamedTensor::ints(name, vec![samples.len(), longest], samples.iter().flat_map(row).collect())
        };
        let mut tensors = vec![
            rows("input_ids", input_ids, i64::from(self.pad_id)),
            rows("labels", labels, i64::from(IGNORED)),
            rows("attention_mask", |sample| vec![1; sample.tokens()], 0),
        ];
        if let Some(PixelLayout::Patches { time, .. }) = self.pixel_layout
            && time.has_token_types()
        {
            tensors.push(rows("mm_token_type_ids", token_types, 0));
        }
        if self.pixel_layout == Some(PixelLayout::TypedTiles) {
            tensors.push(rows("token_type_ids", token_types, 0));
        }
        tensors
    }
}

fn input_ids(sample: &PreparedSample) -> Vec<i64> {
    sample.input_ids.iter().map(|&id| i64::from(id)).collect()
}

fn labels(sample: &PreparedSample) -> Vec<i64> {
    sample.labels.iter().map(|&label| i64::from(label)).collect()
}

/// Returns 1 for image tokens, 2 for video tokens, 0 for all others.
fn token_types(sample: &PreparedSample) -> Vec<i64> {
    let mut types = vec![0; sample.tokens()];
    for run in &sample.runs {
        let kind = match run.modality {
            Modality::Image => 1,
            Modality::Video => 2,
            Modality::Audio => continue,
        };
        types[run.start..run.start + run.tokens].fill(kind);
    }
    types
}

/// Upper bound for the seconds per layer, far below the point where sums overflow.
const SECONDS_MAX: f32 = 16_777_216.0;

/// Returns layer, row and column for every token in a sample.
///
/// `merge` is the number of patches along a side that become one token. A medium without a grid counts as
/// text.
fn grid_positions(sample: &PreparedSample, merge: u32, time: LayerTime) -> [Vec<i64>; 3] {
    let mut positions = [const { Vec::new() }; 3];
    let (mut at, mut next) = (0, 0i64);
    let mut images = sample.images.iter().map(|image| (image.grid_thw, None));
    let mut videos = sample.videos.iter().flat_map(grids_in_text);
    for run in &sample.runs {
        let (grid, seconds) = match run.modality {
            Modality::Image => images.next().unwrap_or_default(),
            Modality::Video => videos.next().unwrap_or_default(),
            Modality::Audio => continue,
        };
        let Some([layers, rows, columns]) = grid else { continue };
        count_up(&mut positions, run.start - at, &mut next);
        let (rows, columns) = (i64::from(rows / merge), i64::from(columns / merge));
        for layer in 0..layers {
            let layer = layer_position(layer, seconds, time);
            for row in 0..rows {
                for column in 0..columns {
                    for (axis, step) in positions.iter_mut().zip([layer, row, column]) {
                        axis.push(next + step);
                    }
                }
            }
        }
        // The next text continues after the largest of the three coordinates.
        let last_layer = layer_position(layers.saturating_sub(1), seconds, time);
        next += (last_layer + 1).max(rows).max(columns);
        at = run.start + run.tokens;
    }
    count_up(&mut positions, sample.input_ids.len() - at, &mut next);
    positions
}

/// Returns a video's grids in the text, with the seconds per layer: the whole grid, or a grid for each layer
/// if layers are separate in the text, with times.
fn grids_in_text(video: &VideoValues) -> impl Iterator<Item = (Option<[u32; 3]>, Option<f32>)> {
    let layers = video.layer_seconds.len();
    let grid = match video.pixels.grid_thw {
        Some([_, rows, columns]) if layers > 0 => Some([1, rows, columns]),
        grid => grid,
    };
    std::iter::repeat_n((grid, Some(video.seconds_per_grid)), layers.max(1))
}

/// Returns the time position of a layer in a video with `seconds` per layer; image layers are counted.
fn layer_position(layer: u32, seconds: Option<f32>, time: LayerTime) -> i64 {
    match (seconds, time) {
        (None, _) | (_, LayerTime::Counted) => i64::from(layer),
        (Some(seconds), LayerTime::TypedSeconds { positions } | LayerTime::Seconds { positions }) => {
            (layer as f32 * seconds.clamp(0.0, SECONDS_MAX) * positions as f32) as i64
        }
    }
}

fn count_up(positions: &mut [Vec<i64>; 3], tokens: usize, next: &mut i64) {
    let until = *next + tokens as i64;
    for axis in positions {
        axis.extend(*next..until);
    }
    *next = until;
}

/// Number of ladder steps between two powers of two.
const LADDER_STEPS: usize = 8;
/// Minimum distance between two ladder steps.
const LADDER_STEP_LEAST: usize = 16;

/// Lengths that other lengths are rounded up to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Buckets {
    /// Multiples of a number, at least 1.
    Multiple(usize),
    /// A list of lengths, and beyond the longest, multiples of the longest.
    Lengths(Vec<usize>),
    /// Eight lengths between two powers of two: at most an eighth is padding, on average about a sixteenth.
    Ladder,
}

impl Buckets {
    /// Returns the bucket for a length; 0 has a separate bucket.
    #[must_use]
    pub fn round_up(&self, length: usize) -> usize {
        if length == 0 {
            return 0;
        }
        match self {
            Self::Multiple(multiple) => length.next_multiple_of(*multiple),
            Self::Lengths(lengths) => {
                let longest = lengths.iter().copied().max().unwrap_or(1);
                let fitting = lengths.iter().copied().filter(|bucket| *bucket >= length).min();
                fitting.unwrap_or_else(|| length.next_multiple_of(longest))
            }
            Self::Ladder => {
                let octave = 1 << length.ilog2();
                length.next_multiple_of((octave / LADDER_STEPS).max(LADDER_STEP_LEAST))
            }
        }
    }

    /// Returns whether the settings are valid.
    pub(super) fn is_valid(&self) -> bool {
        match self {
            Self::Multiple(multiple) => *multiple > 0,
            Self::Lengths(lengths) => !lengths.is_empty() && lengths.iter().all(|length| *length > 0),
            Self::Ladder => true,
        }
    }
}

impl Preparer {
    /// Creates a blank medium that rounds a microbatch's pixels up to a bucket: patches or tiles with zeros,
    /// in a separate sequence.
    pub(super) fn media_filler(&self, samples: &[PreparedSample]) -> Option<PreparedSample> {
        let buckets = self.media_buckets.as_ref()?;
        let images = || samples.iter().flat_map(|sample| &sample.images);
        let first = images().find(|image| !image.values.is_empty())?;
        let rows: usize = images().map(|image| image.shape[0]).sum();
        let (rows_of_token, tokens_of_row) = match self.packer.pixel_layout? {
            PixelLayout::Patches { merge, .. } => ((merge * merge) as usize, 1),
            PixelLayout::Tiles | PixelLayout::TypedTiles => {
                (1, first.tokens as usize / first.shape[0].max(1))
            }
            PixelLayout::PaddedTiles
            | PixelLayout::SizedTiles
            | PixelLayout::TileRow
            | PixelLayout::PaddedImages => return None,
        };
        let missing = buckets.round_up(rows).next_multiple_of(rows_of_token) - rows;
        let tokens = missing / rows_of_token * tokens_of_row;
        let (ids, start, has_markers) =
            self.expander.lone(Modality::Image, tokens).filter(|_| missing > 0)?;
        let row_values: usize = first.shape[1..].iter().product();
        let mut shape = first.shape.clone();
        shape[0] = missing;
        let grid_thw = first.grid_thw.map(|_| {
            let side = rows_of_token.isqrt();
            [1, side as u32, (missing / side) as u32]
        });
        let values = first.values.zeros(missing * row_values);
        let blank = PixelValues { values, shape, grid_thw, image_size: None, tokens: tokens as u32 };
        let run = MediaRun { modality: Modality::Image, start, tokens, has_markers };
        let labels = vec![IGNORED; ids.len()];
        Some(PreparedSample {
            input_ids: ids,
            labels,
            runs: vec![run],
            images: vec![blank],
            ..PreparedSample::default()
        })
    }
}
