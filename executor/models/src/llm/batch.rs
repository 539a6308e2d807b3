//! Turns microbatch tokens into a decoder context.

use super::LlmConfig;
use crate::block::{LayerContext, MicrobatchContext, ModuleInputs, TextInputs};
use crate::error::{Error, Result};
use crate::layers::Rope;
use dflop_device::ops::sparse_rows::SparseRows;
use dflop_device::{Device, Dtype};
use half::bf16;

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
