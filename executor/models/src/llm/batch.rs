//! Turns microbatch tokens into a decoder context, with the keys that each token attends to: all earlier
//! tokens, a window, or a complete image.

use super::LlmConfig;
use crate::block::{LayerContext, MicrobatchContext, ModuleInputs, TextInputs};
use crate::error::{Error, Result};
use crate::layers::Rope;
use dflop_costmodel::model::{Window, WindowedAttention};
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::{Device, Dtype, HostSegments, KeyRanges, Segments};
use half::bf16;
use std::ops::Range;

/// Label for a token that is not a target.
pub const IGNORED: i64 = -100;

/// Packed microbatch tokens.
#[derive(Debug, Clone, Copy)]
pub struct TextBatch<'a> {
    /// Token ids: `[tokens]`.
    pub input_ids: &'a [i64],
    /// Target for each token, [`IGNORED`] for tokens that are not targets: `[tokens]`. The first token in a
    /// sample is never a target, as nothing before it predicts it.
    pub labels: &'a [i64],
    /// Positions on one axis, or by layer, row and column: `[axes, tokens]`.
    pub positions: &'a [i64],
    /// First token in every sample, then the number of tokens.
    pub cu_seqlens: &'a [i32],
    /// Sequence rows for media tokens, in encoder output order; the ids in these rows are not read.
    pub media_places: &'a [u32],
    /// Factor for the loss sum: 1 / target tokens in the complete step.
    pub loss_scale: f64,
}

impl LlmConfig {
    /// Checks a microbatch and uploads the decoder stage inputs.
    ///
    /// # Errors
    /// [`Error::Input`] that names the mismatched input.
    pub fn context<D: Device>(&self, device: &D, batch: &TextBatch<'_>) -> Result<MicrobatchContext<D>> {
        let tokens = batch.input_ids.len();
        let segments = segments(batch.cu_seqlens, tokens)?;
        let embedding = self.embedding(device.storage(), batch)?;
        let (predictions, targets) = self.targets(batch, &segments)?;
        let media = match batch.media_places {
            [] => None,
            places => {
                let sources = (0..).zip(places).map(|(source, &place)| (source, place));
                Some((scatter(sources, tokens).upload(device)?, places.len()))
            }
        };
        let axes = self.rope.axes();
        if axes == 0
            || !batch.positions.len().is_multiple_of(tokens.max(1))
            || batch.positions.len() < axes * tokens
        {
            let problem =
                format!("has {} elements for {axes} axes of {tokens} tokens", batch.positions.len());
            return Err(Error::Input { input: "position_ids", problem });
        }
        // a row with text positions may precede the axis rows
        let rows = batch.positions.len() / tokens.max(1);
        let positions = &batch.positions[if rows > axes { (rows - axes) * tokens } else { 0 }..];
        let positions: Vec<u32> = to_u32("position_ids", positions)?;
        let (segments, windows) = self.key_segments(device, &segments, batch.media_places)?;
        let angles = |rope: &Rope| rope.angles(device, &positions, tokens);
        let temperature = self.form.temperature.filter(|_| !self.form.unrotated.is_empty());
        Ok(MicrobatchContext {
            layers: LayerContext {
                rows: tokens,
                segments,
                windows,
                rotation: Some(angles(&self.rope)?),
                window_rotation: self.form.window_rope.as_ref().map(angles).transpose()?,
                query_scales: match temperature {
                    Some(temperature) => temperature.scales(device, &positions[..tokens])?,
                    None => None,
                },
            },
            inputs: ModuleInputs::Text(TextInputs {
                embedding: embedding.upload(device)?,
                words: embedding,
                media,
                predictions: predictions.upload(device)?,
                targets: device.upload_indices(&targets)?,
                loss_scale: batch.loss_scale,
            }),
        })
    }

    fn embedding(&self, storage: Dtype, batch: &TextBatch<'_>) -> Result<SparseRows> {
        let mut is_medium = vec![false; batch.input_ids.len()];
        for &place in batch.media_places {
            match is_medium.get_mut(place as usize) {
                // two media tokens in one row would be added up
                Some(taken) if !*taken => *taken = true,
                _ => {
                    let problem = format!("position {place} is taken twice or is beyond the tokens");
                    return Err(Error::Input { input: "media_places", problem });
                }
            }
        }
        let mut sources = Vec::with_capacity(is_medium.len());
        for (&id, &is_medium) in batch.input_ids.iter().zip(&is_medium) {
            sources.push(if is_medium { None } else { Some(self.in_vocabulary("input_ids", id)?) });
        }
        if self.form.embedding_scale.to_bits() == 1.0_f64.to_bits() {
            return Ok(SparseRows::gather(sources));
        }
        // transformers rounds the factor to the weight type
        let mut factor = self.form.embedding_scale as f32;
        if storage == Dtype::Bf16 {
            factor = bf16::from_f32(factor).to_f32();
        }
        Ok(SparseRows::weighted(sources.into_iter().map(|source| source.map(|source| (source, factor)))))
    }

    /// Returns the rows that predict a target, and the targets.
    fn targets(&self, batch: &TextBatch<'_>, segments: &[u32]) -> Result<(SparseRows, Vec<u32>)> {
        if batch.labels.len() != batch.input_ids.len() {
            let problem = format!("has {} elements for {} tokens", batch.labels.len(), batch.input_ids.len());
            return Err(Error::Input { input: "labels", problem });
        }
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        for segment in segments.windows(2).filter(|segment| segment[0] < segment[1]) {
            // from the second token on: a row predicts its successor within the sample
            for token in segment[0] + 1..segment[1] {
                let label = batch.labels[token as usize];
                if label != IGNORED {
                    rows.push(Some(token - 1));
                    targets.push(self.in_vocabulary("labels", label)?);
                }
            }
        }
        Ok((SparseRows::gather(rows), targets))
    }

