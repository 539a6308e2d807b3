//! Arranges windows of log-mel frames, and chunks of variable-length clips, as encoder rows.
//!
//! Only the audio in a window is encoded, not the padding: padding rows would be masked and dropped anyway.
//!
//! Convolutions read zeros beyond both chunk ends, and each chunk is a segment: rows attend within their
//! chunk. Positions restart with every chunk. Row pairs in a clip are averaged, across chunk ends if chunks
//! have an odd number of rows.

use super::convolution::TAPS;
use super::{HostContext, refuse};
use crate::error::Result;
use crate::parameters::weights::sinusoids;
use dflop_device::ops::sparse_rows::SparseRows;

/// Window rows after each convolution.
struct WindowRows {
    /// Frames that are read, including the first frame after the audio.
    frames: usize,
    /// Rows after the first convolution, up to the last row that the second convolution reads.
    first: usize,
    /// Rows after the second convolution.
    second: usize,
}

impl WindowRows {
    fn new(frames: usize, longest: usize) -> Self {
        let second = frames.div_ceil(2);
        Self { frames: (2 * second + 1).min(longest), first: (2 * second).min(longest), second }
    }
}

/// Checks and arranges windows of log-mel features.
pub(super) fn arrange_windows(
    mels: usize,
    positions: usize,
    features: &[f32],
    frames: &[u32],
) -> Result<HostContext> {
    let longest = 2 * positions;
    if features.len() != frames.len() * mels * longest {
        let problem = format!("has {} elements for {} x {mels} x {longest}", features.len(), frames.len());
        return refuse("input_features", problem);
    }
    if let Some(index) = frames.iter().position(|&frames| frames as usize > longest) {
        return refuse("frames", format!("window {index} has {} of {longest}", frames[index]));
    }
    let mut plan = HostContext { segments: vec![0], ..HostContext::default() };
    let (mut first, mut second, mut placed, mut pooled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut medium_rows, mut first_rows, mut rows) = (0, 0, 0);
    for (values, &frames) in features.chunks(mels * longest).zip(frames) {
        let window = WindowRows::new(frames as usize, longest);
        // features are stored by mel bin, rows are frames
        for frame in 0..window.frames {
            plan.medium.extend((0..mels).map(|mel| values[mel * longest + frame]));
        }
        unfold(window.first, 1, window.frames, medium_rows, &mut first);
        unfold(window.second, 2, window.first, first_rows, &mut second);
        placed.extend((0..window.second).map(|row| Some(row as u32)));
        // average over two neighboring rows; an odd last row is dropped, as in transformers
        pooled.extend(
            (0..window.second / 2).map(|row| [0, 1].map(|next| ((rows + 2 * row + next) as u32, 0.5))),
        );
        medium_rows += window.frames;
        first_rows += window.first;
        rows += window.second;
        plan.segments.push(rows as u32);
    }
    plan.medium_rows = medium_rows;
    plan.stem = vec![SparseRows::gather(first), SparseRows::gather(second)];
    plan.positions = Some(SparseRows::gather(placed));
    plan.projected_rows = pooled.len();
    plan.taken = Some(SparseRows::weighted(pooled));
    Ok(plan)
}

/// Checks and arranges clip log-mel features, `[mel bins, frames]` each.
pub(super) fn arrange_chunks(
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

/// Adds the neighbors for every convolution output row; zeros at both ends.
fn unfold(rows: usize, stride: usize, inputs: usize, start: usize, sources: &mut Vec<Option<u32>>) {
    for row in 0..rows {
        for tap in 0..TAPS {
            let place = (row * stride + tap).checked_sub(1).filter(|&place| place < inputs);
            sources.push(place.map(|place| (start + place) as u32));
        }
    }
}
