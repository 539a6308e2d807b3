//! Packs prepared samples into the tensors for a microbatch.
//!
//! In the *packed* layout, samples follow each other in a row, `position_ids` restart at zero with each
//! sample, and `cu_seqlens` holds the boundaries; attention must not cross them. In the *padded* layout,
//! every sample has a row with the length of the longest sample. Either layout may be padded to a fixed
//! length. No target crosses a boundary: the first token in a sample, which has no predecessor, is never a
//! target.

use dflop_samples::inputs::{IGNORED, ModelInputs, NamedTensor, PreparedSample};
use dflop_samples::media::Modality;
use dflop_samples::sample::{BatchLayout, PaddingSide};

use super::buckets::Buckets;
use super::pixels::{feature_tensors, pixel_tensors, video_tensors};
use super::positions::grid_positions;
use crate::family::PixelLayout;

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