    fn in_vocabulary(&self, input: &'static str, id: i64) -> Result<u32> {
        match u32::try_from(id) {
            Ok(id) if id < self.spec.vocab => Ok(id),
            _ => {
                Err(Error::Input { input, problem: format!("has {id}, the vocabulary {}", self.spec.vocab) })
            }
        }
    }
}

/// Maps each row `source` to row `target`, with `targets` rows in total.
fn scatter(pairs: impl Iterator<Item = (u32, u32)>, targets: usize) -> SparseRows {
    let mut sources = vec![None; targets];
    pairs.for_each(|(source, target)| sources[target as usize] = Some(source));
    SparseRows::gather(sources)
}

pub(in super::super) fn to_u32(input: &'static str, values: &[i64]) -> Result<Vec<u32>> {
    let convert = |&value: &i64| {
        u32::try_from(value).map_err(|_| Error::Input { input, problem: format!("has {value}") })
    };
    values.iter().map(convert).collect()
}

/// Checks that first rows ascend from 0 to the number of rows.
pub(in super::super) fn segments(cu_seqlens: &[i32], rows: usize) -> Result<Vec<u32>> {
    let fits = cu_seqlens.first() == Some(&0)
        && cu_seqlens.is_sorted()
        && cu_seqlens.last().is_some_and(|&last| last as usize == rows);
    if !fits {
        let problem = format!("must ascend from 0 to {rows}, found {cu_seqlens:?}");
        return Err(Error::Input { input: "cu_seqlens", problem });
    }
    Ok(cu_seqlens.iter().map(|&start| start as u32).collect())
}

impl LlmConfig {
    /// Returns the segments for layers with full attention and for layers with windows; `None` if these are
    /// the same.
    ///
    /// - `starts`: first token in every sample, then the number of tokens
    /// - `media`: media token rows
    fn key_segments<D: Device>(
        &self,
        device: &D,
        starts: &[u32],
        media: &[u32],
    ) -> Result<(Segments<D>, Option<Segments<D>>)> {
        let plain = HostSegments::new(starts);
        let blocks = if self.form.has_media_blocks { runs(starts, media) } else { Vec::new() };
        let ranged = |windows: Option<WindowedAttention>| -> Result<Segments<D>> {
            let ranges = KeyRanges::new(&keys(starts, &blocks, windows));
            Ok(Segments::of(device, plain.clone().ranged(ranges))?)
        };
        let full = if blocks.is_empty() { Segments::of(device, plain.clone())? } else { ranged(None)? };
        // a window that covers every complete sample hides nothing
        let windows = self.spec.windows.filter(|windows| windows.tokens < plain.longest());
        Ok((full, windows.map(|windows| ranged(Some(windows))).transpose()?))
    }
}

/// Finds the runs of consecutive media tokens, which never cross sample boundaries.
fn runs(starts: &[u32], media: &[u32]) -> Vec<Range<u32>> {
    let mut places = media.to_vec();
    places.sort_unstable();
    let mut runs: Vec<Range<u32>> = Vec::new();
    for place in places {
        match runs.last_mut() {
            Some(run) if run.end == place && starts.binary_search(&place).is_err() => run.end += 1,
            _ => runs.push(place..place + 1),
        }
    }
    runs
}

/// Returns the first key and the end of the key range, for every token.
///
/// Windows cut off keys before a token, but not later keys in the image that contains the token.
fn keys(starts: &[u32], blocks: &[Range<u32>], windows: Option<WindowedAttention>) -> Vec<[u32; 2]> {
    let mut keys = Vec::new();
    let mut blocks = blocks.iter().peekable();
    for pair in starts.windows(2) {
        for token in pair[0]..pair[1] {
            while blocks.next_if(|block| block.end <= token).is_some() {}
            let block = blocks.peek().filter(|block| block.contains(&token));
            let first = match windows {
                None => pair[0],
                Some(WindowedAttention { tokens, kind: Window::Sliding, .. }) => {
                    (token + 1).saturating_sub(tokens).max(pair[0])
                }
                Some(WindowedAttention { tokens, kind: Window::Chunk, .. }) => {
                    token - (token - pair[0]) % tokens
                }
            };
            keys.push([first, block.map_or(token + 1, |block| block.end)]);
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::model::LayerSet;

    fn windows(tokens: u32, kind: Window) -> WindowedAttention {
        WindowedAttention { layers: LayerSet::range(0, 1), tokens, kind }
    }

    #[test]
    fn images_are_seen_as_a_whole_and_windows_end_at_samples() {
        let starts = [0, 5, 5, 9];
        let blocks = runs(&starts, &[2, 3, 1, 4, 5, 7]);
        assert_eq!(blocks, [1..5, 5..6, 7..8]);
        let full = [[0, 1], [0, 5], [0, 5], [0, 5], [0, 5], [5, 6], [5, 7], [5, 8], [5, 9]];
        assert_eq!(keys(&starts, &blocks, None), full);
        let sliding = [[0, 1], [0, 5], [1, 5], [2, 5], [3, 5], [5, 6], [5, 7], [6, 8], [7, 9]];
        assert_eq!(keys(&starts, &blocks, Some(windows(2, Window::Sliding))), sliding);
        let chunks = [[0, 1], [0, 2], [2, 3], [2, 4], [4, 5], [5, 6], [5, 7], [7, 8], [7, 9]];
        assert_eq!(keys(&starts, &[], Some(windows(2, Window::Chunk))), chunks);
    }
}
