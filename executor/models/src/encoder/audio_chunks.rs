//! Arranges chunks of variable-length clips as encoder rows.
//!
//! Convolutions read zeros beyond both chunk ends, and each chunk is a segment: rows attend within their
//! chunk. Positions restart with every chunk. Row pairs in a clip are averaged, across chunk ends if chunks
//! have an odd number of rows.

use super::audio_windows::unfold;
use super::input::{HostContext, refuse};
use crate::error::Result;
use crate::parameters::weights::sinusoids;
use dflop_device::ops::sparse_rows::SparseRows;

/// Checks and arranges clip log-mel features, `[mel bins, frames]` each.
pub(super) fn arrange(
    mels: usize,
    hidden: usize,
    chunk: usize,
    features: &[f32],
    frames: &[u32],
) -> Result<HostContext> {
    let total: usize = frames.iter().map(|&frames| frames as usize).sum();
    if features.len() != total * mels {
        let problem = format!("has {} elements for {total} frames of {mels}", features.len());
        return refuse("input_features", problem);
    }
    let mut plan = HostContext { segments: vec![0], ..HostContext::default() };
    let (mut first, mut second, mut placed, mut pooled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut rest, mut medium_rows, mut rows) = (features, 0, 0);
    for &frames in frames {
        let frames = frames as usize;
        let (clip, after) = rest.split_at(frames * mels);
        rest = after;
        // features are stored by mel bin, rows are frames
        for frame in 0..frames {
            plan.medium.extend((0..mels).map(|mel| clip[mel * frames + frame]));
        }
        let clip_rows = rows;
        for start in (0..frames).step_by(chunk) {
            let length = chunk.min(frames - start);
            let outputs = length.div_ceil(2);
            unfold(length, 1, length, medium_rows, &mut first);
            // the first convolution has as many rows as the chunk has frames
            unfold(outputs, 2, length, medium_rows, &mut second);
            placed.extend((0..outputs).map(|row| Some(row as u32)));
            medium_rows += length;
            rows += outputs;
            plan.segments.push(rows as u32);
        }
        // an odd last clip row is dropped, as in transformers
        let pair = |row: usize| [0, 1].map(|next| ((clip_rows + 2 * row + next) as u32, 0.5));
        pooled.extend((0..(rows - clip_rows) / 2).map(pair));
    }
    plan.medium_rows = medium_rows;
    plan.stem = vec![SparseRows::gather(first), SparseRows::gather(second)];
    plan.positions = Some(SparseRows::gather(placed));
    plan.position_table = sinusoids(&[chunk.div_ceil(2), hidden]);
    plan.projected_rows = pooled.len();
    plan.taken = Some(SparseRows::weighted(pooled));
    Ok(plan)
}
